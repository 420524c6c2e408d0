"""Every configuration, constructor and call of hw.models refuses nonsense in words that name it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.models import (
    GPT,
    LSTM,
    Beam,
    Bert,
    BertConfig,
    Conv,
    ConvConfig,
    FixedGPT,
    FixedGPTConfig,
    GPTConfig,
    Greedy,
    LSTMConfig,
    Sample,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
)
from tests.nn.garbage import complaints

B, N, V, COUNT = 2, 6, 30, 3
SMALL: dict[str, tuple[type[torch.nn.Module], Any]] = {
    "GPT": (GPT, GPTConfig(V, 16, d_model=16, layers=2, heads=2, end=3)),
    "GPT, learned positions": (
        GPT,
        GPTConfig(V, 16, d_model=16, layers=1, heads=2, position=hw.nn.Learned(16)),
    ),
    "FixedGPT": (FixedGPT, FixedGPTConfig(V, 16, d_model=16, layers=1, heads=2)),
    "Conv": (Conv, ConvConfig(V, d_model=16, layers=1)),
    "Bert": (Bert, BertConfig(V, 16, d_model=16, layers=1, heads=2)),
    "Transformer": (
        Transformer,
        TransformerConfig(V, d_model=16, encoder_layers=1, decoder_layers=1, heads=2),
    ),
    "LSTM": (LSTM, LSTMConfig(V, d_model=16, attention=hw.nn.Bahdanau(8))),
    "ViT": (ViT, ViTConfig(image=8, patch=4, d_model=16, layers=1, heads=2)),
}


def tokens() -> Tensor:
    return torch.randint(V, (B, N))


def lengths() -> Tensor:
    return torch.tensor([6, 4])


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "GPT": lambda: {"tokens": tokens(), "mask": None, "caches": None, "positions": None},
    "GPT, learned positions": lambda: {"tokens": tokens(), "positions": None, "caches": None},
    "FixedGPT": lambda: {"tokens": tokens(), "mask": None},
    "Conv": lambda: {"tokens": tokens()},
    "Bert": lambda: {"tokens": tokens(), "lengths": None, "segments": None, "mask": None},
    "Transformer": lambda: {"source": tokens(), "target": tokens(), "source_lengths": None},
    "LSTM": lambda: {"source": tokens(), "target": tokens(), "source_lengths": None},
    "ViT": lambda: {"images": torch.randn(B, 3, 8, 8)},
}
CONTINUE: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        name: lambda: {
            **{"prompt": tokens(), "count": COUNT, "strategy": Greedy()},
            **{"lengths": lengths(), "cache": hw.nn.GrowingCache()},
        }
        for name in ("GPT", "GPT, learned positions")
    },
    "FixedGPT": lambda: {"prompt": tokens(), "count": COUNT, "lengths": None, "cache": None},
    "Conv": lambda: {"prompt": tokens(), "count": COUNT, "strategy": Sample(seed=1)},
    "Transformer": lambda: {
        **{"source": tokens(), "count": COUNT, "source_lengths": lengths()},
        **{"strategy": Beam(2), "cache": hw.nn.GrowingCache()},
    },
    "LSTM": lambda: {"source": tokens(), "count": COUNT, "source_lengths": lengths()},
}


def built(name: str) -> torch.nn.Module:
    kind, config = SMALL[name]
    return kind(config).eval()


def from_fields(name: str) -> tuple[Callable[..., object], Callable[[], dict[str, Any]]]:
    """A model built from a configuration, one field of which may be garbage."""
    kind, config = SMALL[name]
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return lambda **given: kind(type(config)(**given)), lambda: dict(values)


EVERY: dict[str, tuple[Callable[..., object], Callable[[], dict[str, Any]]]] = {
    **{f"{name} from fields": from_fields(name) for name in SMALL},
    **{
        f"{name}(config)": (kind, lambda config=config: {"config": config})
        for name, (kind, config) in SMALL.items()
    },
    **{f"{name}()": (built(name), make) for name, make in CALLS.items()},
    **{f"{name}.generate": (built(name).generate, make) for name, make in CONTINUE.items()},
    "Sample": (
        Sample,
        lambda: {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "seed": 1},
    ),
    "Beam": (Beam, lambda: {"width": 3, "penalty": 1.0}),
    "from_dict": (GPTConfig.from_dict, lambda: {"data": GPTConfig(V).to_dict()}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("batch", "length"), [(0, N), (B, 0), (0, 0)])
@torch.no_grad()
def test_empty_inputs_give_empty_outputs_or_are_refused(name: str, batch: int, length: int) -> None:
    given = CALLS[name]()
    for key, value in given.items():
        if isinstance(value, Tensor):
            given[key] = value[:batch] if value.ndim == 4 else value[:batch, :length]
    if name in ("Conv", "LSTM") and (length == 0 or name == "LSTM"):
        with pytest.raises(ValueError, match="at least"):
            built(name)(**given)
    else:
        assert built(name)(**given).shape[0] == batch


@pytest.mark.parametrize("what", EVERY)
@torch.no_grad()
def test_nonsense_is_refused_in_words(what: str) -> None:
    call, make = EVERY[what]
    found = [" | ".join(complaint) for complaint in complaints(call, make)]
    assert not found, "\n" + "\n".join(found)
