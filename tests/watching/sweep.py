"""Every family of transformers that builds from a tiny config, watched.

    python -m tests.watching.sweep [--write] [family ...]

Prints one line per family, and with --write puts the table into docs/watch-models.md.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import headwise as hw
import headwise.transformers
from headwise.apps.cli.doctor import cpu_device, usable_cores
from headwise.watching import WatchedLayer

BATCH, LENGTH, NEW, SECONDS, PARAMETERS = 2, 12, 4, 20, 30_000_000
DOCUMENT = Path(__file__).parents[2] / "docs" / "watch-models.md"
MARKS = "<!-- the sweep's table: python -m tests.watching.sweep --write -->", "<!-- end -->"
TOLERANCE = 1e-3

PACKED = {"position_ids": torch.tensor([[*range(5), *range(7)], [*range(3), *range(4), *range(5)]])}
"""Two sequences in the first row of a batch, and three in the second."""
ENDS: dict[str, Any] = {
    **dict.fromkeys(
        ("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 5, 12, 15, 19, 24], dtype=torch.int32)
    ),
    **dict.fromkeys(("max_length_q", "max_length_k"), 7),
}
"""The same, as flash attention takes it."""

_TWO = "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers layers depth "
_TWO += "num_decoder_layers num_encoder_layers num_blocks encoder_num_layers decoder_num_layers "
_TWO += "num_experts_per_tok top_k num_key_value_heads n_kv_heads kv_heads num_kv_heads n_group"
_FOUR = "num_attention_heads n_head n_heads num_heads encoder_attention_heads heads "
_FOUR += "decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads "
_FOUR += "num_experts num_local_experts n_routed_experts moe_num_experts num_decoder_heads"
_WIDE = "hidden_size d_model n_embd dim embed_dim embedding_size d_embed decoder_hidden_size "
_WIDE += "projection_dim word_embed_proj_dim hidden_dim encoder_hidden_size"
_INNER = "intermediate_size d_ff d_inner encoder_ffn_dim decoder_ffn_dim ffn_dim n_inner mlp_dim "
_INNER += "moe_intermediate_size ffn_hidden_size feed_forward_size shared_expert_intermediate_size"
_EIGHT = "head_dim d_kv rotary_dim qk_rope_head_dim qk_nope_head_dim v_head_dim attention_head_dim "
_EIGHT += "sliding_window attention_window window_size num_buckets patch_size"
SIZES: dict[str, int] = {
    **dict.fromkeys(_TWO.split(), 2),
    **dict.fromkeys(_FOUR.split(), 4),
    **dict.fromkeys(_WIDE.split(), 32),
    **dict.fromkeys(_INNER.split(), 48),
    **dict.fromkeys(_EIGHT.split(), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "image_size", "n_mels", "num_mel_bins"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions"), 64),
    **dict.fromkeys(("max_target_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 99),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    **{"bos_token_id": 1, "eos_token_id": 2, "image_size": 32, "first_k_dense_replace": 1},
    **{
        "n_shared_experts": 1,
        "topk_group": 2,
        "moe_k": 2,
        "moe_topk": 2,
        "num_selected_experts": 2,
    },
}
"""Settings that make a config tiny, by the names that families use."""


class TooSlow(BaseException):  # checks take an Exception for an answer
    """A check took longer than its limit."""


@dataclass
class Result:
    """The findings of the sweep for one family; a reason if a check was not possible."""

    family: str
    built: str = "yes"
    heads: int = 0
    unread: list[str] = field(default_factory=list)
    bits: str = "–"
    figures: str = "–"
    packed: str = "–"
    apart: bool = False  # packed sequences do not see each other
    headwise: str = "–"
    generate: str = "–"
    clip: str = "–"
    seconds: float = 0.0

    @property
    def wrong(self) -> list[str]:
        """The checks that went wrong, rather than not at all."""
        checks = ("bits", "figures", "packed", "headwise", "generate", "clip")
        return [name for name in checks if getattr(self, name).startswith("wrong")]

    @property
    def complete(self) -> bool:
        """True if every attention was read and nothing went wrong."""
        return self.built == "yes" and not self.unread and not self.wrong and self.heads > 0


def families() -> list[str]:
    """The families that transformers has a model for."""
    return sorted(name for name in auto.MODEL_MAPPING_NAMES if name in CONFIG_MAPPING)


def tiny(kind: Any, without: tuple[str, ...] = ()) -> Any:
    """A config of this class with small sizes, its parts' too; `without` some of them."""
    known = set(inspect.signature(kind.__init__).parameters) | set(vars(kind))
    known |= {key for parent in kind.__mro__ for key in getattr(parent, "__annotations__", {})}
    options: dict[str, Any] = {name: SIZES[name] for name in SIZES if name in known - {*without}}
    if "kv_lora_rank" in known:
        options["num_key_value_heads"] = SIZES["num_attention_heads"]
    for name, part in (getattr(kind, "sub_configs", None) or {}).items():
        if inspect.isclass(part) and part is not transformers.AutoConfig:
            options[name] = tiny(part, without).to_dict()
    for _ in range(len(options)):
        try:
            return kind(**options)
        except Exception as error:  # a size that this family checks
            named = [name for name in options if name in str(error)]
            if not named:
                raise
            del options[named[0]]
    return kind()


