"""Every family of transformers that builds from a tiny config, watched.

    python -m tests.watching.sweep [--write] [family ...]

Prints one line per family. With --write the record keeps what was found, and the tables in
docs/watch-models.md and docs/watch-families.md are written anew from the record.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import headwise as hw
import headwise.transformers
from headwise.apps.cli.doctor import cpu_device, usable_cores
from headwise.watching import WatchedLayer
from tests.watching import tiny_models
from tests.watching.tiny_models import LENGTH, families

NEW, SECONDS = 4, 20
ROOT = Path(__file__).parents[2]
RECORD = ROOT / "bench/results/watched_families.json"
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


class TooSlow(BaseException):  # checks take an Exception for an answer
    """A check took longer than its limit."""


@dataclass
class Result:
    """The findings of the sweep for one family; a reason if a check was not possible."""

    family: str
    built: str = "yes"
    heads: int = 0
    compared: int = 0  # heads whose entropies were compared with eager weights
    unread: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # what its layers without a softmax are
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
    def verdict(self) -> str:
        """What became of the family's softmax attention."""
        if self.built != "yes":
            return "not built"
        if self.wrong:
            return "wrong"
        if self.unread:
            return "partly read" if self.heads else "not read"
        return "read" if self.heads else "no softmax attention"


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
        result.others = sorted({str(kind) for kind in seen.others["kind"]})
    pairs = zip(tensors(before), tensors(after), strict=True)
    same = all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in pairs)
    result.bits = "same" if same else "wrong: outputs differ"
    result.heads = sum(x.heads for x in seen.layers)
    if not seen.layers:
        raise ValueError("no attention")
    found = returned(model, given, {layer.module for layer in seen.layers})
    apart = {
        layer.number: min(off)
        for layer in seen.layers
        if layer.kind != "window"
        and (off := [x for p in found[layer.module] if (x := _distance(p, layer)) is not None])
    }
    handed = _nearest(attentions(model, given, tensors(before)[0]), seen)
    result.compared = max(
        sum(x.heads for x in seen.layers if x.number in apart), sum(heads for _, heads in handed)
    )
    every = [*apart.values(), *(far for far, _ in handed)]
    result.figures = _judged(max(every)) if every else "no weights to compare with"


