"""Models of PyTorch alone: its function, its modules on every path, and softmax by hand."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

import headwise as hw
from headwise.watching import Watch

B, N, D, H = 3, 7, 32, 4
LENGTHS = torch.tensor([7, 4, 6])
PADDED = torch.arange(N) >= LENGTHS[:, None]
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


class Projected(nn.Module):
    """Projections around whatever `attend` does with q, k and v."""

    def __init__(self, attend: Callable[..., Tensor], kv: int = D) -> None:
        super().__init__()
        self.attend, self.num_heads = attend, H
        self.q, self.kv, self.o = nn.Linear(D, D), nn.Linear(D, 2 * kv), nn.Linear(D, D)
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        k, v = (y.unflatten(-1, (-1, D // H)).transpose(1, 2) for y in (k, v))
        out = self.attend(heads(self.q(x)), k, v, **options)
        return self.o(out.transpose(1, 2).flatten(2))


def entropy(p: Tensor) -> Tensor:
    return -torch.special.xlogy(p, p).sum(-1)


def watched(model: nn.Module, *given: Any, **options: Any) -> Watch:
    """The model watched; its output is what it was."""
    before = model(*given, **options)
    with hw.watch(model) as seen:
        during = model(*given, **options)
    pairs = zip(*((x,) if isinstance(x, Tensor) else x for x in (before, during)), strict=True)
    assert all(a is b is None or torch.equal(a, b) for a, b in pairs)
    return seen


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": torch.ones(N, N).tril(2).bool()},
    "dense mask": {"attn_mask": torch.rand(B, 1, N, N) > 0.4},
    "added mask": {"attn_mask": torch.randn(B, H, N, N)},
    "hiding mask": {"attn_mask": torch.zeros(N, N).masked_fill(PADDED[1], -torch.inf)},
    "scale": {"scale": 0.9},
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_the_attention_function_are_seen_with_all_their_arguments(call: str) -> None:
    model, x = Projected(F.scaled_dot_product_attention), torch.randn(B, N, D)
    seen = watched(model, x, **CALLS[call])
    options = CALLS[call]
    k = heads(model.kv(x).chunk(2, -1)[0])
    s = heads(model.q(x)) @ k.mT * options.get("scale", (D // H) ** -0.5)
    mask = torch.ones(N, N).tril().bool() if "is_causal" in options else options.get("attn_mask")
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    p, (layer,) = s.softmax(-1).nan_to_num(), seen.layers
    sees = s.isfinite().any(-1)
    torch.testing.assert_close(layer.observation.entropy, entropy(p) * sees, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.observation.max_logit, s.amax(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.map().to_tensor(), p * sees[..., None])


def test_grouped_heads_and_a_function_imported_by_name_are_seen() -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    (layer,) = watched(Projected(grouped, kv=D // 2), torch.randn(B, N, D)).layers
    assert layer.heads == H


def test_causal_calls_of_fewer_queries_are_aligned_at_the_start_as_pytorch_has_it() -> None:
    class Last(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 6, 8)
    (layer,) = watched(Last(), q, k).layers
    alone = layer.observation.self_mass[0, :, 0]  # row 0 sees key 0 alone
    torch.testing.assert_close(alone, torch.ones(2))


def test_one_row_of_a_mask_for_all_queries_does_not_tell_where_they_stand() -> None:
    model, x = Projected(F.scaled_dot_product_attention), torch.randn(B, N, D)
    expected = watched(model, x).heads()
    found = watched(model, x, attn_mask=torch.ones(B, 1, 1, N, dtype=torch.bool)).heads()
    for name in ("self_mass_mean", "previous_mass_mean", "distance_mean"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5)


def test_calls_without_heads_and_with_more_axes_are_seen() -> None:
    class Bare(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q)

    assert watched(Bare(), torch.randn(2, 5, 8)).layers[0].observation.entropy.shape == (2, 1, 5)
    five = watched(Bare(), torch.randn(2, 3, 4, 5, 8)).layers[0]
    assert five.observation.entropy.shape == (6, 4, 5)


class Written(nn.Module):
    """Attention by hand, in one of the ways people write it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.num_heads, self.dropout = way, H, nn.Dropout(0.0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        s = s.masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
        if self.way == "einsum":
            return torch.einsum("bhij,bhjd->bhid", torch.softmax(s, -1), v)
        if self.way == "dropout and cast":
            return self.dropout(F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)) @ v
        if self.way == "flat":
            p = s.flatten(0, 1).softmax(dim=-1)
            return torch.bmm(p, v.flatten(0, 1)).unflatten(0, (-1, H))
        return nn.Softmax(-1)(s).matmul(v)


