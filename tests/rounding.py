"""How far rounding may carry a result from the float64 truth, by the dtype and the problem itself.

The bounds follow the computation step by step with absolute values: a logit's error is a few units
of rounding times Σ |q||k|, a weight's relative error is twice that of its logits, and every
gradient's is what those errors carry along. Nothing here is tuned to a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracle import Answer
from tests.problems import Call

LARGEST = 1 << 22  # products that a bound may write out


@dataclass(frozen=True)
class Units:
    """The units of rounding of a dtype: of what goes in and out, and of the sums in between."""

    io: float
    sums: float

    @staticmethod
    def of(dtype: torch.dtype) -> Units:
        wide = torch.promote_types(dtype, torch.float32)
        return Units(torch.finfo(dtype).eps / 2, torch.finfo(wide).eps / 2)


@dataclass(frozen=True)
class Grads:
    """What flows back into out (B, Hq, N, Dv), and lse and entropy (B, Hq, N)."""

    out: Tensor
    lse: Tensor
    entropy: Tensor


def logit_error(call: Call, found: Answer) -> Tensor:
    """The largest error of each row's visible logits, (B, Hq, N)."""
    unit = Units.of(call.q.dtype)
    size = _absolute_score(call)
    error = (call.q.shape[-1] + call.k.shape[-1] + 8) * unit.sums * size
    if call.score in ("general", "cosine"):  # a dot product of rewritten, rounded queries and keys
        error = error + 4 * unit.io * size
    if call.softcap is not None:
        error = error + 8 * unit.sums * call.softcap
    added = found.added.detach().abs().masked_fill(found.added.isinf(), 0)
    error = error + 8 * unit.sums * (added + found.s.detach().abs())
    error = error.detach().expand_as(found.s).masked_fill(~found.seen, 0)
    # lse, which may be a sink's that is far from every logit, is a rounded number too.
    level = found.lse.detach().abs().masked_fill(found.lse.isinf(), 0)
    return error.amax(-1) + 4 * unit.sums * level


def weight_error(call: Call, found: Answer) -> Tensor:
    """The relative error of each row's weights, (B, Hq, N)."""
    # exp turns an absolute error into a relative one; the clamp only keeps the bound finite
    from_logits = torch.expm1(2 * logit_error(call, found).clamp_max(100))
    return from_logits + 4 * (call.sizes.keys + 8) * Units.of(call.q.dtype).sums


def bounds(call: Call, found: Answer) -> dict[str, Tensor]:
    """How far out and every statistic may be off."""
    unit = Units.of(call.q.dtype)
    logit, weight = logit_error(call, found), weight_error(call, found)
    p, seen = found.p.detach(), found.seen
    # A fused kernel may round the weights to the dtype before it multiplies them with v.
    spread = (p * found.kept) @ _keys_as_queries(call, call.v).abs()
    out = spread * (weight[..., None] + 2 * unit.io) + tiny(call.q.dtype)
    surprise = _surprise(p) + found.entropy.detach()[..., None] + 1 + 2 * logit[..., None]
    entropy = (p * surprise).sum(-1) * weight
    span = found.s.detach().abs().masked_fill(~seen, 0).amax(-1)
    distance = call.positions[:, None, :, None] - torch.arange(call.sizes.keys)
    # counted from some key or other, not from the query's own
    far = 4 * (call.sizes.keys + 8) * distance.abs().amax(-1) * p.sum(-1)
    faint = (call.sizes.value_width * tiny(call.q.dtype)) ** 0.5  # squares underflow
    gap, dots = _about_the_mean(call, found)
    slack = logit + (call.sizes.keys + 8) * unit.sums * span
    variance = 2 * gap * slack + slack**2 + (call.sizes.keys + 8) * unit.sums * (gap**2 + dots**2)
    top = p.amax(-1)
    mass = weight * top + tiny(call.q.dtype)
    return {
        "out": out,
        "lse": logit + 8 * unit.sums * (span + 8) + call.sizes.keys * unit.sums,
        "max_logit": logit + 8 * unit.sums * span,
        "top_prob": mass,
        "entropy": entropy + 4 * weight * unit.sums,
        "effective_keys": (entropy + 8 * unit.sums) * found.entropy.detach().exp() * 2,
        # relative: twice that of a weight in the sum and its square
        "participation": 8 * weight * found.seen.sum(-1),
        "logit_mean": slack,
        "logit_var": variance,
        "sink_mass": weight * p.sum(-1) + tiny(call.q.dtype),
        "self_mass": mass,
        "previous_mass": mass,
        "distance": (p * distance.abs()).sum(-1) * weight + far * unit.sums + faint,
        "output_norm": out.norm(dim=-1) + 4 * unit.sums * found.out.detach().norm(dim=-1) + faint,
    }


