"""Calls split between ranks, made on each of them, and the same calls in one process."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import headwise as hw
from headwise.distributed.layouts import Layout
from headwise.distributed.ranges import Ranges, positions, take_ranges
from tests.problems import Call, Recipe


@dataclass(frozen=True)
class Case:
    """A recipe, and how its sequence is split."""

    recipe: Recipe
    ranks: int
    layout: str = "contiguous"
    move: str = "auto"

    def __str__(self) -> str:
        return f"{self.recipe} on {self.ranks} ranks, {self.layout}, {self.move}"

    def made(self, call: Call) -> Layout:
        """The layout for a call."""
        if self.layout == "balanced":
            return hw.distributed.balanced(call.rule.mask or hw.mask.causal())
        return getattr(hw.distributed, "contiguous" if self.layout == "uneven" else self.layout)()

    def pieces(self, call: Call, total: int) -> tuple[Ranges, ...]:
        """The positions of each rank; uneven parts follow each other, and some may be empty."""
        if self.layout != "uneven":
            return self.made(call).pieces(total, self.ranks)
        dice = random.Random(f"{self.recipe.seed} {self.ranks} {total}")
        cuts = sorted(dice.randint(0, total) for _ in range(self.ranks - 1))
        return tuple((pair,) for pair in itertools.pairwise((0, *cuts, total)))


def incoming(call: Call) -> dict[str, Tensor]:
    """Gradients of out, lse and entropy, the same in every process."""
    numbers = torch.Generator().manual_seed(7)
    sizes = call.sizes
    rows = sizes.batch, sizes.heads, sizes.queries
    out = torch.randn(*rows, call.v.shape[-1], generator=numbers, dtype=torch.float64)
    lse, entropy = (torch.randn(rows, generator=numbers, dtype=torch.float64) for _ in range(2))
    return {"out": out.to(call.q.dtype), "lse": lse, "entropy": entropy}


def loss(out: Tensor, seen: hw.Observation, grads: dict[str, Tensor]) -> Tensor:
    blind = seen.lse == -torch.inf
    lse = seen.lse.masked_fill(blind, 0) * grads["lse"].to(seen.lse.dtype)
    entropy = seen.entropy * grads["entropy"].to(seen.entropy.dtype)
    return (out * grads["out"]).sum() + lse.sum() + entropy.sum()


def alone(recipe: Recipe, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Out, every statistic and every gradient, in one process."""
    made = recipe.call()
    call = made.copy(dtype)
    out, seen = call.observe("reference" if call.q.dtype == torch.float64 else "auto")
    grads = incoming(made)
    loss(out, seen, {name: x.to(out.dtype) for name, x in grads.items()}).backward()
    found = {"out": out.detach()} | {name: x.detach() for name, x in seen.values.items()}
    return found | {f"grad of {name}": x.grad for name, x in call.learnable().items()}


def split(mesh: DeviceMesh, case: Case) -> dict[str, object]:
    """The same on this rank: its rows, its keys' gradients, and its share of the others."""
    call = case.recipe.call()
    layout, rank = case.made(call), mesh.get_local_rank()
    rows = case.pieces(call, call.sizes.queries)[rank]
    keys = case.pieces(call, call.sizes.keys)[rank]
    part = replace(
        call,
        q=take_ranges(call.q, 2, rows),
        k=take_ranges(call.k, 2, keys),
        v=take_ranges(call.v, 2, keys),
    )
    table = call.table
    by_rows = call.bias in ("tensor", "hiding") and table.ndim > 1 and table.shape[-2] > 1
    if by_rows:
        part = replace(part, table=take_ranges(table, table.ndim - 2, rows))
    part = part.copy()
    out, seen = hw.distributed.observe(
        part.q, part.k, part.v, mesh=mesh, layout=layout, move=case.move, **part.options()
    )
    loss(
        out, seen, {name: take_ranges(x, 2, rows) for name, x in incoming(call).items()}
    ).backward()
    found = {"out": out.detach()} | {name: x.detach() for name, x in seen.values.items()}
    grads = {f"grad of {name}": x.grad for name, x in part.learnable().items()}
    return {
        "rows": positions(rows), "keys": positions(keys), "by_rows": by_rows, "found": found,
        "grads": grads,
    }  # fmt: skip


def joined(parts: list[dict[str, object]]) -> dict[str, Tensor]:
    """The parts of all ranks as one process would have them."""
    orders = {
        axis: torch.cat([part[axis] for part in parts]).argsort() for axis in ("rows", "keys")
    }
    whole = {}
    for name in parts[0]["found"]:
        whole[name] = torch.cat([part["found"][name] for part in parts], 2)[:, :, orders["rows"]]
    for name in parts[0]["grads"]:
        shares = [part["grads"][name] for part in parts]
        if name == "grad of q":
            whole[name] = torch.cat(shares, 2)[:, :, orders["rows"]]
        elif name in ("grad of k", "grad of v"):
            whole[name] = torch.cat(shares, 2)[:, :, orders["keys"]]
        elif name == "grad of table" and parts[0]["by_rows"]:
            whole[name] = torch.cat(shares, -2)[..., orders["rows"], :]
        else:
            whole[name] = sum(shares)
    return whole


def distances(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """How far each result is from the truth, as a share of 1 or of its size."""
    far = {}
    for name, exact in truth.items():
        value, exact = found[name].double(), exact.double()
        assert value.shape == exact.shape, (name, value.shape, exact.shape)
        same = value == exact  # infinities
        gap = (value - exact).abs().masked_fill(same, 0) / exact.abs().clamp_min(1)
        far[name] = float(gap.nan_to_num(torch.inf).max()) if gap.numel() else 0.0
    return far


def chosen(mesh: DeviceMesh, seed: int) -> dict[str, object]:
    """Some statistics of some rows, and dropout whose seed only the first rank has drawn."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 12, 8, dtype=torch.float64).unbind(0)
    part = [hw.distributed.shard(x, mesh, dim=2) for x in (q, k, v)]
    torch.manual_seed(seed + mesh.get_local_rank())
    out, seen = hw.distributed.observe(
        *part, mesh=mesh, mask=hw.mask.causal(), dropout=0.3, stats=("entropy", "sink_mass"),
        rows=2, sink_keys=2,
    )  # fmt: skip
    return {"out": out, "values": seen.values, "rows": seen.rows}


SPANS = {"start": (0, 5), "middle": (4, 9), "late": (torch.tensor([10, 2]), torch.tensor([12, 12]))}


def spanned(mesh: DeviceMesh, move: str) -> dict[str, object]:
    """The weight on spans of the whole sequence, from a bias and a window."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 12, 8, dtype=torch.float64).unbind(0)
    layout = hw.distributed.head_tail()
    part = [hw.distributed.shard(x, mesh, dim=2, layout=layout) for x in (q, k, v)]
    _, seen = hw.distributed.observe(
        *part, mesh=mesh, layout=layout, move=move, mask=hw.mask.causal() & hw.mask.window(6),
        bias=hw.ALiBi(2), sinks=torch.ones(2, dtype=torch.float64), spans=SPANS,
    )  # fmt: skip
    return {
        name: hw.distributed.unshard(x, mesh, dim=2, layout=layout)
        for name, x in seen.spans.items()
    }