@pytest.mark.parametrize("way", ["module", "einsum", "dropout and cast", "flat"])
def test_attention_written_by_hand_is_seen(way: str) -> None:
    model, other = Projected(Written(way)), Projected(F.scaled_dot_product_attention)
    other.load_state_dict(model.state_dict())
    x = torch.randn(B, N, D)
    by_hand = watched(model, x).layers[0]
    fused = watched(other, x, is_causal=True).layers[0]
    for name in hw.STATISTICS:
        ours, theirs = by_hand.observation.values[name], fused.observation.values[name]
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4, msg=name)


def test_a_softmax_that_weighs_no_values_is_no_attention() -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.softmax(-1).topk(1).values

    router = Router()
    with pytest.raises(ValueError, match="no attention was found"), hw.watch(router):
        router(torch.randn(B, N, D))


def test_values_that_cannot_be_told_are_refused_by_name() -> None:
    class Twisted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            p = torch.einsum("ibd,jbd->bij", x, x)[:, None].softmax(-1)
            return torch.einsum("bhij,jbd->ibd", p, x)

    model = nn.Sequential(Twisted())
    with (
        pytest.raises(ValueError, match=r"0 can't be watched: it writes its attention out"),
        hw.watch(model, strict=True),
    ):
        model(torch.randn(N, B, D))


