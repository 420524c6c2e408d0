"""Generated problems on a GPU, at sizes around the edges of tiles: `python -m tests.gpu_fuzz`.

Engines are compared with the reference in float64, values, statistics and gradients, within the
bounds of `tests/rounding.py`. A problem is a function of its number, and one that fails prints the
command that repeats it. Every form of calls compiles kernels of its own, so each process takes some
of the forms. Without a GPU the problems are small, and Triton's interpreter runs them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.core.place import Place
from tests.engines.agreement import assert_agrees
from tests.problems import Call, Recipe, Rule, Sizes

FORMS = 150
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 385)
WIDTHS = (
    (64, 64),
    (128, 128),
    (64, 64),
    (128, 128),
    (96, 96),
    (80, 80),
    (192, 128),
    (256, 256),
    (40, 24),
)
MASKS = (
    *("none", "causal", "causal", "window", "prefix-lm", "documents", "documents", "padding"),
    *("sinks and window", "sinks and window", "offsets", "between", "dense", "any"),
)
FIVE = ("lse", "max_logit", "top_prob", "entropy", "sink_mass")
STATS = ((), ("entropy",), FIVE, hw.STATISTICS)
PAIRS = 1 << 18  # of a head, at most
SLOWLY = 1 << 14  # where the truth asks a function of Python about each of them
FATAL = 3  # a process ends with it after an error that its GPU does not recover from


@dataclass(frozen=True)
class ReadRule(Rule):
    """A rule whose matrix is read from its mask, which other tests compare with the rule."""

    def matrix(self, sizes: Sizes) -> Tensor:
        shape = sizes.batch, sizes.heads, sizes.queries, sizes.keys
        if self.mask is None:
            return torch.ones(shape, dtype=torch.bool)
        return self.mask.to_dense(Place(*shape, offset=sizes.offset)).expand(shape)


@dataclass(frozen=True)
class LargeRecipe(Recipe):
    """A recipe of a call with heads as wide as those of models, and lengths around tile edges."""

    width: int = 64
    value_width: int = 64

    def call(self) -> Call:
        made = super().call()
        return replace(
            made, rule=ReadRule(made.rule.mask, made.rule.sees, made.rule.pieces, made.rule.stands)
        )

    def _sizes(self, dice: random.Random) -> Sizes:
        heads = {"equal": (3, 3), "grouped": dice.choice(((4, 2), (6, 2))), "one": (4, 1)}
        slow = self.dropout != "none" or self.score == "additive"
        most = min(self.longest, int((SLOWLY if slow else PAIRS) ** 0.5))
        queries, keys = length(dice, most), length(dice, most)
        queries, keys = {
            "square": (queries, queries),
            "more keys": (min(queries, keys), max(queries, keys)),
            "more queries": (max(queries, keys), min(queries, keys)),
            "one query": (1, dice.randint(1, most if slow else 6 * most)),
            "one key": (queries, 1),
        }[self.lengths]
        batch = dice.randint(1, 2) if queries * keys < SLOWLY else 1
        return Sizes(batch, *heads[self.heads], queries, keys, self.width, self.value_width)


def length(dice: random.Random, most: int) -> int:
    """A length of at most so many tokens, most often near a multiple of a tile's."""
    edges = [x for x in EDGES if x <= most]
    return dice.choice(edges) if dice.random() < 0.7 else dice.randint(1, most)


@dataclass(frozen=True)
class Problem:
    """A call, and how it is made."""

    recipe: LargeRecipe
    engines: tuple[str, ...]  # the first that takes it serves it
    stats: tuple[str, ...]
    learn: bool

    def engine(self, device: str) -> str:
        """The engine that serves it on this device."""
        call = self.recipe.call().copy(device=device, learn=self.learn)
        reasons = call.explain(observed=bool(self.stats)).reasons
        return next(x for x in self.engines if x == "auto" or reasons[x] is None)

    def __str__(self) -> str:
        seen = "all" if self.stats == hw.STATISTICS else " ".join(self.stats) or "nothing"
        how = f"{'/'.join(self.engines)}, {'learning, ' if self.learn else ''}observed: {seen}"
        return f"{self.recipe} ({how})"


