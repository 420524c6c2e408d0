"""The places of a prompt's image tokens on its pictures, in all ways that models cut pictures up.

A picture may be one grid of tokens, or several: the whole in one tile and its parts in others.
Between its tokens may be separators, and newlines among them. Models say which in different ways.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from headwise.apps.look.readers import image_bytes as images
from headwise.apps.look.readers.transformers_reader import unscaled
from headwise.apps.look.scene import Picture
from headwise.messages import Sentence, say

TILE = re.compile(r"<row_(\d+)_col_(\d+)>|<\|tile_([xy])_separator\|>|<global-img>|<\|image\|>")
"""What stands before a tile: its row and column, a step to the next tile, or a sign that the whole
picture follows."""


@dataclass(frozen=True)
class Laid:
    """A grid of tokens over one of the pictures, or over the whole of its tiles."""

    source: int  # the number of the picture
    grid: tuple[int, int]
    tokens: tuple[int, ...]  # of each cell, row by row
    tiles: tuple[
        int, ...
    ] = ()  # of the pixel values, row by row; none: the picture as it was given
    across: int = 1  # tiles in a row
    whole: bool = False  # besides its tiles


@dataclass
class Prompt:
    """What a processor has made of pictures and a text, and what the model does with it."""

    ids: Sequence[int]
    given: Any
    model: Any
    processor: Any
    opened: Sequence[Any]  # Pillow images
    packed: list[Tensor] = field(default_factory=list)
    """Of models that pack the tiles of a picture: for each picture, True where a newline stands."""

    @property
    def places(self) -> list[int]:
        """The positions of image tokens."""
        config = self.model.config
        token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", -1)
        return [place for place, id in enumerate(self.ids) if id == token]

    @property
    def runs(self) -> list[range]:
        """The image tokens as stretches without any other token in between."""
        places = self.places
        ends = [at + 1 for at, (one, next) in enumerate(pairwise(places)) if next > one + 1]
        return [
            range(places[start], places[stop - 1] + 1)
            for start, stop in zip([0, *ends], [*ends, len(places)], strict=True)
            if stop > start
        ]

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Ask a model that packs the tiles of pictures where it puts newlines, as it runs."""
        core = getattr(self.model, "model", None)
        pack = getattr(core, "pack_image_features", None)
        if core is None or pack is None:
            yield
            return

        def listened(features: Any, *given: Any, **options: Any) -> Any:
            blank = [x.new_zeros(*x.shape[:2], 1) for x in features]
            mark = {**options, "image_newline": features[0].new_ones(1)}
            self.packed[:] = [x[:, 0] > 0.5 for x in pack(blank, *given, **mark)[0]]
            return pack(features, *given, **options)

        core.pack_image_features = listened
        try:
            yield
        finally:
            del core.pack_image_features


def pictures(prompt: Prompt) -> tuple[Picture, ...]:
    """The pictures of a prompt, each with the token of every cell of its grid.

    ValueError if it is not known how a model cuts its pictures up.
    """
    laid, values = _laid(prompt), _values(prompt)
    return tuple(
        Picture(each.grid, each.tokens, _name(prompt, each, laid), _png(prompt, each, values))
        for each in laid
    )


def _laid(prompt: Prompt) -> list[Laid]:
    if not prompt.places:
        raise ValueError(say("there is no image among the tokens of this prompt"))
    for lay in (_by_sizes, _by_newlines, _by_breaks, _by_names, _by_counts):
        found = lay(prompt)
        if found and all(len(each.tokens) == math.prod(each.grid) for each in found):
            return found
    raise ValueError(
        say(
            "{name} reads its images as {count} tokens, and it is not known which parts of them "
            "they are; hw.watch has its figures",
            name=type(prompt.model).__name__,
            count=len(prompt.places),
        )
    )


