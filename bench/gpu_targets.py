"""The figures of `bench.gpu` and their targets: one line each, of the worst cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from bench.pairs import Figure, at_least, at_most

Rows = list[dict[str, Any]]
Results = dict[str, Any]


def figures(results: Results) -> list[Figure]:
    """The targets of the sections that were measured."""
    found: list[Figure] = []
    for section, judge in JUDGES.items():
        if section in results:
            found += judge(results[section])
    return found


def _plain(rows: Rows) -> list[Figure]:
    long = [row for row in rows if row["n"] >= 4096]
    made = []
    for engine in ("hopper", "triton"):
        for width, peer, least in ((128, "cudnn", 0.82), (128, "flash", 1.4), (64, "cudnn", 0.90)):
            cells = [row for row in long if row["d"] == width and engine in row]
            ratios = {_cell(row): row[engine] / row[peer] for row in cells}
            made += _worst(f"{engine}: forward, d {width}, to {peer}", ratios, least)
    for width in (64, 128):
        cells = [row for row in long if row["d"] == width]
        ratios = {_cell(row): row["triton back"] / row["cudnn back"] for row in cells}
        made += _worst(f"backward, d {width}, to cudnn", ratios, 0.6)
    return made


def _seeing(rows: Rows) -> list[Figure]:
    made = []
    for engine in ("hopper", "triton"):
        for width, least in ((128, 0.90), (64, 0.80)):
            cells = [row for row in rows if (row["engine"], row["d"]) == (engine, width)]
            ratios = {_cell(row): row["all / plain"] for row in cells}
            made += _worst(f"{engine}: every statistic, d {width}, to its plain", ratios, least)
    return made


def _capped(rows: Rows) -> list[Figure]:
    made = []
    for width in (64, 128):
        for name, run, peer in (
            ("hopper: softcap", "hopper", "flex"),
            ("triton: softcap", "triton", "flex"),
            ("softcap backward", "triton back", "flex back"),
        ):
            ratios = {
                f"logits' deviation {row['deviation']:g}": row[run] / row[peer]
                for row in rows
                if row["d"] == width and run in row
            }
            made += _worst(f"{name}, d {width}, to flex", ratios, 2.5)
    return made


def _masked(rows: Rows) -> list[Figure]:
    return [
        at_most(f"{engine}: {row['mask']}, to its visible share", row[key], 1.3)
        for row in rows
        for engine in ("hopper", "triton")
        if (key := f"{engine}, times the visible share") in row
    ]


def _observing(rows: Rows) -> list[Figure]:
    short, long = rows
    return [
        at_most(
            "observe, n 32768: beyond inputs and outputs",
            long["MiB beyond inputs and outputs"],
            64,
            "MiB",
        ),
        at_least(
            "observe, every statistic, n 8192: faster than eager",
            short["eager ms"] / short["every statistic ms"],
            15,
        ),
        at_least(
            "observe, entropy as eager, n 8192: faster than eager",
            short["eager ms"] / short["entropy ms"],
            15,
        ),
    ]


def _mapping(rows: Rows) -> list[Figure]:
    full = rows[0]["pool 256 ms"]
    return [at_most("pooled 256² map, n 100,000", full, 15, "ms", "lse included")]


def _adding(rows: Rows) -> list[Figure]:
    made = []
    for row in rows:
        if "compiled ms" in row:
            limit = row["one special function a pair ms"]
            name = f"additive, n {row['n']}, {row['dtype']}"
            faster = row["compiled ms"] / row["headwise ms"]
            made.append(at_least(f"{name}: faster than compiled", faster, 3))
            made.append(
                at_least(f"{name}: of the limit", 100 * limit / row["headwise ms"], 50, "%")
            )
    return made


def _decoding(rows: Rows) -> list[Figure]:
    ways = {"whole calls": "", "graphs": ", graph"}
    made = []
    for way, end in ways.items():
        peers = [f"{peer}{end}" for peer in ("cudnn", "flash", "flex")]
        ratios = {
            row["cell"]: row[f"headwise{end}"] / max(row[peer] for peer in peers if peer in row)
            for row in rows
        }
        first = rows[0]["cell"]
        made += _worst(f"decode, {way}, to the best peer", ratios, 0.95)
        made.append(at_least(f"decode, {way}, {first}", ratios[first], 1.15))
    return made


def _first(rows: Rows) -> list[Figure]:
    return [
        at_most(f"{row['engine']}: first call, {kind}", row[f"{kind} s"], most, "s")
        for row in rows
        for kind, most in (("cold", 10), ("from the cache", 1))
    ]


def _calls(rows: Rows) -> list[Figure]:
    small = next((row for row in rows if "small: attention µs" in row), None)
    if small is None:
        return []
    found = (("attention", 40), ("observe, five", 60))
    name = "a call of 16 heads, n 256, d 64: "
    return [at_most(name + x, small[f"small: {x} µs"], most, "µs") for x, most in found]


def _precise(rows: Rows) -> list[Figure]:
    worst = max(rows, key=lambda row: row["ratio"])
    detail = f"{worst['engine']}, {worst['input']}, {worst['dtype']}"
    return [at_most("error to SDPA's", worst["ratio"], 1.2, detail=detail)]


def _cell(row: dict[str, Any]) -> str:
    return f"n {row['n']}{', causal' if row['causal'] else ''}"


def _worst(name: str, ratios: dict[str, float], least: float) -> list[Figure]:
    """The figure of the worst cell; empty if an engine serves no cell on this GPU."""
    if not ratios:
        return []
    cell = min(ratios, key=lambda x: ratios[x])
    best = max(ratios.values())
    return [at_least(name, ratios[cell], least, detail=f"at {cell}; the best {best:.2f}")]


JUDGES: dict[str, Callable[[Rows], Iterable[Figure]]] = {
    "calls": _calls,
    "precise": _precise,
    "plain": _plain,
    "seeing": _seeing,
    "capped": _capped,
    "masked": _masked,
    "observing": _observing,
    "mapping": _mapping,
    "adding": _adding,
    "decoding": _decoding,
    "first calls": _first,
}
