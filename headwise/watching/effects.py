"""Effects of edges: scalars to differentiate, and the edges that mattered, in one table.

A scalar says what a model's output is about: the probability of a token, the gap between two, a
loss. Its backward pass gives every edge an effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.core.observation import sample_rows
from headwise.maps.effect_map import EffectMap
from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.recorder.watch_options import WatchOptions
from headwise.watching.table import Table, Value


def runner_up(logits: Tensor, answer: int | Tensor | None = None, at: int = -1) -> Tensor:
    """The logit of an answer minus that of the best other one, at one position: a scalar.

    logits (B, N, V), or (B, V) and (V,) without positions; `answer` is the model's own first choice
    unless it is given, a token or one per batch entry. Batch entries are added up. It is the
    default to differentiate because it does not saturate.

    >>> logits = torch.tensor([[[0.0, 3.0, 1.0]]])
    >>> runner_up(logits), runner_up(logits, answer=2)
    (tensor(2.), tensor(-2.))
    """
    rows = _rows(logits, at, "runner_up")
    chosen = _chosen(rows, answer, "runner_up")
    others = rows.scatter(1, chosen[:, None], -torch.inf)
    return (rows.gather(1, chosen[:, None])[:, 0] - others.amax(1)).sum()


def logit_difference(
    logits: Tensor, answer: int | Tensor, other: int | Tensor, at: int = -1
) -> Tensor:
    """The logit of one token or class minus that of another, at one position: a scalar.

    >>> logit_difference(torch.tensor([[0.0, 3.0, 1.0]]), answer=1, other=2)
    tensor(2.)
    """
    rows = _rows(logits, at, "logit_difference")
    one, two = (_chosen(rows, x, "logit_difference")[:, None] for x in (answer, other))
    return (rows.gather(1, one) - rows.gather(1, two)).sum()


def log_probability(logits: Tensor, answer: int | Tensor | None = None, at: int = -1) -> Tensor:
    """The log-probability of a token or class, by default the model's first choice: a scalar.

    It saturates where the model is sure; `runner_up` does not.

    >>> log_probability(torch.zeros(1, 4)).exp()
    tensor(0.2500)
    """
    rows = _rows(logits, at, "log_probability")
    chosen = _chosen(rows, answer, "log_probability")
    return rows.log_softmax(1).gather(1, chosen[:, None]).sum()


def sequence_loss(logits: Tensor, ids: Tensor, ignore: int = -100) -> Tensor:
    """The loss of a language model on its own tokens: each position predicts the next one.

    logits (B, N, V), ids (B, N); positions whose next token is `ignore` do not count.

    >>> round(sequence_loss(torch.zeros(1, 3, 4), torch.tensor([[1, 2, 3]])).item(), 4)
    1.3863
    """
    if logits.ndim != 3 or ids.shape != logits.shape[:2]:
        raise ValueError(
            f"sequence_loss(logits {tuple(logits.shape)}, ids {tuple(ids.shape)}): it takes logits "
            "(batch, length, tokens) and ids (batch, length)"
        )
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), ignore_index=ignore
    )


def _rows(logits: Tensor, at: int, call: str) -> Tensor:
    """The logits of one position, (B, V), in float32 or wider."""
    if logits.ndim not in (1, 2, 3):
        raise ValueError(
            f"{call} takes logits (batch, length, tokens), (batch, classes) or (classes,), not "
            f"{tuple(logits.shape)}"
        )
    if logits.ndim == 3:
        if not -logits.shape[1] <= at < logits.shape[1]:
            raise ValueError(f"{call}(at={at!r}): there are {logits.shape[1]} positions")
        logits = logits[:, at]
    rows = logits if logits.ndim == 2 else logits[None]
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _chosen(rows: Tensor, answer: int | Tensor | None, call: str) -> Tensor:
    """The number of the answer in each batch entry, (B,)."""
    if answer is None:
        return rows.detach().argmax(1)
    chosen = torch.as_tensor(answer, device=rows.device).expand(rows.shape[0]).long()
    if bool(((chosen < 0) | (chosen >= rows.shape[1])).any()):
        raise ValueError(f"{call}: answers are numbers from 0 to {rows.shape[1] - 1}")
    return chosen


COLUMNS = ["layer", "name", "kind", "head", "batch", "query", "key", "weight", "effect"]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a pass, as far as known: numbers (B, N), or pieces that somebody names."""

    numbers: Tensor | None = None
    pieces: Sequence[str] | None = None
    source: Sequence[str] | None = None

    @property
    def known(self) -> bool:
        """True if there is anything to show."""
        return self.numbers is not None or self.pieces is not None

    def at(self, batch: int, position: int, elsewhere: bool) -> Value:
        """The token at a position of the sequence, or of the other one, of cross-attention."""
        pieces = self.source if elsewhere else self.pieces
        if pieces is not None:
            if position >= len(pieces):
                raise ValueError(
                    f"seen.edges: an edge is at position {position}, and "
                    f"{'source' if elsewhere else 'tokens'} names {len(pieces)} pieces; give one "
                    "per position"
                )
            return pieces[position]
        if self.numbers is None or elsewhere or self.pieces is not None:
            return ""
        there = batch < self.numbers.shape[0] and 0 <= position < self.numbers.shape[1]
        return int(self.numbers[batch, position]) if there else ""


