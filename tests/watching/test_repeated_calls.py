"""Calls like the last one of their module are observed by what that one prepared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.watching.adapters.torch_calls import Listener
from headwise.watching.recorder import call_recorder
from headwise.watching.recorder.repeated_call import RepeatedCall

H, D, N = 4, 32, 12
Rows = list[dict[str, Any]]


class Layer(nn.Module):
    """Attention by whatever `attend` is."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend, self.qkv = attend, nn.Linear(D, 3 * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        return x + self.attend(q, k, v).transpose(1, 2).flatten(2)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return hw.attention(q, k, v, mask=hw.mask.causal())


def llama(implementation: str) -> Any:
    transformers = pytest.importorskip("transformers")
    import headwise.transformers  # noqa: F401

    config = transformers.LlamaConfig(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=2, num_hidden_layers=2,
        intermediate_size=D, vocab_size=50, attn_implementation=implementation, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def tokens(step: int, n: int = N) -> Tensor:
    return torch.randint(50, (2, n), generator=torch.Generator().manual_seed(step))


def floats(step: int, n: int = N) -> Tensor:
    return torch.randn(2, n, D, generator=torch.Generator().manual_seed(step))


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[..., Tensor]]]] = {
    "sdpa": lambda: (nn.Sequential(Layer(fused), Layer(fused)), floats),
    "written": lambda: (nn.Sequential(Layer(written)), floats),
    "hw.attention": lambda: (nn.Sequential(Layer(own), Layer(own)), floats),
    "llama": lambda: (llama("sdpa"), tokens),
    "llama, ours": lambda: (llama("headwise"), tokens),
}


def run(model: nn.Module, given: Tensor) -> None:
    out = model(given)
    (out if isinstance(out, Tensor) else out.logits).square().mean().backward()
    model.zero_grad()


def steps(name: str, given: list[tuple[int, int]], **options: Any) -> list[Rows]:
    """The tables of steps with these seeds and lengths."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    found = []
    with hw.watch(model, strict=True, **options) as seen:
        for seed, n in given:
            run(model, inputs(seed, n))
            seen.step()
            found.append([dict(row) for row in seen.series[-1].table] if seen.series else [])
        found.append([dict(row) for row in seen.series[-1].table])
        assert len(seen.series) == len(given)
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return one == other


OPTIONS: dict[str, dict[str, Any]] = {
    "maps": {},
    "figures": {"maps": False},
    "rows": {"rows": 4, "maps": False},
    "few": {"stats": ("entropy", "max_logit")},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_repeated_calls_have_the_figures_of_first_ones(
    name: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [(0, N), (1, N), (2, N), (3, N + 5), (4, N), (5, N)]
    found = steps(name, given, **OPTIONS[options])
    monkeypatch.setattr(RepeatedCall, "of", lambda *_: None)
    wanted = steps(name, given, **OPTIONS[options])
    for rows, others in zip(found, wanted, strict=True):
        for row, other in zip(rows, others, strict=True):
            assert row.keys() == other.keys()
            assert all(same(row[key], other[key]) for key in row), (row, other)


@pytest.mark.parametrize("name", ["sdpa", "llama", "llama, ours"])
def test_a_repeated_call_is_not_read_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for function in ("statistics", "observe"):
        original = getattr(call_recorder, function)

        def count(*given: Any, original: Any = original, **more: Any) -> Any:
            asked.append(original.__name__)
            return original(*given, **more)

        monkeypatch.setattr(call_recorder, function, count)
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    with hw.watch(model, maps=False, strict=True) as seen:
        for step in range(3):  # two of them with the mode
            run(model, inputs(step))
            seen.step()
        asked.clear()
        for step in range(4):
            run(model, inputs(step))
            seen.step()
        assert asked == []
        run(model, inputs(9, N + 3))  # of another length
        assert len(asked) == 2
        seen.step()


def test_the_mode_rests_where_other_adapters_hear_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[str] = []
    original = Listener.__torch_function__

    def listen(self: Listener, func: Any, *given: Any, **more: Any) -> Any:
        heard.append(getattr(func, "__name__", "?"))
        return original(self, func, *given, **more)

    monkeypatch.setattr(Listener, "__torch_function__", listen)
    torch.manual_seed(0)
    for name, rests in (
        ("sdpa", True),
        ("llama", True),
        ("hw.attention", True),
        ("written", False),
    ):
        model, inputs = MODELS[name]()
        with hw.watch(model, maps=False) as seen:
            for step in range(3):
                run(model, inputs(step))
                seen.step()
            heard.clear()
            run(model, inputs(5))
            seen.step()
        assert (heard == []) == rests, (name, heard)


def test_a_module_that_attends_in_another_way_is_heard_again() -> None:
    model = nn.Sequential(Layer(fused))
    with hw.watch(model, maps=False, strict=True) as seen:
        for step in range(4):
            run(model, floats(step))
            seen.step()
        model[0].attend = written
        for step in range(3):  # the first pass is the one in which it is missed
            run(model, floats(step))
            seen.step()
        assert [entry.step for entry in seen.series][-2:] == [5, 6]
        assert seen.series[-1].table["entropy_mean"] == pytest.approx(
            _entropies(model, floats(2)), rel=1e-5
        )


def _entropies(model: nn.Module, x: Tensor) -> list[float]:
    q, k, _ = model[0].qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
    p = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    found: list[float] = -torch.special.xlogy(p, p).sum(-1).mean((0, 2))
    return found.tolist()