def returned(model: Any, given: dict[str, Any], names: set[str]) -> dict[str, list[Tensor]]:
    """The weights (B, H, N, M) that modules of these names return beside their output."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}

    def keep(name: str, out: Any) -> None:
        many = out if isinstance(out, list | tuple) else []
        for x in many:
            if isinstance(x, Tensor) and x.ndim == 4 and x.is_floating_point() and x.numel():
                sums = x.sum(-1)
                alike = x.shape[1] > 1 and torch.equal(x[:, 0], x[:, 1])  # a mean over heads
                if not alike and bool((x >= 0).all()) and 1e-3 < float(sums.max()) < 1.001:
                    found[name].append(x)

    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: keep(name, out))
        for name, module in model.named_modules()
        if name in names
    ]
    try:
        run(model, given)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def check_packed(model: Any, given: dict[str, Tensor], result: Result) -> None:
    """Sequences packed by position_ids that start again: every layer's entropy is that of eager
    weights, with every implementation, and with cu_seq_lens beside them.
    """
    if not _takes(model, "position_ids") or "input_ids" not in given:
        return
    text = tiny_models.text(model)
    packed: dict[str, Any] = {name: text[name] for name in given if name in text}
    packed.pop("attention_mask", None)
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
        try:
            with hw.watch(model) as seen:
                after = tensors(run(model, more))[0]
        except ValueError as error:
            if kind != "headwise":
                raise
            result.packed = f"refused: {str(error).splitlines()[0][:60]}"
            continue
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
    return max((far for far, _ in _nearest(weights, seen)), default=None)


def _nearest(weights: list[Tensor], seen: hw.Watch) -> list[tuple[float, int]]:
    """How far each of the weights that fit a layer are from the nearest one, and its heads."""
    found = []
    for p in weights:  # some families hand out those of a few layers only
        off = [(_distance(p, layer), layer.heads) for layer in seen.layers]
        fits = [(far, heads) for far, heads in off if far is not None]
        found += [min(fits)] if fits else []
    return found


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
    whole = call is None or call.sinks is not None or layer.kind == "window"
    if not whole and rows.any() and float(p.sum(-1)[rows].min()) < 0.999:
        return None  # weights on some of the keys: T5Gemma 2 hands out two parts of a row
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
    rows: Any = slice(None)
    if "attention_mask" in given and before.shape[:2] == given["attention_mask"].shape:
        rows = given["attention_mask"].bool()

    def off(expected: Tensor) -> float:
        size = float(expected[rows].nan_to_num().abs().max().clamp_min(1))
        return float((expected - after)[rows].nan_to_num().abs().max()) / size

    far = off(before)
    result.headwise = f"{far:.0e}" if far <= TOLERANCE else f"wrong: off by {far:.2g}"
    if far > TOLERANCE and _set(model, "sdpa"):
        if off(tensors(run(model, given))[0]) <= TOLERANCE:
            result.headwise = "that of sdpa, which is not that of eager"
        _set(model, "eager")


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
    if rows == {1} and "past_key_values" not in model(**ids, use_cache=True):
        result.generate = "forgets"  # RecurrentGemma: a new cache in every step
        return
    if not rows <= expected:  # a model may put tokens of its own before the text
        both = {**ids, "decoder_input_ids": before[:, :-1]}
        with hw.watch(model) as whole:
            run(model, both if model.config.is_encoder_decoder else {"input_ids": before[:, :-1]})
        expected |= {x.observation.entropy.shape[2] for x in whole.layers}
        expected |= {x + more for x in expected for more in (1, 2)}  # or after it, as XLNet does
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
                model, given = tiny_models.ready(family)
        except (Exception, TooSlow) as error:
            result.built = (
                f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:70]}"
            )
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


CHECKS = {
    "bits": "outputs are the same to the bit while watched",
    "figures": f"entropy of every row is that of eager weights, to {TOLERANCE:g}",
    "packed": "the same for packed sequences, with eager, sdpa and headwise",
    "headwise": 'outputs with attn_implementation="headwise" are those of eager',
    "generate": "generate gives the same tokens, and one row per token",
    "clip": "qk_clip brings the largest logit to its limit",
}


def summary(machine: str, results: list[Result]) -> str:
    """What was found, counted, as Markdown."""
    counts = Counter(x.verdict for x in results)
    built = len(results) - counts["not built"]
    seen = [x for x in results if x.heads]
    rows = [
        f"{machine}: {len(results)} families, of which {built} build from a tiny config. Of these "
        f"{counts['no softmax attention']} have no softmax attention; of the other "
        f"{built - counts['no softmax attention']}, {counts['read']} are read completely, "
        f"{counts['partly read']} partly and {counts['not read']} not, and "
        f"{counts['wrong']} are wrong. Entropies of {sum(x.compared for x in seen):,} of the "
        f"{sum(x.heads for x in seen):,} heads were compared with eager weights.",
        "",
        "| check | families | right | wrong |",
        "|---|---|---|---|",
    ]
    for name, said in CHECKS.items():
        values = [getattr(x, name) for x in seen]
        done = [x for x in values if x[:1].isdigit() or x in ("same", "done")]
        bad = [x for x in values if x.startswith("wrong")]
        rows.append(f"| {said} | {len(done) + len(bad)} | {len(done)} | {len(bad)} |")
    kept = [x.family for x in seen if x.packed[:1].isdigit() and not x.apart]
    rows += ["", "Packed sequences see each other in these families, whatever `position_ids` say: "
             f"{', '.join(kept)}."]  # fmt: skip
    return "\n".join(rows)


def table(results: list[Result]) -> str:
    """One row per family, as Markdown."""
    rows = [
        "| family | verdict | heads | compared | how far | qk_clip | notes |",
        "|---|---|---|---|---|---|---|",
    ]
    for x in results:
        names = ", ".join(f"`{name}`" for name in x.unread[:2])
        more = f" and {len(x.unread) - 2} more" if len(x.unread) > 2 else ""
        notes = [f"also {', '.join(x.others)}"] if x.others else []
        notes += [f"not read: {names}{more}"] if x.unread else []
        notes += [f"{name}: {getattr(x, name)[7:]}" for name in x.wrong]
        notes += [
            f"slower than {SECONDS} s: {name}" for name in CHECKS if getattr(x, name) == "too slow"
        ]
        notes += [f"headwise's output is {x.headwise}"] if x.headwise.startswith("that") else []
        notes += [x.built] if x.built != "yes" else []
        said = "; ".join(notes).replace("|", "\\|").replace("<", "&lt;")
        far = x.figures if x.figures[:1].isdigit() else "–"
        heads = f"{x.heads} | {x.compared}" if x.heads else "– | –"
        clip = x.clip if x.clip in ("done", "refused") else "–"
        rows.append(f"| {x.family} | {x.verdict} | {heads} | {far} | {clip} | {said} |")
    return "\n".join(rows)


def recorded() -> tuple[str, list[Result]]:
    """The machine and the results of the record."""
    kept = json.loads(RECORD.read_text(encoding="utf-8"))
    return kept["machine"], [Result(**each) for each in kept["families"]]


def record(results: list[Result]) -> None:
    """Keep the results beside those of other families."""
    machine = (
        f"{date.today().isoformat()}, {cpu_device().name} ({usable_cores()} cores), torch "
        f"{torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    )
    before = recorded()[1] if RECORD.exists() else []
    every = {x.family: x for x in [*before, *results]}
    kept = [asdict(every[name]) for name in families() if name in every]
    text = json.dumps({"machine": machine, "families": kept}, indent=1)
    RECORD.write_text(text + "\n", encoding="utf-8")


def documents() -> dict[Path, str]:
    """The text of each document, with what the record says between its marks."""
    machine, results = recorded()
    texts = {"watch-models": summary(machine, results), "watch-families": table(results)}
    found = {}
    for name, text in texts.items():
        path = ROOT / "docs" / f"{name}.md"
        before, _, rest = path.read_text(encoding="utf-8").partition(MARKS[0])
        found[path] = f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"
    return found


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
    parser.add_argument(
        "--write", action="store_true", help="keep what is found, and write the tables"
    )
    given = parser.parse_args()
    results = []
    for family in given.families or families():
        results.append(check(family))
        print(family, results[-1].verdict, asdict(results[-1]), flush=True)
        if given.write:
            record(results[-1:])
    if given.write:
        for path, text in documents().items():
            path.write_text(text, encoding="utf-8")
    sys.exit(any(x.wrong for x in results))


if __name__ == "__main__":
    main()