def ready(family: str) -> tuple[Any, dict[str, Tensor]]:
    """A model of the family that runs, and its inputs; the first error if none does."""
    first: Exception | None = None
    for without in ((), ("head_dim", "embed_dim", "patch_size", "window_size")):
        try:
            model = build(family, without)
            with contextlib.suppress(Exception):
                model.set_attn_implementation("eager")
            given = inputs_of(model)
            with contextlib.suppress(Exception):
                model(**given)
                return model, given
            if _takes(model, "pixel_values"):
                given |= pictures(model)
            model(**given)
            return model, given
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def build(family: str, without: tuple[str, ...] = ()) -> Any:
    """A small model of the family: one that generates, if it has one."""
    config = tiny(CONFIG_MAPPING[family], without)
    for names in (
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_MAPPING_NAMES,
    ):
        made = names.get(family)
        if made is None:
            continue
        made = made[0] if isinstance(made, list | tuple) else made
        kind = getattr(transformers, made)
        with torch.device("meta"):
            count = sum(x.numel() for x in kind(config).parameters())
        if count > PARAMETERS:
            raise ValueError(f"{count:,} parameters from a tiny config")
        torch.manual_seed(0)
        model = kind(config).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        return model
    raise ValueError("no model")


def inputs_of(model: Any) -> dict[str, Tensor]:
    """Inputs of the kind that the model reads, the second sequence padded on the right."""
    torch.manual_seed(1)
    config, name = model.config, model.main_input_name
    if name == "pixel_values":
        return pictures(model)
    if name == "input_values":
        return {name: torch.randn(BATCH, 2000)}
    if name == "input_features":
        bins = getattr(config, "num_mel_bins", getattr(config, "input_feat_per_channel", 16))
        return {name: torch.randn(BATCH, bins, 2 * getattr(config, "max_source_positions", 64))}
    ids = torch.randint(5, 90, (BATCH, LENGTH))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given["attention_mask"][1, -4:] = 0
    parameters = inspect.signature(model.forward).parameters
    if config.is_encoder_decoder and "decoder_input_ids" in parameters:
        given["decoder_input_ids"] = torch.randint(5, 90, (BATCH, LENGTH - 3))
    return {key: value for key, value in given.items() if key in parameters}


def pictures(model: Any) -> dict[str, Tensor]:
    """Images of the size that the model's config states."""
    vision = getattr(model.config, "vision_config", model.config)
    size = getattr(vision, "image_size", 32)
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    return {"pixel_values": torch.randn(BATCH, getattr(vision, "num_channels", 3), *sides)}


def tensors(x: Any) -> list[Tensor]:
    """The tensors of a model's output."""
    if isinstance(x, Tensor):
        return [x]
    values = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ()
    return [y for value in values for y in tensors(value)]


def run(model: Any, given: dict[str, Tensor], **options: Any) -> Any:
    """The model's output; one that draws random numbers draws the same each time."""
    torch.manual_seed(2)
    return model(**given, **options)


