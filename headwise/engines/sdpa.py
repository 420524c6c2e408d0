"""PyTorch's own fused kernels, for what they compute exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import RLock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwise.core.patterns import Causal
from headwise.core.problem import Problem
from headwise.core.schedule import seen_keys, used_stretch
from headwise.engines import flops
from headwise.engines.contract import Engine, Prepared, Results
from headwise.engines.decoding import is_decoding
from headwise.engines.library_kernels import FEW
from headwise.engines.second_derivatives import differentiated_once

flops.register_cpu_sdpa()

SMALL = 1 << 22  # pairs: up to here a dense mask is cheaper than skipping blocks
OTHERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
FIRST = [SDPBackend.CUDNN_ATTENTION, *OTHERS]
_NUMBERS = [kernel.value for kernel in FIRST]  # PyTorch's priority order lists all its kernels
_NUMBERS += [x for x in torch._C._get_sdp_priority_order() if x not in _NUMBERS]
_CHOOSING = RLock()  # the order and the switches are global to the process


class Sdpa(Engine):
    """PyTorch's `scaled_dot_product_attention`."""

    name = "sdpa"
    rank = 4
    functional = True

    def refuses(self, problem: Problem, observed: bool) -> str | None:
        if observed:
            return "PyTorch's fused kernels return no statistics"
        if problem.additive is not None:
            return "they compute dot scores only"
        if not problem.scale > 0:
            return "keys they hide become NaN if the scale is not positive"
        if problem.softcap:
            return "they have no softcap"
        if problem.sinks is not None:
            return "they have no sinks"
        if problem.dropout:
            return "their dropout differs from the one that all engines share"
        return _refuses_bias(problem) or _refuses_shape(problem) or _refuses_mask(problem)

    def priority(self, problem: Problem) -> int:
        """Prefer them if they need no mask tensor, except in decoding, where they are slow."""
        q, k = problem.q, problem.k
        decoding = q.is_cuda and is_decoding(q.shape, k.shape)
        return 1 if maskless(problem) and not decoding else self.rank

    def attend(self, problem: Problem) -> Tensor:
        q, k, v, place = problem.q, problem.k, problem.v, problem.place
        serve, added = _kernel(problem), None
        if problem.mask is not None and not maskless(problem):
            added = problem.mask.to_dense(place)
        bias = problem.terms().bias if problem.bias is not None else None
        if bias is not None:
            bias = bias.to(q.dtype)
            added = bias if added is None else bias.masked_fill(~added, -torch.inf)
        if added is None:
            return differentiated_once(serve(q, k, v))
        if added.dtype == torch.bool and added.shape[-2] == 1:
            # PyTorch would expand booleans to all pairs before it converts them to numbers.
            hidden = ~added
            added = torch.zeros_like(added, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
        added = added.expand(*added.shape[:2], place.queries, place.keys)
        k, v, added = _existing(problem, added)
        return differentiated_once(serve(q, k, v, added))

    def observe(
        self, problem: Problem, names: tuple[str, ...], sink_keys: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        raise ValueError("PyTorch's fused kernels return no statistics")

    def backward(self, problem: Problem) -> str:
        return "PyTorch's, of the kernel that it chose"

    def first(
        self, problem: Problem, names: tuple[str, ...], sink_keys: int, tensors: tuple[Tensor, ...]
    ) -> tuple[Results, Prepared | None]:
        if not maskless(problem):
            return (self.attend(problem),), None
        kernel = _kernel(problem)

        def run(*tensors: Tensor) -> Results:
            return (differentiated_once(kernel(*tensors)),)

        return run(*tensors), run


SDPA = Sdpa()


def _refuses_bias(problem: Problem) -> str | None:
    if problem.bias is None:
        return None
    if not isinstance(problem.bias, Tensor):
        return f"they would need {type(problem.bias).__name__} as a tensor of all pairs"
    if torch.promote_types(problem.bias.dtype, problem.q.dtype) != problem.q.dtype:
        return f"they would round the {problem.bias.dtype} bias to {problem.q.dtype}"
    if problem.bias.requires_grad and torch.is_grad_enabled():
        return "they do not compute the gradient of a bias"
    return None


def _refuses_shape(problem: Problem) -> str | None:
    q, k, v = problem.q, problem.k, problem.v
    if 0 in (*q.shape, *k.shape, *v.shape):
        return "they do not take empty tensors"
    if q.device.type == "cpu" and v.shape[-1] != k.shape[-1]:
        return "on a CPU they need values as wide as keys"
    if q.device.type not in ("cpu", "cuda"):
        return f"they are not known to be fused on {q.device.type}"
    if q.device.type == "cuda" and q.dtype == torch.float64:
        return "they have no fused CUDA kernel for float64"
    return None


def _refuses_mask(problem: Problem) -> str | None:
    mask = problem.mask
    if mask is None or mask.pieces == 0 or (mask.rows_alike and problem.q.device.type == "cpu"):
        return None
    return None if maskless(problem) else _too_many(problem)


def maskless(problem: Problem) -> bool:
    """Return whether the kernels need no mask tensor: all keys, or the causal triangle."""
    mask = problem.mask
    triangle = isinstance(mask, Causal) and mask.is_lower_triangle(problem.place)
    return problem.bias is None and (mask is None or triangle)


def _too_many(problem: Problem) -> str | None:
    place = problem.place
    if place.batch * place.queries * place.keys <= SMALL:
        return None
    return "their mask would take memory for every pair"


def _kernel(problem: Problem) -> Callable[..., Tensor]:
    """Return the kernel for q, k, v and possibly a mask tensor, its other arguments filled in."""
    q, causal = problem.q, problem.mask is not None and maskless(problem)
    causal = True if causal else False  # noqa: SIM210 (never symbolic)
    halves = q.device.type == "cuda" and q.dtype.itemsize == 2
    run: Callable[..., Tensor] = F.scaled_dot_product_attention
    if halves and _is_hopper(q.device.index or 0):
        run = _on_hopper
    return partial(run, is_causal=causal, scale=problem.scale, enable_gqa=problem.grouped)


def _on_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    added: Tensor | None = None,
    *,
    is_causal: bool,
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    """Prefer cuDNN's kernel, 1.5 to 1.8 times as fast as PyTorch's own, if its gradients are right.

    With a mask tensor, or for few queries, its gradients may be NaN for rows with lse below -88.
    """
    learning = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    first = not learning or (added is None and q.shape[2] >= FEW)
    run = partial(
        F.scaled_dot_product_attention, q, k, v, added, is_causal=is_causal, scale=scale,
        enable_gqa=enable_gqa,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        with sdpa_kernel(FIRST if first else OTHERS, set_priority=True):
            return run()
    # `sdpa_kernel` takes the CPU longer than the rest of a short call, and would enable kernels
    # that the user has disabled.
    with _CHOOSING:
        order, allowed = torch._C._get_sdp_priority_order(), torch._C._get_cudnn_sdp_enabled()
        torch._C._set_sdp_priority_order(_NUMBERS)
        torch._C._set_sdp_use_cudnn(allowed and first)
        try:
            return run()
        finally:
            torch._C._set_sdp_priority_order(order)
            torch._C._set_sdp_use_cudnn(allowed)


def _existing(problem: Problem, added: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return k, v and the mask without the keys that no row sees, which may hold anything."""
    k, v = problem.k, problem.v
    seen = seen_keys(problem.terms(), k)
    if seen is None:
        return k, v, added
    # No GPU has to be waited for; compilers and transforms don't know the numbers.
    unknown = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if k.device.type == "cpu" and not unknown:
        used = used_stretch(seen)
        if used.start < used.stop:
            k, v, added, seen = k[:, :, used], v[:, :, used], added[..., used], seen[..., used]
        if bool(seen.all()):
            return k, v, added
    return k.masked_fill(~seen[..., None], 0), v.masked_fill(~seen[..., None], 0), added


def _is_hopper(index: int) -> bool:
    if index not in _HOPPER:
        _HOPPER[index] = torch.cuda.get_device_capability(index)[0] == 9
    return _HOPPER[index]


_HOPPER: dict[int, bool] = {}
# Sets what torch.compiler.assume_constant_result would, without loading all of torch's compiler:
# compilers can't trace the query, and its result never changes.
_is_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]
