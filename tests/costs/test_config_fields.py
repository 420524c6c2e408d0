"""Every field of a configuration that changes the parameters is read, or refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.costs.readers import built_models, configurations
from headwise.costs.readers.configurations import KNOWN
from tests.costs.families import CONFIGS

transformers = pytest.importorskip("transformers")

FAST = ("opt", "cohere", "bert", "llama")
NOT_SIZES = ("architectures", "id2label", "label2id", "transformers_version", "dtype")


def held(kind: type, config: Any) -> int | None:
    """The parameters of the model that transformers builds; None if it does not build one."""
    try:
        with torch.device("meta"):
            model = kind(config)
    except Exception:  # each class has checks of its own
        return None
    model.tie_weights()
    return sum(weight.numel() for weight in model.parameters())


def changes(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each field alone: flags turned around, numbers doubled and halved, empty ones filled."""
    yield {}
    for name, value in fields.items():
        if name in NOT_SIZES:
            continue
        if isinstance(value, bool):
            yield {name: not value}
        elif isinstance(value, int) and value > 0:
            yield from ({name: 2 * value}, {name: max(1, value // 2)})
        elif value is None:
            yield from ({name: True}, {name: 64})


def classes(config: Any) -> list[type]:
    """The classes of transformers whose names begin as those of this architecture."""
    stem = transformers.MODEL_MAPPING[type(config)].__name__.removesuffix("Model")
    stem = stem.removesuffix("Text")
    found = [name for name in dir(transformers) if name.startswith((f"{stem}For", f"{stem}LM"))]
    return [getattr(transformers, name) for name in (*found, f"{stem}Model")
            if isinstance(getattr(transformers, name, None), type)]  # fmt: skip


def small(kind: str) -> dict[str, Any]:
    return next(fields for each, fields in CONFIGS.values() if each == kind)


def every_family() -> list[Any]:
    return [pytest.param(kind, marks=[] if kind in FAST else pytest.mark.slow) for kind in KNOWN]


@pytest.mark.parametrize("kind", every_family())
def test_a_field_that_is_changed_is_counted_or_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The readers themselves, without the check against the model that transformers builds."""
    monkeypatch.setattr(
        configurations, "check_built", lambda config, name, head, read: read(config)
    )
    fields = small(kind)
    usual = transformers.AutoConfig.for_model(kind, **fields)
    compared = 0
    for model in classes(usual):
        for change in changes(usual.to_dict()):
            try:
                config = transformers.AutoConfig.for_model(kind, **{**fields, **change})
            except Exception:  # transformers refuses it
                continue
            config.architectures = [model.__name__]
            try:
                counted = hw.cost(config).params
            except ValueError:
                continue
            built = held(model, config)
            compared += built is not None
            assert built in (None, counted), f"{model.__name__} with {change}"
    assert compared > 10


OPT = {
    "model_type": "opt", "hidden_size": 64, "num_hidden_layers": 2, "ffn_dim": 96,
    "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"word_embed_proj_dim": 32},
        {"do_layer_norm_before": False},
        {"word_embed_proj_dim": 32, "do_layer_norm_before": False},  # OPT-350m
        {"enable_bias": False},
        {"layer_norm_elementwise_affine": False},
        {"_remove_final_layer_norm": True},
    ],
    ids=str,
)
def test_every_option_of_opt_is_counted(change: dict[str, Any]) -> None:
    fields = {"word_embed_proj_dim": 64, **OPT, **change}
    config = transformers.AutoConfig.for_model(**fields)
    built = held(transformers.OPTForCausalLM, config)
    assert hw.cost(fields, queries=8).params == built
    assert built != hw.cost({"word_embed_proj_dim": 64, **OPT}, queries=8).params


class Wider(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """A class that reads a field which the readers do not know."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.mlp_bias:
            self.extra = torch.nn.Linear(5, 5)


def test_a_config_whose_model_has_other_parameters_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The field, its value, both counts, and a value that is counted."""
    monkeypatch.setattr(built_models, "model_class", lambda *given: Wider)
    fields = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 100,
              "intermediate_size": 96, "architectures": ["LlamaForCausalLM"],
              "num_attention_heads": 4}  # fmt: skip
    counted = hw.cost(fields, queries=8).params
    more = 64 + 2 * 96
    message = (
        f"'llama' with mlp_bias=True is not counted: transformers builds {counted + more + 30:,} "
        f"parameters from it, and {counted + more:,} are counted. A configuration with "
        "mlp_bias=False is"
    )
    with pytest.raises(ValueError, match=message):
        hw.cost({**fields, "mlp_bias": True}, queries=8)


def test_a_model_is_refused_for_the_reason_that_its_config_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not as one with parameters of its own, unless it has some."""
    config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=64, vocab_size=100,
                                      intermediate_size=96, num_attention_heads=4)  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        model.extra = torch.nn.Linear(5, 5)
    with pytest.raises(ValueError, match="holds parameters beside those of its class"):
        hw.cost(model, queries=8)
    monkeypatch.setattr(built_models, "model_class", lambda *given: Wider)
    config.mlp_bias = True
    with torch.device("meta"):
        model = Wider(config)
    with pytest.raises(ValueError, match="'llama' with mlp_bias=True is not counted"):
        hw.cost(model, queries=8)


def test_a_count_leaves_random_numbers_as_they_were() -> None:
    before = torch.get_rng_state()
    hw.cost({"model_type": "llama", "num_hidden_layers": 1}, queries=8)
    assert torch.equal(before, torch.get_rng_state())


HUGE = (10**9, 10**18, 10**30, 10**400)


@pytest.mark.parametrize("size", HUGE, ids=["1e9", "1e18", "1e30", "1e400"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "bert", "vit", "t5", "whisper", "jamba"])
def test_absurd_sizes_are_counted_or_refused_at_once(kind: str, size: int) -> None:
    fields = {"model_type": kind, **small(kind)}
    usual = transformers.AutoConfig.for_model(**fields).to_dict()
    for name, value in usual.items():
        if type(value) is int and name not in NOT_SIZES:
            try:
                found = hw.cost({**fields, name: size})
            except ValueError:
                continue
            assert found.params > 0


@pytest.mark.parametrize("size", HUGE, ids=["1e9", "1e18", "1e30", "1e400"])
@pytest.mark.parametrize("name", ["vocabulary", "d_model", "layers", "heads", "context", "window"])
def test_absurd_sizes_of_own_configs_are_counted_or_refused_at_once(name: str, size: int) -> None:
    try:
        config = hw.models.GPTConfig(**{"vocabulary": 50, "d_model": 32, "layers": 2, "heads": 4,
                                        name: size})  # fmt: skip
        found = hw.cost(config, queries=8)
    except (ValueError, TypeError):
        return
    assert found.params > 0