def check_figures(model: Any, given: dict[str, Tensor], result: Result) -> None:
    """Bits unchanged, and every layer's entropy that of eager weights."""
    options = {"use_cache": False} if _takes(model, "use_cache") else {}
    before, seen = run(model, given, **options), hw.watch(model)
    try:
        with seen:
            after = run(model, given, **options)
    finally:
        result.unread = seen.unread
    same = [torch.equal(*pair) for pair in zip(tensors(before), tensors(after), strict=True)]
    result.bits = "same" if all(same) else "wrong: outputs differ"
    result.heads = sum(x.heads for x in seen.layers)
    far = _farthest(attentions(model, given, tensors(before)[0]), seen)
    result.figures = "no weights to compare with" if far is None else _judged(far)


def check_packed(model: Any, given: dict[str, Tensor], result: Result) -> None:
    """Sequences packed by position_ids that start again: every layer's entropy is that of eager
    weights, with every implementation, and with cu_seq_lens beside them.
    """
    if not _takes(model, "position_ids") or "input_ids" not in given:
        return
    packed = {name: x for name, x in given.items() if name != "attention_mask"}
    packed |= PACKED | ({"use_cache": False} if _takes(model, "use_cache") else {})
    try:
        before = tensors(run(model, packed))[0]
    except Exception:
        result.packed = "does not take it"
        return
    weights, farthest = attentions(model, packed, before), None
    across = PACKED["position_ids"].eq(0).cumsum(-1)
    across = across[:, None, :, None] != across[:, None, None]
    fitting = [p for p in weights if p.ndim == 4 and p.shape[2:] == across.shape[2:]]
    result.apart = bool(fitting) and not any(p[across.expand_as(p)].any() for p in fitting)
    ways = [(kind, packed) for kind in ("eager", "sdpa", "headwise") if _set(model, kind)]
    _set(model, "eager")
    with contextlib.suppress(Exception):  # not every model takes cu_seq_lens
        run(model, packed | ENDS)
        # eager and sdpa ignore them, and headwise keeps sequences apart by them
        ways += [(kind, packed | ENDS) for kind, _ in ways if kind != "headwise" or result.apart]
    for kind, more in ways:
        _set(model, kind)
        with hw.watch(model) as seen:
            after = tensors(run(model, more))[0]
        far = _farthest(weights, seen)
        if seen.unread:
            result.packed = f"wrong: {len(seen.unread)} not read with {kind}"
        elif not torch.allclose(before, after, rtol=1e-3, atol=TOLERANCE):
            result.packed = f"wrong: other outputs with {kind}"
        elif far is not None and not far <= TOLERANCE:
            result.packed = f"wrong: off by {far:.2g} with {kind}"
        farthest = far if farthest is None else max(far or 0.0, farthest)
    _set(model, "eager")
    if result.packed == "–":
        result.packed = "no weights to compare with" if farthest is None else _judged(farthest)


def _set(model: Any, implementation: str) -> bool:
    """Choose an implementation of attention; False if the model does not have it."""
    with contextlib.suppress(Exception):
        model.set_attn_implementation(implementation)
    return bool(model.config._attn_implementation == implementation)


def _farthest(weights: list[Tensor], seen: hw.Watch) -> float | None:
    """How far the weights are from the watched layers that fit best; None if none fits."""
    found: list[float] = []
    for p in weights:  # some families hand out those of a few layers only
        off = [_distance(p, layer) for layer in seen.layers]
        found += [min(x for x in off if x is not None)] if any(x is not None for x in off) else []
    return max(found, default=None)


def _judged(far: float) -> str:
    return f"{far:.0e}" if far <= TOLERANCE else f"wrong: off by {far:.2g}"


def _distance(p: Tensor, layer: WatchedLayer) -> float | None:
    """How far a layer is from the entropies of weights (B, H, N, M); None if they don't fit.

    Windows are handed out as (B, windows, H, N, M) or (B, H, windows, N, M), or without the rows
    that were added to fill the last one.
    """
    if p.ndim == 5:
        ways = (_distance(x.flatten(2, 3), layer) for x in (p, p.transpose(1, 2)))
        return min((x for x in ways if x is not None), default=None)
    found = layer.observation.entropy.double()
    found = found[:, :, : p.shape[2]] if layer.kind == "window" else found
    call = None if layer.last is None else layer.last.call
    if p.shape[:3] != found.shape or (
        call is not None and call.sinks is not None and float(p.sum(-1).min()) > 0.9999
    ):
        return None  # weights may be handed out without the sinks
    rows = layer.observation.sees[:, :, : p.shape[2]]
    rows = rows if layer.padding is None else rows & ~layer.padding[:, None]
    entropy = torch.special.entr(p.double()).sum(-1)
    return float((entropy - found)[rows].abs().max()) if rows.any() else None


