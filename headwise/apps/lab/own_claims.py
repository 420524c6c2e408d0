"""Claims in a user's own file, which the lab runs like its own."""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import wraps
from pathlib import Path

from headwise.apps.lab.claim import Claim, Figures, Verdict
from headwise.apps.lab.fingerprint import OWN
from headwise.messages import say

ID = re.compile(r"[a-z][a-z0-9-]{0,60}")
"""An id is a part of addresses and of names of files."""


def claims_in(file: Path, taken: Collection[str]) -> list[Claim]:
    """The claims that a Python file defines, in its order; it is run to find them.

    ValueError if the file fails, if there is none, or if one has an id of `taken`.
    """
    if not file.is_file():
        raise ValueError(say("there is no file {file}", file=str(file)))
    name = f"{OWN}{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where inspect looks for its source
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file raises
        raise failure(str(file), error, file) from error
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
        if not ID.fullmatch(claim.id):
            raise ValueError(
                say(
                    "{id!r} is not an id; use small letters, digits and hyphens, as in my-claim",
                    id=claim.id,
                )
            )
    return [replace(claim, rule=giving_verdicts(claim.id, claim.rule)) for claim in found]


def giving_verdicts(id: str, rule: Callable[[Figures], Verdict]) -> Callable[[Figures], Verdict]:
    """The rule; ValueError if it returns something else than a verdict."""

    @wraps(rule)
    def checked(figures: Figures) -> Verdict:
        found: object = rule(figures)
        if not isinstance(found, Verdict):
            raise ValueError(
                say(
                    "the rule of {id} returned {found}; return holds(…), holds_when(…), "
                    "does_not_hold(…) or undecided(…), from headwise.apps.lab.claim",
                    id=id,
                    found=f"{found!r:.60}",
                )
            )
        return found

    return checked


def failure(what: str, error: Exception, file: Path | None = None) -> ValueError:
    """An error in one sentence: what failed, and in which line of the file or of the innermost."""
    lines = traceback.extract_tb(error.__traceback__)
    inside = [each for each in lines if file is None or Path(each.filename) == file] or lines
    place, line = inside[-1].filename, inside[-1].lineno
    if isinstance(error, SyntaxError):
        place, line = error.filename or place, error.lineno
    return ValueError(
        say(
            "{what} failed at {place}, line {line}: {error}",
            what=what,
            place=Path(place).name,
            line=line,
            error=f"{type(error).__name__}: {error}",
        )
    )
