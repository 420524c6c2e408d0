"""Answers about an input that the model has read: its tokens, its heads and their maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headwise import Edge
from headwise.apps.interface.background import BusyError
from headwise.apps.interface.reply import Answer, Query, Refusal, as_json, number
from headwise.apps.look.atlas import Atlas, PackedCells
from headwise.apps.look.head_sentences import reason, seen_by, sentence
from headwise.apps.look.predictions import Predictor
from headwise.apps.look.reasons import CELLS, Reasons, hidden
from headwise.apps.look.scene import Group, Head
from headwise.apps.look.session import Session
from headwise.maps import TILE, Cells
from headwise.messages import halves, say, with_chinese

MOST_TOKENS = 20_000  # in one answer
MOST_PAIRS = 1 << 26  # rows by keys of a span
MOST_LINES = 512  # rows whose largest weights are given in one answer


def tokens(session: Session, query: Query, id: str) -> Answer:
    """The tokens of an axis."""
    group = _atlas(session, id).input.group(query.given.get("group", "self"))
    axis = query.given.get("axis", "rows")
    if axis not in ("rows", "columns"):
        raise Refusal(400, say("axis={axis!r}; use rows or columns", axis=axis[:40]))
    all_tokens = group.rows if axis == "rows" else group.columns
    start = query.number("start", 0)
    stop = min(query.number("stop", MOST_TOKENS), start + MOST_TOKENS)
    return as_json({"tokens": all_tokens[start:stop], "total": len(all_tokens)})


def heads(session: Session, query: Query, id: str) -> Answer:
    """Every head with its figures, and in a sentence."""
    read = _atlas(session, id).input
    rows = [
        {
            "group": group.id,
            "layer": head.layer,
            "head": head.number,
            "type": head.type,
            "score": number(head.scores.get(head.type or "", math.nan)),
            "says": sentence(head.type, head.scores, head.figures, seen_by(read, group)),
            "why": reason(head.type, head.scores, seen_by(read, group)),
            "figures": {name: number(value) for name, value in head.figures.items()},
        }
        for group in read.groups
        for head in group.heads
    ]
    columns: dict[str, None] = {}
    for group in read.groups:
        columns |= dict.fromkeys(group.heads[0].figures)
    return as_json(with_chinese({"columns": list(columns), "heads": rows}))


def thumbnails(session: Session, query: Query, id: str) -> Answer:
    """The maps of a group's heads, small."""
    atlas = _atlas(session, id)
    group = atlas.input.group(query.given.get("group", atlas.input.main.id))
    how, drop = query.how(), query.number("drop", 0)
    size = query.number("size", 32, 1, TILE)
    small = [atlas.thumbnail(group, head, size, how, drop) for head in group.heads]
    first = small[0]
    return _binary(PackedCells(b"".join(x.cells for x in small), first.rows, first.columns))


def image(session: Session, query: Query, id: str, number: str) -> Answer:
    """An image of the input."""
    seen = _atlas(session, id).input.images
    if int(number) >= len(seen):
        raise Refusal(404, say("input {id} has no image {number}", id=id, number=number))
    return Answer(seen[int(number)], "image/png")


def pyramid(session: Session, query: Query, id: str, *where: str) -> Answer:
    """The size of a head's map."""
    _, group, head = _head(session, id, *where)
    _, _, rows, columns = head.map.shape
    levels = head.map.levels
    size = {"rows": rows, "columns": columns, "levels": levels, "tile": TILE}
    return as_json({**size, "causal": group.causal})


def tile(session: Session, query: Query, id: str, *where: str) -> Answer:
    """One tile of a head's map."""
    atlas, group, head = _head(session, id, *where[:3])
    level, x, y = map(int, where[3:])
    return _binary(atlas.tile(group, head, level, x, y, query.how(), query.number("drop", 0)))