def gradient_bounds(call: Call, found: Answer, grads: Grads) -> dict[str, Tensor]:
    """How far the gradient of every learnable part may be off; found must hold no graph."""
    unit, dtype = Units.of(call.q.dtype), call.q.dtype
    p, kept = found.p.detach(), found.kept
    v = _keys_as_queries(call, call.v).abs()
    dp = (grads.out.abs() @ v.transpose(-1, -2)) * kept
    surprise = _surprise(p) + found.entropy.detach()[..., None] + 2
    entropy = grads.entropy.abs()[..., None] * surprise
    row = (p * dp).sum(-1, keepdim=True)
    flow = dp + row + grads.lse.abs()[..., None] + entropy  # all that is added up to one ds
    # out enters the row's constant, and is rounded to the dtype first
    relative = weight_error(call, found)[..., None] + (v.shape[-1] + 8) * unit.sums + 4 * unit.io
    ds = p * flow * relative
    error = _carried(call, found, grads, ds, p * flow, p * kept * relative)
    size = _carried(call, found, grads, p * flow, 0 * p, p * kept)
    if call.sinks is not None:
        row = row[..., 0] + grads.lse.abs() + grads.entropy.abs() * (found.entropy.detach() + 3)
        size["sinks"] = row.sum((0, 2))
        error["sinks"] = (found.sink.detach() * row * relative[..., 0]).sum((0, 2))
    terms = call.sizes.batch * call.sizes.heads * (call.sizes.queries + call.sizes.keys)
    rounds = 2 * unit.io + terms * unit.sums  # of the sums over pairs, and of the result
    return {name: 2 * x + rounds * size[name] + tiny(dtype) for name, x in error.items()}


def _carried(
    call: Call, found: Answer, grads: Grads, ds: Tensor, size: Tensor, weights: Tensor
) -> dict[str, Tensor]:
    """Errors of the logits' gradients and of the weights, carried to every learnable part."""
    made = _through_score(call, found, ds, size)
    made["v"] = _per_key_head(call, weights.transpose(-1, -2) @ grads.out.abs())
    if call.table is not None:
        made["table"] = _through_bias(call, ds)
    return made


def _through_score(call: Call, found: Answer, ds: Tensor, size: Tensor) -> dict[str, Tensor]:
    """Errors ds (B, Hq, N, M) of logit gradients of that size, carried to q, k and the weight."""
    unit = Units.of(call.q.dtype)
    q, k = call.q.detach().double().abs(), _keys_as_queries(call, call.k).abs()
    if call.softcap is not None:
        slope = 1 - torch.tanh(found.raw.detach() / call.softcap) ** 2
        noise = 2 * (logit_error(call, found)[..., None] / call.softcap + 4 * unit.sums)
        ds, size = ds * slope + size * noise.clamp_max(1), size * slope
    weight = None if call.weight is None else call.weight.detach().double()
    if call.score == "additive":
        sums = call.q.detach().double()[:, :, :, None] + _keys_as_queries(call, call.k)[:, :, None]
        bent = torch.tanh(sums)
        w = weight.expand(call.sizes.heads, -1).abs()[:, None, None]
        # 1 - tanh² has an absolute error, however small it is
        slope = ds[..., None] * (1 - bent**2) + 8 * unit.sums * size[..., None]
        made = {"q": (slope * w).sum(3), "k": _per_key_head(call, (slope * w).sum(2))}
        extra = torch.einsum("bhnm,bhnmd->hd", ds, bent.abs() + unit.sums)
        return made | {"weight": extra.sum_to_size(weight.shape)}
    if call.score == "general":
        w = weight.expand(call.sizes.heads, -1, -1).abs()
        made = {
            "q": torch.einsum("bhnm,bhme,hde->bhnd", ds, k, w),
            "k": _per_key_head(call, torch.einsum("bhnm,bhnd,hde->bhme", ds, q, w)),
        }
        extra = torch.einsum("bhnm,bhnd,bhme->hde", ds, q, k)
        return made | {"weight": extra.sum_to_size(weight.shape)}
    if call.score == "cosine":
        t = weight.reshape(-1, 1, 1).abs()
        unit_q, unit_k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        at_q, at_k = ds @ unit_k, ds.transpose(-1, -2) @ unit_q
        # d(x/|x|) = (1 - u uᵀ)/|x|
        at_q = t * (at_q + unit_q * (unit_q * at_q).sum(-1, keepdim=True))
        at_k = t * (at_k + unit_k * (unit_k * at_k).sum(-1, keepdim=True))
        made = {
            "q": at_q / q.norm(dim=-1, keepdim=True),
            "k": _per_key_head(call, at_k / k.norm(dim=-1, keepdim=True)),
        }
        extra = (ds * (unit_q @ unit_k.transpose(-1, -2))).sum((0, 2, 3))
        return made | {"weight": extra.sum_to_size(weight.reshape(-1).shape).reshape(weight.shape)}
    scale = call.sizes.width**-0.5 if call.scale is None else abs(call.scale)
    made = {"q": scale * ds @ k, "k": _per_key_head(call, scale * ds.transpose(-1, -2) @ q)}
    return made


