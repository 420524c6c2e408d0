"""A recording of a model: its layers, a table of heads, maps, and a series of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from torch import Tensor

from headwise.core.spans import SPAN_PREFIX
from headwise.maps.attention_map import AttentionMap
from headwise.watching import head_types
from headwise.watching.alarms import Alarm, alarm_scalars
from headwise.watching.logged import Course
from headwise.watching.recorder.board import Board
from headwise.watching.recorder.layer import LayerPlace, WatchedLayer
from headwise.watching.recorder.other_layers import OtherLayers
from headwise.watching.table import LaterRows, Table, Value, scalars

NAN = float("nan")


@dataclass(frozen=True)
class Entry:
    """One step of a series: its number, its table of heads, and its model FLOPs utilisation.

    `mfu` is None where it is not known; `seen.utilisation` says why.
    """

    step: int
    table: Table
    mfu: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The step as plain lists."""
        rows = [list(row.values()) for row in self.table]
        found = {"step": self.step, "columns": self.table.columns, "rows": rows}
        return found if self.mfu is None else {**found, "mfu": self.mfu}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Entry:
        """The step that `to_dict` returned."""
        columns = list(content["columns"])
        rows = [dict(zip(columns, row, strict=True)) for row in content["rows"]]
        return cls(int(content["step"]), Table(rows, columns), content.get("mfu"))


class Recording:
    """The heads of a model, as far as they were looked at."""

    series: list[Entry]
    alarms: list[Alarm]

    @property
    def logged(self) -> dict[str, Course]:
        """Numbers of the training, such as its loss: by name, the steps and the number at each."""
        return {}

    @property
    def layers(self) -> list[WatchedLayer]:
        """The layers that were seen, in the order in which they ran."""
        raise NotImplementedError

    @property
    def tokens(self) -> Tensor | None:
        """The tokens (B, N) of the last pass; None if they are not known."""
        return None

    @property
    def unread(self) -> list[str]:
        """The names of modules whose attention could not be read, and is left out."""
        return []

    @property
    def others(self) -> Table:
        """The layers that mix tokens without a softmax: one row per head, with what it is.

        Of a linear layer with decay: decay_mean, the mean factor of its state from a token to the
        next; memory, the tokens after which 1/e is left at its mean logarithm; state_norm, the norm
        of the state after a text. NaN where a recurrence was not seen.
        """
        return OtherLayers(kept=False).table()

    @property
    def kept_steps(self) -> Mapping[int, Recording]:
        """The steps whose last pass was kept, by `step(keep=True)`: recordings, by number."""
        return {}

    @property
    def requests(self) -> Mapping[str, Recording]:
        """The requests of a model that generates by continuous batching: recordings, by name."""
        return {}

    @property
    def last_step(self) -> int | None:
        """The number of the last step of the series; None if there is none."""
        return self.series[-1].step if self.series else None

    def heads(self) -> Table:
        """One row per head: layer, name, kind, head and the figures of every statistic.

        Figures are means over all rows that see a key and are not padding, or the largest or
        smallest value where the name says so, since the last training step, or else of all passes.
        """
        return self.series[-1].table if self.series else Table([], note=self._note())

    def _note(self) -> str | None:
        """The line below a table that says what is missing."""
        more = f" and {len(self.unread) - 5} more" if len(self.unread) > 5 else ""
        named = ", ".join(name or "the model" for name in self.unread[:5])
        return f"(could not be read: {named}{more})" if self.unread else None

    def layer(self, which: int | str) -> WatchedLayer:
        """A layer by its number, -1 being the last, or by its name."""
        layers = self.layers
        for layer in layers:
            if which in (layer.number, layer.name):
                return layer
        if isinstance(which, int) and -len(layers) <= which < 0:
            return layers[which]
        there = ", ".join(f"{layer.number} {layer.name}" for layer in layers[:40])
        raise ValueError(f"there is no layer {which!r}; there are {there or 'none yet'}")

    def map(self, layer: int | str, head: int, batch: int = 0) -> AttentionMap:
        """The map of one head in the last pass, (1, 1, N, M): exact on demand, never stored.

        Of a sequence that is split between ranks, every rank asks for the same map and the same of
        it, and each computes the weights of its own keys.
        """
        found = self.layer(layer)
        own = found.own_head(head)
        if found.split:
            return found.split_map(batch, own)
        return found.map().head(batch, own)

    @property
    def spans(self) -> dict[str, dict[int, Tensor]]:
        """The weight on each span in the last pass, row by row: `spans[name][layer]` (B, Hq, N).

        The table has its mean over rows and passes as span_<name>_mean.
        """
        found: dict[str, dict[int, Tensor]] = {}
        for layer in self.layers:
            if any(stat.startswith(SPAN_PREFIX) for stat in layer.stats):
                for name, weight in layer.observation.spans.items():
                    found.setdefault(name, {})[layer.number] = weight
        return found

    def types(self) -> Table:
        """The type of each head, by the first of `head_types.RULES` that fits, and its scores.

        dormant, induction, previous-token, self, sink, local, uniform or content. Induction needs
        the tokens, which are known if the model was called with them.
        """
        rows: list[dict[str, Value]] = []
        for layer in self.layers:
            found = head_types.scores(layer, self.tokens)
            for head, kind in enumerate(found.types()):
                row = layer.place(head) | {"type": kind}
                row |= {name: float(score[head]) for name, score in vars(found).items()}
                rows.append(row)
        return Table(rows)

    def similarity(self, layer: int | str) -> Tensor:
        """The similarity of a layer's heads in their last pass, (Hq, Hq), from 0 to 1."""
        return head_types.similarity(self.layer(layer))

    def scalars(
        self, figures: Iterable[str] | None = None, *, heads: bool = False
    ) -> dict[str, float]:
        """The table as a plain dictionary for TensorBoard and Weights & Biases.

        attn/layer_03/entropy_mean and attn/global/entropy_mean: over heads, the mean of means, the
        max of maxima and the min of minima. With `heads` also attn/layer_03/head_05/entropy_mean.
        attn/alarms and attn/alarms/logit_growth count the alarms so far, if a watch has rules. The
        names are the same whether all rows are observed or some.
        """
        found = scalars(self.heads(), figures, heads=heads)
        return {**found, **alarm_scalars(self.alarms, self._rules())}

    def _rules(self) -> list[str]:
        """The names of the rules that are checked."""
        return []

    def show(
        self,
        tokens: Sequence[str] | Callable[[list[int]], Sequence[str]] | None = None,
        source: Sequence[str] | None = None,
        *,
        image: Any = None,
        grid: tuple[int, int] | Sequence[tuple[int, int]] | None = None,
        batch: int = 0,
    ) -> Any:
        """Show the heads' last pass: a widget in a notebook, else a page, until Ctrl-C.

        `tokens` are those of the text, as many as the model read, or of the decoder, or a function
        that makes them of their numbers, such as `tokenizer.convert_ids_to_tokens`; `source` those
        of the encoder, or of the prompt that a picture is made by. Without them positions are
        numbered. `image` is what the model saw or made, a file, Pillow image or tensor
        (C, H, W) from 0 to 1, or several; `grid` its patches down and across, taken from the
        image's shape if it is left out. Kept steps are shown instead of the last pass, and the
        requests of continuous batching one by one.
        """
        for viewer in entry_points(group="headwise.viewers"):
            return viewer.load()(self, tokens, source, image=image, grid=grid, batch=batch)
        raise ValueError("the page is not installed: pip install 'headwise[look]'")

    def __repr__(self) -> str:
        heads = sum(layer.heads for layer in self.layers)
        steps = f", {len(self.series)} steps" if self.series else ""
        return f"<{type(self).__name__} of {len(self.layers)} layers, {heads} heads{steps}>"

    def _repr_html_(self) -> str:
        return self.heads()._repr_html_()

    def __rich__(self) -> Any:
        return self.heads().__rich__()


