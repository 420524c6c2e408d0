"""Clipping heads whose weights are tied: at the limit afterwards, nothing else changed, or refused.

Every model runs its layers side by side on one input, so that clipping one does not change another.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import headwise as hw

LIMIT, WIDTH, HEADS = 20.0, 32, 4


class Layer(nn.Module):
    """Attention with a linear layer for each of queries, keys and values."""

    def __init__(self, keys: int = HEADS) -> None:
        super().__init__()
        self.q_proj, self.out_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, keys * WIDTH // HEADS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        made = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for y in made)
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] > k.shape[1])
        return self.out_proj(out.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    """Layers that all read the input, and a projection of it that may use their weights."""

    def __init__(self, layers: int = 2, keys: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(keys) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)
        for name, parameter in self.named_parameters():
            if "q_proj" in name or "k_proj" in name:  # some heads beyond the limit, some below
                size = torch.linspace(0.2, 1.4, len(parameter))
                nn.init.normal_(parameter)
                parameter.data.mul_(size.reshape(-1, *[1] * (parameter.ndim - 1)))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([*(layer(x) for layer in self.layers), self.head(x)]).sum(0)


def tie(model: Model, *names: str) -> Model:
    """The model in which these parameters are one."""
    first = model.get_parameter(names[0])
    for name in names[1:]:
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, first)
    return model


def weights(layer: int, *names: str) -> list[str]:
    return [f"layers.{layer}.{name}_proj.weight" for name in names]


def whole(layer: int, name: str) -> list[str]:
    return [f"layers.{layer}.{name}_proj.{part}" for part in ("weight", "bias")]


def one_linear() -> Model:
    model = Model()
    model.layers[0].k_proj = model.layers[0].q_proj
    return model


def same_layers() -> Model:
    model = Model()
    for name in ("q", "k"):
        for first, second in zip(whole(0, name), whole(1, name), strict=True):
            tie(model, first, second)
    return model


def same_keys(keys: int) -> Model:
    model = Model(3, keys)
    for first, *others in zip(*(whole(i, "k") for i in range(3)), strict=True):
        tie(model, first, *others)
    return model


EXACT: dict[str, Callable[[], Model]] = {
    "one matrix for queries and keys": lambda: tie(Model(), *weights(0, "q", "k")),
    "one matrix and one bias": lambda: tie(
        tie(Model(), *weights(0, "q", "k")), "layers.0.q_proj.bias", "layers.0.k_proj.bias"
    ),
    "one linear layer": one_linear,
    "one bias": lambda: tie(Model(), "layers.0.q_proj.bias", "layers.0.k_proj.bias"),
    "keys of three layers": lambda: same_keys(HEADS),
    "shared keys of three layers": lambda: same_keys(2),
    "keys that are values": lambda: tie(Model(keys=2), *weights(0, "k", "v")),
    "keys of two layers that are values": lambda: tie(
        Model(), *weights(0, "k", "v"), *weights(1, "k")
    ),
    "queries that are the head's": lambda: tie(Model(), *weights(0, "q"), "head.weight"),
}
"""Models whose heads can each get their own factor."""


def largest(model: nn.Module, x: Tensor, **options: object) -> tuple[hw.Watch, Tensor]:
    with torch.no_grad(), hw.watch(model, **options) as seen:
        model(x)
    return seen, torch.tensor(seen.heads()["max_logit_max"], dtype=torch.float64)


def inputs() -> Tensor:
    return torch.randn(
        2, 12, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


@pytest.mark.parametrize("tied", EXACT)
def test_every_head_gets_its_own_factor_and_nothing_else_changes(tied: str) -> None:
    model, x = EXACT[tied](), inputs()
    seen, before = largest(model, x)
    limit = float(before.median())  # some heads are beyond it
    roles = ("q_proj", "k_proj")
    others = {n: p for n, p in model.named_parameters(remove_duplicate=False)
              if not any(role in n for role in roles)}  # fmt: skip
    kept = {name: parameter.detach().clone() for name, parameter in others.items()}
    sizes = {name: parameter.norm() for name, parameter in model.named_parameters()}
    hw.qk_clip(model, seen, limit)
    _, after = largest(model, x)
    torch.testing.assert_close(after, before.clamp_max(limit))
    assert all(torch.equal(kept[name], parameter) for name, parameter in others.items())
    assert all(p.norm() <= sizes[name] for name, p in model.named_parameters())


def test_layers_with_the_same_weights_shrink_together() -> None:
    model, x = same_layers(), inputs()
    model.layers[1].forward = lambda y: Layer.forward(model.layers[1], 2 * y)  # larger logits
    seen, before = largest(model, x)
    found = hw.qk_clip(model, seen, LIMIT)
    _, after = largest(model, x)
    bound = before.view(2, HEADS).amax(0)
    factor = (LIMIT / bound).clamp_max(1).repeat(2)
    torch.testing.assert_close(after, before * factor, rtol=1e-2, atol=1e-2)  # biases stay beside
    assert after.view(2, HEADS).amax(0).tolist() == pytest.approx(bound.clamp_max(LIMIT).tolist())
    assert {clip.layer for clip in found} == {0, 1}
    assert [clip.factor for clip in found] == pytest.approx(factor[factor < 1].tolist())


def test_a_module_at_several_depths_and_tied_embeddings() -> None:
    config = transformers.AlbertConfig(
        vocab_size=50, embedding_size=16, intermediate_size=32, num_hidden_layers=3,
        hidden_size=WIDTH, num_attention_heads=HEADS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AlbertForMaskedLM(config).eval()
    (attention,) = (x for x in model.modules() if hasattr(x, "query"))
    for layer in (attention.query, attention.key):
        nn.init.normal_(layer.weight, std=0.8)
    decoder, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert decoder.weight is embedding.weight
    words, ids = embedding.weight.clone(), torch.randint(1, 50, (2, 12))
    seen, before = largest(model, ids)
    bound = before.view(3, HEADS).amax(0)
    assert (bound > LIMIT).any()
    hw.qk_clip(model, seen, LIMIT)
    _, after = largest(model, ids)
    expected = before[:HEADS] * (LIMIT / bound).clamp_max(1)  # deeper ones have other inputs now
    torch.testing.assert_close(after[:HEADS], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(embedding.weight, words)


REFUSED: dict[str, tuple[Callable[[], Model], dict[str, object], str]] = {
    "queries of two layers": (
        lambda: tie(Model(), *weights(0, "q"), *weights(1, "q")), {},
        "layers.0: its queries have the weights of layers.1's, and its keys have not",
    ),
    "queries that are another's keys": (
        lambda: tie(Model(), *weights(0, "q"), *weights(1, "k")), {},
        "layers.0: weights that make its queries or keys make the others in layers.1",
    ),
    "one matrix that is also the keys of another": (
        lambda: tie(Model(), *weights(0, "q", "k"), *weights(1, "k")), {},
        "layers.0: its keys have weights that make queries and keys in layers.1",
    ),
    "one matrix for all three": (
        lambda: tie(Model(), *weights(0, "q", "k", "v")), {},
        "layers.0: its queries are made by weights that are also layers.0.v_proj.weight",
    ),
    "queries and keys that make something else": (
        lambda: tie(tie(Model(), *weights(0, "k", "v")), *weights(0, "q"), "head.weight"), {},
        "layers.0: its keys are made by weights that are also layers.0.v_proj.weight",
    ),
    "queries of shared keys that make something else": (
        lambda: tie(Model(keys=2), *weights(0, "q"), "head.weight"), {},
        "layers.0: its queries are made by weights that are also head.weight",
    ),
    "a layer that is not watched": (
        same_layers, {"layers": "layers.0"},
        "layers.0: its keys are made by weights that are also layers.1.k_proj.weight, which would",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_no_factor_suits_are_refused(case: str) -> None:
    made, options, said = REFUSED[case]
    model, x = made(), inputs()
    seen, _ = largest(model, x, **options)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"hw\.qk_clip can't clip") as refusal:
        hw.qk_clip(model, seen, LIMIT)
    assert said in str(refusal.value)
    assert all(map(torch.equal, before, model.parameters()))
