"""Attention over split sequences is that of one process, whatever the mask, layout and options."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import headwise as hw
from headwise.core.options import Options
from headwise.core.problem import pose
from headwise.core.row_sums import ENTROPY
from headwise.distributed.geometry import geometry
from headwise.distributed.key_blocks import KeyBlocks, Learnable, RunGradients
from headwise.distributed.key_exchange import KeyRun
from headwise.engines.gradients import RowGradients
from headwise.engines.plan import choose_partial
from tests.distributed.cases import SPANS, Case, alone, chosen, distances, joined, spanned, split
from tests.distributed.processes import Processes
from tests.problems import KINDS, Recipe, every_pair, recipes

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, one set of processes

LAYOUTS = ("contiguous", "head_tail", "uneven", "balanced")  # the last is for self-attention
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


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("move", MOVES[1:])
def test_every_move_in_every_layout(processes: Processes, ranks: int, move: str) -> None:
    """Of lengths that do not divide evenly, and of heads that do not: 4, on 2 key heads."""
    for i, layout in enumerate(LAYOUTS):
        mask, bias = ("causal", "documents", "any", "window")[i], KINDS["bias"][(i + ranks) % 5]
        recipe = Recipe(
            mask=mask, bias=bias, heads="grouped", sinks="sinks", dropout="dropout", longest=23,
            seed=10 * i + ranks,
        )  # fmt: skip
        check(processes, Case(recipe, ranks, layout, move))


CELLS = list(itertools.product((3, 4), MOVES[1:], LAYOUTS, KINDS["mask"]))


@pytest.mark.parametrize("cells", [24, pytest.param(len(CELLS), marks=pytest.mark.slow)])
def test_three_and_four_ranks_with_every_move_layout_and_mask(
    processes: Processes, cells: int
) -> None:
    for seed in random.Random(0).sample(range(len(CELLS)), cells):
        ranks, move, layout, mask = CELLS[seed]
        recipe = Recipe(mask=mask, heads="grouped", seed=seed, longest=20)
        check(processes, Case(recipe, ranks, layout, move))


def test_one_number_of_a_strided_tensor_moves(processes: Processes) -> None:
    recipe = Recipe(
        heads="grouped", widths="narrow values", layout="strided", longest=30, seed=2280,
    )  # fmt: skip
    case = Case(recipe, 2, "uneven", "ulysses")
    call = recipe.call()
    assert case.pieces(call, call.sizes.keys)[0] == ((0, 1),)
    assert (call.sizes.batch, call.v.shape[-1], call.v.stride(-1)) == (1, 1, 2)
    check(processes, case)


PAIRS = every_pair(
    dtype=("float64",), parameters=("same dtype",), layout=("packed", "expanded"),
    logits=("usual", "huge"),
)  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_pair_of_options(processes: Processes, ranks: int) -> None:
    for i, recipe in enumerate(PAIRS):
        if i % 3 == ranks - 2:
            layout = LAYOUTS[i // 3 % (4 if recipe.lengths == "square" else 3)]
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


@pytest.mark.parametrize(("move", "ranks"), [("ranges", 2), ("ring", 3), ("ulysses", 4)])
def test_spans_have_the_weights_of_one_process(processes: Processes, move: str, ranks: int) -> None:
    found = processes.run(spanned, ranks, move)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 12, 8, dtype=torch.float64).unbind(0)
    _, seen = hw.observe(
        q, k, v, mask=hw.mask.causal() & hw.mask.window(6), bias=hw.ALiBi(2),
        sinks=torch.ones(2, dtype=torch.float64), spans=SPANS,
    )  # fmt: skip
    for part in found:
        for name, weight in seen.spans.items():
            torch.testing.assert_close(part[name], weight, rtol=0, atol=1e-9)


def inferred(mesh: DeviceMesh) -> Tensor:
    """Documents whose numbers can't tell when they were changed, before and after a change."""
    numbers = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        q, k, v = torch.randn(3, 1, 2, 12, 8, generator=numbers).unbind(0)
        part = [hw.distributed.shard(x, mesh, dim=2) for x in (q, k, v)]
        ends = torch.tensor([12])
        mask = hw.mask.lengths(ends)
        hw.distributed.attention(*part, mesh=mesh, mask=mask)
        ends.fill_(5)
        out = hw.distributed.attention(*part, mesh=mesh, mask=mask)
        whole = hw.distributed.unshard(out, mesh, dim=2)
        return (whole - hw.attention(q, k, v, mask=hw.mask.lengths(5))).clone()


def test_masks_made_in_inference_mode(processes: Processes) -> None:
    for off in processes.run(inferred, 2):
        assert float(off.abs().max()) < 1e-5


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
    problem = pose("attention", q, k, v, Options(**options)._replace(mask=None))
    engine = choose_partial(problem, "triton").name
    place = geometry(options["mask"], 1, 4, (8, 16), (8, 16), hw.distributed.contiguous())
    blocks = KeyBlocks(problem, place, 1, engine, ENTROPY, (), 1)
    terms = problem.terms()
    rows_only = Learnable(q.detach()[:, :, 8:], None, None, terms.slopes, None, terms.sinks)
    cuts = ((0, 5), (5, 24))
    runs = [KeyRun(i, j, k.detach()[:, :, i:j], v.detach()[:, :, i:j]) for i, j in cuts]
    sums = blocks.forward(rows_only, 16, runs).rows
    out, seen = hw.observe(q, k, v, **options)
    torch.testing.assert_close(sums.out, out[:, :, 8:].detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sums.entropy, seen.entropy[:, :, 8:].detach(), rtol=1e-4, atol=1e-5)
    grad, grad_entropy = torch.randn_like(sums.out), torch.randn_like(sums.lse)
    ((out[:, :, 8:] * grad).sum() + (seen.entropy[:, :, 8:] * grad_entropy).sum()).backward()
    rows = RunGradients(blocks, rows_only, sums, RowGradients(grad, None, grad_entropy), False)
    for (i, j), found in zip(cuts, map(rows.add_run, runs), strict=True):
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
    layout = layout if recipe.lengths == "square" else LAYOUTS[ranks % 3]
    check(processes, Case(recipe, ranks, layout, move))