def largest_edges(
    layers: Iterable[WatchedLayer],
    options: WatchOptions,
    count: int,
    tokens: Tokens,
    batch: int | None = None,
) -> Table:
    """The edges with the largest effects, largest magnitude first, one row each."""
    found: list[dict[str, Value]] = []
    notes = []
    for layer in layers:
        why = None if layer.held is None else layer.held.refusal()
        if layer.held is None or why is not None:
            notes.append(f"{layer.title}: {why or 'its calls were not seen in eager code'}")
            continue
        edges = list(_of_layer(layer, options, count, tokens, batch))
        found = sorted(found + edges, key=lambda row: -abs(float(row["effect"])))[:count]
    if not found and notes:
        raise ValueError("no effects are known:\n  " + "\n  ".join(notes[:20]))
    shown = "; ".join(notes[:5]) + (f"; and {len(notes) - 5} more" if len(notes) > 5 else "")
    said = [f"(without effects: {shown})"] if notes else []
    said += [f"(of {options.rows} sampled rows per head)"] if options.rows is not None else []
    extra = ["query_token", "key_token"] if tokens.known else []
    return Table(found, [*COLUMNS[:7], *extra, *COLUMNS[7:]], note="\n".join(said) or None)


def _of_layer(
    layer: WatchedLayer, options: WatchOptions, count: int, tokens: Tokens, batch: int | None
) -> Iterator[dict[str, Value]]:
    held = layer.held
    assert held is not None
    rows = held.sampled(options.rows)
    for first, emap in maps(layer, options.heads, rows):
        numbers = rows
        if options.rows is not None and rows is None:  # gathered from all ranks: sampled here
            numbers = sample_rows(options.rows, emap.shape[2], emap.region.q.device)
            emap = emap if numbers is None else emap.at(numbers)
        emap = emap if batch is None else emap.entry(batch)
        weights = emap.weights()
        effects, places = emap.largest(count)
        for effect, place in zip(effects.tolist(), places.tolist(), strict=True):
            b, h, i, j = place
            row = i if numbers is None else int(numbers[i])
            query, key = row + held.rows.start, j + held.rows.first_key
            where: dict[str, Value] = layer.place(first + h)
            entry = b if batch is None else batch
            where |= {"batch": entry, "query": query, "key": key}
            if tokens.known:
                where["query_token"] = tokens.at(entry, query, False)
                where["key_token"] = tokens.at(entry, key, layer.kind == "cross")
            yield where | {"weight": float(weights[b, h, i, j]), "effect": effect}


def maps(
    layer: WatchedLayer, heads: Sequence[int] | None, rows: Tensor | None = None
) -> Iterator[tuple[int, EffectMap]]:
    """Maps of the heads that are watched: the number of the first among this rank's, and a map.

    A sequence that is split between ranks is gathered one head at a time.
    """
    held = layer.held
    assert held is not None
    if held.rows.split is None and heads is None:
        yield 0, held.map(rows)
        return
    wanted = range(layer.heads)
    if heads is not None:
        wanted = [x - layer.first_head for x in heads]  # type: ignore[assignment]
    for head in wanted:
        if 0 <= head < layer.heads:
            yield head, held.of_head(head).map(rows)
