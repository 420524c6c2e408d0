"""The design of a claim, fixed before its figures: what is measured, at what sizes, judged how.

A design is the code of an experiment, with its sizes, seeds, steps, rates and tasks, and of the
rule that judges its figures. Its hash leaves out wording and the place of files. `designs.json`
registers the hash of every claim; a result carries the hash and the commit it was measured at, so
that the history of the repository proves which came first.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwise.apps.lab.claim import Claim
from headwise.apps.lab.fingerprint import covered, fingerprint, parsed, unworded
from headwise.files import write_whole
from headwise.messages import say

REGISTER = Path(__file__).parent / "designs.json"
"""The registered designs: a hash for every claim."""
COMMIT = "HEADWISE_COMMIT"
"""The environment variable that names the commit where the code runs without its repository."""
SEARCHED = ("headwise", ":!headwise/apps/lab/results", ":!headwise/apps/look/static")


def design_hash(claim: Claim) -> str:
    """Sixteen hexadecimal digits of a claim's experiment and rule.

    >>> from headwise.apps.lab.runner import find
    >>> (claim,) = find(["scale-sigma"])
    >>> len(design_hash(claim))
    16
    """
    rule = sorted(
        (name.rpartition(".")[2], code) for name, code in covered(claim.rule, unworded).items()
    )
    text = json.dumps([fingerprint(claim.experiment), rule])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def registered() -> dict[str, str]:
    """The hashes that are registered, by claim."""
    found: dict[str, str] = json.loads(REGISTER.read_text(encoding="utf-8"))
    return found


def register(claims: Sequence[Claim], **others: str) -> list[str]:
    """Register the designs as they stand; the names of those that are new or changed.

    `others` are the hashes of what is not a claim.
    """
    before = registered() if REGISTER.exists() else {}
    now = {claim.id: design_hash(claim) for claim in claims} | others
    write_whole(REGISTER, json.dumps(now, indent=0) + "\n")
    return [id for id, found in now.items() if before.get(id) != found]


def commit() -> str | None:
    """The commit of this code; None outside its repository, or if files differ from the commit."""
    named = os.environ.get(COMMIT)
    if named:
        return named
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        changed = _git(root, "status", "--porcelain", "--", *SEARCHED)
        return None if changed else _git(root, "rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def settings(claim: Claim) -> dict[str, dict[str, Any]]:
    """The settings of an experiment: what each is in the quick and in the full form.

    >>> from headwise.apps.lab.runner import find
    >>> (claim,) = find(["qk-gradient"])
    >>> sorted(settings(claim))
    ['seeds', 'steps']
    """
    found: dict[str, dict[str, Any]] = {}
    for source in covered(claim.experiment, textwrap.dedent).values():
        for node in _calls(source):
            name = node.args[0]
            assert isinstance(name, ast.Constant)
            sizes = {each.arg: each.value for each in node.keywords if each.arg}
            try:
                values = {arg: ast.literal_eval(value) for arg, value in sizes.items()}
            except ValueError:
                continue  # what a name stands for can't be replaced by a text
            values.setdefault("full", values["quick"])
            found.setdefault(str(name.value), {x: values[x] for x in ("quick", "full")})
    return found


def _calls(source: str) -> list[ast.Call]:
    """The calls of `Lab.pick` that name their setting."""
    try:
        tree = parsed(source)
    except SyntaxError:  # a constant's text
        return []
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "pick"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ]


def read_settings(claims: Sequence[Claim], texts: Mapping[str, str]) -> dict[str, Any]:
    """The settings that a user replaces; ValueError for one that a claim does not have.

    >>> from headwise.apps.lab.runner import find
    >>> read_settings(find(["qk-gradient"]), {"steps": "40"})
    {'steps': 40}
    """
    found: dict[str, Any] = {}
    for claim in claims:
        there = settings(claim)
        for name, text in texts.items():
            if name not in there:
                known = ", ".join(f"{x}={written(y['quick'])}" for x, y in sorted(there.items()))
                raise ValueError(
                    say(
                        "{id} has no setting {name}; it has {known}",
                        id=claim.id,
                        name=name,
                        known=known or say("none"),
                    )
                )
            found[name] = _value(name, text, there[name]["quick"])
    return found


def _value(name: str, text: str, usual: Any) -> Any:
    """A text as a value of the same type as the usual one."""
    kind, example = type(usual), written(usual)
    try:
        if kind is tuple:
            each = type(usual[0])
            values = tuple(each(part) for part in text.split(","))
            if all(isinstance(x, str) or x > 0 or x in usual for x in values):
                return values
        elif kind in (int, float) and (value := kind(text)) > 0:
            return value
        elif kind is str:
            return text
    except ValueError:
        pass
    raise ValueError(
        say(
            "{name}={text} is not a setting like {name}={example}; give positive numbers, with "
            "commas where there are several",
            name=name,
            text=text,
            example=example,
        )
    )


def written(value: Any) -> str:
    """A value as `--set` takes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
