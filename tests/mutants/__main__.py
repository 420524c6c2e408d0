"""`make test-mutants`: change the code in small ways, one at a time, and ask that a test fails.

`python -m tests.mutants` copies the package and its tests into build/mutants, notes which tests run
which lines, draws changes with a seed, and runs for each the tests of its part that run its lines,
the fastest first, until one fails. It may be interrupted: verdicts are kept. The package is
copied once, the tests at every start. `--again` runs the survivors against the files of tests that
are new or have changed; each stays a survivor until it is caught. `--fresh` copies the package
again and forgets the verdicts, but for which test caught what: it runs that one first. Changes
that change nothing are named in equivalent.txt, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import plugin
from tests.mutants.changes import Change, drawn
from tests.mutants.tree import PARTS, ROOT, Job, Tree, forked, spread

EQUIVALENT = Path(__file__).with_name("equivalent.txt")
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- make test-mutants -->", "<!-- the end of make test-mutants -->"
FEW = 40
"""So many tests are run against every change before all others are loaded for the survivors."""
ONLY = ("-m", "not slow and not gpu", "-q", "-p", "no:cacheprovider", "--assert=plain")


def traced(tree: Tree, file: str) -> dict[str, Any]:
    """Run the tests of a file; return for each its seconds, its lines and whether it passes."""
    tracing = plugin.Tracing(plugin.Lines(tree.root, list(tree.sources)))
    pytest.main([file, *ONLY], plugins=[plugin.Quick(), tracing])
    return tracing.tests


def imported(files: list[str], root: Path) -> list[str]:
    """Return the modules that tests import, but for those of the tree itself."""
    pytest.main([*files, *ONLY, "--collect-only"])
    places = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return [name for name, file in places.items() if file and not file.startswith(str(root))]


def failing(order: list[str], *options: str) -> list[str]:
    """Run tests in this order and return those that fail."""
    chosen = plugin.Chosen(order)
    files = dict.fromkeys(name.split("::")[0] for name in order)
    code = pytest.main([*files, *ONLY, *options], plugins=[plugin.Quick(), chosen])
    return chosen.failed or ([] if code == 0 else [f"pytest ended with {int(code)}"])


def moved(root: Path) -> None:
    """Work in this tree, and import from it."""
    os.chdir(root)
    sys.path[0] = os.environ["PYTHONPATH"] = str(root)


class Suite:
    """The tests of every part, with the lines that they run, and copies of the tree to change."""

    def __init__(self, tree: Tree, parts: list[str], workers: int) -> None:
        self.tree, self.workers = tree, workers
        self.files = {part: tree.tests_of(part) for part in parts}
        self.tests: dict[str, dict[str, Any]] = {}
        known = tree.read("tests.json")
        self.stamps = every = {k: v for files in self.files.values() for k, v in files.items()}
        self.likely = {
            anywhere(name): found["caught"][0]
            for name, found in tree.read("before.json").items()
            if found["caught"]
        }
        new = [file for file in every if known.get(file, {}).get("stamp") != every[file]]
        jobs = (Job(file, lambda _, file=file: traced(tree, file), 900) for file in new)
        for i, (job, _, found) in enumerate(spread(jobs, tree.folder, workers), 1):
            ended, found = isinstance(found, dict), found if isinstance(found, dict) else {}
            known[job.name] = {"stamp": every[job.name] if ended else "", "tests": found}
            tree.write("tests.json", known)
            bad = [name for name, test in found.items() if not test["ok"]]
            say(f"{i}/{len(new)} {job.name}: {len(found)} tests, without {bad}")
        for file in every:
            for name, test in known[file]["tests"].items():
                if test["ok"]:
                    self.tests[name] = {**test, "file": file, "lines": int(test["lines"], 16)}
        first = plugin.Lines(tree.root, list(tree.sources)).first
        ends = [*list(first.values())[1:], list(first.values())[-1] + 100_000]
        self.range = dict(zip(first, zip(first.values(), ends, strict=True), strict=True))
        self.copies = tree.copied(workers)

    def rank(self, name: str) -> tuple[bool, int, str]:
        """Order tests from fast to slow, in groups, so that fixtures of a file are made once.

        Tests with ranks come first: they fork, and autograd must not have started before.
        """
        test = self.tests[name]
        return not test["ranks"], round(math.log(test["seconds"] + 0.05, 3)), test["file"]

    def that_run(self, change: Change, before: dict[str, Any]) -> list[list[str]]:
        """Return the tests of a change's part, or else of any part, that run its lines.

        First the one that is known to catch it, then a few fast ones, then the others. If the
        change has survived before, the tests of files that are as they were are left out.
        """
        first, end = self.range[change.file]
        if change.lines is not None:
            first, end = first + change.lines[0], first + change.lines[1] + 1
        lines, files = ((1 << (end - first)) - 1) << first, self.files[change.part]

        ran = [name for name, test in self.tests.items() if test["lines"] & lines]
        own = [name for name in ran if self.file(name) in files]
        known = before.get("survived", {})
        new = [x for x in own or ran if known.get(self.file(x)) != self.stamps[self.file(x)]]
        likely = self.likely.get(anywhere(change.name))
        rest = sorted((name for name in new if name != likely), key=self.rank)
        return [[name for name in new if name == likely], rest[:FEW], rest[FEW:]]

    def file(self, name: str) -> str:
        """Return the file of a test."""
        return str(self.tests[name]["file"])

    def seconds(self, order: list[str]) -> float:
        """Return how long tests may take, which a change can make slow."""
        return 120 + 10 * sum(self.tests[name]["seconds"] for name in order)

    def forget_unsteady(self, verdicts: dict[str, Any]) -> None:
        """Forget what was caught by tests that fail though nothing was changed."""
        caught = {name: found["caught"][0] for name, found in verdicts.items() if found["caught"]}
        order = sorted((x for x in set(caught.values()) if x in self.tests), key=self.rank)
        if not order:
            return
        unsteady = forked(lambda _: failing(order), self.tree.folder, self.seconds(order))
        for name in [name for name, by in caught.items() if by in unsteady]:
            del verdicts[name]
        say(f"{len(order)} tests caught changes; {unsteady} fail without a change")

    def asked(self, orders: dict[Change, list[str]]) -> Iterator[tuple[Change, list[str]]]:
        """Run tests against each change, several changes at once, and yield those that fail."""

        def work(change: Change, slot: int) -> list[str]:
            moved(self.copies[slot])
            Path(change.file).write_text(change.applied(self.tree.sources[change.file]))
            return failing(orders[change], "-x")

        changes = {change.name: change for change, order in orders.items() if order}
        jobs = (
            Job(name, partial(work, change), self.seconds(orders[change]))
            for name, change in changes.items()
        )
        for job, slot, caught in spread(jobs, self.tree.folder, self.workers):
            change = changes[job.name]
            shutil.copy2(self.tree.root / change.file, self.copies[slot] / change.file)
            yield change, caught
        yield from ((change, []) for change, order in orders.items() if not order)

    def verdicts(self, changes: list[Change], known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Run the likely tests against each change, and all others against those that survive."""
        before = {change: known.get(change.name, {}) for change in changes}
        orders = {change: self.that_run(change, before[change]) for change in changes}
        left = list(changes)
        for stage in range(3):
            going, left = left, []
            for change, caught in self.asked({x: orders[x][stage] for x in going}):
                if not caught and any(orders[change][stage + 1 :]):
                    left.append(change)
                    continue
                ran = {self.file(x) for order in orders[change] for x in order}
                survived = before[change].get("survived", {}) | {x: self.stamps[x] for x in ran}
                yield change.name, {"caught": caught, "survived": {} if caught else survived}


