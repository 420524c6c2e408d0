"""Models that read: a text or an image goes in, and what each head did with it comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headwise.loading import LanguageModel, Translator
from headwise.look.scene import Description, Group, Head, Input
from headwise.map import AttentionMap
from headwise.nn import MultiHeadAttention
from headwise.observation import Observation

Report = Callable[[str, float | None], None]
"""Told what is being done, and how much of it is: `report("running the model", 0.5)`."""

MOST_TOKENS = {"cpu": 32_768, "cuda": 262_144}
"""A longer input would take more than some minutes before anything is seen."""

REPEATS = 32
"""How many repeated tokens are followed up in search of induction."""


class Reader(Protocol):
    """A model that is ready to be looked at while it reads."""

    @property
    def description(self) -> Description:
        """The model in a few numbers."""

    @property
    def sample(self) -> str:
        """What to read when nothing is given."""

    def read(self, what: str | bytes, report: Report) -> Input:
        """Read a text, or the bytes of an image."""


def silent(stage: str, done: float | None) -> None:
    """A report that nobody hears."""


@dataclass
class Recorder:
    """Looks beside every attention of a model while it runs, as a context manager."""

    model: nn.Module
    report: Report = silent
    seen: dict[str, Observation] = field(default_factory=dict)
    maps: dict[str, AttentionMap] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)

    def __enter__(self) -> Recorder:
        for name, module in self.model.named_modules():
            if isinstance(module, MultiHeadAttention):
                hook = self._hook(name)
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def record(module: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
            self.report("running the model", len(self.seen) / len(self._handles))
            kept = {key: options[key] for key in ("mask", "bias", "positions") if key in options}
            _, self.seen[name] = module.observe(*given, **kept)
            self.maps[name] = module.attention_map(*given, **kept)

        return record


@dataclass(frozen=True)
class TextReader:
    """A language model that reads a text."""

    name: str
    loaded: LanguageModel
    sample: str

    @property
    def description(self) -> Description:
        config = self.loaded.model.config
        # A rival may know no limit.
        context = getattr(config, "context", None)
        count = config.layers * config.heads
        return Description(self.name, parameters(self.loaded.model), config.layers, count, context)

    def read(self, what: str | bytes, report: Report = silent) -> Input:
        """Run the model on a text.

        >>> import headwise as hw
        >>> read = TextReader("gpt", hw.load("gpt"), "").read("to be or not to be")
        >>> len(read.main.heads), read.main.rows[1:4]
        (48, ('to', ' be', ' or'))
        """
        ids = self.loaded.encode(checked_text(what))
        check_length(ids)
        with torch.no_grad(), Recorder(self.loaded.model, report) as recorder:
            self.loaded.model.features(ids)
        tokens = tuple(self.loaded.tokeniser.pieces(ids[0].tolist()))
        heads = heads_of(recorder, list(recorder.seen), repeats(ids[0]))
        group = Group("self", "self-attention", True, tokens, tokens, heads)
        return Input(title(what), "text", (group,), too_long(len(tokens), self.description))


@dataclass(frozen=True)
class TranslationReader:
    """A translator that reads a sentence, and then its own translation of it."""

    name: str
    loaded: Translator
    sample: str

    @property
    def description(self) -> Description:
        model, config = self.loaded.model, self.loaded.model.config
        layers = config.encoder_layers + 2 * config.decoder_layers
        return Description(self.name, parameters(model), layers, layers * config.heads, None)

    def read(self, what: str | bytes, report: Report = silent) -> Input:
        """Translate a text and run the model on both sides of it.

        >>> import headwise as hw
        >>> read = TranslationReader("translate", hw.load("translate"), "").read("Let's see.")
        >>> [group.id for group in read.groups], read.notes
        (['encoder', 'decoder', 'cross'], ('→ Voyons !',))
        """
        loaded, text = self.loaded, checked_text(what)
        source = loaded.encode(text)
        check_length(source)
        report("running the model", None)
        (said,) = loaded.translate(text)
        target = loaded.encode_target(said)
        with torch.no_grad(), Recorder(loaded.model, report) as recorder:
            loaded.model(source, target)
        french, english = (tuple(loaded.tokeniser.pieces(x[0].tolist())) for x in (target, source))

        def group(id: str, name: str, causal: bool, ends: str, rows: Any, columns: Any) -> Group:
            names = [at for at in recorder.seen if at.startswith(id[:2]) and at.endswith(ends)]
            return Group(id, name, causal, rows, columns, heads_of(recorder, names, []))

        cross = [at for at in recorder.seen if at.endswith("cross_attention")]
        return Input(
            title(what),
            "translation",
            (
                group("encoder", "encoder", False, ".attention", english, english),
                group("decoder", "decoder", True, ".attention", french, french),
                Group("cross", "cross", False, french, english, heads_of(recorder, cross, [])),
            ),
            (f"→ {said}",),
        )


def heads_of(
    recorder: Recorder, names: Sequence[str], followed: Sequence[tuple[int, int]]
) -> tuple[Head, ...]:
    """The heads of some modules; `followed` pairs (row, column) are induction's."""
    heads = []
    for layer, name in enumerate(names):
        seen, maps = recorder.seen[name], recorder.maps[name]
        figures = seen.heads()
        if followed:
            follow = torch.stack([maps[0, :, row, column] for row, column in followed])
            figures["induction_mean"] = follow.mean(0)
        for number in range(maps.shape[1]):
            mine = {figure: float(values[number]) for figure, values in figures.items()}
            rows = seen.entropy[0, number], seen.top_prob[0, number]
            heads.append(Head(layer, number, name, mine, maps.head(0, number), *rows))
    return tuple(heads)


def repeats(ids: Tensor) -> list[tuple[int, int]]:
    """(row, column): a token said before, and what followed it the last time.

    >>> repeats(torch.tensor([5, 6, 7, 5, 6]))
    [(3, 1), (4, 2)]
    """
    last: dict[int, int] = {}
    found = []
    for row, token in enumerate(ids.tolist()):
        if token in last and last[token] + 1 < row:
            found.append((row, last[token] + 1))
        last[token] = row
    return found[-REPEATS:]


def parameters(model: nn.Module) -> int:
    """How many numbers a model has learnt, shared ones once."""
    return sum(p.numel() for p in model.parameters())


def checked_text(what: str | bytes) -> str:
    """The text; ValueError where there is no word in it."""
    if isinstance(what, bytes):
        raise ValueError("this model reads text, and was given an image")
    if not what.strip():
        raise ValueError(f"there is no word to look at in {what[:20]!r}")
    return what


def check_length(ids: Tensor) -> None:
    """ValueError where tokens (1, N) would take too long on their device."""
    most = MOST_TOKENS.get(ids.device.type, MOST_TOKENS["cpu"])
    if ids.shape[1] > most:
        where = ids.device.type
        hint = "; a GPU takes more" if where == "cpu" else ""
        raise ValueError(f"{ids.shape[1]:,} tokens are too many on {where}: at most {most:,}{hint}")


def too_long(tokens: int, model: Description) -> tuple[str, ...]:
    """What to say of an input that is longer than those the model was trained on."""
    if model.context is None or tokens <= model.context:
        return ()
    return (f"{tokens:,} tokens; the model was trained on {model.context:,} at a time",)


def title(what: str | bytes) -> str:
    """A text's first words."""
    if isinstance(what, bytes):
        return "image"
    words: Iterable[str] = what.split()
    line = " ".join(words)
    return line if len(line) <= 40 else line[:39].rstrip() + "…"
