"""flex_attention that a model calls itself: read exactly, or refused by name."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import headwise as hw
from headwise.watching.adapters import function_calls

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile", "ignore:return_lse is deprecated"
)
compiled = torch.compile(flex_attention, backend="eager")
LENGTH = 24


class Attention(nn.Module):
    """Four heads with two of keys and values; `options` go to flex_attention."""

    held: ClassVar[Any] = staticmethod(compiled)

    def __init__(self, call: str = "plain", **options: Any) -> None:
        super().__init__()
        self.call, self.options = call, {"enable_gqa": True, **options}
        self.project = nn.Linear(32, 64)
        closed = flex_attention
        self.hidden = lambda *given, **more: closed(*given, **more)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.project(x).unflatten(-1, (8, 8)).transpose(1, 2)  # (B, 8, N, 8)
        q, k, v = parts.split((4, 2, 2), 1)
        return q, k, v

    def forward(self, x: Tensor) -> Any:
        function: Callable[..., Any] = {
            "plain": flex_attention,
            "of torch": theirs.flex_attention,
            "compiled": compiled,
            "of the class": self.held,
            "hidden": self.hidden,
        }[self.call]
        return function(*self.heads(x), **self.options)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():  # on a CPU flex_attention has no backward
        yield


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def blocks(rule: Callable[..., Tensor], batch: int | None = None) -> theirs.BlockMask:
    return create_block_mask(rule, batch, None, LENGTH, LENGTH, device="cpu")


def watched(model: Attention, x: Tensor) -> tuple[Any, hw.watching.Watch]:
    """What the model gives while it is watched, the same as ever, and what was seen."""
    alone = model(x)
    with hw.watch(model, strict=True) as seen:
        out = model(x)
    outputs = [given[0] if isinstance(given, tuple) else given for given in (alone, out)]
    assert torch.equal(*outputs)
    return out, seen


def assert_seen(seen: hw.watching.Watch, model: Attention, x: Tensor, **options: Any) -> None:
    """Every statistic is that of the same call of headwise."""
    _, expected = hw.observe(*model.heads(x), **options)
    for name, value in seen.layers[0].observation.values.items():
        torch.testing.assert_close(value, getattr(expected, name), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("call", ["plain", "of torch", "compiled", "of the class"])
def test_a_call_is_seen_by_whichever_name_it_has(call: str) -> None:
    model, x = Attention(call, block_mask=blocks(causal), scale=0.7), torch.randn(2, LENGTH, 32)
    before = (flex_attention, theirs.flex_attention, compiled, vars(Attention)["held"])
    _, seen = watched(model, x)
    assert_seen(seen, model, x, mask=hw.mask.causal(), score=hw.Dot(0.7))
    after = (flex_attention, theirs.flex_attention, compiled, vars(Attention)["held"])
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_a_mask_that_is_an_interval_stays_one() -> None:
    model = Attention(block_mask=blocks(causal))
    _, seen = watched(model, torch.randn(1, LENGTH, 32))
    last = seen.layers[0].last
    assert last is not None
    assert last.call is not None
    assert repr(last.call.mask) == "causal(offset=0)"


def test_documents_and_rules_with_gaps_are_read_too() -> None:
    ids = torch.tensor([[0] * 10 + [1] * 14, [0] * 20 + [1] * 4])
    documents = blocks(lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j), batch=2)
    model, x = Attention(block_mask=documents), torch.randn(2, LENGTH, 32)
    _, seen = watched(model, x)
    entropy = seen.layers[0].observation.entropy
    _, expected = hw.observe(*model.heads(x), mask=hw.mask.causal() & hw.mask.documents(ids))
    torch.testing.assert_close(entropy, expected.entropy)
    model = Attention(block_mask=blocks(lambda b, h, i, j: (i + j) % 2 == 0))
    _, seen = watched(model, x)
    shown = torch.arange(LENGTH)[:, None].add(torch.arange(LENGTH)) % 2 == 0
    assert_seen(seen, model, x, mask=hw.mask.dense(shown))


def test_what_is_returned_beside_the_output_stays() -> None:
    x = torch.randn(1, LENGTH, 32)
    (_, lse), seen = watched(Attention(return_lse=True), x)
    torch.testing.assert_close(seen.layers[0].observation.lse, lse)
    (_, more), seen = watched(Attention(return_aux=AuxRequest(lse=True)), x)
    torch.testing.assert_close(seen.layers[0].observation.lse, more.lse)


def test_a_score_mod_is_asked_for_every_logit(monkeypatch: pytest.MonkeyPatch) -> None:
    slopes = 2.0 ** -torch.arange(1, 5)

    def steep(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 5 * torch.tanh(score / 5) - slopes[h] * (i - j)

    model = Attention(score_mod=steep, block_mask=blocks(causal))
    x = torch.randn(2, LENGTH, 32)
    _, seen = watched(model, x)
    options = {"mask": hw.mask.causal(), "softcap": 5.0, "bias": hw.ALiBi(slopes)}
    assert_seen(seen, model, x, **options)
    monkeypatch.setattr(function_calls, "LARGEST", 1000)
    with pytest.raises(ValueError, match=r"a score_mod.*2 × 4 × 24 × 24 pairs are more"):
        watched(model, x)


def test_a_mask_that_was_misread_is_refused() -> None:
    whole = blocks(lambda b, h, i, j: (i >= j) if i.ndim == 0 else (j >= 0))  # asked pair by pair
    model, x = Attention(block_mask=whole), torch.randn(1, LENGTH, 32)
    with pytest.raises(ValueError, match="the model can't be watched: its output is not softmax"):
        watched(model, x)

    def single(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if query.ndim:
            raise RuntimeError("one pair at a time")
        return query >= key

    with pytest.raises(ValueError, match=r"mask_mod .* whole rows: one pair at a time"):
        watched(Attention(block_mask=blocks(single)), x)


def test_a_head_is_switched_off_for_its_importance() -> None:
    model, x = Attention(block_mask=blocks(causal)), torch.randn(1, LENGTH, 32)
    with hw.watch(model) as seen:
        table = seen.importance(lambda: model(x)[:, 1].abs().sum())
    without = table["without"]
    assert without[1] == 0
    assert without[0] == without[2] == without[3] > 0


def test_a_call_nobody_can_find_runs_and_is_not_found() -> None:
    model, x = Attention("hidden", block_mask=blocks(causal)), torch.randn(1, LENGTH, 32)
    with pytest.raises(ValueError, match="no attention was found"), hw.watch(model):
        model(x)
