"""Counts every family that transformers builds, beside PyTorch's own counter and a real cache.

    python -m bench.cost_families                 # every family; results are kept as they come
    python -m bench.cost_families llama gpt2      # some of them
    python -m bench.cost_families --part 1/8      # every eighth
    python -m bench.cost_families --docs          # write what was kept into docs/cost-families.md

A family is "equal" if parameters, dense FLOPs of the forward, and the bytes that its cache holds
after a prompt and after a step are those of the model that transformers builds; "refused" if
hw.cost says why it can't be counted, "counted" if transformers' own code fails here, so that there
is nothing to compare with, and "different" otherwise. Models are on the meta device, where nothing
is computed; what transformers can't run there runs on the processor, if it is small. A family that
needs more than text gets tensors as `inputs=`. Of those that are equal some fields are changed at
random, and all of it is compared again.
"""

from __future__ import annotations

import copy
import json
import logging
import random
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from bench import described
from bench.pairs import RESULTS
from headwise.costs.tracing import building, inputs
from headwise.costs.tracing.traced_model import TracedModel, encoded
from headwise.files import write_whole

KEPT = RESULTS / "cost_families.json"
PAGE = RESULTS.parent.parent / "docs" / "cost-families.md"

SAMPLE = ("bart", "bloom", "falcon", "gemma3_text", "hrm_text", "llama", "mamba2", "mixtral",
          "mobilenet_v1", "mpt", "nemotron_h", "rwkv", "t5", "wav2vec2")  # fmt: skip
"""A few families of each sort, for a test that runs every day."""

