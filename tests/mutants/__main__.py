"""`make test-mutants`: change the code in small ways, one at a time, and ask that a test fails.

`python -m tests.mutants` copies the package and its tests into build/mutants, notes which tests run
which lines, draws changes with a seed, and runs for each the tests of its part that run its lines,
the fastest first, until one fails. It may be interrupted: verdicts are kept. The package is
copied once (`--fresh` copies it again and forgets the verdicts), the tests at every start;
`--again` runs the survivors against the tests as they are now, and each stays one until it is
caught. Changes that change nothing are named in equivalent.txt, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
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
        every = {file: stamp for files in self.files.values() for file, stamp in files.items()}
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

    def that_run(self, change: Change) -> list[str]:
        """Return the tests of a change's part, or else of any part, that run its lines."""
        first, end = self.range[change.file]
        if change.lines is not None:
            first, end = first + change.lines[0], first + change.lines[1] + 1
        lines, files = ((1 << (end - first)) - 1) << first, self.files[change.part]

        ran = [name for name, test in self.tests.items() if test["lines"] & lines]
        own = [name for name in ran if self.tests[name]["file"] in files]
        return sorted(own or ran, key=self.rank)

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

    def verdicts(self, changes: list[Change]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Run the tests against each change, several changes at once."""
        orders = {change.name: self.that_run(change) for change in changes}

        def work(change: Change, slot: int) -> list[str]:
            moved(self.copies[slot])
            Path(change.file).write_text(change.applied(self.tree.sources[change.file]))
            return failing(orders[change.name], "-x")

        files = {change.name: change.file for change in changes}
        jobs = (
            Job(change.name, partial(work, change), self.seconds(orders[change.name]))
            for change in changes
            if orders[change.name]
        )
        for job, slot, caught in spread(jobs, self.tree.folder, self.workers):
            file = files[job.name]
            shutil.copy2(self.tree.root / file, self.copies[slot] / file)
            yield job.name, {"caught": caught, "tests": len(orders[job.name])}
        for name in (name for name, order in orders.items() if not order):
            yield name, {"caught": [], "tests": 0}


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
        for i, (name, found) in enumerate(suite.verdicts(left), 1):
            verdicts[name] = found
            tree.write("verdicts.json", verdicts)
            told = found["caught"] or f"SURVIVES {found['tests']} tests"
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
