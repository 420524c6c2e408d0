"""How long commands take before their own work: `python -m bench.startup`.

Seconds of the processor, the least of several runs: on an idle core the clock shows the same, and
other programs do not change it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from bench.pairs import Figure, at_most, report

COMMANDS = {
    "headwise --help": 0.5,
    "headwise lab": 2.0,
    "headwise cost --help": 2.0,
    "headwise look --help": 2.0,
    "headwise watch --help": 2.0,
}
"""The most seconds that each may take."""


def processor_seconds(command: str) -> float:
    """The seconds of a processor that a command takes in its own process."""
    before = os.times()
    subprocess.run([sys.executable, "-m", *command.split()], stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    started = before.children_user + before.children_system
    return after.children_user + after.children_system - started


def measured(command: str, most: float, runs: int) -> Figure:
    """The least of several runs, after one that fills the caches."""
    processor_seconds(command)
    seconds = min(processor_seconds(command) for _ in range(runs))
    return at_most(command, seconds, most, "s")


def main() -> None:
    """Measure every command and write bench/results/startup.json."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=5)
    runs = options.parse_args().runs
    report([measured(*each, runs) for each in COMMANDS.items()], "startup.json")


if __name__ == "__main__":
    main()
