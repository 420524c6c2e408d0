"""What the page shows of a recording: its passes, the tokens of their rows and keys, pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from headwise.apps.look.head_groups import Axes, groups, heads_of, mapped, of_other_sizes, side
from headwise.apps.look.readers import image_bytes as images
from headwise.apps.look.scene import Group, Head, Input, InputKind, Picture
from headwise.messages import Sentence, say
from headwise.watching import Recording, WatchedLayer

Pictures = tuple[Picture, ...]
Tokens = Sequence[str] | Callable[[list[int]], Sequence[str]]
"""The tokens as strings, or what makes them of their numbers, such as a tokenizer's method."""

MOST = 8
"""Requests that are shown, the last ones; each is read as a text is."""


@dataclass(frozen=True)
class Shown:
    """What is known of a recording beside what was recorded."""

    tokens: Sequence[str] | None = None
    pieces: Callable[[list[int]], Sequence[str]] | None = None  # makes them of their numbers
    source: Sequence[str] | None = None
    images: tuple[bytes, ...] = ()  # PNG files
    shapes: tuple[float, ...] = ()  # of each image, its width by its height
    grids: tuple[tuple[int, int], ...] = ()
    batch: int = 0

    @classmethod
    def of(
        cls,
        tokens: Tokens | None = None,
        source: Sequence[str] | None = None,
        image: Any = None,
        grid: Any = None,
        batch: int = 0,
    ) -> Shown:
        """What a user has given; ValueError for what is no image and no grid."""
        many = image if isinstance(image, list | tuple) else [] if image is None else [image]
        pixels = [_pixels(each) for each in many]
        grids = [] if grid is None else [grid] if isinstance(grid[0], int) else list(grid)
        if any(len(each) != 2 or min(each) < 1 for each in grids):
            raise ValueError(f"grid={grid!r}: give the patches down and across, such as (16, 16)")
        return cls(
            None if callable(tokens) else tokens,
            tokens if callable(tokens) else None,
            source,
            tuple(images.png(x) for x in pixels),
            tuple(x.shape[2] / x.shape[1] for x in pixels),
            tuple((int(down), int(across)) for down, across in grids),
            batch,
        )

    @property
    def pictured(self) -> bool:
        """True if the user said that there is a picture."""
        return bool(self.images or self.grids)

    def frames(self, count: int) -> int:
        """The frames of a video of `count` tokens, by the grid of one of them; a picture is one.

        >>> Shown(grids=((4, 4),)).frames(48), Shown(grids=((4, 4),)).frames(8), Shown().frames(9)
        (3, 1, 1)
        """
        found, rest = divmod(count, math.prod(self.grids[0])) if self.grids else (1, 0)
        return 1 if rest or not found else found

    def read(self, seen: Recording) -> Shown:
        """The same with the tokens that a recording's model read, if a function makes them."""
        if self.pieces is None:
            return self
        if seen.tokens is None:
            raise ValueError(
                f"tokens={self.pieces!r}: the numbers of the tokens are not known, because the "
                "model was not called with them while it was watched; give the tokens as strings"
            )
        return replace(self, tokens=list(self.pieces(seen.tokens[self.batch].tolist())))

    def grid(self, number: int, count: int) -> tuple[int, int]:
        """The grid of a picture's tokens: the one that is given, or the one most like the image.

        >>> Shown(grids=((8, 4),)).grid(0, 8), Shown(shapes=(1.5,)).grid(0, 6), Shown().grid(0, 9)
        ((4, 2), (2, 3), (3, 3))
        """
        known = self.grids[min(number, len(self.grids) - 1)] if self.grids else None
        shape = self.shapes[min(number, len(self.shapes) - 1)] if self.shapes else 1.0
        if known is not None:
            shape = known[1] / known[0]
            if math.prod(known) == count:
                return known
        able = [high for high in range(1, count + 1) if count % high == 0]
        high = min(able, key=lambda high: abs(math.log(count / high / high / shape)))
        if known is None and not self.shapes and high * high != count:
            raise ValueError(
                f"{count} tokens of the picture are not those of a square; say how many there are "
                "down and across, such as grid=(16, 24), or give the image"
            )
        return high, count // high