def attentions(model: Any, given: dict[str, Tensor], expected: Tensor) -> list[Tensor]:
    """All weights that the model hands out, (B, H, N, M) or windows, if it computes the same then.

    Some families hand out logits in their place, or the mean over heads, or compute something else
    when asked for them.
    """
    try:
        out = run(model, given, output_attentions=True)
    except Exception:
        return []
    if not torch.allclose(tensors(out)[0], expected, rtol=1e-3, atol=1e-4):
        return []
    keys = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    keys += ("decoder_ngram_attentions",)
    found = tensors([out.get(key) for key in keys if isinstance(out, dict)])
    found = [x for x in found if x.ndim in (4, 5) and bool((x >= 0).all())]
    found = [x for x in found if x.shape[1] == 1 or not torch.equal(x[:, 0], x[:, 1])]
    return [x for x in found if float((x.sum(-1) - 1).clamp_min(0).max()) < 1e-3]


def check_headwise(model: Any, given: dict[str, Tensor], result: Result) -> None:
    """Outputs with attn_implementation="headwise" as with eager."""
    before = tensors(run(model, given))[0]
    try:
        model.set_attn_implementation("headwise")
        if model.config._attn_implementation != "headwise":
            raise ValueError("not taken")
    except Exception:
        result.headwise = "has no choice"
        return
    try:
        after = tensors(run(model, given))[0]
    except Exception as error:
        result.headwise = f"refused: {str(error).splitlines()[0][:60]}"
        return
    finally:
        model.set_attn_implementation("eager")
    rows = slice(None)
    if "attention_mask" in given and before.shape[:2] == given["attention_mask"].shape:
        rows = given["attention_mask"].bool()
    off = float((before - after)[rows].abs().max()) / float(before[rows].abs().max().clamp_min(1))
    result.headwise = f"{off:.0e}" if off <= TOLERANCE else f"wrong: off by {off:.2g}"


def check_generate(model: Any, given: dict[str, Tensor], result: Result) -> None:
    """The same tokens while watched, and one row per token of the decoder."""
    if not hasattr(model, "generate") or "input_ids" not in given:
        return
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    ids = {"input_ids": given["input_ids"][:1]}
    try:
        before = model.generate(**ids, **options)
    except Exception:
        result.generate = "does not generate"
        return
    with hw.watch(model) as seen:
        after = model.generate(**ids, **options)
    if not torch.equal(before, after):
        result.generate = "wrong: other tokens"
        return
    rows = {x.observation.entropy.shape[2] for x in seen.layers if x.kind == "self"}
    expected = {before.shape[1] - 1, LENGTH}  # a decoder's, an encoder's
    if not rows <= expected:  # a model may put tokens of its own before the text
        both = {**ids, "decoder_input_ids": before[:, :-1]}
        with hw.watch(model) as whole:
            run(model, both if model.config.is_encoder_decoder else {"input_ids": before[:, :-1]})
        expected |= {x.observation.entropy.shape[2] for x in whole.layers}
    result.generate = "same" if rows <= expected else f"wrong: {sorted(rows)} rows"


def check_clip(model: Any, given: dict[str, Tensor], result: Result) -> None:
    """qk_clip brings the largest logit down to its limit, or refuses in words."""
    with hw.watch(model) as seen:
        run(model, given)
    largest = max(seen.heads()["max_logit_max"])
    if not largest > 0:
        result.clip = "no positive logit"
        return
    try:
        done = hw.qk_clip(model, seen, limit=largest / 2)
    except ValueError:
        result.clip = "refused"
        return
    first = done[0].layer if done else 0
    with hw.watch(model) as after:
        run(model, given)
    number = min(x.layer for x in done) if done else first
    now = max(row["max_logit_max"] for row in after.heads() if row["layer"] == number)
    result.clip = "done" if now <= largest / 2 * 1.001 else f"wrong: {now:.3g} of {largest / 2:.3g}"