class SeenLayer(NamedTuple):
    """A layer as it was when a step ended, and where its figures are."""

    place: LayerPlace
    heads: int
    stats: tuple[str, ...]
    board: Board
    slot: int

    @classmethod
    def of(cls, layer: WatchedLayer) -> SeenLayer:
        assert layer.slot is not None
        slot = layer.slot
        return cls(layer.own_place, layer.heads, layer.stats, slot.board, slot.number)


class HeadRows(LaterRows):
    """One row per head of some layers, from what their boards hold.

    Most steps of a training are never looked at, so the rows are made when somebody asks for them.
    """

    def __init__(
        self, layers: Iterable[WatchedLayer], boards: Mapping[Board, Tensor], sampled: bool
    ) -> None:
        self._layers, self._sampled = [SeenLayer.of(layer) for layer in layers], sampled
        used = {layer.board for layer in self._layers}
        self._boards = {board: x for board, x in boards.items() if board in used}
        self._made: list[dict[str, Value]] | None = None

    @property
    def finite(self) -> bool:
        """True if no figure is infinite, which is known before any row is made."""
        found = (board.columns.means_and_extremes(x) for board, x in self._boards.items())
        return not any(bool(figures.isinf().any()) for figures in found)

    def blind(self) -> frozenset[tuple[int, int]]:
        """The (layer, head) of heads in which no row saw a key, by what their boards hold."""
        found = set()
        for layer in self._layers:
            none = self._boards[layer.board][layer.slot, 0, : layer.heads] == 0
            if bool(none.any()):
                heads = none.nonzero().flatten().tolist()
                found |= {(layer.place.number, layer.place.first_head + x) for x in heads}
        return frozenset(found)

    def made(self) -> list[dict[str, Value]]:
        """The rows."""
        if self._made is None:
            self._made = list(self._rows())
            self._layers, self._boards = [], {}
        return self._made

    def _rows(self) -> Iterator[dict[str, Value]]:
        found: dict[Board, list[list[list[float]]]] = {}  # slot, figure, head
        names: dict[str, str] = {}
        for board, values in self._boards.items():
            slots, order = board.columns.means_and_extremes(values).tolist(), board.columns.order
            found[board] = [[slot[at] for at in order] for slot in slots]
            names = board.columns.names(self._sampled)
        seen = {name for layer in self._layers for name in layer.stats}
        for layer in self._layers:
            of_heads = found[layer.board][layer.slot]
            mine = [
                (name, value if stat in layer.stats else [NAN] * layer.heads)
                for (name, stat), value in zip(names.items(), of_heads, strict=True)
                if stat in seen
            ]
            for head in range(layer.heads):
                yield layer.place.of_head(head) | {name: value[head] for name, value in mine}

    def __len__(self) -> int:
        known = self._made is not None
        return len(self.made()) if known else sum(layer.heads for layer in self._layers)

    def __getitem__(self, wanted: Any) -> Any:
        return self.made()[wanted]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.made(),)


def overflow(rows: Sequence[Mapping[str, Value]]) -> str | None:
    """The line below a table that names infinite figures; None if there are none.

    >>> overflow([{"layer": 0, "head": 3, "logit_var_mean": float("inf"), "max_logit_max": 9.0}])
    '(infinite, beyond the range of its numbers: logit_var_mean of head 0.3)'
    """
    found = [
        f"{name} of head {row['layer']}.{row['head']}"
        for row in rows
        for name, value in row.items()
        if value == math.inf
    ]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    said = f"(infinite, beyond the range of its numbers: {', '.join(found[:3])}{more})"
    return said if found else None