def inputs(seen: Recording, shown: Shown) -> list[Input]:
    """The passes of a recording, each as an input: kept steps, requests, or the last pass."""
    passes: list[tuple[Sentence, Recording]] = [
        (say("step {number}", number=number), each) for number, each in seen.kept_steps.items()
    ]
    notes: tuple[Sentence, ...] = ()
    if not passes:
        all = list(seen.requests.items())
        passes = [(Sentence(name), each) for name, each in all[-MOST:]]
        if len(all) > MOST:
            notes = (
                say(
                    "the last {count} of {all} requests; seen.requests has them all, each with "
                    "show()",
                    count=MOST, all=len(all),
                ),
            )  # fmt: skip
    if not passes:
        passes = [(Sentence("watched"), seen)]
    made = [_input(name, each, shown) for name, each in passes]
    return [replace(each, notes=(*each.notes, *notes)) for each in made]


def _input(name: str, seen: Recording, shown: Shown) -> Input:
    if not seen.layers:
        raise ValueError("nothing was recorded yet; run the model while it is watched")
    entries = max(len(layer.map().lse) for layer in mapped(seen))
    if not 0 <= shown.batch < entries:
        raise ValueError(f"batch={shown.batch}: the last pass had {entries}, from 0")
    shown = shown.read(seen)
    makes = _makes_pictures(seen, shown)
    made = _of_pictures(seen, shown) if makes else _of_text(seen, shown)
    alone = makes or [group.id for group in made] == ["self"]
    kind: InputKind = "text" if alone else "translation"
    return Input(name, kind, tuple(made), of_other_sizes(seen, made))


def _of_text(seen: Recording, shown: Shown) -> list[Group]:
    """The groups of a model that reads text, with the pictures among its tokens."""
    found = []
    for group in groups(seen, _axes(seen, shown), batch=shown.batch):
        part = seen.layer(group.heads[0].layer).parts.get("image") if group.square else None
        places = [] if part is None else part[shown.batch].nonzero()[:, 0].tolist()
        pictures = _in_prompt(places, shown)
        found.append(_named(group, pictures, "text") if pictures else group)
    if shown.pictured and not any(group.pictures for group in found):
        raise ValueError(
            "it is not known which tokens are those of the image: the model was not called with "
            "tokens while it was watched, or it reads no images"
        )
    return found


def _axes(seen: Recording, shown: Shown) -> dict[str, Axes]:
    """The tokens of each group's rows and columns: as many as are given, or as the last layer has.

    Layers of another number, such as those of a vision tower, are in no group.
    """
    both = any(layer.kind == "cross" for layer in seen.layers)
    ids = ("encoder", "decoder", "cross") if both else ("self",)
    found: dict[str, list[WatchedLayer]] = {id: [] for id in ids}
    for layer in mapped(seen):
        found[side(layer, found)].append(layer)
    return {id: _words(id, layers, shown) for id, layers in found.items() if layers}


def _words(id: str, layers: Sequence[WatchedLayer], shown: Shown) -> Axes:
    """The tokens that were given for the rows and the columns of some layers, or their numbers."""
    ours = shown.source if id == "encoder" else shown.tokens
    theirs = shown.source if id in ("encoder", "cross") else shown.tokens
    for layer in reversed(layers):
        pairs = list(zip((ours, theirs), layer.map().shape[2:], strict=True))
        if all(given is None or len(given) == count for given, count in pairs):
            rows, keys = (_numbered(n) if given is None else tuple(given) for given, n in pairs)
            return rows, keys
    given, count = next((x, n) for x, n in pairs if x is not None and len(x) != n)
    hint = "; of a model that makes a picture, give image= or grid=, too" if id == "encoder" else ""
    raise ValueError(
        f"{len(given)} tokens were given for {layers[0].name}, which read {count}; give as many "
        f"tokens as the model read{hint}"
    )