def check(family: str) -> Result:
    """Everything of one family."""
    result, began = Result(family), time.monotonic()
    with _quiet(), torch.no_grad():
        try:
            with _limit(SECONDS):
                model, given = ready(family)
        except (Exception, TooSlow) as error:
            result.built = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:70]}"
            return result
        for name, one in (
            ("figures", check_figures),
            ("packed", check_packed),
            ("headwise", check_headwise),
            ("generate", check_generate),
            ("clip", check_clip),
        ):
            try:
                with _limit(SECONDS):
                    one(model, given, result)
            except TooSlow:
                setattr(result, name, "too slow")
            except Exception as error:
                said = (str(error).splitlines() or [type(error).__name__])[0]
                if "no attention" in said:
                    setattr(result, name, "no attention")
                    break
                setattr(result, name, f"wrong: {said[:60]}")
    result.seconds = time.monotonic() - began
    return result


def table(results: list[Result]) -> str:
    """The results as Markdown: counts, the families that are not complete, and the others."""
    built = [x for x in results if x.built == "yes"]
    seen = [x for x in built if x.heads]
    rows = [
        f"{date.today().isoformat()}, {cpu_device().name} ({usable_cores()} cores), torch "
        f"{torch.__version__.partition('+')[0]}, transformers {transformers.__version__}: "
        f"{len(results)} families, of which {len(built)} "
        f"build from a tiny config, and {len(seen)} of these have attention that headwise reads.",
        "",
        "| check | families | right | wrong |",
        "|---|---|---|---|",
    ]
    checks = {
        "bits": "outputs are the same to the bit while watched",
        "figures": f"entropy of every row is that of eager weights, to {TOLERANCE:g}",
        "packed": "the same for packed sequences, with eager, sdpa and headwise",
        "headwise": 'outputs with attn_implementation="headwise" are those of eager',
        "generate": "generate gives the same tokens, and one row per token",
        "clip": "qk_clip brings the largest logit to its limit",
    }
    for name, said in checks.items():
        values = [getattr(x, name) for x in seen]
        done = [x for x in values if x[:1].isdigit() or x in ("same", "done")]
        bad = [x for x in values if x.startswith("wrong")]
        rows.append(f"| {said} | {len(done) + len(bad)} | {len(done)} | {len(bad)} |")
    kept = [x.family for x in seen if x.packed[:1].isdigit() and not x.apart]
    rows += ["", "Packed sequences see each other in these families, whatever `position_ids` say: "
             f"{', '.join(kept)}."]  # fmt: skip
    apart = [x for x in built if x.unread or x.wrong]
    rows += ["", "Families with attention that is not read, and what is wrong:", ""]
    rows += ["| family | heads read | not read | wrong |", "|---|---|---|---|"]
    for x in apart:
        more = f" and {len(x.unread) - 2} more" if len(x.unread) > 2 else ""
        names = ", ".join(f"`{name}`" for name in x.unread[:2]) + more
        wrong = "; ".join(f"{name}: {getattr(x, name)[7:]}" for name in x.wrong)
        rows.append(f"| {x.family} | {x.heads} | {names or '–'} | {wrong or '–'} |")
    rows += ["", "Read completely: " + ", ".join(x.family for x in built if x.complete) + "."]
    none = [x.family for x in built if x.figures == "no attention" and not x.unread]
    slow = [x.family for x in built if "too slow" in vars(x).values()]
    rows += ["", f"Slower than {SECONDS} seconds in a check: " + ", ".join(slow) + "."]
    rows += ["", "Without attention: " + ", ".join(none) + "."]
    failed = [x.family for x in results if x.built != "yes"]
    rows += ["", "Not built from a tiny config, and not tried: " + ", ".join(failed) + "."]
    return "\n".join(rows)


def write(text: str) -> None:
    """Put the table between its marks in the document."""
    document = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = document.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    said = f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}"
    DOCUMENT.write_text(said, encoding="utf-8")


def _takes(model: Any, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Raise TooSlow after so much time of the processor: the machine may be busy."""

    def stop(*_: object) -> None:
        raise TooSlow(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def main() -> None:
    """Sweep over all families, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", action="store_true", help="put the table into the document")
    given = parser.parse_args()
    results = []
    for family in given.families or families():
        results.append(check(family))
        fields = {k: v for k, v in vars(results[-1]).items() if k not in ("family",)}
        print(family, fields, flush=True)
    print(table(results))
    if given.write:
        write(table(results))
    sys.exit(any(x.wrong for x in results))


if __name__ == "__main__":
    main()
