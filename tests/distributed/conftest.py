"""One group of four processes for all cases; meshes of fewer ranks are its first ones."""

from collections.abc import Iterator

import pytest

from tests.distributed.processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    found = Processes(4)
    yield found
    found.close()
