"""The Hopper forward with every kind of mask and width: `python -m bench.gpu_masks`, 90 seconds.

First, processes beside each other compile each variant and compare it with the reference on small
inputs. Then variants are timed in turns with cuDNN, and at last, if time is left, with
FlexAttention for masks that cuDNN lacks; other settings are tried beside the usual ones. Prints one
line per cell, with the microseconds of each kernel, and writes everything to $OUT/gpu_masks.json,
or bench/results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import headwise as hw
from bench.gpu_timing import Fused, Run, interleaved, normal
from bench.pairs import RESULTS
from bench.watched_steps import FIVE
from headwise.core.observation import STATISTICS
from headwise.core.place import Place
from headwise.engines import calls, failures

STATS: dict[str, tuple[str, ...]] = {
    "plain": (), "entropy": ("entropy",), "five": FIVE, "every": STATISTICS,
}  # fmt: skip
WORKERS, PATIENCE = 13, 120  # processes, and seconds until one counts as hung
Tile = tuple[int, int, int, bool]  # keys, stages, consumer warpgroups, direct
LOOP: Tile = (0, 0, 0, False)  # the usual tile, and all moments in the loop over keys


@dataclass(frozen=True)
class Cell:
    """One shape and mask, and what is timed of it."""

    name: str
    n: int
    mask: str = "causal"
    batch: int = 1
    heads: int = 16
    key_heads: int = 16
    width: int = 128
    values: int = 128
    stats: tuple[str, ...] = ("plain", "entropy", "five")
    tiles: tuple[Tile, ...] = ()  # tried beside the table's, with the last of `stats`
    cudnn: bool = True
    flex: bool = False
    document: int = 700
    profiled: tuple[str, ...] = ()  # of which kernels are timed one by one

    def tensors(self) -> list[Tensor]:
        """Return q, k, v."""
        q = normal(self.batch, self.heads, self.n, self.width)
        k = normal(self.batch, self.key_heads, self.n, self.width)
        return [q, k, normal(self.batch, self.key_heads, self.n, self.values)]

    def small(self) -> Cell:
        """Return a cell that the reference can compute, for the same kernels."""
        return replace(self, batch=2, heads=4, key_heads=4 * self.key_heads // self.heads, n=777)


EVERY = tuple(STATS)
ALONE = ("plain", "five")
CELLS = (
    Cell("256", 8192, heads=8, key_heads=8, width=256, values=256, stats=EVERY,
         tiles=((32, 3, 2, True),), profiled=("every",)),
    Cell("64", 16384, heads=32, key_heads=32, width=64, values=64, stats=ALONE,
         tiles=((64, 4, 3, False),)),
    Cell("64 short", 2048, batch=8, heads=32, key_heads=32, width=64, values=64,
         stats=(*ALONE, "every"), tiles=(LOOP,), profiled=("every",)),
    Cell("128", 8192, stats=EVERY, tiles=(LOOP,), profiled=("five", "every")),
    Cell("128 short", 2048, batch=8, stats=EVERY, tiles=(LOOP,), profiled=("five", "every")),
    Cell("sinks and window", 16384, "sinks", key_heads=4, stats=ALONE, cudnn=False, flex=True,
         profiled=("plain",)),
    Cell("prefix", 16384, "prefix", key_heads=4, stats=("plain",), profiled=("plain",)),
    Cell("documents of 700", 4096, "documents", batch=4, stats=ALONE, tiles=((64, 3, 2, False),),
         flex=True, profiled=("plain",)),
    Cell("documents of 768", 4096, "documents", batch=4, document=768, stats=("plain",),
         profiled=("plain",)),
    Cell("one document", 4096, "one document", batch=4, stats=ALONE, profiled=("plain",)),
    Cell("uneven documents", 16384, "uneven", stats=("plain",), cudnn=False, profiled=("plain",)),
    Cell("MLA", 8192, width=192, stats=EVERY, profiled=("every",)),
    Cell("causal, long", 16384, key_heads=4, stats=("plain",)),
    Cell("128 full", 8192, "none", stats=ALONE),
    Cell("causal, 4096", 4096, batch=4, stats=ALONE),
    Cell("window", 16384, "window", key_heads=4, stats=("plain",), cudnn=False,
         profiled=("plain",)),
    Cell("lengths", 4096, "lengths", batch=4, stats=("plain",), profiled=("plain",)),
    Cell("64 full", 4096, "none", batch=4, heads=32, key_heads=32, width=64, values=64,
         stats=("plain",)),
)  # fmt: skip


def bounds_of(cell: Cell) -> Tensor:
    """Return where each document begins and the last one ends."""
    if cell.mask == "one document":
        return torch.tensor([0, cell.n])
    if cell.mask == "uneven":  # from 100 tokens to half of all
        made = torch.Generator().manual_seed(3)
        cuts = (torch.rand(24, generator=made) ** 3 * cell.n).long()
        return torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([cell.n])])
    return torch.tensor([*range(0, cell.n, cell.document if cell.n > 1000 else 130), cell.n])


def mask_of(cell: Cell) -> hw.mask.Mask | None:
    """Return the mask."""
    m, short = hw.mask, cell.n < 1000
    if cell.mask in ("one document", "uneven", "documents"):
        ids = torch.searchsorted(bounds_of(cell), torch.arange(cell.n), right=True)
        return m.causal() & m.documents(ids[None].cuda())
    window = 200 if short else 1023
    return {
        "none": lambda: None,
        "causal": m.causal,
        "window": lambda: m.causal() & m.window(window),
        "sinks": lambda: m.causal() & (m.window(window) | m.prefix(4)),
        "prefix": lambda: m.causal() | m.prefix(150 if short else 2000),
        "lengths": lambda: m.lengths(torch.linspace(0.4, 1, cell.batch).mul(cell.n).long().cuda()),
    }[cell.mask]()


def pairs_of(cell: Cell) -> float:
    """Return the visible pairs of one head of all batch entries."""
    mask = mask_of(cell)
    if mask is None:
        return float(cell.batch * cell.n * cell.n)
    place = Place(cell.batch, 1, cell.n, cell.n, device=torch.device("cuda"))
    pieces = mask.intervals(place)
    seen = sum((last.clamp(0, cell.n) - first.clamp(0, cell.n)).clamp(0) for first, last in pieces)
    whole = torch.broadcast_to(torch.as_tensor(seen), (cell.batch, 1, cell.n))
    return float(whole.double().sum())


@contextmanager
def using(cell: Cell, tile: Tile | None) -> Iterator[None]:
    """Let the kernel use another tile."""
    from headwise.engines.triton.host import hopper_call

    widths = next(x for x in (64, 128, 192, 256) if cell.width <= x), cell.values
    usual, least = hopper_call.TILES[widths], hopper_call.LEAST_KEYS
    if tile == LOOP:
        hopper_call.LEAST_KEYS = 1 << 30
    elif tile is not None:
        hopper_call.TILES[widths] = hopper_call.HopperTile(*tile)
    calls.forget()
    failures.forget()
    try:
        yield
    finally:
        hopper_call.TILES[widths], hopper_call.LEAST_KEYS = usual, least
        calls.forget()


def call_of(cell: Cell, stats: str, engine: str = "hopper") -> Callable[..., object]:
    """Return the call, which takes q, k and v."""
    names = STATS[stats]
    if not names:
        return partial(hw.attention, mask=mask_of(cell), engine=engine)
    return partial(hw.observe, mask=mask_of(cell), engine=engine, stats=names)


def check(cell: Cell, stats: str, tile: Tile | None) -> dict[str, object]:
    """Compare a variant with the reference, and compile it for the sizes that are timed."""
    began = time.perf_counter()
    small, row = cell.small(), {"cell": cell.name, "stats": stats, "tile": tile}
    q, k, v = small.tensors()
    if small.mask == "lengths":  # what no row sees may be anything
        k[0, :, 400:], v[0, :, 400:] = torch.nan, torch.nan
    wide = [x.nan_to_num(0).double() for x in (q, k, v)]
    with torch.no_grad(), using(cell, tile):
        names = STATS[stats] or ("lse",)
        out, seen = hw.observe(*wide, mask=mask_of(small), stats=names, engine="reference")
        found = call_of(small, stats)(q, k, v)
        pairs = {"out": (found, out)}
        if STATS[stats]:
            pairs["out"] = (found[0], out)  # type: ignore[index]
            pairs |= {x: (found[1].values[x], seen.values[x]) for x in names}  # type: ignore[index]
        for name, (x, y) in pairs.items():
            x, y = x.double().nan_to_num(neginf=0), y.double().nan_to_num(neginf=0)  # type: ignore[union-attr]
            row[name] = float((x - y).norm() / y.norm().clamp_min(1e-9))
        call_of(cell, stats)(*cell.tensors())
        torch.cuda.synchronize()
    worst = max(float(row[x]) / (1.5e-2 if x == "out" else 2e-3) for x in pairs)  # type: ignore[arg-type]
    return row | {"right": worst < 1, "seconds": round(time.perf_counter() - began, 1)}


def variants() -> list[tuple[Cell, str, Tile | None]]:
    """Return what is compiled and checked."""
    return [
        (cell, stats, tile)
        for cell in CELLS
        for tile in (None, *cell.tiles)
        for stats in (cell.stats if tile is None else cell.stats[-1:])
    ]


def work(mine: list[int]) -> None:
    """Check some variants; print one line of JSON for each."""
    every = variants()
    for n in mine:
        if n < 0:
            warm_flex()
            continue
        cell, stats, tile = every[n]
        try:
            row = check(cell, stats, tile)
        except Exception as error:
            traceback.print_exc()
            row = {"cell": cell.name, "stats": stats, "tile": tile, "failed": str(error)[:300]}
        print(json.dumps(row), flush=True)


def flexible(cell: Cell) -> Run:
    """Return FlexAttention with the cell's mask, without its tensors."""
    n = cell.n
    ids = torch.searchsorted(bounds_of(cell), torch.arange(n), right=True).cuda()
    rule = {
        "window": lambda b, h, i, j: (j <= i) & (i - j < 1024),
        "sinks": lambda b, h, i, j: (j <= i) & ((i - j < 1024) | (j < 4)),
    }.get(cell.mask, lambda b, h, i, j: (j <= i) & (ids[i] == ids[j]))
    blocks = create_block_mask(rule, None, None, n, n, device="cuda")
    flex = torch.compile(flex_attention, dynamic=False)
    grouped = cell.heads != cell.key_heads
    return partial(flex, *cell.tensors(), block_mask=blocks, enable_gqa=grouped)


