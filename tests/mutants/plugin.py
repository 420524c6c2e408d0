"""Plugins for pytest that note which lines a test runs, and run chosen tests in their order."""

from __future__ import annotations

import mmap
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.multiprocessing as mp
from hypothesis import Phase, settings

RANKS = "processes"  # the fixture of tests/distributed/conftest.py


class Lines:
    """The lines of the package that ran, also in processes that a test forks: shared memory."""

    def __init__(self, root: Path, files: list[str]) -> None:
        self.first: dict[str, int] = {}
        count = 0
        for file in files:
            self.first[file] = count
            count += (root / file).read_bytes().count(b"\n") + 2
        self.ran = mmap.mmap(-1, count)
        self.places = {str(root / file): at for file, at in self.first.items()}
        self.tracers = {file: self.tracer(at) for file, at in self.places.items()}

    def tracer(self, first: int) -> Callable[..., Any]:
        """Return a trace function of one file."""
        ran = self.ran

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            ran[first + frame.f_lineno] = 1
            return trace

        return trace

    def called(self, frame: FrameType, event: str, argument: object) -> Any:
        """Trace the package's own functions, and nothing else."""
        tracer = self.tracers.get(frame.f_code.co_filename)
        return None if tracer is None else tracer(frame, event, argument)

    def follow_compiler(self) -> None:
        """Note the lines that torch.compile turns into a graph too: Python does not run them."""
        # It imports Triton, which reads once whether to interpret its kernels.
        from torch._dynamo.symbolic_convert import InstructionTranslatorBase as Compiler

        usual = Compiler.starts_line

        def starts_line(compiler: Compiler, line: int) -> None:
            at = self.places.get(compiler.f_code.co_filename)
            if at is not None:
                self.ran[at + line] = 1
            usual(compiler, line)

        Compiler.starts_line = starts_line  # type: ignore[method-assign]

    def taken(self) -> str:
        """Return the lines since the last time, and forget them: line i is bit i of a number."""
        found = self.ran[:]
        self.ran[:] = bytes(len(found))
        return f"{int(found[::-1].translate(b'0' + b'1' * 255), 2):x}"


class Tracing:
    """Times every test and notes its lines."""

    def __init__(self, lines: Lines) -> None:
        self.lines, self.tests = lines, dict[str, dict[str, Any]]()
        lines.follow_compiler()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.lines.taken()
        began = time.perf_counter()
        threading.settrace(self.lines.called)
        sys.settrace(self.lines.called)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            ranks = RANKS in getattr(item, "fixturenames", ())
            seconds = time.perf_counter() - began
            noted = {"seconds": round(seconds, 4), "ranks": ranks, "lines": self.lines.taken()}
            self.tests.setdefault(item.nodeid, {"ok": True}).update(noted)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.tests.setdefault(report.nodeid, {})["ok"] = False


class Chosen:
    """Keeps the chosen tests, in the order in which they were chosen."""

    def __init__(self, order: list[str]) -> None:
        self.place = {name: i for i, name in enumerate(order)}
        self.failed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = [item for item in items if item.nodeid in self.place]
        items[:] = sorted(found, key=lambda item: self.place[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


class Quick:
    """Forks the ranks of a session, which have PyTorch then, and shrinks no counterexample."""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        usual, fork = mp.get_context, mp.get_context("fork")
        if fixturedef.argname == RANKS:
            mp.get_context = lambda method=None: fork
        try:
            return (yield)
        finally:
            mp.get_context = usual

    def pytest_collection_finish(self) -> None:
        usual, phases = settings.get_profile("quick"), (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", usual, phases=phases, database=None)
        settings.load_profile("mutants")
