"""Packed requests over a paged pool: every request is what `hw.observe` says of it alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.core.observation import STATISTICS
from headwise.engines.triton.engine import TRITON
from headwise.watching.recorder.ragged_batch import Marks, Pages, RaggedBatch

KEYS, COUNTS = (9, 14, 5, 23), (1, 6, 5, 1)  # two requests decode, one goes on, one begins
HEADS, KEY_HEADS, WIDTH = 6, 2, 8


def ends(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


def pool(page: int, dtype: torch.dtype) -> tuple[RaggedBatch, list[Tensor]]:
    """A batch whose keys lie in shuffled pages, and the rows of the pool of each request."""
    torch.manual_seed(page)
    pages = [-(-count // page) for count in KEYS]
    order = torch.randperm(sum(pages) + 3)[: sum(pages)].split(pages)
    most = max(pages)
    each = [
        (p[:, None] * page + torch.arange(page)).flatten()[:m]
        for p, m in zip(order, KEYS, strict=True)
    ]
    if page == 1:
        table = Pages(torch.cat(each))
    else:
        entries = torch.zeros(len(KEYS), most, dtype=torch.int32)
        for r, p in enumerate(order):
            entries[r, : len(p)] = p
        table = Pages(entries.flatten(), page, most)
    rows = (sum(pages) + 3) * page
    keys, values = torch.randn(2, rows, KEY_HEADS, WIDTH).to(dtype)
    q = torch.randn(sum(COUNTS) + 2, HEADS, WIDTH).to(dtype)  # and two rows of padding
    given = (q, keys, values, ends(COUNTS), ends(KEYS), table)
    return RaggedBatch(*given, longest=max(COUNTS), scale=0.3), each


OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 4},
    {"softcap": 2.0, "sinks": torch.linspace(-1, 1, HEADS)},
]


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("options", OPTIONS)
def test_requests_are_those_of_hw_observe(page: int, options: dict[str, Any]) -> None:
    check(page, options, torch.float64)  # which no kernel serves


@pytest.mark.parametrize(
    ("page", "options", "dtype"),
    [(1, OPTIONS[1], torch.float16), (4, OPTIONS[2], torch.float32)],
)
def test_the_triton_kernel_serves_them(
    page: int, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the kernel is written in Triton")
    from headwise.engines.triton.host import ragged_kernel

    served, launch = [], ragged_kernel.launch

    def spy(*given: Any) -> Any:
        served.append(given)
        return launch(*given)

    monkeypatch.setattr(ragged_kernel, "launch", spy)
    monkeypatch.setattr(TRITON, "devices", ("cuda", "cpu"))
    check(page, options, dtype)
    assert len(served) == 3


def check(page: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    batch, each = pool(page, dtype)
    batch = replace(batch, **options)
    slots = torch.zeros(len(batch.keys), HEADS)
    of = [rows[m - n :] for rows, m, n in zip(each, KEYS, COUNTS, strict=True)]
    spare = min({*range(len(batch.keys))} - {*torch.cat(each).tolist()})
    own = torch.cat([*of, torch.tensor([spare, spare])])
    slots[own] = 7.0  # of whoever had these slots before
    out, seen = batch.observe(STATISTICS, 2, Marks(batch.pages, own, slots))
    close = {"atol": 2e-3, "rtol": 2e-3} if dtype == torch.float16 else {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(batch.attend(), out, **close)
    marked = torch.zeros_like(slots)
    _, bare = batch.observe((), 2, Marks(batch.pages, own, marked))
    assert [*bare.values] == ["lse"]
    torch.testing.assert_close(marked, slots)
    torch.testing.assert_close(batch.whole().k[0].transpose(0, 1), batch.keys[torch.cat(each)])
    begin = 0
    for rows, n in zip(each, COUNTS, strict=True):
        mask: Any = hw.mask.causal()
        if "window" in options:
            mask = mask & hw.mask.window(options["window"] - 1, 0)
        some = slice(begin, begin + n)
        q, k, v = (
            x.transpose(0, 1)[None] for x in (batch.q[some], batch.keys[rows], batch.values[rows])
        )
        given = {"score": hw.Dot(0.3), "mask": mask, "softcap": batch.softcap, "sinks": batch.sinks}
        right, told = hw.observe(q, k, v, **given, sink_keys=2, engine="reference")
        torch.testing.assert_close(out[some], right[0].transpose(0, 1), **close)
        for name in STATISTICS:
            torch.testing.assert_close(
                seen.values[name][0, :, some].double(),
                told.values[name][0].double(),
                **close,
                msg=name,
            )
        weights = hw.attention_map(q.double(), k.double(), **given).received()[0].T
        torch.testing.assert_close(slots[rows].double(), weights.double(), **close)
        begin += n
    assert not out[begin:].any()
    assert not seen.sees[..., begin:].any()
    whole = batch.whole()
    again = hw.attention(*whole[:3], **{**whole.options(), "engine": "reference"})
    torch.testing.assert_close(again[0].transpose(0, 1), out, **close)