def strips(session: Session, query: Query, id: str, *where: str) -> Answer:
    """Entropy and largest weight of the rows, and weight received by the keys, pooled."""
    atlas, group, head = _head(session, id, *where)
    size = query.number("size", 1024, 1, 8192)
    rows = query.range("row", len(group.rows))
    columns = query.range("column", len(group.columns))
    return as_json(
        {
            "entropy": _pooled(head.entropy[rows], size),
            "top_prob": _pooled(head.top_prob[rows], size),
            "received": _pooled(atlas.received(group, head)[columns], size),
            "rows": len(group.rows),
            "columns": len(group.columns),
        }
    )


def span(session: Session, query: Query, id: str) -> Answer:
    """The weight of every head on a span of keys: the mean over rows, and that of one row."""
    group = _atlas(session, id).input.group(query.given.get("group", "self"))
    keys, row = _keys(query, group), _row(query, group)
    found = []
    for head in group.heads:
        query.check()
        mass = head.map.mass(keys.start, keys.stop)[0, 0]  # (N,)
        shares = {"mean": number(float(mass.mean())), "row": number(float(mass[row]))}
        found.append({"layer": head.layer, "head": head.number, **shares})
    return as_json({"first": keys.start, "last": keys.stop, "row": row, "heads": found})


def without(session: Session, query: Query, id: str, *where: str) -> Answer:
    """The predictions of a row if a head did not see a span of keys."""
    atlas, group, head = _head(session, id, *where)
    predictor = _predictor(atlas, group)
    keys = _keys(query, group)
    edge = Edge(head.module.partition("#")[0], head.number, (keys.start, keys.stop))
    try:
        outcomes, moved = session.compare(predictor, _row(query, group), [edge])
    except BusyError as busy:
        raise Refusal(409, *busy.args) from busy
    return as_json({"moved": moved, "outcomes": [outcome._asdict() for outcome in outcomes]})


def reasons(session: Session, query: Query, id: str, row: str) -> Answer:
    """The prediction of a row, and the edges that matter most for it."""
    told = _reasons(session, id, int(row))
    return as_json(told.to_dict(query.number("count", 40, 1, 400)))


def support(session: Session, query: Query, id: str, row: str, *where: str) -> Answer:
    """A head's map, pooled, by weight and by what each edge gave to the prediction of a row."""
    _, _, head = _head(session, id, *where)
    told = _reasons(session, id, int(row)).map(head)
    weights = head.map.pool(CELLS, how="max")[0, 0]
    values = {"weights": weights, "support": told}
    flat = {name: [number(round(x, 6)) for x in v.flatten().tolist()] for name, v in values.items()}
    return as_json({"rows": told.shape[0], "columns": told.shape[1], **flat})


def support_tile(session: Session, query: Query, id: str, row: str, *where: str) -> Answer:
    """One tile of a head's map by what each edge gave to the prediction of a row."""
    _, _, head = _head(session, id, *where[:3])
    found, largest = _reasons(session, id, int(row)).tile(head, *map(int, where[3:]))
    answer = _binary(PackedCells.of_shares(found, largest))
    return replace(answer, headers=answer.headers | {"X-Largest": repr(largest)})


def unseen(session: Session, query: Query, id: str, row: str) -> Answer:
    """The predictions of a row without some edges: edges=self:5.1:30:12, head, query and key."""
    atlas = _atlas(session, id)
    predictor = _predictor(atlas, atlas.input.groups[-1])
    try:
        edges = hidden({x.id: x for x in atlas.input.groups}, query.given.get("edges", ""))
        outcomes, moved = session.compare(predictor, int(row), edges)
    except BusyError as busy:
        raise Refusal(409, *busy.args) from busy
    except (ValueError, KeyError) as error:
        raise Refusal(400, say("these are no edges of this input")) from error
    return as_json({"moved": moved, "outcomes": [outcome._asdict() for outcome in outcomes]})


