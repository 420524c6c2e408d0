"""`make test-versions`: the tests that depend on versions, in one environment per row of a table.

`python tests/versions.py` builds every environment that is missing, runs every check that has no
result for this commit, and writes the table into docs/versions.md. It may be interrupted: what is
done stays done. Name rows to run only those; `--list` shows them.

The Triton and Gluon kernels are compiled for GPUs that need not be here, and run on Triton's
interpreter. Only `make test-gpu` runs them on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- the table of versions: make test-versions -->", "<!-- the end of the table -->"
SHOWN = ("torch", "triton", "transformers")
GENERATIONS = (80, 90, 100, 120)
CALLS = [  # one of each kind of kernel, at the widths that people use
    "causal 64 bfloat16", "both 128 bfloat16", "bias 128 bfloat16", "capped 128 bfloat16",
    "decode 128 bfloat16", "stored 128 bfloat16", "maps 64 bfloat16", "additive 64 bfloat16",
]  # fmt: skip
NEEDED = [  # by the tests; the newest that fit the row
    "accelerate", "anywidget", "httpx", "hypothesis", "lightning", "matplotlib", "numpy", "pandas",
    "pillow", "pyarrow", "pytest", "pytest-xdist", "rich", "sacrebleu", "safetensors",
    "setuptools>=77", "starlette", "tokenizers", "typer", "uvicorn",
]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One environment: what is installed, by pip's own words; None for constraints.txt."""

    name: str
    about: str
    requires: tuple[str, ...] | None


ROWS = {
    row.name: row
    for row in (
        Row(
            "oldest",
            "the oldest supported",
            # Triton 3.6's interpreter, which only tests use, fails with NumPy 2.4.
            ("torch==2.11.*", "triton==3.6.*", "transformers==4.57.*", "numpy==2.3.*"),
        ),
        Row(
            "mixed",
            "the oldest PyTorch, the newest transformers",
            ("torch==2.11.*", "triton==3.6.*", "transformers", "numpy==2.3.*"),
        ),
        Row("pinned", "constraints.txt", None),
        Row("newest", "the newest on the registry", ("torch", "triton", "transformers")),
    )
}


@dataclass(frozen=True)
class Check:
    """One column of the table: a command that an environment's Python runs, and for how long."""

    title: str
    command: tuple[str, ...]
    minutes: int


def checks(workers: int) -> list[Check]:
    """Return the columns of the table."""
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu")
    tests += ("-n", str(workers)) if workers > 1 else ()
    engines = [f"tests/engines/test_{name}.py" for name in ENGINE_TESTS]
    watching = ("tests/watching", "tests/nn/test_swap.py", "headwise/transformers.py")
    found = [
        Check(f"kernels for sm_{n}", ("-m", "tests.engines.fits", str(n), *CALLS), 60)
        for n in GENERATIONS
    ]
    found.append(Check("Gluon for sm_90", ("-m", "tests.engines.compiled"), 60))
    found.append(Check("engines", (*tests, *engines, "tests/maps"), 90))
    found.append(Check("watching", (*tests, *watching), 90))
    return found


ENGINE_TESTS = (
    "calls", "citizen", "hopper", "plan", "triton", "triton_additive", "triton_calls",
    "triton_decoding", "triton_failures",
)  # fmt: skip


