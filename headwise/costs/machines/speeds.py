"""The time that one unit of each kind of work takes, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

Tile = tuple[int, int]


@dataclass(frozen=True)
class AttentionSpeed:
    """Fused attention with heads of one width, in seconds.

    A forward with many queries takes `pair` for each pair in the tiles that it visits and `row` for
    each query; one with few queries takes `decode_pair` for each pair and `decode_byte` for each
    byte of keys and values. A backward takes `backward_pair`.
    """

    width: int
    pair: float
    row: float
    decode_pair: float
    decode_byte: float
    backward_pair: float


@dataclass(frozen=True)
class Speeds:
    """The speeds of a device for one dtype, in seconds per unit; `attention` by rising width.

    `overlap` says that a matrix product computes while it reads, as on a GPU: the slower of the two
    decides. On a CPU the same core does both, and the two add up.
    """

    flop: float  # of a matrix product
    flop_byte: float  # read or written by a matrix product
    byte: float  # read or written by anything else
    special: float  # exponential, tanh, erf or sigmoid
    launch: float  # of a kernel
    attention: tuple[AttentionSpeed, ...]
    overlap: bool
    tile: Tile  # queries and keys that a kernel computes together

    def of_width(self, width: float) -> AttentionSpeed:
        """The speed of heads of this width, between the nearest widths that are known.

        Narrower heads than all of them take as long as the narrowest, wider ones longer in
        proportion.
        """
        known = self.attention
        if width <= known[0].width:
            return known[0]
        if width >= known[-1].width:
            return _between(known[-1], _scaled(known[-1], 2.0), width)
        above = next(i for i, each in enumerate(known) if each.width >= width)
        return _between(known[above - 1], known[above], width)


def speeds_from(content: dict[str, Any]) -> Speeds:
    """Speeds out of the dictionary that `dataclasses.asdict` makes of them."""
    attention = tuple(AttentionSpeed(**each) for each in content["attention"])
    first, second = content["tile"]
    return Speeds(**{**content, "attention": attention, "tile": (first, second)})


def _between(low: AttentionSpeed, high: AttentionSpeed, width: float) -> AttentionSpeed:
    share = (width - low.width) / (high.width - low.width)
    found = {
        each.name: (1 - share) * getattr(low, each.name) + share * getattr(high, each.name)
        for each in fields(AttentionSpeed)
    }
    return AttentionSpeed(**{**found, "width": round(width)})


def _scaled(speed: AttentionSpeed, by: float) -> AttentionSpeed:
    found = {each.name: by * getattr(speed, each.name) for each in fields(AttentionSpeed)}
    # Per byte, a wider head is no slower.
    return AttentionSpeed(
        **{**found, "width": round(by * speed.width), "decode_byte": speed.decode_byte}
    )
