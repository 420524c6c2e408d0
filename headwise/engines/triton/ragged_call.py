"""Packed requests over a paged pool by one kernel, where there is a GPU for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.engines import failures
from headwise.engines.failures import KernelError
from headwise.engines.triton.board_call import usable
from headwise.engines.triton.engine import TRITON

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 256  # of heads, which a tile of keys holds whole


def observe_by_kernel(
    batch: Any, stats: Sequence[str], sink_keys: int, marks: Any
) -> tuple[Tensor, dict[str, Tensor], Tensor] | None:
    """The output (T, Hq, Dv) of a `RaggedBatch`, its statistics and lse, and max_logit (1, Hq, T).

    None if no kernel serves it; without statistics and marks only the output is computed.
    """
    q, keys, values = batch.q, batch.keys, batch.values
    if q.device.type not in TRITON.devices or not usable(q.device):
        return None
    widest = max(q.shape[2], values.shape[2])
    if q.dtype not in DTYPES or not q.dtype == keys.dtype == values.dtype or widest > WIDEST:
        return None
    if any(x.stride(2) != 1 for x in (q, keys, values)):
        return None
    from headwise.engines.triton.host import ragged_kernel

    look = bool(stats) or marks is not None
    options = (batch.softcap is not None, batch.sinks is not None, look)
    alike = failures.family(TRITON.name, "packed requests", q, values, False, options)
    if alike in failures.failed():
        return None
    try:
        out, found = ragged_kernel.launch(batch, look, sink_keys, marks)
    except KernelError as failure:
        failures.record(alike, failure)
        return None
    named = dict(zip(ragged_kernel.FIGURES, found[:, None], strict=True)) if look else {}
    highest = named.get("max_logit", out.new_zeros(0))
    return out, {name: named[name] for name in (*stats, "lse") if look}, highest