def equivalent() -> dict[tuple[str, ...], str]:
    """Return (file, line, change) of the changes that change nothing, with the reasons."""
    rows = [line.split(" | ") for line in EQUIVALENT.read_text().splitlines() if " | " in line]
    return {tuple(row[:3]): row[3] for row in rows}


def report(chosen: list[Change], verdicts: dict[str, Any], seed: int) -> str:
    """Return the score and the survivors in Markdown."""
    same = equivalent()
    none = [change for change in chosen if change.row in same]
    run = [change for change in chosen if change.name in verdicts or change.row in same]
    left = [c for c in run if c.row not in same and not verdicts[c.name]["caught"]]
    of = len(run) - len(none)
    lines = [
        f"{len(run)} of {len(chosen)} changes drawn with seed {seed} were run: {of - len(left)} of "
        f"{of} were caught ({(of - len(left)) / max(of, 1):.1%}), and {len(none)} more change "
        "nothing ([why](../tests/mutants/equivalent.txt)).", "",
        "| part | run | caught | change nothing | survive |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for part in PARTS:
        n, e, s = (Counter(change.part for change in each)[part] for each in (run, none, left))
        lines.append(f"| {part} | {n} | {n - e - s} | {e} | {s} |")
    if left:
        lines += ["", "Survivors:", "", *(f"- `{change.name}`" for change in left)]
    return "\n".join(lines)


def anywhere(name: str) -> str:
    """Return the name of a change without its place in the file."""
    return re.sub(r":[0-9]+:[0-9]+ ", " ", name, count=1)


def say(line: str) -> None:
    """Print progress with the time."""
    print(time.strftime("%H:%M:%S"), line, flush=True)


def asked() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(prog="tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="changes to draw (300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=PARTS, action="append", help="only changes of this part")
    parser.add_argument("--again", action="store_true", help="run the survivors once more")
    parser.add_argument("--fresh", action="store_true", help="copy the package; forget everything")
    parser.add_argument("--workers", type=int, default=1, help="changes to run at once (1)")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    return parser.parse_args()


def main() -> int:
    given = asked()
    tree = Tree(given.folder.resolve(), given.fresh)
    chosen = drawn(tree.sources, given.seed, given.count)
    verdicts, same = tree.read("verdicts.json"), equivalent()
    parts = given.part or list(PARTS)
    known = {name for name, found in verdicts.items() if found["caught"] or not given.again}
    left = [c for c in chosen if c.name not in known and c.row not in same and c.part in parts]
    if left and not given.report:
        sys.path[:] = ["", *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
        os.environ |= {"CI": "true", "TRITON_INTERPRET": "1"}
        moved(tree.root)
        files = [file for part in parts for file in tree.tests_of(part)]
        for name in forked(lambda _: imported(files, tree.root), tree.folder, 900):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        assert "headwise" not in sys.modules, "changes would not be imported"
        suite = Suite(tree, parts, given.workers)
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        for i, (name, found) in enumerate(suite.verdicts(left, verdicts), 1):
            verdicts[name] = found
            tree.write("verdicts.json", verdicts)
            told = found["caught"] or f"SURVIVES the tests of {len(found['survived'])} files"
            say(f"{i}/{len(left)} {name}: {told}")
        suite.forget_unsteady(verdicts)
        tree.write("verdicts.json", verdicts)
    told = report(chosen, verdicts, given.seed)
    head, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{told}\n{END}{rest.split(END)[1]}")
    print(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
