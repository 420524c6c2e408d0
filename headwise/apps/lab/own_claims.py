"""Claims in a user's own file, which the lab runs like its own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection
from pathlib import Path

from headwise.apps.lab.claim import Claim
from headwise.apps.lab.fingerprint import OWN
from headwise.messages import say


def read(file: Path, taken: Collection[str]) -> list[Claim]:
    """The claims that a Python file defines, in its order; it is run to find them.

    ValueError if there is none, or if one has an id of `taken`.
    """
    if not file.is_file():
        raise ValueError(say("there is no file {file}", file=str(file)))
    name = f"{OWN}{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where inspect looks for its source
    spec.loader.exec_module(module)
    found = [value for value in vars(module).values() if isinstance(value, Claim)]
    if not found:
        raise ValueError(
            say(
                "{file} defines no claim; write claim = Claim(id=…, sentence=…, experiment=…, "
                "rule=…) in it, with Claim from headwise.apps.lab.claim",
                file=str(file),
            )
        )
    for claim in found:
        if claim.id in taken:
            raise ValueError(say("{id} is a claim of the lab; give yours another id", id=claim.id))
    return found