def torch_weights(attention: nn.MultiheadAttention, *given: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        p: Tensor = attention(*given, **options, need_weights=True, average_attn_weights=False)[1]
    return p if p.ndim == 4 else p[None]


@pytest.mark.parametrize("grad", [True, False], ids=["slow path", "fast path"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masked", ["nothing", "padding", "causal", "both", "added"])
def test_multihead_attention_is_seen_on_every_path(
    grad: bool, need_weights: bool, masked: str
) -> None:
    attention = nn.MultiheadAttention(D, H, batch_first=True).eval()
    x = torch.randn(B, N, D)
    later = torch.ones(N, N).triu(1).bool()
    options: dict[str, Any] = {}
    if masked in ("padding", "both"):
        options["key_padding_mask"] = PADDED
    if masked in ("causal", "both"):
        options["attn_mask"] = later
    if masked == "added":
        options["attn_mask"] = torch.randn(B * H, N, N).masked_fill(later, -torch.inf)
    with torch.set_grad_enabled(grad):
        seen = watched(attention, x, x, x, **options, need_weights=need_weights)
    p, (layer,) = torch_weights(attention, x, x, x, **options), seen.layers
    rows = ~PADDED if layer.padding is not None else torch.ones(B, N, dtype=torch.bool)
    kept = rows[:, None].expand(-1, H, -1)
    torch.testing.assert_close(layer.observation.entropy[kept], entropy(p)[kept])
    own = p.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(layer.observation.self_mass[kept], own[kept])
    assert (layer.padding is not None) == ("key_padding_mask" in options)
    assert layer.kind == "self"


def test_multihead_attention_without_batch_across_and_with_other_widths() -> None:
    first = nn.MultiheadAttention(D, H, kdim=20, vdim=28)
    x, keys, values = torch.randn(N, B, D), torch.randn(5, B, 20), torch.randn(5, B, 28)
    (layer,) = watched(first, x, keys, values).layers
    p = torch_weights(first, x, keys, values)
    torch.testing.assert_close(layer.observation.entropy, entropy(p))
    assert layer.kind == "cross"
    second, alone = nn.MultiheadAttention(D, H, bias=False), torch.randn(N, D)
    (layer,) = watched(second, alone, alone, alone).layers
    p = torch_weights(second, alone, alone, alone)
    torch.testing.assert_close(layer.observation.entropy, entropy(p))


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_keys_that_are_no_tokens_are_refused_by_name(option: str) -> None:
    model = nn.Sequential(Around(Attends(nn.MultiheadAttention(D, H, **{option: True}))))
    refused = pytest.raises(
        ValueError, match=rf"0\.inner\.inner can't be watched: it uses {option}"
    )
    with refused, hw.watch(model, strict=True):
        model(torch.randn(N, B, D))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Functional(nn.Module):
    """PyTorch's function, called with parameters of its own, as WavLM does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(D, H)

    def forward(self, x: Tensor, hides: Tensor) -> Tensor:
        inner = self.inner
        packed = (inner.in_proj_weight, inner.in_proj_bias, None, None, False, 0.0)
        last = (inner.out_proj.weight, inner.out_proj.bias)
        return F.multi_head_attention_forward(
            x, x, x, D, H, *packed, *last, attn_mask=hides, need_weights=False
        )[0]


def test_the_function_behind_multihead_attention_is_read() -> None:
    model, x = Functional().eval(), torch.randn(N, B, D)
    hides = torch.ones(N, N, dtype=torch.bool).triu(1)
    before = model(x, hides)
    with hw.watch(model, strict=True) as seen:
        assert torch.equal(model(x, hides), before)
    p = torch_weights(model.inner, x, x, x, attn_mask=hides)
    (layer,) = seen.layers
    torch.testing.assert_close(layer.map().to_tensor(), p)
    refused = pytest.raises(ValueError, match="multi_head_attention_forward can't be switched off")
    with hw.watch(model) as seen, refused:
        seen.importance(lambda: model(x, hides).sum())


class Attends(nn.Module):
    """Self-attention of PyTorch's."""

    def __init__(self, inner: nn.MultiheadAttention) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, x, x)[0]
        return out


class Around(nn.Module):
    """Someone's module around PyTorch's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        out: Tensor = self.inner(x * 1.0, **options)
        return out


class Changed(nn.TransformerEncoderLayer):
    """Someone's layer that goes on to PyTorch's."""

    def forward(self, src: Tensor, *given: Any, **options: Any) -> Tensor:
        return super().forward(src, *given, **options)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("shape", ["encoder", "layer", "inside a module", "changed", "patched"])
def test_encoders_keep_their_fast_path_nested_tensors_and_outputs(
    shape: str, grad: bool, padded: bool, norm_first: bool
) -> None:
    make = Changed if shape == "changed" else nn.TransformerEncoderLayer
    layer = make(D, H, 64, batch_first=True, norm_first=norm_first).eval()
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    models = {"layer": layer, "inside a module": Around(encoder).eval()}
    model, x = models.get(shape, encoder), torch.randn(B, N, D)
    if shape == "patched":  # a module whose own forward is replaced is followed by hooks
        model, layer.linear1.forward = layer, layer.linear1.forward
    first: Any = layer if model is layer else encoder.layers[0]
    options = {"src_key_padding_mask": PADDED} if padded else {}
    with torch.set_grad_enabled(grad):
        seen = watched(model, x, **options)
    assert len(seen.layers) == (1 if model is layer else 2)
    given = first.norm1(x) if norm_first else x
    masks = {"key_padding_mask": PADDED} if padded else {}
    p = torch_weights(first.self_attn, given, given, given, **masks)
    rows = (~PADDED if padded else torch.ones(B, N, dtype=torch.bool))[:, None].expand(-1, H, -1)
    torch.testing.assert_close(seen.layers[0].observation.entropy[rows], entropy(p)[rows])
    assert seen.layers[0].name.endswith("self_attn")


def test_a_whole_transformer_shows_self_and_cross_attention() -> None:
    model = nn.Transformer(D, H, 1, 1, 64, batch_first=True).eval()
    causal = nn.Transformer.generate_square_subsequent_mask(N)
    seen = watched(model, torch.randn(B, 5, D), torch.randn(B, N, D), tgt_mask=causal)
    assert [layer.kind for layer in seen.layers] == ["self", "self", "cross"]
    alone = seen.layers[1].observation.self_mass[..., 0]
    torch.testing.assert_close(alone, torch.ones(B, H))


class Loud(TorchFunctionMode):
    """A mode of the user's own, which sees every function once."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_of_the_user_inside_and_outside_a_watch_do_not_count_twice() -> None:
    class Moded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Projected(F.scaled_dot_product_attention)

        def forward(self, x: Tensor) -> Tensor:
            with Loud():
                out: Tensor = self.inner(x)
                return out

    with Loud() as outer, hw.watch(model := Moded()) as seen:
        model(torch.randn(B, N, D))
    assert int(seen.layers[0].counted()[0]) == B * N
    assert outer.heard.count(F.scaled_dot_product_attention) == 1


def test_modules_of_ours_inside_a_foreign_model_are_seen_once() -> None:
    ours = hw.nn.MultiHeadAttention(D, H)
    with hw.watch(model := Around(ours)) as seen:
        model(torch.randn(B, N, D))
    assert [layer.name for layer in seen.layers] == ["inner"]
    assert int(seen.layers[0].counted()[0]) == B * N


def test_a_model_copied_or_saved_while_it_is_watched_is_free(tmp_path: Any) -> None:
    model = Around(Projected(Written("module")))
    with hw.watch(model) as seen:
        copied = copy.deepcopy(model)
        model(torch.randn(B, N, D))
        copied(torch.randn(2 * B, N, D))
        torch.save(model.state_dict(), tmp_path / "model.pt")
    assert int(seen.layers[0].counted()[0]) == B * N


def test_an_interrupted_run_leaves_nothing_on() -> None:
    def interrupt(*_: Tensor) -> Tensor:
        raise KeyboardInterrupt

    model, depth = Around(Projected(interrupt)), torch._C._len_torch_function_stack()
    with pytest.raises(KeyboardInterrupt), hw.watch(model):
        model(torch.randn(B, N, D))
    assert torch._C._len_torch_function_stack() == depth
    watch = hw.watch(model).attach()
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(B, N, D))
    model.inner.attend = F.scaled_dot_product_attention
    model(torch.randn(B, N, D))
    watch.detach()
    assert [layer.name for layer in watch.layers] == ["inner"]
    assert torch._C._len_torch_function_stack() == depth


def test_accumulated_gradients_and_rows_are_those_of_all_passes() -> None:
    model = Around(Projected(F.scaled_dot_product_attention))
    with hw.watch(model) as seen:
        for _ in range(3):
            model(torch.randn(B, N, D)).sum().backward()
        assert int(seen.layers[0].counted()[0]) == 3 * B * N


# In a process that ends at once: PyTorch may wait for itself where it takes a group apart.
PARALLEL = """
import os, torch, torch.distributed as dist, torch.nn.functional as F, headwise as hw
from tests.watching.test_adapters_torch import B, D, N, Projected
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = Projected(F.scaled_dot_product_attention)
model = torch.nn.parallel.DistributedDataParallel(model)
with hw.watch(model) as seen:
    model(torch.randn(B, N, D)).sum().backward()
print([layer.name for layer in seen.layers], flush=True)
os._exit(0)
"""


def test_data_parallel_on_one_process_is_watched() -> None:
    command = [sys.executable, "-c", PARALLEL]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout.strip() == "['module']"