def _in_prompt(places: Sequence[int], shown: Shown) -> Pictures:
    """The pictures of the image tokens in a prompt, by their places."""
    breaks = [at + 1 for at, (one, next) in enumerate(pairwise(places)) if next > one + 1]
    ends = [0, *breaks, len(places)] if places else []
    runs = [places[start:stop] for start, stop in pairwise(ends)]
    gaps = {later[0] - sooner[-1] for sooner, later in pairwise(runs)}
    rows = len(shown.images) < 2 and gaps == {2} and len(set(map(len, runs))) == 1
    if rows:  # a separator after every row of a picture
        return (Picture((len(runs), len(runs[0])), tuple(places), png=_first(shown.images)),)
    if not shown.pictured and any(math.isqrt(len(run)) ** 2 != len(run) for run in runs):
        return ()
    alone = len(runs) == len(shown.images)
    return tuple(
        Picture(
            shown.grid(number, len(run)),
            tuple(run),
            say("image {number}", number=number + 1) if len(runs) > 1 else say("the image"),
            shown.images[number] if alone else None,
        )
        for number, run in enumerate(runs)
    )


def _makes_pictures(seen: Recording, shown: Shown) -> bool:
    """True of a denoiser, which makes a picture by a text: it is given both, and no tokens."""
    joint = any({"text", "image"} <= layer.parts.keys() for layer in seen.layers)
    across = shown.pictured and any(layer.kind == "cross" for layer in seen.layers)
    return seen.tokens is None and (joint or across)


def _of_pictures(seen: Recording, shown: Shown) -> list[Group]:
    """The groups of a denoiser: a picture that looks at itself and at the text, at every size."""
    figures = {(row["layer"], row["head"]): row for row in seen.heads()}
    joint = [layer for layer in mapped(seen) if layer.kind == "self"]
    texts = {len(text) for layer in joint if (text := _text_of(layer, shown.batch))}
    found: dict[_Sizes, list[Head]] = {}
    for layer in mapped(seen):
        sizes = _Sizes.of(layer, shown.batch, texts)
        found.setdefault(sizes, []).extend(heads_of(layer, figures, None, shown.batch))
    order = sorted(found, key=lambda sizes: (ORDER.index(sizes.kind), sizes.rows))
    kinds = [sizes.kind for sizes in order]
    frames = shown.frames(max(len(sizes.cells) for sizes in order))
    return [
        sizes.group(tuple(found[sizes]), shown, frames, alone=kinds.count(sizes.kind) == 1)
        for sizes in order
    ]


ORDER = ("text", "image", "joint", "cross")
"""The kinds of groups of a denoiser; the last is shown first."""