def problem(seed: int, longest: int = 400) -> Problem:
    """The problem of a number; those of one form differ in lengths, layouts and numbers only."""
    form, dice = random.Random(seed % FORMS), random.Random(seed)
    additive = form.random() < 0.06
    width, value_width = (48, 48) if additive else form.choice(WIDTHS)
    biases = ("none",) if additive else ("none",) * 7 + ("alibi", "tensor", "hiding")
    recipe = LargeRecipe(
        score="additive" if additive else "scaled" if form.random() < 0.1 else "dot",
        mask=form.choice(MASKS),
        bias=form.choice(biases),
        softcap="cap" if form.random() < 0.15 else "none",
        sinks="sinks" if form.random() < 0.25 else "none",
        dropout="dropout" if form.random() < 0.1 else "none",
        heads=form.choice(("equal", "grouped", "one")),
        lengths=form.choice(("square",) * 3 + ("more keys", "more queries", "one query")),
        layout=dice.choice(("packed", "heads last") * 2 + ("strided", "expanded")),
        logits=dice.choice(("usual",) * 4 + ("huge", "tiny")),
        dtype=form.choice(("bfloat16", "bfloat16", "bfloat16", "float16", "float32")),
        seed=seed,
        longest=longest,
        width=width,
        value_width=value_width,
    )  # fmt: skip
    engines = form.choice((("auto",), ("hopper", "triton", "auto"), ("triton", "auto")))
    return Problem(recipe, engines, form.choice(STATS), form.random() < 0.6)


def check(seed: int, device: str, longest: int = 400) -> None:
    """Raise AssertionError unless the answers to a problem are the reference's."""
    one = problem(seed, longest)
    assert_agrees(one.recipe, one.engine(device), device, one.stats, one.learn)


def share(given: argparse.Namespace) -> Iterator[int]:
    """The numbers of the problems that fall to this process: some of the forms."""
    number, of = given.share
    for seed in range(given.first, given.first + given.count):
        if seed % FORMS % of == number:
            yield seed


def work(given: argparse.Namespace) -> None:
    """Check this process's problems, and print a line of JSON for each."""
    stop = time.monotonic() + given.seconds
    torch.set_num_threads(1)
    for seed in share(given):
        if time.monotonic() > stop:
            return
        error = None
        try:
            check(seed, given.device, given.longest)
        except Exception as found:  # whatever a kernel makes of a problem
            error = f"{type(found).__name__}: {found}".replace("\n", " ")[:600]
        print(json.dumps([seed, error]), flush=True)
        if error is not None and "CUDA error" in error:
            sys.exit(FATAL)


def in_turn(given: argparse.Namespace, number: int) -> list[tuple[int, str | None]]:
    """The results of one process, which is started again after an error that it can't survive."""
    stop, first, found = time.monotonic() + given.seconds, given.first, []
    while first < given.first + given.count and (left := stop - time.monotonic()) > 0:
        command = [
            *(sys.executable, "-m", "tests.gpu_fuzz", "--share", f"{number}/{given.workers}"),
            *("--first", str(first), "--count", str(given.first + given.count - first)),
            *("--seconds", str(left), "--longest", str(given.longest), "--device", given.device),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        lines: list[tuple[int, str | None]] = [
            tuple(json.loads(x)) for x in done.stdout.splitlines()
        ]
        found += lines
        if done.returncode != FATAL:
            if done.returncode:
                found.append((lines[-1][0] if lines else first, f"died with {done.returncode}"))
            break
        first = lines[-1][0] + 1
    return found


def fuzz(given: argparse.Namespace) -> dict[str, Any]:
    """Check the problems in several processes; returns how many, and those that failed."""
    start = time.monotonic()
    with ThreadPoolExecutor(given.workers) as pool:
        found = [
            x for part in pool.map(partial(in_turn, given), range(given.workers)) for x in part
        ]
    failed = sorted((seed, error) for seed, error in found if error is not None)
    for seed, error in failed:
        print(f"python -m tests.gpu_fuzz --first {seed} --count 1  # {problem(seed)}: {error}")
    seconds = round(time.monotonic() - start)
    print(
        f"{len(found)} of {given.count} problems in {seconds} s, {len(failed)} disagree", flush=True
    )
    return {"problems": len(found), "failed": failed, "seconds": seconds}


def asked(*given: str) -> argparse.Namespace:
    """The options."""
    here = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=300, help="begin no problem after this")
    parser.add_argument("--longest", type=int, default=400 if here else 20)
    parser.add_argument("--device", default="cuda" if here else "cpu")
    parser.add_argument(
        "--share", type=lambda x: tuple(map(int, x.split("/"))), help="for a worker"
    )
    return parser.parse_args(given or None)


if __name__ == "__main__":
    options = asked()
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if options.share is not None:
        work(options)
    elif options.count == 1:
        print(problem(options.first, options.longest))
        check(options.first, options.device, options.longest)
    elif fuzz(options)["failed"]:
        sys.exit(1)
