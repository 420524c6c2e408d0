"""Block shapes by what a kernel has to hold: a small table, measured, so that no call is tuned.

The bfloat16 choices of Hopper are the best of bench/results/gpu_shapes.json, an NVIDIA H200's. GPUs
with less shared memory get tiles that fit it; `headwise doctor --tune` measures on the GPU at hand
and leaves what was fastest where `shape` finds it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from headwise.engines import again
from headwise.engines.triton.cards import Card
from headwise.files import write_whole

_LIKE = {  # whose shape serves where there is none of its own
    "narrow": "forward",
    "capped": "forward",
    "capped queries": "queries",
    "capped keys": "keys",
}
KERNELS = ("forward", "queries", "keys", *_LIKE)
"""The forward and the two kernels that differentiate; the forward for rows that see few keys; and
all three with a cap."""


@dataclass(frozen=True)
class Shape:
    """A kernel's tile, rows by keys, its warps, and how many loads it keeps in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


INTERPRETED = Shape(32, 32, 4, 1)  # small, so that small problems have edges and a middle

_TABLE = {  # kernel, bytes of an element: shapes for padded widths up to 64, 128 and 256
    "hopper": {
        ("forward", 2): (Shape(64, 128, 4, 3), Shape(128, 128, 8, 3), Shape(128, 64, 8, 2)),
        ("narrow", 2): (Shape(64, 128, 4, 3), Shape(64, 64, 4, 3), Shape(128, 64, 8, 2)),
        ("capped", 2): (Shape(64, 64, 4, 2), Shape(128, 128, 8, 3), Shape(128, 64, 8, 2)),
        ("queries", 2): (Shape(128, 64, 4, 3), Shape(128, 64, 8, 3), Shape(128, 32, 8, 2)),
        ("capped queries", 2): (Shape(64, 64, 4, 3), Shape(128, 64, 8, 3), Shape(128, 32, 8, 2)),
        ("keys", 2): (Shape(32, 128, 4, 3), Shape(64, 64, 4, 2), Shape(64, 64, 8, 2)),
        ("capped keys", 2): (Shape(64, 64, 4, 3), Shape(64, 64, 4, 2), Shape(64, 64, 8, 2)),
        ("forward", 4): (Shape(128, 64, 8, 2), Shape(128, 64, 8, 2), Shape(64, 32, 8, 1)),
        ("queries", 4): (Shape(64, 32, 4, 1), Shape(64, 32, 4, 1), Shape(64, 16, 4, 1)),
        ("keys", 4): (Shape(32, 64, 4, 1), Shape(32, 64, 4, 1), Shape(16, 64, 8, 1)),
    },
    "ampere": {  # 164 KB a program
        ("forward", 2): (Shape(128, 64, 4, 3), Shape(128, 64, 8, 3), Shape(64, 32, 4, 2)),
        ("queries", 2): (Shape(64, 64, 4, 2), Shape(64, 64, 4, 2), Shape(64, 32, 4, 1)),
        ("keys", 2): (Shape(32, 64, 4, 2), Shape(32, 64, 4, 2), Shape(32, 32, 4, 1)),
        ("forward", 4): (Shape(64, 32, 4, 2), Shape(64, 32, 4, 1), Shape(32, 16, 4, 1)),
        ("queries", 4): (Shape(32, 32, 4, 1), Shape(32, 32, 4, 1), Shape(16, 16, 4, 1)),
        ("keys", 4): (Shape(32, 32, 4, 1), Shape(32, 32, 4, 1), Shape(16, 16, 4, 1)),
    },
    "small": {  # 99 KB: the GPUs of desks and of inference
        ("forward", 2): (Shape(128, 64, 4, 2), Shape(64, 32, 4, 2), Shape(64, 16, 4, 1)),
        ("queries", 2): (Shape(64, 32, 4, 2), Shape(64, 32, 4, 1), Shape(32, 16, 4, 1)),
        ("keys", 2): (Shape(32, 64, 4, 1), Shape(32, 32, 4, 1), Shape(16, 32, 4, 1)),
        ("forward", 4): (Shape(64, 32, 4, 1), Shape(32, 32, 4, 1), Shape(16, 16, 4, 1)),
        ("queries", 4): (Shape(32, 32, 4, 1), Shape(32, 16, 4, 1), Shape(16, 16, 4, 1)),
        ("keys", 4): (Shape(32, 32, 4, 1), Shape(16, 32, 4, 1), Shape(16, 16, 4, 1)),
    },
}


_CHOSEN: dict[tuple[str, int, int, Card], Shape] = {}


def shape(kernel: str, width: int, itemsize: int, card: Card) -> Shape:
    """Of one of the KERNELS, for a padded head width and the bytes of an element."""
    what = kernel, width, itemsize, card
    if what not in _CHOSEN:
        found = _tuned().get(card.name, {}).get(_key(kernel, width, itemsize))
        _CHOSEN[what] = Shape(**found) if found else default(*what)
    return _CHOSEN[what]


def use(kernel: str, width: int, itemsize: int, card: Card, chosen: Shape) -> None:
    """Have this process use a shape from now on."""
    _CHOSEN[kernel, width, itemsize, card] = chosen
    again.forget()


def default(kernel: str, width: int, itemsize: int, card: Card) -> Shape:
    """The table's choice, whatever was tuned."""
    room = "hopper" if card.shared >= 220_000 else "ampere" if card.shared >= 160_000 else "small"
    table = _TABLE[room]
    kernel = kernel if (kernel, itemsize) in table else _LIKE[kernel]
    return table[kernel, itemsize][0 if width <= 64 else 1 if width <= 128 else 2]


def tuned_file() -> Path:
    """Where tuned shapes lie: in the user's cache folder."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "headwise" / "shapes.json"


def remember(card: Card, found: dict[tuple[str, int, int], Shape]) -> Path:
    """Store a GPU's fastest shapes by kernel, width and bytes of an element, beside other GPUs'."""
    file = tuned_file()
    known = _tuned()
    known.setdefault(card.name, {}).update(
        {_key(*what): asdict(best) for what, best in found.items()}
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(known, indent=1) + "\n")
    _CHOSEN.clear()
    again.forget()
    return file


def _tuned() -> dict[str, dict[str, dict[str, int]]]:
    """What the file says of each GPU; nothing where it says nothing that can be understood."""
    try:
        known = json.loads(tuned_file().read_text())
        for each in (kernel for card in known.values() for kernel in card.values()):
            Shape(**each)
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    found: dict[str, dict[str, dict[str, int]]] = known
    return found


def _key(kernel: str, width: int, itemsize: int) -> str:
    return f"{kernel} {width} {itemsize}"
