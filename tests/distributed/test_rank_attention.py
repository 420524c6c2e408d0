"""Attention over split sequences is that of one process, whatever the mask, layout and options."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headwise as hw
from headwise.core.problem import pose
from headwise.core.sums import ENTROPY
from headwise.distributed.geometry import geometry
from headwise.distributed.key_blocks import KeyBlocks, Learnable, RunGradients
from headwise.distributed.key_exchange import KeyRun
from headwise.engines.plan import choose_partial
from tests.distributed.cases import SPANS, Case, alone, chosen, distances, joined, spanned, split
from tests.distributed.processes import Processes
from tests.problems import KINDS, Recipe, every_pair, recipes

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, one set of processes

LAYOUTS = ("contiguous", "head_tail", "balanced")
MOVES = ("auto", "ranges", "ring", "gather", "ulysses")


def check(processes: Processes, case: Case) -> None:
    found = joined(processes.run(split, case.ranks, case))
    far = distances(found, alone(case.recipe))
    assert max(far.values()) <= 1e-9, (str(case), far)


@pytest.mark.parametrize("mask", KINDS["mask"])
def test_every_mask_in_every_layout(processes: Processes, mask: str) -> None:
    for i, layout in enumerate(LAYOUTS):
        recipe = Recipe(mask=mask, heads="grouped", seed=i, longest=24)
        check(processes, Case(recipe, 2 + i % 3, layout, MOVES[(i + len(mask)) % 5]))


PAIRS = every_pair(
    dtype=("float64",), parameters=("same dtype",), layout=("packed", "expanded"),
    logits=("usual", "huge"),
)  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_pair_of_options(processes: Processes, ranks: int) -> None:
    for i, recipe in enumerate(PAIRS):
        if i % 3 == ranks - 2:
            layout = LAYOUTS[i // 3 % (3 if recipe.lengths == "square" else 2)]
            check(processes, Case(replace(recipe, longest=12), ranks, layout, MOVES[i % 5]))


def test_some_statistics_of_some_rows_and_one_seed_for_all(processes: Processes) -> None:
    found = processes.run(chosen, 2, 5)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 12, 8, dtype=torch.float64).unbind(0)
    torch.manual_seed(5)  # what the first rank draws is what one process draws
    out, seen = hw.observe(q, k, v, mask=hw.mask.causal(), dropout=0.3, sink_keys=2)
    torch.testing.assert_close(torch.cat([part["out"] for part in found], 2), out)
    for rank, part in enumerate(found):
        assert list(part["values"]) == ["entropy", "sink_mass"]
        rows = part["rows"] + 6 * rank
        for name, value in part["values"].items():
            torch.testing.assert_close(value, seen.values[name][:, :, rows])


@pytest.mark.parametrize("move", ["ranges", "ring"])
def test_spans_have_the_weights_of_one_process(processes: Processes, move: str) -> None:
    found = processes.run(spanned, 3, move)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 12, 8, dtype=torch.float64).unbind(0)
    _, seen = hw.observe(
        q, k, v, mask=hw.mask.causal() & hw.mask.window(6), bias=hw.ALiBi(2),
        sinks=torch.ones(2, dtype=torch.float64), spans=SPANS,
    )  # fmt: skip
    for part in found:
        for name, weight in seen.spans.items():
            torch.testing.assert_close(part[name], weight, rtol=0, atol=1e-9)


def test_bfloat16_is_as_exact_as_in_one_process(processes: Processes) -> None:
    recipe = Recipe(
        mask="causal", heads="grouped", sinks="sinks", dtype="bfloat16", longest=90, seed=3
    )
    truth, one = alone(recipe, torch.float64), alone(recipe)
    for move in ("ring", "gather", "ulysses"):  # there two ranks use one key head
        many = joined(processes.run(split, 3, Case(recipe, 3, "head_tail", move)))
        for name in ("out", "grad of q", "grad of k", "grad of v", "lse", "entropy"):
            errors = [(x[name].double() - truth[name]).square().mean() ** 0.5 for x in (many, one)]
            assert errors[0] <= 1.2 * errors[1] + 1e-7, (name, move, errors)


@pytest.mark.parametrize("kind", ["plain", "bent"])
def test_triton_computes_the_parts_too(kind: str) -> None:
    options = {"mask": hw.mask.causal() & hw.mask.window(9)}
    if kind == "bent":
        options |= {"bias": hw.ALiBi(4), "softcap": 9.0, "sinks": torch.randn(4)}
    q, k, v = (torch.randn(1, heads, 24, 16, requires_grad=True) for heads in (4, 2, 2))
    problem = pose("attention", q, k, v, **{n: x for n, x in options.items() if n != "mask"})
    engine = choose_partial(problem, "triton").name
    place = geometry(options["mask"], 1, 4, (8, 16), (8, 16), hw.distributed.contiguous())
    blocks = KeyBlocks(problem, place, 1, engine, ENTROPY, (), 1)
    terms = problem.terms()
    rows_only = Learnable(q.detach()[:, :, 8:], None, None, terms.slopes, None, terms.sinks)
    cuts = ((0, 5), (5, 24))
    runs = [KeyRun(i, j, k.detach()[:, :, i:j], v.detach()[:, :, i:j]) for i, j in cuts]
    sums = blocks.forward(rows_only, 16, runs).sums
    out, seen = hw.observe(q, k, v, **options)
    torch.testing.assert_close(sums.out, out[:, :, 8:].detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sums.entropy, seen.entropy[:, :, 8:].detach(), rtol=1e-4, atol=1e-5)
    grad, grad_entropy = torch.randn_like(sums.out), torch.randn_like(sums.lse)
    ((out[:, :, 8:] * grad).sum() + (seen.entropy[:, :, 8:] * grad_entropy).sum()).backward()
    rows = RunGradients(blocks, rows_only, sums, grad, None, grad_entropy, False)
    for (i, j), found in zip(cuts, map(rows.of, runs), strict=True):
        for x, part in zip((k, v), found, strict=True):
            torch.testing.assert_close(part, x.grad[:, :, i:j], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(rows.total.q, q.grad[:, :, 8:], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    recipes(longest=30, dtype="float64", parameters="same dtype"), st.integers(1, 4),
    st.sampled_from(LAYOUTS), st.sampled_from(MOVES),
)  # fmt: skip
def test_any_call_on_any_number_of_ranks(
    processes: Processes, recipe: Recipe, ranks: int, layout: str, move: str
) -> None:
    layout = layout if recipe.lengths == "square" else LAYOUTS[ranks % 2]
    check(processes, Case(recipe, ranks, layout, move))