class _Sizes(NamedTuple):
    """What layers have in common whose maps are of the same tokens."""

    kind: str
    rows: int
    keys: int
    text: tuple[int, ...] = ()  # the places of the text among the keys

    @classmethod
    def of(cls, layer: WatchedLayer, batch: int, texts: set[int]) -> _Sizes:
        """Those of a layer; `texts` are the numbers of tokens that texts have here."""
        _, _, rows, keys = layer.map().shape
        text = _text_of(layer, batch)
        if layer.kind == "cross":
            return cls("cross", rows, keys, text)
        if text:
            return cls("joint", rows, keys, text)
        return cls("text" if rows in texts else "image", rows, keys)

    @property
    def cells(self) -> tuple[int, ...]:
        """The rows of the picture, or of all frames of a video."""
        if self.kind == "text":
            return ()
        text = set(self.text if self.kind == "joint" else ())
        return tuple(at for at in range(self.rows) if at not in text)

    def group(self, heads: tuple[Head, ...], shown: Shown, frames: int, alone: bool) -> Group:
        """The group of these heads; `alone` if there is no other of its kind."""
        pictures = self._pictures(shown, frames)
        rows, columns = list(_numbered(self.rows)), list(_numbered(self.keys))
        words = self.text or (tuple(range(self.keys)) if self.kind == "text" else ())
        given = shown.source or shown.tokens
        if words and given is not None:
            if len(given) != len(words):
                raise ValueError(
                    f"{len(given)} tokens were given for a text of {len(words)}; give as many "
                    "tokens as the model read, those of padding included"
                )
            for place, word in zip(words, given, strict=True):
                columns[place] = word
        id, name = self.kind, NAMED[self.kind]()
        if not alone and pictures:
            down, across = pictures[0].grid
            id = f"{id}_{self.rows}x{self.keys}"
            name = say("{name}, {down} × {across} patches", name=name, down=down, across=across)
        square = self.kind != "cross"
        ours = columns if square else rows
        made = Group(id, name, False, tuple(ours), tuple(columns), heads)
        if self.kind == "image" and len(pictures) == 1:
            made = made.in_patches(pictures[0])
        return _named(made, pictures, "image" if self.text else None)

    def _pictures(self, shown: Shown, frames: int) -> Pictures:
        """The picture, or the frames of a video, each of the grid that is given or a part of it."""
        if not self.cells:
            return ()
        size, rest = divmod(len(self.cells), frames)
        if rest:
            frames, size = 1, len(self.cells)
        return tuple(
            Picture(
                shown.grid(0, size),
                self.cells[number * size : (number + 1) * size],
                say("frame {number}", number=number + 1) if frames > 1 else "",
                shown.images[number] if len(shown.images) == frames else _first(shown.images),
                "rows" if self.kind == "cross" else "both",
            )
            for number in range(frames)
        )


NAMED = {
    "text": lambda: say("the text to itself"),
    "image": lambda: say("the picture to itself"),
    "joint": lambda: say("text and picture together"),
    "cross": lambda: say("the picture to the text"),
}
"""The kinds of groups of a denoiser, in words."""


def _text_of(layer: WatchedLayer, batch: int) -> tuple[int, ...]:
    """The places of the text among a layer's keys."""
    if layer.kind == "cross":
        return tuple(range(layer.map().shape[3]))
    part = layer.parts.get("text")
    return () if part is None else tuple(part[batch].nonzero()[:, 0].tolist())


def _named(group: Group, pictures: Pictures, looks: Literal["text", "image"] | None) -> Group:
    """The group with pictures, the tokens of their cells named by row and column."""
    rows, columns = list(group.rows), list(group.columns)
    for picture in pictures:
        for place, name in zip(picture.cells, images.patch_names(0, *picture.grid), strict=True):
            if picture.axis != "columns":
                rows[place] = f" {name}"
            if picture.axis != "rows":
                columns[place] = f" {name}"
    return replace(group, rows=tuple(rows), columns=tuple(columns), pictures=pictures, looks=looks)


def _numbered(count: int) -> tuple[str, ...]:
    """Names for tokens that are not known, apart from each other where they are lines of text."""
    return tuple(f" {number}" for number in range(count))


def _first(many: Sequence[bytes]) -> bytes | None:
    return many[0] if many else None


def _pixels(image: Any) -> Tensor:
    """The pixels (C, H, W) of a file, a Pillow image or a tensor; ValueError for anything else."""
    if isinstance(image, Tensor) and image.ndim == 3 and image.shape[0] in (1, 3):
        return image.detach().float().cpu().clamp(0, 1)
    if isinstance(image, str | Path):
        image = Path(image).read_bytes()
    if isinstance(image, bytes):
        return images.tensor(images.opened(image))
    if hasattr(image, "convert"):
        return images.tensor(image.convert("RGB"))
    shape = f" of shape {tuple(image.shape)}" if hasattr(image, "shape") else ""
    raise ValueError(
        f"image={type(image).__name__}{shape}: give a file, a Pillow image, or a tensor (C, H, W) "
        "of numbers from 0 to 1"
    )