def _through_bias(call: Call, ds: Tensor) -> Tensor:
    """The errors of the logits' gradients, carried to the bias."""
    from tests.oracle import _bias

    table = call.table.detach().double().requires_grad_()
    with torch.enable_grad():
        # Every entry of a bias enters with a factor of one sign, so its gradient bounds the error.
        copy = Call(**{**vars(call), "table": table})
        added = _bias(copy)
        (found,) = torch.autograd.grad(added.expand_as(ds), table, ds)
    return found.abs()


def _absolute_score(call: Call) -> Tensor:
    """scale · score with every term made positive, (B, Hq, N, M)."""
    q, k = call.q.detach().double().abs(), _keys_as_queries(call, call.k).abs()
    weight = None if call.weight is None else call.weight.detach().double().abs()
    if call.score == "additive":
        total = 2 * weight.expand(call.sizes.heads, -1).sum(-1)
        return total[None, :, None, None].expand(*q.shape[:3], k.shape[2])
    if call.score == "general":
        w = weight.expand(call.sizes.heads, -1, -1)
        return torch.einsum("bhnd,hde,bhme->bhnm", q, w, k)
    dots = q @ k.transpose(-1, -2)
    if call.score == "cosine":
        norms = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[:, :, None]
        return weight.reshape(-1, 1, 1) * dots / norms
    return dots * (call.sizes.width**-0.5 if call.scale is None else abs(call.scale))


def _keys_as_queries(call: Call, x: Tensor) -> Tensor:
    """k or v with a head for each query head, float64."""
    return x.detach().double().repeat_interleave(call.sizes.heads // call.sizes.key_heads, 1)


def _per_key_head(call: Call, x: Tensor) -> Tensor:
    """(B, Hq, ...) added up over the query heads of each key head."""
    return x.unflatten(1, (call.sizes.key_heads, -1)).sum(2)


def _surprise(p: Tensor) -> Tensor:
    return -p.clamp_min(1e-300).log().masked_fill(p == 0, 0)


def _about_the_mean(call: Call, found: Answer) -> tuple[Tensor, Tensor]:
    """The largest distance of a visible logit from the mean; for dot scores also with Σ |q||k|."""
    seen = found.seen
    count = seen.sum(-1, keepdim=True).clamp_min(1)
    s = found.s.detach().masked_fill(~seen, 0)
    gap = (s - s.sum(-1, keepdim=True) / count).abs().masked_fill(~seen, 0).amax(-1)
    if call.score not in ("dot", "scaled"):
        return gap, gap
    k, q = _keys_as_queries(call, call.k), call.q.detach().double().abs()
    scale = call.sizes.width**-0.5 if call.scale is None else abs(call.scale)
    if seen.numel() * k.shape[-1] > LARGEST:  # a mean is no further from a key than another key
        return gap, scale * (q @ (k.amax(-2) - k.amin(-2))[..., None])[..., 0]
    k = k[:, :, None].expand(*seen.shape, -1)  # (B, Hq, N, M, D)
    k = k.masked_fill(~seen[..., None], 0)
    centred = (k - k.sum(-2, keepdim=True) / count[..., None]).abs()
    dots = scale * torch.einsum("bhnd,bhnmd->bhnm", q, centred)
    return gap, dots.masked_fill(~seen, 0).amax(-1)


def tiny(dtype: torch.dtype) -> float:
    """What underflow may take: a few of the smallest numbers of the dtype."""
    return 64 * max(torch.finfo(dtype).smallest_normal, torch.finfo(torch.float32).smallest_normal)


def close(found: Tensor, truth: Tensor, bound: Tensor | float) -> str:
    """Empty where every entry is within its bound; otherwise the worst one in words."""
    largest = torch.finfo(found.dtype).max
    found, truth = found.detach().double(), truth.detach().double()
    if found.shape != truth.shape:
        return f"shape {tuple(found.shape)} for {tuple(truth.shape)}"
    bound = torch.as_tensor(bound, dtype=torch.float64).expand(truth.shape)
    same = found == truth  # infinities included
    same |= (found.isinf()) & (found.sign() * truth + bound >= largest)  # beyond the dtype
    off = (found - truth).abs()
    bad = ~same & ~(off <= bound)
    if not bad.any():
        return ""
    ratio = (off / bound.clamp_min(1e-300)).masked_fill(~bad, -1).nan_to_num(torch.inf)
    worst = tuple(int(x) for x in torch.unravel_index(ratio.argmax(), ratio.shape))
    return (
        f"{int(bad.sum())} of {bad.numel()} differ; at {worst}: {found[worst].item():.9g} for "
        f"{truth[worst].item():.9g}, off by {off[worst].item():.3g} where rounding explains "
        f"{bound[worst].item():.3g}"
    )
