"""Many generated small problems against the reference: `python -m tests.many --count 100000`.

Everything is float64, so that a fixed tolerance holds for every problem. Each checks the output and
every statistic, and in turn gradients, the map, or the weights of rows lifted by a large number.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace

import torch
from torch import Tensor

import headwise as hw
from headwise.apps.cli.doctor import cpu_device
from tests.problems import KINDS, Call, Recipe, small_blocks

SPARED = {"dtype": ("float64",), "parameters": ("same dtype",), "layout": ("packed", "strided")}
SHARES = ("top_prob", "entropy", "self_mass", "previous_mass", "sink_mass", "distance")


def problem(seed: int) -> Recipe:
    """The recipe of a number."""
    dice = random.Random(seed)
    chosen = {name: dice.choice(SPARED.get(name, kinds)) for name, kinds in KINDS.items()}
    return Recipe(**chosen, seed=seed, longest=6)


def check(seed: int) -> None:
    """Raise AssertionError unless the problem's answers are the reference's."""
    recipe, dice = problem(seed), random.Random(seed)
    call = recipe.call()
    with small_blocks(rows=2, keys=3) if dice.random() < 0.5 else small_blocks(64, 64, 1 << 12):
        found, truth = (outcome(call, x, seed % 3 == 0) for x in ("streaming", "reference"))
        for name, x in found.items():
            same(x, truth[name], f"{name} of {recipe}")
        with torch.no_grad():
            same(call.attention("auto"), truth["out"], f"auto on {recipe}")
            if seed % 3 == 1:
                check_map(call, recipe)
            elif seed % 3 == 2:
                check_lifted(call, recipe, dice)


def outcome(call: Call, engine: str, learn: bool) -> dict[str, Tensor]:
    """Output, statistics and gradients."""
    leaves = call.copy(learn=learn)
    out, seen = leaves.observe(engine, sink_keys=2)
    found = {"out": out} | seen.values
    if not learn:
        return found
    wave = torch.linspace(-1, 1, seen.lse.numel(), dtype=torch.float64).reshape(seen.lse.shape)
    loss = (out * wave[..., None]).sum() + (seen.entropy * wave).sum()
    loss = loss + (seen.lse * wave).masked_fill(seen.lse == -torch.inf, 0).sum()
    loss.backward()
    grads = {f"gradient of {name}": x.grad for name, x in leaves.learnable().items()}
    found |= {name: x for name, x in grads.items() if x is not None}
    return {name: x.detach() for name, x in found.items()}


def check_map(call: Call, recipe: Recipe) -> None:
    given = call.options()
    given.pop("dropout", None)
    eye = torch.eye(call.sizes.keys, dtype=torch.float64).expand(*call.k.shape[:2], -1, -1)
    wanted = hw.attention(call.q, call.k, eye, engine="reference", **given)
    amap = hw.attention_map(call.q, call.k, **given)
    same(amap.to_tensor(), wanted, f"map of {recipe}")
    same(amap.received(), wanted.sum(-2), f"received of {recipe}")
    same(amap.top(1)[0][..., 0], wanted.amax(-1), f"top of {recipe}")


def check_lifted(call: Call, recipe: Recipe, dice: random.Random) -> None:
    """Rows whose logits are whole numbers keep their weights when they are lifted."""
    if call.bias != "none" or call.softcap is not None or call.sinks is not None:
        return
    plain, lifted = lift(call, dice, 2**40)
    seen, high = (x.observe("streaming")[1] for x in (plain, lifted))
    for name in SHARES:
        same(getattr(high, name), getattr(seen, name), f"lifted {name} of {recipe}")
    maps = (hw.attention_map(x.q, x.k, **mapped(x)) for x in (plain, lifted))
    same(*(amap.to_tensor() for amap in maps), f"lifted map of {recipe}")


def mapped(call: Call) -> dict[str, object]:
    return {name: x for name, x in call.options().items() if name != "dropout"}


def lift(call: Call, dice: random.Random, most: int) -> tuple[Call, Call]:
    """The call with small whole numbers as logits, and with each row lifted by a large one."""
    q, k = (x.detach().round().clamp(-2, 2) for x in (call.q, call.k))
    if k.shape[-1] != q.shape[-1]:
        k = k[..., : q.shape[-1]]
    plain = replace(call, q=q, k=k, score="scaled", scale=1.0, weight=None)
    heights = [float(dice.choice((0, 1, -1)) * dice.randint(1, most)) for _ in range(q.shape[2])]
    table = torch.tensor(heights, dtype=q.dtype).reshape(-1, 1)
    return plain, replace(plain, bias="tensor", table=table)


def same(found: Tensor, wanted: Tensor, name: str) -> None:
    torch.testing.assert_close(
        found, wanted, rtol=1e-7, atol=1e-7, msg=lambda text: f"{name}\n{text}"
    )


def main() -> None:
    """Check problems one after the other, and say which one failed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=100_000)
    options.add_argument("--first", type=int, default=0)
    given = options.parse_args()
    start = time.process_time()
    for seed in range(given.first, given.first + given.count):
        try:
            check(seed)
        except Exception as error:
            raise SystemExit(f"problem {seed}: {problem(seed)}\n{error}") from error
        if (done := seed + 1 - given.first) % 1000 == 0:
            print(f"{done:,} of {given.count:,}", end="\r", file=sys.stderr, flush=True)
    minutes = (time.process_time() - start) / 60
    said = (
        f"{given.count:,} problems agree with the reference, in {minutes:.1f} minutes of CPU time"
    )
    print(f"{said}: {cpu_device().name}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
