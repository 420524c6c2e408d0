"""Attention over a KV cache by the decoding kernels, which read pages and int8 directly."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.options import Options
from headwise.core.patterns import Causal
from headwise.engines import calls, failures
from headwise.engines.decoding import FEW_QUERIES, MOST_ROWS, Stored
from headwise.engines.failures import KernelError
from headwise.engines.triton.engine import TRITON
from headwise.engines.triton.limits import fits_grid
from headwise.score import Dot


def attend_stored(q: Tensor, stored: Stored, options: Options) -> Tensor | None:
    """Return attention of the last tokens' queries q (B, Hq, N, D) over everything in a KV cache.

    None if the decoding kernels do not serve the call.
    """
    score, mask, _, softcap, sinks, _, engine = options
    if engine not in ("auto", TRITON.name) or not _serves(q, stored, mask, softcap, sinks):
        return None
    alike = failures.family(TRITON.name, "cached attention", q, stored.values, False)
    if failures.reason(alike) is not None:
        return None
    held = (stored.key_scales, stored.value_scales, stored.pages)
    key, tensors = calls.describe(
        (q, stored.keys, stored.values, *(x for x in held if x is not None)),
        options._replace(mask=None),
        "stored", mask is not None, stored.length, *(x is None for x in held),
    )  # fmt: skip
    if key is None or calls.learns(tensors):
        return None
    prepared = calls.known(key)
    try:
        if prepared is not None:
            return prepared(*tensors)[0]
        from headwise.engines.triton.host import decoding_call, launches

        scale = score.scale if isinstance(score, Dot) else None
        scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
        if not 1e-6 < scale < 1e6:
            return None

        def work_out(now: launches.Launches) -> tuple[Tensor]:
            given = q, stored, scale, mask is not None, softcap, sinks
            return (decoding_call.run_stored(now, *given),)

        found, prepared = launches.recorded(work_out, tensors)
    except KernelError as failure:
        calls.drop(key)
        failures.record(alike, failure)
        return None
    calls.keep(key, prepared)
    out: Tensor = found[0]
    return out


def _serves(q: Tensor, stored: Stored, mask: object, softcap: object, sinks: object) -> bool:
    """Return whether the kernels take shapes, dtypes and mask; `hw.attention` checks the rest."""
    if torch.compiler.is_compiling() or type(q) is not Tensor or q.ndim != 4:
        return False
    if TRITON.absent(q.device) is not None or not fits_grid(q.shape):
        return False
    if mask is not None and not (type(mask) is Causal and mask.offset is None):
        return False
    batch = (stored.keys if stored.pages is None else stored.pages).shape[0]
    key_heads, width = stored.keys.shape[1], stored.keys.shape[3]
    if (q.shape[0], q.shape[3]) != (batch, width) or q.shape[1] % key_heads:
        return False
    if q.shape[2] > FEW_QUERIES or q.shape[1] // key_heads * q.shape[2] > MOST_ROWS:
        return False
    if width not in (64, 128, 256) or q.dtype not in _dtypes(q.device):
        return False
    if softcap is not None and not (isinstance(softcap, int | float) and softcap > 0):
        return False
    if sinks is not None and not _fits(sinks, q):
        return False
    kept = q.dtype if stored.key_scales is None else torch.int8
    return stored.keys.dtype == stored.values.dtype == kept and stored.keys.device == q.device


def _fits(sinks: object, q: Tensor) -> bool:
    """Return whether `hw.attention` would take the sinks: one number per head."""
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        return False
    return sinks.shape == q.shape[1:2] and sinks.device == q.device


def _dtypes(device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes for queries; NumPy, which the interpreter uses, has no bfloat16."""
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    return half, torch.float16