def warm_flex() -> None:
    """Compile FlexAttention's kernels into the cache."""
    torch._dynamo.config.recompile_limit = 64
    for cell in CELLS:
        if cell.flex:
            flexible(cell)()
    torch.cuda.synchronize()


def checked() -> list[dict[str, object]]:
    """Check all variants in processes beside each other."""
    count = len(variants())
    shares = [[-1], *([n for n in range(count) if n % WORKERS == w] for w in range(WORKERS))]

    def run(share: list[int]) -> list[dict[str, object]]:
        command = [sys.executable, "-m", "bench.gpu_masks", "--work", *map(str, share)]
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired as late:
            text = (late.stdout or b"").decode()
            return [*_rows(text), {"failed": f"hung after {len(_rows(text))} of {share}"}]
        rows = _rows(told.stdout)
        if told.returncode or len(rows) < len([n for n in share if n >= 0]):
            rows.append({"failed": told.stderr[-1500:]})
        return rows

    with ThreadPoolExecutor(len(shares)) as pool:
        return [row for rows in pool.map(run, shares) for row in rows]


def _rows(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def timed(cell: Cell, bad: set[tuple[object, ...]]) -> dict[str, object]:
    """Return the milliseconds of a cell's variants and of cuDNN, in turns."""
    q, k, v = cell.tensors()
    runs: dict[str, Run] = {}
    for stats in cell.stats:
        if (cell.name, stats, None) not in bad:
            runs[stats] = partial(call_of(cell, stats), q, k, v)
    usual = dict(runs)
    if cell.cudnn:
        runs["cudnn"] = Fused(SDPBackend.CUDNN_ATTENTION, q, k, v, cell.mask != "none")
    ms = interleaved(runs, rounds=5, slice_ms=8.0)
    stats = cell.stats[-1]
    for tile in cell.tiles:
        if (cell.name, stats, tile) not in bad:
            with using(cell, tile):
                name = f"{stats} {'in the loop' if tile == LOOP else tile}"
                ms |= interleaved({name: partial(call_of(cell, stats), q, k, v)}, 5, 8.0)
    flops = pairs_of(cell) * cell.heads * 2 * (cell.width + cell.values)
    row: dict[str, object] = {"cell": cell.name, "ms": {x: round(t, 4) for x, t in ms.items()}}
    row["TFLOP/s"] = {x: round(flops / t / 1e9) for x, t in ms.items()}
    parts = {x: _kernels(usual[x]) for x in cell.profiled if x in usual}
    return row | ({"µs": parts} if parts else {})


def _kernels(run: Run) -> dict[str, int]:
    """Return the microseconds of each kernel of a call."""
    from bench.gpu_profile import kernels

    return {name[:30]: round(took) for name, took in kernels(run).items()}


def beside_flex(cell: Cell) -> dict[str, object]:
    """Return the milliseconds of a cell and of FlexAttention, in turns."""
    runs: dict[str, Run] = {
        "plain": partial(call_of(cell, "plain"), *cell.tensors()),
        "flex": flexible(cell),
    }
    ms = interleaved(runs, rounds=5, slice_ms=8.0)
    return {"cell": cell.name, "ms": {x: round(t, 4) for x, t in ms.items()}}


def main() -> None:
    """Check, time and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="*", type=int, help="check these variants (used inside)")
    parser.add_argument("--seconds", type=float, default=75, help="time no cell after this")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.gpu_masks needs an NVIDIA GPU, and PyTorch finds none here")
    torch.manual_seed(0)
    if given.work is not None:
        work(given.work)
        return
    began = time.monotonic()
    file = Path(os.environ.get("OUT", RESULTS)) / "gpu_masks.json"
    results: dict[str, object] = {"device": torch.cuda.get_device_name()}

    def keep(name: str, found: object) -> None:
        results[name] = found
        file.write_text(json.dumps(results, indent=1) + "\n")

    rows = checked()
    keep("checks", rows)
    wrong = [row for row in rows if not row.get("right")]
    print(
        f"checked {len(rows)} in {time.monotonic() - began:.0f} s, {len(wrong)} wrong", flush=True
    )
    for row in wrong:
        print("  WRONG", {x: y for x, y in row.items() if y is not None}, flush=True)
    bad = {(row.get("cell"), row.get("stats"), _tuple(row.get("tile"))) for row in wrong}
    torch._dynamo.config.recompile_limit = 64
    cells = []
    for run, chosen in (
        (partial(timed, bad=bad), CELLS),
        (beside_flex, [x for x in CELLS if x.flex]),
    ):
        for cell in chosen:
            if time.monotonic() - began > given.seconds:
                print(f"{cell.name}: no time left")
                continue
            try:
                with torch.no_grad():
                    cells.append(run(cell))
            except Exception as error:
                traceback.print_exc()
                cells.append({"cell": cell.name, "failed": str(error)[:300]})
            print(*(f"{x} {y}" for x, y in cells[-1].items()), sep="  ", flush=True)
            keep("cells", cells)
    print(f"{time.monotonic() - began:.0f} s")


def _tuple(x: object) -> object:
    return tuple(x) if isinstance(x, list) else x


if __name__ == "__main__":
    main()
