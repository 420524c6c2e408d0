"""What a call of F.scaled_dot_product_attention is: how many heads, and whose keys."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import headwise as hw
from headwise.core.options import Options
from headwise.watching.recorder.seen_call import Call, of_head
from tests.thinned import thinned
from tests.watching.test_unread import stand_in


class Folded(nn.Module):
    """Attention whose heads lie in the batch, (B · H, N, D), as before PyTorch had four axes."""

    def __init__(self, heads: int, stated: bool) -> None:
        super().__init__()
        self.qkv, self.parts = nn.Linear(16, 48), heads
        self.mask: Tensor | None = None
        if stated:
            self.num_heads = heads

    def folded(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (y.unflatten(-1, (self.parts, -1)) for y in self.qkv(x).chunk(3, -1))
        q, k, v = (y.transpose(1, 2).flatten(0, 1) for y in (q, k, v))
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(*self.folded(x), self.mask)
        return out.unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("masks", [0, 1, 8])
def test_heads_in_the_batch_are_told_apart_by_what_the_module_states(masks: int) -> None:
    model, x = Folded(4, stated=True).eval(), torch.randn(2, 6, 16)
    seen_by = torch.rand(max(1, masks), 6, 6) < 0.6
    seen_by |= torch.eye(6, dtype=torch.bool) | (masks == 0)
    model.mask = seen_by if masks else None
    with torch.no_grad(), hw.watch(model) as seen:
        model(x)
        q, k, _ = model.folded(x)
    assert seen.heads()["head"] == [0, 1, 2, 3]
    logits = (q @ k.mT / 2).masked_fill(~seen_by, -torch.inf)
    weights = torch.softmax(logits, -1).unflatten(0, (2, 4))
    for head in range(4):
        torch.testing.assert_close(seen.map(0, head, 1)[0, 0], weights[1, head])
    entropy = torch.special.entr(weights).sum(-1).mean((0, 2))
    assert seen.heads()["entropy_mean"] == pytest.approx(entropy.tolist(), rel=1e-4)


def test_heads_in_the_batch_that_nothing_states_are_listed_as_unread() -> None:
    model = Folded(4, stated=False)
    watch = hw.watch(model).attach()
    with pytest.warns(UserWarning, match="nothing states how many heads"):
        model(torch.randn(2, 6, 16))
    watch.detach()
    assert watch.unread == [""]
    assert len(watch.layers) == 0


def test_three_axes_of_the_models_input_are_one_head() -> None:
    class Single(nn.Module):
        num_heads = 2

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    with hw.watch(Single()) as seen:
        seen.model(torch.randn(2, 6, 16))
    assert seen.heads()["head"] == [0]


def by_sdpa(_: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=False)


def by_headwise(_: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return hw.attention(q, k, v)


def by_hand(_: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def by_flash_attn(_: nn.Module, *given: Tensor) -> Tensor:
    called = sys.modules["flash_attn"].flash_attn_func
    return called(*(x.transpose(1, 2) for x in given)).transpose(1, 2)


def by_the_interface_of_transformers(module: nn.Module, *given: Tensor) -> Tensor:
    function = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return function(module, *given, None, is_causal=False)[0].transpose(1, 2)


class Attention(nn.Module):
    """The attention of a diffusers UNet: without another sequence it looks at its own."""

    def __init__(self, attend: Callable[..., Tensor] = by_sdpa) -> None:
        super().__init__()
        self.heads, self.attend = 2, attend
        self.to_q, self.to_k, self.to_v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        other = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        made = (self.to_q(hidden_states), self.to_k(other), self.to_v(other))
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in made)
        return self.attend(self, q, k, v).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """A block of such a UNet."""

    def __init__(self, attend: Callable[..., Tensor] = by_sdpa) -> None:
        super().__init__()
        self.attn1, self.attn2 = Attention(attend), Attention(attend)

    def forward(self, pixels: Tensor, text: Tensor) -> Tensor:
        pixels = pixels + self.attn1(pixels)
        return pixels + self.attn2(pixels, encoder_hidden_states=text)


WAYS = (by_sdpa, by_headwise, by_hand, by_flash_attn, by_the_interface_of_transformers)


@pytest.mark.parametrize("words", [8, 5])
@pytest.mark.parametrize("attend", WAYS)
def test_keys_of_another_sequence_are_cross_attention_whatever_their_number(
    attend: Callable[..., Tensor], words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in())
    with hw.watch(Block(attend)) as seen:
        for _ in range(4):  # modules in which nothing was heard are not listened to any more
            seen.model(torch.randn(1, 8, 16), torch.randn(1, words, 16))
    assert [(layer.name, layer.kind) for layer in seen.layers] == [
        ("attn1", "self"),
        ("attn2", "cross"),
    ]
    for row in seen.heads():
        for name in ("self_mass_mean", "previous_mass_mean", "distance_mean"):
            assert math.isnan(float(row[name])) == (row["name"] == "attn2"), name


@pytest.mark.parametrize(
    "attend", thinned([by_sdpa, by_headwise, by_the_interface_of_transformers])
)
def test_compiled_layers_have_the_kinds_and_numbers_of_eager_ones(
    attend: Callable[..., Tensor],
) -> None:
    torch.compiler.reset()
    model = nn.ModuleList([Block(attend), Block(attend)])

    def run(pixels: Tensor, text: Tensor) -> Tensor:
        for block in model:
            pixels = block(pixels, text)
        return pixels

    given, found = (torch.randn(1, 8, 16), torch.randn(1, 8, 16)), []
    for way in (run, torch.compile(run, backend="eager", fullgraph=True)):
        with hw.watch(model) as seen:
            way(*given)
        found.append(seen.heads())
        assert not seen.unread
    for name in ("layer", "name", "kind", "head"):
        assert found[0][name] == found[1][name]
    assert found[1]["kind"] == ["self", "self", "cross", "cross"] * 2
    assert found[1]["entropy_mean"] == pytest.approx(found[0]["entropy_mean"], rel=1e-5)


def test_a_second_argument_that_is_a_sequence_is_where_keys_come_from() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x[:, None], y[:, None], y[:, None])

    model, x = Reads(), torch.randn(2, 6, 16)
    kinds = []
    for y in (x, torch.randn(2, 6, 16)):
        with hw.watch(model) as seen:
            model(x, y)
        kinds.append(seen.layers[0].kind)
    assert kinds == ["self", "cross"]


def test_a_head_that_sees_no_key_has_no_figures_at_all() -> None:
    class Blind(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen = torch.tensor([True, False]).reshape(1, 2, 1, 1).expand(1, 2, 4, 4)
            return hw.attention(x, x, x, mask=hw.mask.dense(seen))

    with hw.watch(Blind(), alarms=True) as seen:
        seen.model(torch.randn(1, 2, 4, 8))
        seen.step()
    first, second = seen.heads()
    figures = [name for name in seen.heads().columns if name.endswith(("_mean", "_max", "_min"))]
    assert {"entropy_min", "max_logit_max"} <= set(figures)
    assert not any(math.isnan(float(first[name])) for name in figures)
    assert all(math.isnan(float(second[name])) for name in figures)
    assert not seen.alarms


def test_one_head_of_a_grouped_call_has_its_own_keys_and_values() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)
    call = Call(q, k, v, Options(mask=hw.mask.causal()))
    whole = hw.attention_map(q, k, mask=hw.mask.causal())
    for head in range(4):
        one = of_head(call, range(1, 2), head)
        found = hw.attention_map(one.q, one.k, **one.given.of_weights())
        torch.testing.assert_close(found.to_tensor(), whole[1, head][None, None])
        assert torch.equal(one.v, v[1:, head // 2, None])