def _reasons(session: Session, id: str, row: int) -> Reasons:
    atlas = _atlas(session, id)
    group = atlas.input.groups[-1]
    if atlas.input.effects is None:
        _predictor(atlas, group)
    if row >= len(group.rows):
        raise Refusal(404, say("there is no token {row} in this input", row=row))
    try:
        return session.reasons(id, row)
    except BusyError as busy:
        raise Refusal(409, *busy.args) from busy


def _predictor(atlas: Atlas, group: Group) -> Predictor:
    predictor = atlas.input.predictor
    if predictor is None or group.id not in predictor.groups:
        hint = say("use a model that predicts tokens or classes; of a translator, its decoder")
        raise Refusal(404, say("this input has no predictions to compare"), hint)
    return predictor


def row(session: Session, query: Query, id: str, *where: str) -> Answer:
    """The weights of a row, exactly; of several rows or heads, their mean."""
    return _mean_line(session, query, id, "rows", *where)


def column(session: Session, query: Query, id: str, *where: str) -> Answer:
    """The weights on a key, exactly; on several keys or of several heads, their mean."""
    return _mean_line(session, query, id, "columns", *where)


def _mean_line(
    session: Session, query: Query, id: str, axis: str, group: str, layer: str, head: str, of: str
) -> Answer:
    """The mean of some lines of the map of a head, of a layer's heads, or of all of a group's."""
    found = _atlas(session, id).input.group(group)
    if "all" not in (layer, head):
        heads: Sequence[Head] = [found.head(f"{int(layer)}.{int(head)}")]
    else:
        heads = [x for x in found.heads if layer == "all" or x.layer == int(layer)]
    length = len(found.rows if axis == "rows" else found.columns)
    lines = [_stretch(stretch, length) for stretch in of.split(".")]
    count = sum(line.stop - line.start for line in lines)
    if count * max(len(found.rows), len(found.columns)) > MOST_PAIRS:
        raise Refusal(400, *halves(say("these are too many tokens at once; choose fewer")))
    total = torch.zeros(len(found.columns if axis == "rows" else found.rows), dtype=torch.float64)
    for each in heads:
        query.check()
        for line in lines:
            some = each.map[0, 0, line] if axis == "rows" else each.map[0, 0, :, line].T
            total += some.double().sum(0).cpu()
    return _floats(total / (max(1, len(heads)) * count))


def _stretch(text: str, length: int) -> slice:
    """From 3 to 5 of 3-5; a Refusal for what lies outside."""
    first, _, last = text.partition("-")
    found = slice(int(first), int(last or first) + 1)
    if not found.start < found.stop <= length:
        said = say("there are no tokens {text}; there are {count:,}", text=text, count=length)
        raise Refusal(404, *halves(said))
    return found


def weight(session: Session, query: Query, id: str, *where: str) -> Answer:
    """One weight, with its logit and its row's lse."""
    *_, head = _head(session, id, *where[:3])
    i, j = map(int, where[3:])
    value = float(head.map[0, 0, i, j])
    lse = float(head.map.lse[0, 0, i])
    logit = lse + math.log(value) if value > 0 else None
    return as_json({"weight": value, "logit": logit, "lse": number(lse)})


def top(session: Session, query: Query, id: str, *where: str) -> Answer:
    """The largest weights of some rows."""
    _, group, head = _head(session, id, *where)
    rows = query.range("row", len(group.rows))
    count = rows.stop - rows.start
    if count > MOST_LINES:
        said = say("{rows} rows; ask for at most {most} at once", rows=count, most=MOST_LINES)
        raise Refusal(400, said)
    weights, keys = head.map[0, 0, rows].topk(min(query.number("k", 3, 1, 64), len(group.columns)))
    pairs = [
        [[key, value] for key, value in zip(*row, strict=True) if value > 0]
        for row in zip(keys.tolist(), weights.tolist(), strict=True)
    ]
    return as_json({"rows": pairs})


