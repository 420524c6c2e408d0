"""Counts every family that transformers builds, beside PyTorch's own counter and a real cache.

    python -m bench.cost_families            # prints the table of docs/cost.md

A family is "equal" if parameters, dense FLOPs of the forward, and the bytes of the cache after a
prompt and a step are those of the model that transformers builds; "refused" if hw.cost says why it
can't be counted, and "different" otherwise. Nothing is computed: models are on the meta device.
"""

from __future__ import annotations

import copy
import logging
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise.costs.tracing import building, inputs

SAMPLE = ("bart", "bloom", "falcon", "gemma3_text", "gptj", "llama", "mamba2", "mixtral", "mpt",
          "nemotron_h", "olmo2", "qwen3", "rwkv", "t5")  # fmt: skip
"""A few families of each sort, for a test that runs every day."""

SECONDS = 60  # for one family
SMALLER = {
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 4, "vocab_size": 1000,
}  # fmt: skip


class Row(NamedTuple):
    """A family and what was found."""

    kind: str
    verdict: str
    note: str = ""


def rows() -> Iterator[Row]:
    """Every model type of transformers that has a model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for kind in CONFIG_MAPPING_NAMES:
        row = in_time(kind)
        if "has no model for" not in row.note:
            yield row


def in_time(kind: str) -> Row:
    """The row of a family, unless it takes too long."""

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return compare(small(kind))
    except TimeoutError:
        return Row(kind, "refused", f"it takes more than {SECONDS} seconds")
    except Exception as error:  # its configuration has no usable default
        return Row(kind, "refused", " ".join(str(error).split())[:120])
    finally:
        signal.alarm(0)


def small(kind: str) -> Any:
    """The default configuration of a family, with a few layers where it allows that."""
    from transformers import AutoConfig

    usual = AutoConfig.for_model(kind)
    sizes = usual.to_dict()
    fewer = {
        name: value
        for name, value in SMALLER.items()
        if type(sizes.get(name)) is int and sizes[name] > value
    }
    for fields in (fewer, {}):
        try:
            config = AutoConfig.for_model(kind, **fields)
            building.build(config)
        except Exception:  # lists with an entry per layer, ids of tokens beyond the vocabulary
            continue
        return config
    return usual


def compare(config: Any, tokens: int = 24) -> Row:
    """A configuration, counted by hw.cost and by PyTorch."""
    kind = config.model_type
    try:
        architecture = hw.costs.read_architecture(config)
        asked = {} if architecture.own_length else {"queries": tokens}
        found = hw.cost(architecture, batch=1, **asked)
        given = {} if architecture.own_length else {"keys": tokens + 1, "queries": 1}
        if architecture.pair:
            given["context"] = tokens
        step = hw.cost(architecture, batch=1, **given) if found.kv_cache else found
    except ValueError as error:
        return Row(kind, "refused", " ".join(str(error).split())[:160])
    notes = [str(each) for each in found.left_out]
    try:
        params, flops, cache = by_pytorch(config, tokens, bool(found.kv_cache))
    except Exception as error:  # transformers' own code needs numbers that are not there
        return Row(kind, "counted", "; ".join([*notes, "PyTorch's counter: "
                                               + " ".join(str(error).split())[:80]]))  # fmt: skip
    both = {
        "parameters": (found.params, params),
        "FLOPs": (found.flops_dense, flops),
        "cache": ((found.kv_cache, step.kv_cache), cache),
    }
    wrong = [f"{name} {ours} for {theirs}" for name, (ours, theirs) in both.items()
             if ours != theirs]  # fmt: skip
    return Row(kind, "different" if wrong else "equal", "; ".join(wrong or notes))


def by_pytorch(config: Any, tokens: int, cached: bool) -> tuple[int, int, tuple[int, int]]:
    """Parameters, FLOPs of a prompt, and bytes of the cache after it and after a step."""
    own = copy.deepcopy(config)
    own._attn_implementation = "eager"
    with torch.device("meta"):
        model: Any = building.model_class(config)(own)
    model.tie_weights()
    model = model.to(torch.bfloat16).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    options = {"use_cache": True} if hasattr(config, "use_cache") else {}
    out, counter, extras = run(model, tokens, options)
    flops = counter.get_total_flops()
    params = sum(weight.numel() for weight in model.parameters())
    if not cached:
        return params, flops, (0, 0)
    name = "past_key_values" if hasattr(out, "past_key_values") else "cache_params"
    held = [held_by(out[name])]
    with torch.no_grad():
        given = taken(model, 1, tokens + 1, tokens, extras)
        if inputs.is_pair(model):
            del given[inputs.main_name(model)]
            given["encoder_outputs"] = (out.encoder_last_hidden_state,)
        out = model(**given, **{name: out[name]}, **options)
    return params, flops, (held[0], held_by(out[name]))


def run(model: Any, tokens: int, options: dict[str, Any]) -> tuple[Any, Any, inputs.Extras]:
    """Outputs of a prompt and the counter, without a mask or with one."""
    reason: Exception | None = None
    for extras in (inputs.Extras(), inputs.Extras(mask=True), inputs.Extras(mask=True, image=True)):
        try:
            with FlopCounterMode(display=False) as counter:
                given = taken(model, tokens, tokens, tokens, extras)
                return model(**given, **options), counter, extras
        except Exception as error:  # transformers' code, which reads the numbers of a mask
            reason = reason or error
    assert reason is not None
    raise reason


def taken(
    model: Any, queries: int, keys: int, context: int, extras: inputs.Extras
) -> dict[str, Any]:
    """The cost of a model, as hw.cost gives it."""
    return inputs.inputs_of(
        model, 1, queries, keys, context=context, dtype=torch.bfloat16, extras=extras
    )


def held_by(cache: Any) -> int:
    """Bytes of all keys and values in a cache."""
    halves = [getattr(cache, name, None) for name in ("self_attention_cache",
                                                      "cross_attention_cache")]  # fmt: skip
    layers = [layer for each in halves if each is not None for layer in each.layers]
    found = 0
    for layer in layers or getattr(cache, "layers", []):
        for name in ("keys", "values"):
            x = getattr(layer, name, None)
            found += x.numel() * x.element_size() if isinstance(x, Tensor) else 0
    return found


def table(found: list[Row]) -> str:
    """The table of docs/cost.md."""
    count = Counter(row.verdict for row in found)
    lines = [f"{len(found)} families: " + ", ".join(f"{n} {name}" for name, n in count.items()), ""]
    lines += ["| verdict | families |", "|---|---|"]
    for verdict in ("equal", "counted", "different"):
        kinds = [f"{row.kind} ({row.note})" if row.note else row.kind for row in found
                 if row.verdict == verdict]  # fmt: skip
        lines.append(f"| {verdict} | {', '.join(kinds)} |")
    reasons: dict[str, list[str]] = {}
    for row in found:
        if row.verdict == "refused":
            reasons.setdefault(row.note.replace(repr(row.kind), "it")[:60], []).append(row.kind)
    lines += [f"| refused: {note} | {', '.join(kinds)} |" for note, kinds in reasons.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    print(table(list(rows())))
