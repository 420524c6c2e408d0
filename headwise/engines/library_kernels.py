"""PyTorch's kernels that compute gradients of attention, and what each of them takes.

Their operators are private to PyTorch: one that is missing, takes other arguments than are known
here, or fails on this machine is not used.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from headwise.core.problem import Terms
from headwise.core.row_sums import RowTotals
from headwise.engines import failures

FEW = 128  # rows per tile of cuDNN's backward: for fewer, its gradients may be NaN
VECTOR = 16  # bytes that a GPU's kernels load at once

Three = tuple[Tensor, Tensor, Tensor]


class BackwardArguments(NamedTuple):
    """The arguments that every kernel takes, in layouts that it can read."""

    grad: Tensor  # of out
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    causal: bool
    scale: float


class KernelFit(NamedTuple):
    """A kernel's answer for all calls of one description: operator, mask and layouts."""

    operator: Any
    causal: bool
    strides: tuple[tuple[int, ...], ...]  # of q, k and v, if kernels can read them so
    grad_strides: tuple[int, ...]  # those that the gradient of out needs


class LibraryKernel:
    """One of PyTorch's backward kernels: its name in words, its operator, and the arguments."""

    name: str
    library: str
    operator: str
    arguments: str  # the operator's, when this was written

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> str | None:
        """Return why it can't differentiate a call exactly, or None if it can."""
        if private_operator(self.operator, self.arguments) is None:
            return f"is missing from PyTorch {torch.__version__}, or has changed there"
        cause = failures.failed().get(self.family(q, v))
        if cause is not None:
            return f"failed on this machine: {cause}"
        causal = is_causal(q, k, terms)
        if causal is None:
            return "takes no mask but causal() with as many queries as keys"
        return refuses_terms(q, v, terms) or self.limits(q, k, v, causal)

    def limits(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str | None:
        """Return what this kernel in particular can't do."""
        raise NotImplementedError

    def fit(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> KernelFit | None:
        """Return what all calls of this description need; None if it refuses them."""
        if self.refuses(q, k, v, terms) is not None:
            return None
        operator, causal = private_operator(self.operator, self.arguments), is_causal(q, k, terms)
        assert operator is not None and causal is not None
        strides = tuple(x.stride() if readable(x) is x else () for x in (q, k, v))
        return KernelFit(operator, causal, strides, dense_strides(readable(q)))

    def rounds_too_much(self, lse: Tensor) -> bool:
        """Return whether the rows' totals, known in the backward only, are of no use to it."""
        return False

    def gradients(
        self, fit: KernelFit, three: Three, scale: float, out: Tensor, lse: Tensor, grad: Tensor
    ) -> Three:
        """Return the gradients of q, k and v from that of out, (B, Hq, N, Dv)."""
        q, k, v = (
            x if x.stride() == strides and x.data_ptr() % VECTOR == 0 else readable(x)
            for x, strides in zip(three, fit.strides, strict=True)
        )
        grad = in_layout_of(grad, q, fit.grad_strides if q.stride() == fit.strides[0] else None)
        out, lse = out.contiguous(), lse.contiguous()
        return self.run(fit.operator, BackwardArguments(grad, q, k, v, out, lse, fit.causal, scale))

    def run(self, operator: Any, given: BackwardArguments) -> Three:
        """Call the operator."""
        raise NotImplementedError

    def family(self, q: Tensor, v: Tensor) -> failures.Family:
        """Return the calls that would fail together with this one."""
        return failures.family(f"{self.library} backward", "attention", q, v, True)


class CpuKernel(LibraryKernel):
    """PyTorch's FlashAttention for CPUs."""

    name, library = "PyTorch's CPU kernel", "PyTorch"
    operator = "_scaled_dot_product_flash_attention_for_cpu_backward"
    arguments = "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale"

    def limits(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str | None:
        if not torch.backends.cuda.flash_sdp_enabled():
            return "is switched off"
        if q.dtype.itemsize == 2:
            return f"rounds its sums to {q.dtype}"
        return None

    def rounds_too_much(self, lse: Tensor) -> bool:
        return RowTotals.of_lse(lse).coarse()  # it takes weights from lse alone

    def run(self, operator: Any, given: BackwardArguments) -> Three:
        *tensors, causal, scale = given
        found: Three = operator(*tensors, 0.0, causal, scale=scale)
        return found


class CudnnKernel(LibraryKernel):
    """cuDNN's kernel, on Hopper GPUs and later ones."""

    name, library = "cuDNN's kernel", "cuDNN"
    operator = "_scaled_dot_product_cudnn_attention_backward"
    arguments = (
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q "
        "cum_seq_k max_q max_k dropout_p is_causal scale"
    )

    def limits(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str | None:
        rows, keys = q.shape[2], k.shape[2]
        if min(rows, keys) < FEW:
            return f"is exact from {FEW} queries and keys on"
        if rows % FEW or keys % FEW:  # in a part of a tile, exp(-lse) of a tiny lse gives NaN
            return f"is exact for lengths that are multiples of {FEW}"
        if os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1":
            return "would reuse plans of other layouts: TORCH_CUDNN_SDPA_AVOID_RECOMPILE is set"
        return refuses_on_gpu("cudnn", q, k, v, causal)

    def run(self, operator: Any, given: BackwardArguments) -> Three:
        grad, q, k, v, out, lse, causal, scale = given
        unused = q.new_empty((), dtype=torch.int64)  # a seed, which only dropout would read
        # PyTorch keeps cuDNN's plans by the layouts of q, k and v, without those of out and grad,
        # and compares the bytes of the dropout rate: with -0.0, plans for this forward's layouts
        # and those for PyTorch's own are kept apart.
        found: Three = operator(
            grad, q, k, v, out, lse[..., None], unused, unused, None, None, None,
            q.shape[2], k.shape[2], -0.0, causal, scale=scale,
        )  # fmt: skip
        return found


class FlashKernel(LibraryKernel):
    """FlashAttention's kernel, on older GPUs."""

    name, library = "FlashAttention's kernel", "FlashAttention"
    operator = "_scaled_dot_product_flash_attention_backward"
    arguments = (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p "
        "is_causal philox_seed philox_offset scale"
    )

    def limits(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str | None:
        return refuses_on_gpu("flash", q, k, v, causal)

    def run(self, operator: Any, given: BackwardArguments) -> Three:
        grad, q, k, v, out, lse, causal, scale = given
        unused = q.new_empty(2, dtype=torch.uint64)  # a seed, which only dropout would read
        found: Three = operator(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal,
            unused, unused, scale=scale,
        )  # fmt: skip
        return found


CPU, CUDNN, FLASH = CpuKernel(), CudnnKernel(), FlashKernel()


@cache
def private_operator(operator: str, arguments: str) -> Any | None:
    """Return a private operator of PyTorch; None if it is missing or has other arguments."""
    found = getattr(getattr(torch.ops.aten, operator, None), "default", None)
    if found is None:
        return None
    return found if " ".join(x.name for x in found._schema.arguments) == arguments else None


def is_causal(q: Tensor, k: Tensor, terms: Terms) -> bool | None:
    """Return False if every row sees all keys, True if row i sees keys 0 to i, None otherwise."""
    rows, keys = q.shape[2], k.shape[2]
    if terms.dense is not None:
        return None
    banded = terms.band is not None and len(terms.band) == 3
    if terms.intervals is None and not banded:
        return False
    if rows != keys or (terms.intervals is not None and banded):
        return None
    if terms.band is not None and banded:
        low, high = terms.band[1:]
        return True if rows - 1 + low <= 0 and high == 1 else None
    bounds = terms.intervals
    if type(bounds) is not Tensor or bounds.device.type != "cpu" or len(bounds) != 1:
        return None  # its numbers are not known here, or a GPU would have to be waited for
    row = torch.arange(rows, dtype=bounds.dtype)
    return True if not bounds[0, 0].any() and (bounds[0, 1] == row + 1).all() else None


def refuses_terms(q: Tensor, v: Tensor, terms: Terms) -> str | None:
    """Return which part of a call no backward kernel of PyTorch takes, or None."""
    if terms.additive is not None:
        return "takes dot scores only"
    if terms.softcap:
        return "has no softcap"
    if not terms.plain:
        return "takes no bias"
    if terms.sinks is not None:
        return "has no sinks"
    if terms.seed is not None:
        return "has a dropout of its own"
    if not terms.scale > 0:
        return f"takes positive scales, and this is {terms.scale:g}"
    if q.shape[-1] != v.shape[-1]:
        return f"takes values as wide as keys, and these are {v.shape[-1]} and {q.shape[-1]} wide"
    return "takes no empty tensors" if q.numel() == 0 or v.numel() == 0 else None


def refuses_on_gpu(backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str | None:
    """Return why PyTorch's kernel can't differentiate these tensors on their GPU, or None."""
    if torch.are_deterministic_algorithms_enabled():
        return "adds up in any order, and deterministic algorithms are asked for"
    if q.shape[-1] % 8:
        return f"takes heads of a multiple of 8, and these are {q.shape[-1]} wide"
    can_use = can_use_cudnn_attention if backend == "cudnn" else can_use_flash_attention
    asked = readable(q).detach().requires_grad_()  # some sizes are refused with gradients only
    with torch.cuda.device(q.device):
        grouped = q.shape[1] != k.shape[1]
        given = SDPAParams(asked, readable(k), readable(v), None, 0.0, causal, grouped)
        if can_use(given, False):
            return None
    return f"is refused by torch.backends.cuda.can_use_{backend}_attention for this call"


def readable(x: Tensor) -> Tensor:
    """Return x, or a copy, with rows that vector loads can read and no two at one address."""
    steps = [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    outer = steps[:-1] if x.shape[-1] > 1 else steps
    whole = all(step and step * x.itemsize % VECTOR == 0 for step in outer)
    inner = x.shape[-1] == 1 or x.stride(-1) == 1
    if inner and whole and x.data_ptr() % VECTOR == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def in_layout_of(x: Tensor, like: Tensor, strides: tuple[int, ...] | None = None) -> Tensor:
    """Return x, or a copy, in the layout of a tensor of the same shape; `strides`, if known.

    The gradient of a sum has strides of 0, and plans are made for one layout.
    """
    strides = dense_strides(like) if strides is None else strides
    if x.stride() == strides and x.data_ptr() % VECTOR == 0:
        return x
    return torch.empty_like(like).copy_(x)


def dense_strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of a new tensor in the layout of x."""
    return torch.empty_like(x, device="meta").stride()
