"""What the heads of a model do with a text: their figures and their maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwise.loading import LanguageModel, Translator
from headwise.map import AttentionMap
from headwise.nn import MultiHeadAttention
from headwise.observation import Observation

MOST_TOKENS = 16_384
"""A longer text would take minutes on a CPU before anything is seen."""

REPEATS = 32
"""How many repeated tokens are followed up in search of induction."""


@dataclass(frozen=True)
class Head:
    """A head: its layer and number, its figures, and its map (1, 1, N, M)."""

    layer: int
    number: int
    figures: dict[str, float]
    map: AttentionMap

    @property
    def name(self) -> str:
        """Layer and number, both from 0: 5.1 is the second head of the sixth layer."""
        return f"{self.layer}.{self.number}"


@dataclass(frozen=True)
class Sight:
    """A text as tokens, and the heads that read it: `rows` look at `columns`."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    heads: tuple[Head, ...]
    causal: bool
    notes: tuple[str, ...] = ()

    def head(self, name: str) -> Head:
        """The head of this name; ValueError names those there are."""
        for head in self.heads:
            if head.name == name:
                return head
        first, last = self.heads[0].name, self.heads[-1].name
        raise ValueError(f"there is no head {name!r}; heads are layer.number, {first} to {last}")


@dataclass
class Recorder:
    """Looks beside every attention of a model while it runs, as a context manager."""

    model: nn.Module
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
            kept = {key: options[key] for key in ("mask", "bias", "positions") if key in options}
            _, self.seen[name] = module.observe(*given, **kept)
            self.maps[name] = module.attention_map(*given, **kept)

        return record


def look_at(loaded: LanguageModel | Translator, text: str) -> Sight:
    """Run a model on a text and keep what its heads did: cross-attention, for a translator.

    >>> import headwise as hw
    >>> sight = look_at(hw.load("gpt"), "to be or not to be")
    >>> len(sight.heads), sight.rows[1:4]
    (48, ('to', ' be', ' or'))
    """
    if not text.strip():
        raise ValueError(f"there is no word to look at in {text!r}")
    with torch.no_grad():
        if isinstance(loaded, Translator):
            return _translation(loaded, text)
        return _language(loaded, text)


def _language(loaded: LanguageModel, text: str) -> Sight:
    ids = loaded.encode(text)
    _check_length(ids)
    with Recorder(loaded.model) as recorder:
        loaded.model(ids)
    tokens = tuple(loaded.tokeniser.pieces(ids[0].tolist()))
    context = getattr(loaded.model.config, "context", None)  # a rival may know no limit
    notes = []
    if context is not None and len(tokens) > context:
        notes.append(f"{len(tokens)} tokens; the model was trained on {context} at a time")
    heads = _heads(recorder, list(recorder.seen), _repeats(ids[0]))
    return Sight(tokens, tokens, heads, causal=True, notes=tuple(notes))


def _translation(loaded: Translator, text: str) -> Sight:
    source = loaded.encode(text)
    _check_length(source)
    (said,) = loaded.translate(text)
    target = loaded.encode_target(said)
    with Recorder(loaded.model) as recorder:
        loaded.model(source, target)
    names = [name for name in recorder.seen if name.endswith("cross_attention")]
    rows, columns = (tuple(loaded.tokeniser.pieces(x[0].tolist())) for x in (target, source))
    return Sight(rows, columns, _heads(recorder, names, []), causal=False, notes=(f"→ {said}",))


def _check_length(ids: Tensor) -> None:
    if ids.shape[1] > MOST_TOKENS:
        raise ValueError(f"{ids.shape[1]} tokens are too many for a terminal; {MOST_TOKENS} work")


def _heads(
    recorder: Recorder, names: Sequence[str], repeats: Sequence[tuple[int, int]]
) -> tuple[Head, ...]:
    heads = []
    for layer, name in enumerate(names):
        figures, maps = recorder.seen[name].heads(), recorder.maps[name]
        if repeats:
            follow = torch.stack([maps[0, :, row, column] for row, column in repeats])
            figures["induction_mean"] = follow.mean(0)
        for number in range(maps.shape[1]):
            mine = {figure: float(values[number]) for figure, values in figures.items()}
            heads.append(Head(layer, number, mine, maps.head(0, number)))
    return tuple(heads)


def _repeats(ids: Tensor) -> list[tuple[int, int]]:
    """(row, column): a token said before, and what followed it the last time."""
    last: dict[int, int] = {}
    found = []
    for row, token in enumerate(ids.tolist()):
        if token in last and last[token] + 1 < row:
            found.append((row, last[token] + 1))
        last[token] = row
    return found[-REPEATS:]