def _by_sizes(prompt: Prompt) -> list[Laid]:
    """Pictures of many sizes, whose neighbouring patches are merged into one token (Qwen-VL)."""
    sizes = prompt.given.get("image_grid_thw")
    if sizes is None:
        return []
    places, found, start = prompt.places, [], 0
    sizes = sizes.tolist()
    merged = math.isqrt(sum(map(math.prod, sizes)) // len(places))
    for number, (_, high, wide) in enumerate(sizes):
        grid = high // merged, wide // merged
        stop = start + math.prod(grid)
        found.append(Laid(number, grid, tuple(places[start:stop])))
        start = stop
    return found if start == len(places) else []


def _by_newlines(prompt: Prompt) -> list[Laid]:
    """The whole picture, and its parts as one grid with newlines (LLaVA-Next, OneVision)."""
    places, found, start = prompt.places, [], 0
    if sum(map(len, prompt.packed)) != len(places):
        return []
    for number, newline in enumerate(prompt.packed):
        own = places[start : start + len(newline)]
        start += len(newline)
        ends = newline.nonzero()[:, 0].tolist()
        wide = ends[1] - ends[0] - 1 if len(ends) > 1 else 0
        first = ends[0] - wide  # of the parts; the whole comes before them
        side = math.isqrt(first if wide else len(own) - len(ends))
        if side * side != (first if wide else len(own) - len(ends)):
            return []
        found.append(Laid(number, (side, side), tuple(own[: side * side]), whole=wide > 0))
        if wide:
            tokens = (own[end - wide + at] for end in ends for at in range(wide))
            found.insert(-1, Laid(number, (len(ends), wide), tuple(tokens)))
    return found


def _by_breaks(prompt: Prompt) -> list[Laid]:
    """A separator after every row of a picture (Pixtral)."""
    between = getattr(prompt.processor, "image_break_token_id", None)
    if between is None:
        return []
    pictures: list[list[range]] = []
    for run in prompt.runs:
        if run.start and prompt.ids[run.start - 1] == between:
            pictures[-1].append(run)
        else:
            pictures.append([run])
    return [
        Laid(number, (len(rows), len(rows[0])), tuple(at for row in rows for at in row))
        for number, rows in enumerate(pictures)
    ]


def _by_names(prompt: Prompt) -> list[Laid]:
    """Tiles that a token before each of them puts in its place (Idefics3, SmolVLM, Llama 4)."""
    found: list[Laid] = []
    tiles: dict[tuple[int, int], tuple[int, range]] = {}
    source, row, column, before = 0, 1, 0, 0
    named = False
    for number, run in enumerate(prompt.runs):
        between = prompt.processor.tokenizer.decode(list(prompt.ids[before : run.start]))
        signs = list(TILE.finditer(between))
        before, named = run.stop, named or bool(signs)
        if signs and signs[-1][0] in ("<global-img>", "<|image|>"):
            if tiles:
                found.append(_tiled(source, tiles))
            found.append(_square(source, run, number, whole=bool(tiles)))
            tiles, source, row, column = {}, source + 1, 1, 0
            continue
        if signs and signs[-1][1]:
            row, column = int(signs[-1][1]), int(signs[-1][2])
        elif signs and signs[-1][3] == "y":
            row, column = row + 1, 1
        else:
            column += 1
        tiles[row, column] = number, run
    return found if named and not tiles else []


def _by_counts(prompt: Prompt) -> list[Laid]:
    """Pictures of so many square tiles each, the last the whole (InternVL), or of one each."""
    runs, sizes = prompt.runs, [image.size for image in prompt.opened]
    each = getattr(prompt.processor, "image_seq_length", None)
    if len(runs) != len(sizes):
        each = len(prompt.places) // len(sizes) if each is None else each
        runs = [run[at : at + each] for run in runs for at in range(0, len(run), each)]
        known = len(runs) == len(sizes)
        return [_square(at if known else 0, run, at) for at, run in enumerate(runs)]
    found: list[Laid] = []
    tile = 0
    for number, (run, size) in enumerate(zip(runs, sizes, strict=True)):
        side = math.isqrt(len(run) if each is None else each)
        count, rest = divmod(len(run), side * side)
        if rest:
            return []
        parts = [(tile + at, run[at * side * side : (at + 1) * side * side]) for at in range(count)]
        tile += count
        if count > 1:
            across = _across(count - 1, size[0] / size[1])
            cut = {divmod(at, across): part for at, part in enumerate(parts[:-1])}
            found.append(_tiled(number, cut))
        found.append(_square(number, parts[-1][1], parts[-1][0], whole=count > 1))
    return found


def _across(tiles: int, shape: float) -> int:
    """The number of tiles in a row whose grid is most like the picture, wide by high.

    >>> _across(6, 1.4), _across(6, 0.7), _across(7, 0.2)
    (3, 2, 1)
    """
    able = [wide for wide in range(1, tiles + 1) if tiles % wide == 0]
    return min(able, key=lambda wide: abs(shape - wide * wide / tiles))


def _square(source: int, run: range, tile: int, whole: bool = False) -> Laid:
    """A square of tokens."""
    side = math.isqrt(len(run))
    return Laid(source, (side, side), tuple(run), (tile,), whole=whole)


def _tiled(source: int, tiles: dict[tuple[int, int], tuple[int, range]]) -> Laid:
    """Square tiles as one grid."""
    (top, left), (bottom, right) = min(tiles), max(tiles)
    side = math.isqrt(len(tiles[top, left][1]))
    down, across = bottom - top + 1, right - left + 1
    tokens = (
        ()
        if len(tiles) < down * across
        else tuple(
            tiles[top + line // side, left + place // side][1][line % side * side + place % side]
            for line in range(down * side)
            for place in range(across * side)
        )
    )
    order = tuple(tiles[where][0] for where in sorted(tiles))
    return Laid(source, (down * side, across * side), tokens, order, across)


def _name(prompt: Prompt, laid: Laid, every: Sequence[Laid]) -> Sentence:
    """The number of the picture, and what of it is shown."""
    if len(prompt.opened) > 1:
        name = say("image {number}", number=laid.source + 1)
    else:
        name = say("the image")
    if laid.whole:
        return say("{name}, small and whole", name=name)
    if any(each.whole and each.source == laid.source for each in every):
        return say("{name}, in parts", name=name)
    return name


def _values(prompt: Prompt) -> Tensor:
    """The pixels of every tile (tiles, C, H, W) as the model sees them; none if it sees patches."""
    values: Tensor = prompt.given["pixel_values"]
    if values.ndim < 4 or values.shape[-3] > 4:
        return values.new_empty(0, 3, 1, 1)
    tiles: Tensor = values.reshape(-1, *values.shape[-3:]).float().cpu()
    return unscaled(prompt.processor.image_processor, tiles)


def _png(prompt: Prompt, laid: Laid, values: Tensor) -> bytes:
    """A picture as the model sees it; where that is cut and packed, as it was given."""
    if laid.tiles and max(laid.tiles) < len(values):
        rows = [values[list(part)] for part in _parts(laid.tiles, laid.across)]
        return images.png(torch.cat([torch.cat(list(row), 2) for row in rows], 1))
    if len(values) == len(prompt.opened) and not prompt.packed:
        own = values[laid.source]
        sizes = prompt.given.get("image_sizes")
        if sizes is not None:  # others in the batch may be larger
            own = own[:, : int(sizes[laid.source][0]), : int(sizes[laid.source][1])]
        return images.png(own)
    return images.png(images.tensor(prompt.opened[laid.source]))


def _parts(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (numbers[at : at + size] for at in range(0, len(numbers), size))