class Environment:
    """A row's environment and what is known of it, in two places of one folder."""

    def __init__(self, folder: Path, row: Row) -> None:
        self.row, self.folder = row, folder / row.name
        self.file = folder / f"{row.name}.json"
        self.state: dict[str, Any] = {"installed": {}, "results": {}}
        if self.file.exists():
            self.state = json.loads(self.file.read_text())

    @property
    def python(self) -> Path:
        """The environment's Python."""
        return self.folder / ("Scripts" if os.name == "nt" else "bin") / "python"

    def save(self) -> None:
        """Keep what is known for the next run."""
        self.file.write_text(json.dumps(self.state, indent=1) + "\n")

    def build(self) -> None:
        """Create the environment and install the row's packages, unless that is done."""
        if self.state["installed"]:
            return
        say(f"{self.row.name}: installing into {self.folder}")
        if not self.python.exists():
            venv.create(self.folder, with_pip=True)
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check"]
        wanted = ["--constraint", "constraints.txt", ".[all,dev]"]
        if self.row.requires is not None:
            wanted = [*self.row.requires, *NEEDED]
        subprocess.run([*pip, "--quiet", *wanted], cwd=ROOT, check=True)
        own = ("--quiet", "--no-deps", "--no-build-isolation", "--editable", ".")
        subprocess.run([*pip, *own], cwd=ROOT, check=True)
        self.look()

    def look(self) -> None:
        """Note what is installed."""
        found = {name: known_version(self.python, name) for name in SHOWN}
        asked = "import platform; print(platform.python_version())"
        told = subprocess.run(
            [self.python, "-c", asked], capture_output=True, text=True, check=True
        )
        self.state["installed"] = {"python": told.stdout.strip(), **found}
        self.save()

    def run(self, check: Check, commit: str, keep: bool) -> None:
        """Run a check, unless it has a result for this commit, or a good one if that is enough."""
        known = self.state["results"].get(check.title)
        if known is not None and (known["commit"] == commit or (keep and known["ok"])):
            return
        say(f"{self.row.name}: {check.title} …")
        began = time.monotonic()
        ok, summary = self._outcome(check)
        seconds = round(time.monotonic() - began)
        say(f"{self.row.name}: {check.title}: {'ok' if ok else 'FAILED'}, {summary}, {seconds} s")
        result = {"ok": ok, "summary": summary, "seconds": seconds, "commit": commit}
        self.state["results"][check.title] = {**result, "date": date.today().isoformat()}
        self.save()

    def _outcome(self, check: Check) -> tuple[bool, str]:
        cache = self.file.with_name(f"{self.row.name}-kernels")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache)}
        env.pop("TRITON_INTERPRET", None)
        env.pop("PYTHONPATH", None)
        log = self.file.with_name(f"{self.row.name}-{check.title.replace(' ', '-')}.log")
        with log.open("w") as out:
            try:
                done = subprocess.run(
                    [self.python, *check.command],
                    cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, check=False,
                    timeout=check.minutes * 60,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return False, f"no end after {check.minutes} minutes"
        text = log.read_text(errors="replace")
        if "pytest" in check.command:
            return done.returncode == 0, tests_in(text)
        return compiled_in(text, done.returncode)


def tests_in(text: str) -> str:
    """Return pytest's own count of what passed, failed and was skipped."""
    counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", text[-2000:])
    named = [f"{int(n):,} {what}" for n, what in counts]
    return ", ".join(named) or "ended without a count: " + last_line(text)


def compiled_in(text: str, code: int) -> tuple[bool, str]:
    """Return whether every kernel was compiled, and how many calls or variants there were."""
    found: list[Any] = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    if code or not found:
        return False, last_line(text)
    if isinstance(found[0][0], dict):  # the variants of the Gluon kernel
        return True, f"{len(found[0])} variants"
    failed = [f"{call}: {refused[-1]}" for _, call, refused in found if refused]
    told = f"{len(found)} calls" if not failed else f"{len(failed)} of {len(found)} calls"
    return not failed, "; ".join([told, *failed])


def last_line(text: str) -> str:
    """Return the last line that says something, cut short."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else "nothing was printed")[:160].replace("|", "/")


def known_version(python: Path, package: str) -> str:
    """Return the version of a package that an environment has, or "" if it has none."""
    asked = f"import importlib.metadata as m; print(m.version({package!r}))"
    told = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=False)
    return told.stdout.strip()


def table(environments: list[Environment], columns: list[Check]) -> str:
    """Return the table in Markdown, with the machine and the dates."""
    titles = ["", "Python", *SHOWN, *(check.title for check in columns)]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    days = []
    for each in environments:
        installed, results = each.state["installed"], each.state["results"]
        cells = [each.row.name, *(installed.get(name, "") for name in ("python", *SHOWN))]
        for check in columns:
            known = results.get(check.title)
            days += [] if known is None else [known["date"]]
            cells.append("not run" if known is None else mark(known))
        lines.append("| " + " | ".join(cells) + " |")
    when = " to ".join(dict.fromkeys((min(days), max(days)))) if days else "never"
    about = f"Run on {when}, on {machine()}."
    return "\n".join([about, "", *lines])


def mark(known: dict[str, Any]) -> str:
    """Return the cell of a result."""
    return ("✓ " if known["ok"] else "✗ ") + str(known["summary"])


def machine() -> str:
    """Return this machine in words."""
    cpus = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpus.read_text()) if cpus.exists() else []
    name = names[0].strip() if names else platform.machine()
    return f"{platform.system()}, {name}, {os.cpu_count()} cores, without a GPU"


def write(text: str) -> None:
    """Put the table into the documentation."""
    page = TABLE.read_text()
    head, rest = page.split(BEGIN)
    TABLE.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def say(line: str) -> None:
    """Print progress with the time."""
    print(time.strftime("%H:%M:%S"), line, flush=True)


def asked() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", nargs="*", choices=[[], *ROWS], metavar="row")
    parser.add_argument("--list", action="store_true", help="list the rows and do nothing")
    parser.add_argument("--workers", type=int, default=2, help="tests at once (2)")
    parser.add_argument("--keep", action="store_true", help="keep good results of earlier commits")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions")
    return parser.parse_args()


def main() -> int:
    given = asked()
    if given.list:
        for row in ROWS.values():
            print(f"{row.name:<16} {row.about}: {', '.join(row.requires or ['constraints.txt'])}")
        return 0
    columns = checks(given.workers)
    given.folder.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    environments = [Environment(given.folder, row) for row in ROWS.values()]
    chosen = [each for each in environments if not given.row or each.row.name in given.row]
    for each in chosen:
        each.build()
        for check in columns:
            each.run(check, commit, given.keep)
            write(table([x for x in environments if x.state["installed"]], columns))
    print(table(chosen, columns))
    return int(any(not x["ok"] for each in chosen for x in each.state["results"].values()))


if __name__ == "__main__":
    sys.exit(main())