SECONDS = 60  # for one family
MOST = 600_000_000  # parameters of a model that runs on the processor
SMALLER = {
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 4, "vocab_size": 1000,
}  # fmt: skip

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
GLM = {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}}
NEEDED: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [2], "vocab_size": 1000},
    "dbrx": {"n_layers": 2, "vocab_size": 1000,
             "attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 8, "clip_qkv": 8}},
    "deepseek_v2": {"num_hidden_layers": 3, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "dots1": {"num_hidden_layers": 3, "n_routed_experts": 8, "n_shared_experts": 1,
              "vocab_size": 1000},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "num_hidden_layers": 4},
    "gemma4_assistant": {},
    "glm4v_text": {**GLM, "num_hidden_layers": 4},
    "glm4v_moe_text": {**GLM, "num_hidden_layers": 4},
    "glm_image_text": {**GLM, "num_hidden_layers": 4},
    "granitemoehybrid": {"num_hidden_layers": 4, "vocab_size": 1000,
                         "layer_types": ["mamba", "attention", "mamba", "attention"]},
    "hunyuan_v1_dense": {"num_hidden_layers": 4, "vocab_size": 1000, "head_dim": 128},
    "hunyuan_v1_moe": {"num_hidden_layers": 4, "vocab_size": 1000, "head_dim": 128},
    "hunyuan_vl_text": {"num_hidden_layers": 4, "vocab_size": 1000, "head_dim": 128},
    "jamba": {"num_hidden_layers": 8, "vocab_size": 1000},
    "lfm2_moe": {"num_hidden_layers": 4, "vocab_size": 1000,
                 "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "ministral": {"num_hidden_layers": 4, "vocab_size": 1000, "head_dim": 128},
    "nemotron": {"num_hidden_layers": 4, "vocab_size": 1000, "head_dim": 128,
                 "num_key_value_heads": 8},
    "qwen4_exp_text": {"num_hidden_layers": 4, "head_dim": 128},
}  # fmt: skip
"""Fields of families whose defaults are no model, or none of a few layers."""

FRAMES = ((80, 3000), (128, 3000), (3000, 80), (3000, 128), (3000, 160))
GIVEN: dict[str, tuple[tuple[int, ...], ...]] = {
    "pixel_values": ((1, 3, 224, 224), (1, 3, 256, 256), (1, 3, 384, 384), (1, 3, 512, 512),
                     (1, 3, 800, 800), (1, 8, 3, 224, 224), (1, 16, 3, 224, 224)),
    "pixel_values_videos": ((1, 16, 3, 224, 224), (1, 16, 3, 256, 256), (1, 16, 3, 288, 288)),
    "input_values": ((1, 16000), (1, 1, 16000), (1, 1, 24000), (1, 1024, 128), (1, 80, 100)),
    "input_features": tuple((1, *shape) for shape in FRAMES),
    "inputs_embeds": ((1, 24, 512), (1, 24, 768), (1, 24, 1024)),
    "past_values": ((1, 512), (1, 512, 7), (1, 32, 1), (1, 512, 1)),
    "inputs": ((1, 256, 256), (1, 512, 768)),
}  # fmt: skip
"""Shapes that are tried for an argument whose shape no configuration tells."""

NOT_SIZES = ("architectures", "id2label", "label2id", "transformers_version", "dtype")


class Row(NamedTuple):
    """A family and what was found."""

    kind: str
    verdict: str
    note: str = ""
    changed: int = 0  # configurations with a changed field that are equal too
    refused: int = 0  # and those that hw.cost refuses


def kinds() -> list[str]:
    """Every model type of transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return list(CONFIG_MAPPING_NAMES)


def rows(wanted: list[str], changes: int = 0) -> Iterator[Row]:
    """The row of each family that has a model."""
    for kind in wanted:
        row = in_time(kind, changes)
        if "has no model for" not in row.note:
            yield row


def in_time(kind: str, changes: int = 0) -> Row:
    """The row of a family, unless it takes too long."""

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        config = small(kind)
        row = compare(config)
    except TimeoutError:
        return Row(kind, "refused", f"it takes more than {SECONDS} seconds")
    except Exception as error:  # its configuration has no usable default
        return Row(kind, "refused", shortened(error))
    finally:
        signal.alarm(0)
    if row.verdict != "equal" or not changes:
        return row._replace(kind=kind)
    found = Counter[str]()
    signal.alarm(SECONDS * 2)
    try:
        for change, changed in drawn(config, changes):
            other = compare(changed)
            found[other.verdict] += 1
            if other.verdict == "different":
                return Row(kind, "different", f"{change}: {other.note}")
    except TimeoutError:
        pass
    finally:
        signal.alarm(0)
    return row._replace(kind=kind, changed=found["equal"], refused=found["refused"])


def shortened(error: object) -> str:
    """A message in a line."""
    return " ".join(str(error).split())[:160] or type(error).__name__


def small(kind: str) -> Any:
    """The default configuration of a family, with a few layers where it allows that."""
    from transformers import AutoConfig

    if kind in NEEDED:
        return AutoConfig.for_model(kind, **NEEDED[kind])
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


def fields_changed(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each field alone: flags turned around, numbers doubled and halved, empty ones filled."""
    for name, value in fields.items():
        if name in NOT_SIZES:
            continue
        if isinstance(value, bool):
            yield {name: not value}
        elif isinstance(value, int) and value > 0:
            yield from ({name: 2 * value}, {name: max(1, value // 2)})
        elif value is None:
            yield from ({name: True}, {name: 64})


def drawn(config: Any, changes: int) -> Iterator[tuple[dict[str, Any], Any]]:
    """Configurations with one changed field each that transformers takes, the same every time."""
    from transformers import AutoConfig

    kind, usual = config.model_type, config.to_dict()
    every = list(fields_changed({k: v for k, v in usual.items() if k != "model_type"}))
    random.Random(kind).shuffle(every)
    made = 0
    for change in every:
        if made == changes:
            return
        given = {name: value for name, value in usual.items() if name != "model_type"}
        try:
            changed = AutoConfig.for_model(kind, **{**given, **change})
        except Exception:  # transformers refuses it
            continue
        made += 1
        yield change, changed


def compare(config: Any, tokens: int = 24) -> Row:
    """A configuration, counted by hw.cost and by PyTorch."""
    kind = config.model_type
    try:
        architecture: Any = hw.costs.read_architecture(config)
    except ValueError as error:
        return Row(kind, "refused", shortened(error))
    row = compare_model(architecture, tokens)
    if row.verdict == "refused" and inputs.main_name(architecture.model) in GIVEN:
        return compare_given(architecture) or row
    return row


def compare_model(architecture: TracedModel, tokens: int) -> Row:
    """A model with the arguments that hw.cost gives it."""
    config, kind = architecture.config, architecture.config.model_type
    asked = {} if architecture.own_length else {"queries": tokens}
    try:
        found = hw.cost(architecture, batch=1, **asked)
    except ValueError as error:
        return Row(kind, "refused", shortened(error))
    notes = [str(each) for each in found.left_out]
    extras = architecture.extras
    assert extras is not None
    step = None
    if found.kv_cache and not architecture.own_length:
        given = {"keys": tokens + 1, "queries": 1}
        given |= {"context": tokens} if architecture.pair else {}
        try:
            step = hw.cost(architecture, batch=1, **given)
        except ValueError as error:
            notes.append(f"a step is refused: {shortened(error)}")
    try:
        theirs = by_pytorch(config, tokens, extras, step is not None)
    except Exception as error:  # transformers' own code needs numbers that are not there
        return Row(kind, "counted", "; ".join([*notes, f"PyTorch's counter: {shortened(error)}"]))
    ours = [found.params, found.flops_dense, found.kv_cache + found.state]
    ours += [] if step is None else [step.kv_cache + step.state]
    return judged(kind, ours, theirs, notes)


def compare_given(architecture: TracedModel) -> Row | None:
    """A model with tensors of the first shape that it takes; None if it takes none of them."""
    config = architecture.config
    name = inputs.main_name(architecture.model)
    for shape in GIVEN[name]:
        made = torch.empty(shape, device="meta", dtype=torch.bfloat16)
        try:
            found = hw.cost(architecture, inputs={name: made})
        except ValueError:
            continue
        notes = [f"given {name} {shape}", *(str(each) for each in found.left_out)]
        try:
            theirs = counted({name: made}, config)
        except Exception as error:  # transformers' own code needs numbers that are not there
            notes.append(f"PyTorch's counter: {shortened(error)}")
            return Row(config.model_type, "counted", "; ".join(notes))
        return judged(config.model_type, [found.params, found.flops_dense], theirs[:2], notes)
    return None


def judged(kind: str, ours: list[int], theirs: list[int], notes: list[str]) -> Row:
    """Equal, or what differs."""
    names = ("parameters", "FLOPs", "cache after the prompt", "cache after a step")
    wrong = [f"{name} {a:,} for {b:,}" for name, a, b in zip(names, ours, theirs, strict=False)
             if a != b]  # fmt: skip
    return Row(kind, "different" if wrong else "equal", "; ".join(wrong or notes))


def built(config: Any, where: str) -> Any:
    """transformers' model of a configuration, without stand-ins."""
    own = copy.deepcopy(config)
    own._attn_implementation = "eager"
    kind: Any = building.model_class(config)
    with torch.device("meta"):
        model = kind(own)
    if where != "meta":
        if sum(weight.numel() for weight in model.parameters()) > MOST:
            raise ValueError("it is too large to run on a processor")
        model = kind(own).to(where)
    model.tie_weights()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    return model.to(torch.bfloat16).eval()


def counted(given: dict[str, Any], config: Any, where: str = "meta") -> list[int]:
    """Parameters and FLOPs of a call with these arguments."""
    model = built(config, where)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**given)
    return [sum(weight.numel() for weight in model.parameters()), counter.get_total_flops()]


def by_pytorch(config: Any, tokens: int, extras: inputs.Extras, step: bool) -> list[int]:
    """Parameters, FLOPs of a prompt, bytes of the cache after it and, if asked, after a step."""
    try:
        return ran(built(config, "meta"), config, tokens, extras, step)
    except Exception:  # its code reads numbers
        return ran(built(config, "cpu"), config, tokens, extras, step)


@torch.no_grad()
def ran(model: Any, config: Any, tokens: int, extras: inputs.Extras, step: bool) -> list[int]:
    """The result of `by_pytorch` for a model that exists already."""
    where = next(model.parameters()).device
    options = {"use_cache": extras.cache} if hasattr(config, "use_cache") else {}

    def taken(queries: int, keys: int) -> dict[str, Any]:
        given = inputs.inputs_of(model, 1, queries, keys, context=tokens, dtype=torch.bfloat16,
                                 extras=extras)  # fmt: skip
        return {name: on(x, where) for name, x in given.items()}

    with FlopCounterMode(display=False) as counter:
        out = model(**taken(tokens, tokens), **options)
    found = [sum(weight.numel() for weight in model.parameters()), counter.get_total_flops()]
    name = next((each for each in ("past_key_values", "cache_params", "state")
                 if getattr(out, each, None) is not None), None)  # fmt: skip
    if name is None:
        return [*found, 0]
    found.append(held_by(out[name]))
    if step:
        given = taken(1, tokens + 1)
        if inputs.is_pair(model):
            del given[inputs.main_name(model)]
            given["encoder_outputs"] = encoded(out.encoder_last_hidden_state)
        out = model(**given, **{name: out[name]}, **options)
        found.append(held_by(out[name]))
    return found


def on(x: Tensor, where: torch.device) -> Tensor:
    """An argument with numbers: ones, such as tokens and a mask that hides none."""
    return x if where.type == "meta" else torch.ones(x.shape, dtype=x.dtype, device=where)


def held_by(cache: Any) -> int:
    """Bytes of all tensors in a cache, flags and counts aside."""
    found: dict[int, int] = {}

    def look(what: Any) -> None:
        if isinstance(what, Tensor):
            if what.is_floating_point():
                found[id(what)] = what.numel() * what.element_size()
        elif isinstance(what, dict):
            for each in what.values():
                look(each)
        elif isinstance(what, list | tuple):
            for each in what:
                look(each)
        elif type(what).__module__.startswith("transformers.") and hasattr(what, "__dict__"):
            look({name: each for name, each in vars(what).items() if name != "config"})

    look(cache)
    return sum(found.values())


def table(found: list[Row]) -> str:
    """The table of docs/cost-families.md."""
    count = Counter(row.verdict for row in found)
    changed = sum(row.changed for row in found)
    lines = [
        f"{len(found)} families: "
        + ", ".join(f"{n} {name}" for name, n in count.items())
        + f"; {changed:,} of their configurations with a changed field are equal too.",
        "",
    ]
    lines += ["| verdict | families |", "|---|---|"]
    of_equal: dict[str, list[str]] = {}
    for row in found:
        if row.verdict == "equal":
            given = row.note.startswith("given ")
            of_equal.setdefault("equal, with `inputs=`" if given else "equal", []).append(row.kind)
    lines += [f"| {name} | {', '.join(sorted(kinds))} |" for name, kinds in of_equal.items()]
    for verdict in ("counted", "different"):
        kinds = [f"{row.kind} ({row.note})" for row in found if row.verdict == verdict]
        lines += [f"| {verdict} | {', '.join(kinds)} |"] if kinds else []
    reasons: dict[str, list[str]] = {}
    for row in found:
        if row.verdict == "refused":
            note = row.note.replace(repr(row.kind), "it").replace(row.kind, "it")
            reasons.setdefault(note[:90].replace("|", "\\|"), []).append(row.kind)
    ordered = sorted(reasons.items(), key=lambda item: -len(item[1]))
    lines += [f"| refused: `{note.replace('`', '')}` | {', '.join(kinds)} |"
              for note, kinds in ordered]  # fmt: skip
    return "\n".join(lines)


def known() -> dict[str, Row]:
    """The rows that were kept."""
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    return {kind: Row(**row) for kind, row in kept.items()}


def keep(row: Row) -> None:
    """Keep a row beside the others."""
    found = {**known(), row.kind: row}
    content = {kind: found[kind]._asdict() for kind in sorted(found)}
    write_whole(KEPT, json.dumps(content, indent=1) + "\n")


def documented(page: str) -> str:
    """A page with the table of what was kept between its marks."""
    begin, end = "<!-- families -->", "<!-- end of families -->"
    before, _, rest = page.partition(begin)
    after = rest.partition(end)[2]
    return f"{before}{begin}\n\n{table(list(known().values()))}\n\n{end}{after}"


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("kinds", nargs="*", help="model types; all of them by default")
    parser.add_argument("--part", default="1/1", help="such as 2/8: the second of eight parts")
    parser.add_argument("--changes", type=int, default=4, help="changed fields of each family")
    parser.add_argument("--missing", action="store_true", help="only those that were not kept")
    parser.add_argument("--docs", action="store_true", help="write what was kept into docs")
    asked = parser.parse_args()
    if asked.docs:
        PAGE.write_text(documented(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    part, parts = (int(each) for each in asked.part.split("/"))
    there = known() if asked.missing else {}
    wanted = [kind for kind in asked.kinds or kinds()[part - 1 :: parts] if kind not in there]
    for row in rows(wanted, asked.changes):
        keep(row)
        print(f"{row.kind:28} {row.verdict:10} {row.changed}/{row.refused} {row.note}", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    main()
