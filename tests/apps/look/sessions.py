"""Sessions that have read something, for the tests of what is answered about it."""

import pytest

from headwise.apps.look.readers.opening import opened
from headwise.apps.look.session import Session


def session_on(text: str, model: str = "gpt") -> Session:
    """A session of a built-in model that has read a text.

    A fixture of a whole module is made before the environment of a single test, so triton's
    interpreter is switched off here as well.
    """
    session = Session()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        session.start(lambda: opened(model, "cpu"), text)
        assert session.join(300)
    return session