BINARY = "application/octet-stream"
HEAD = r"/api/inputs/(\d+)/map/(\w+)/(\d{1,4})/(\d{1,4})"
HEADS = r"/api/inputs/(\d+)/map/(\w+)/(\d{1,4}|all)/(\d{1,4}|all)"
PLACE = r"(\d{1,9})"
PLACES = r"(\d{1,9}(?:-\d{1,9})?(?:\.\d{1,9}(?:-\d{1,9})?)*)"
ROUTES: tuple[tuple[str, Callable[..., Answer]], ...] = (
    (r"/api/inputs/(\d+)/tokens", tokens),
    (r"/api/inputs/(\d+)/heads", heads),
    (r"/api/inputs/(\d+)/thumbnails", thumbnails),
    (r"/api/inputs/(\d+)/image/(\d{1,4})", image),
    (r"/api/inputs/(\d+)/span", span),
    (HEAD, pyramid),
    (rf"{HEAD}/tile/{PLACE}/{PLACE}/{PLACE}", tile),
    (rf"{HEAD}/strips", strips),
    (rf"{HEADS}/row/{PLACES}", row),
    (rf"{HEADS}/column/{PLACES}", column),
    (rf"{HEAD}/weight/{PLACE}/{PLACE}", weight),
    (rf"{HEAD}/top", top),
    (rf"{HEAD}/without", without),
    (rf"/api/inputs/(\d+)/reasons/{PLACE}", reasons),
    (rf"/api/inputs/(\d+)/reasons/{PLACE}/without", unseen),
    (rf"/api/inputs/(\d+)/reasons/{PLACE}/(\w+)/(\d{{1,4}})/(\d{{1,4}})", support),
    (
        rf"/api/inputs/(\d+)/reasons/{PLACE}/(\w+)/(\d{{1,4}})/(\d{{1,4}})"
        rf"/tile/{PLACE}/{PLACE}/{PLACE}",
        support_tile,
    ),
)
"""The addresses of these answers: the groups of a pattern are the arguments after the query."""


def _atlas(session: Session, id: str) -> Atlas:
    atlas = session.atlases.get(id)
    if atlas is None:
        there = ", ".join(session.atlases) or say("none yet")
        hint = say("there are: {there}", there=there)
        raise Refusal(404, say("there is no input {id}", id=id), hint)
    return atlas


def _head(
    session: Session, id: str, group: str, layer: str, head: str
) -> tuple[Atlas, Group, Head]:
    atlas = _atlas(session, id)
    found = atlas.input.group(group)
    return atlas, found, found.head(f"{int(layer)}.{int(head)}")


def _row(query: Query, group: Group) -> int:
    """The row that is asked about; the last one by default."""
    last = len(group.rows) - 1
    return query.number("row", last, 0, last)


def _keys(query: Query, group: Group) -> slice:
    """The span of keys that is asked about, of a size that is computed in a moment."""
    count = len(group.columns)
    first = query.number("first", 0, 0, count - 1)
    last = query.number("last", count, first + 1, count)
    pairs = len(group.rows) * (last - first)
    if pairs > MOST_PAIRS:
        said = say(
            "{rows:,} rows by {keys:,} keys are too many at once; choose fewer keys",
            rows=len(group.rows),
            keys=last - first,
        )
        raise Refusal(400, *halves(said))
    return slice(first, last)


def _binary(packed: PackedCells) -> Answer:
    sizes = {"X-Rows": str(packed.rows), "X-Columns": str(packed.columns)}
    return Answer(packed.cells, BINARY, sizes)


def _floats(values: Tensor) -> Answer:
    """Numbers as little-endian float32."""
    plain = values.detach().to("cpu", torch.float32).contiguous()
    return Answer(plain.numpy().tobytes(), BINARY)


def _pooled(values: Tensor, size: int) -> list[float | None]:
    """At most `size` means of neighbours."""
    cells = Cells.evenly(len(values), size)
    whole = slice(0, len(values))
    sums = cells.pooled(values.double().cpu(), -1, whole, "mean")
    return [number(value) for value in (sums / torch.tensor(cells.widths)).tolist()]
