"""The tables of docs/gpu.md from the figures of `bench.gpu`: `python -m bench.gpu --tables`."""

from __future__ import annotations

from typing import Any

from bench.gpu_targets import Results, figures

Cells = list[object]


def tables(results: Results) -> list[list[str]]:
    """The rows of each table in Markdown, without their headings."""
    made = [
        [_row(cells(row)) for row in results[section]]
        for section, cells in CELLS.items()
        if section in results
    ]
    return [*made, [_row(_judged(figure)) for figure in figures(results)]]


def _row(cells: Cells) -> str:
    return f"| {' | '.join('–' if cell is None else str(cell) for cell in cells)} |"


def _ratio(row: dict[str, Any], peer: str, *engines: str) -> str:
    """The ratio of the fastest engine to a peer."""
    return f"{max(row.get(engine, 0) for engine in engines) / row[peer]:.2f}"


def _shown(row: dict[str, Any]) -> str:
    return "causal" if row["causal"] else "full"


def _plain(row: dict[str, Any]) -> Cells:
    forward = [row.get(name) for name in ("hopper", "triton", "cudnn", "flash", "flex", "eager")]
    backward = [row[f"{name} back"] for name in ("triton", "cudnn", "flash")]
    return [
        row["d"], row["n"], _shown(row), *forward, _ratio(row, "cudnn", "hopper", "triton"),
        *backward, _ratio(row, "cudnn back", "triton back"),
    ]  # fmt: skip


def _seeing(row: dict[str, Any]) -> Cells:
    ratios = [row[f"{what} / plain"] for what in ("entropy", "all but moments", "all")]
    return [row["engine"], row["d"], _shown(row), *(f"{ratio:.2f}" for ratio in ratios)]


def _capped(row: dict[str, Any]) -> Cells:
    return [
        row["d"], f"{row['deviation']:g}", row["hopper"], row["triton"], row["flex"],
        _ratio(row, "flex", "hopper", "triton"), row["triton back"], row["flex back"],
        _ratio(row, "flex back", "triton back"),
    ]  # fmt: skip


def _decoding(row: dict[str, Any]) -> Cells:
    both = [f"{row[name]} / {row[f'{name}, graph']}" for name in ("headwise", "cudnn", "flash")]
    return [row["cell"], *both, row["flex"], row["pages"], row["int8"]]


def _mapping(row: dict[str, Any]) -> Cells:
    names = ["pool 256", "pool 256, lse known", "largest of 256, lse known", "received", "top 8"]
    times = [row[f"{name} ms"] for name in (*names, "tile")]
    return [row["map"], *times, round(row["PyTorch's loops, lse known ms"])]


def _adding(row: dict[str, Any]) -> Cells:
    times = [row.get(f"{name} ms") for name in ("headwise", "compiled")]
    times += [row[f"{name} ms"] for name in ("one special function a pair", "back")]
    return [row["n"], row["dtype"], *times, row["MiB"]]


def _judged(figure: Any) -> Cells:
    judged = "met" if figure.met else "**missed**"
    value = f"{figure.value:.2f} {figure.unit}"
    return [figure.name, figure.target, value, judged, figure.detail]


CELLS = {
    "plain": _plain,
    "seeing": _seeing,
    "capped": _capped,
    "decoding": _decoding,
    "mapping": _mapping,
    "adding": _adding,
}
