"""Block shapes by what a kernel has to hold: a small table, measured, so that no call is tuned.

On Hopper the 16-bit choices of the forward and of the two kernels that differentiate are the best
of bench/results/gpu_shapes.json, an NVIDIA H200's; the others were tried beside each other there.
GPUs with less shared memory get tiles that fit it; `headwise doctor --tune` measures on the GPU at
hand and leaves what was fastest where `shape` finds it. Where a compiler takes more memory than the
table foresaw, `fit` finds a smaller tile, once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from triton.runtime.errors import OutOfResources

from headwise.core.problem import Terms
from headwise.engines import calls
from headwise.engines.triton.host.cards import Card
from headwise.engines.triton.host.launches import Launches
from headwise.engines.triton.kernels.interpreter import INTERPRETING
from headwise.engines.triton.kernels.tile import Given
from headwise.files import write_whole

_LIKE = {  # whose shape serves where there is none of its own
    "narrow": "forward",
    "capped": "forward",
    "capped queries": "queries",
    "capped keys": "keys",
    "biased": "forward",
    "biased queries": "queries",
    "biased keys": "keys",
    "full decode": "decode",
    "biased decode": "decode",
}
KERNELS = ("forward", "queries", "keys", "narrow", "capped", "capped queries", "capped keys")
"""The forward and the two kernels that differentiate; the forward for rows that see few keys; and
all three with a cap: what `tuning` measures.

Beside them there are all three "biased", where pairs have loads of their own (`loads_pairs`),
"decode", the same with all the rows that it takes, or biased, and "map".
"""


@dataclass(frozen=True)
class Shape:
    """A kernel's tile, rows by keys, its warps, and how many loads it keeps in flight.

    Decoding takes the rows that a call has, whatever it says here.
    """

    rows: int
    keys: int
    warps: int
    stages: int


_INTERPRETED = {  # small, so that small problems have edges and a middle
    "decode": Shape(16, 16, 4, 1),
    "map": Shape(32, 16, 4, 1),
}

_TABLE = {  # kernel, bytes of an element: shapes for padded widths up to 64, 128 and 256
    "hopper": {
        ("forward", 2): (
            Shape(64, 128, 4, 3),
            Shape(128, 128, 8, 3),
            Shape(128, 64, 8, 2),
        ),
        ("narrow", 2): (
            Shape(64, 128, 4, 3),
            Shape(64, 64, 4, 3),
            Shape(128, 64, 8, 2),
        ),
        ("capped", 2): (
            Shape(64, 64, 4, 2),
            Shape(128, 128, 8, 3),
            Shape(128, 64, 8, 2),
        ),
        ("biased", 2): (
            Shape(128, 64, 4, 3),
            Shape(128, 64, 8, 3),
            Shape(128, 32, 8, 2),
        ),
        ("queries", 2): (
            Shape(128, 64, 4, 3),
            Shape(128, 64, 8, 3),
            Shape(128, 32, 8, 2),
        ),
        ("capped queries", 2): (
            Shape(64, 64, 4, 3),
            Shape(128, 64, 8, 3),
            Shape(128, 32, 8, 2),
        ),
        ("biased queries", 2): (
            Shape(128, 64, 4, 3),
            Shape(128, 64, 8, 2),
            Shape(128, 32, 8, 2),
        ),
        ("keys", 2): (Shape(32, 128, 4, 3), Shape(64, 64, 4, 2), Shape(64, 64, 8, 2)),
        ("capped keys", 2): (
            Shape(64, 64, 4, 3),
            Shape(64, 64, 4, 2),
            Shape(64, 64, 8, 2),
        ),
        ("decode", 2): (
            Shape(16, 128, 4, 3),
            Shape(16, 128, 4, 3),
            Shape(16, 64, 4, 2),
        ),
        ("biased decode", 2): (
            Shape(16, 128, 4, 3),
            Shape(16, 128, 4, 2),
            Shape(16, 64, 4, 2),
        ),
        ("map", 2): (Shape(128, 64, 4, 2), Shape(128, 64, 4, 2), Shape(64, 64, 4, 2)),
        ("forward", 4): (
            Shape(128, 64, 8, 2),
            Shape(128, 64, 8, 2),
            Shape(64, 32, 8, 1),
        ),
        ("queries", 4): (Shape(64, 32, 4, 1), Shape(64, 32, 4, 1), Shape(64, 16, 4, 1)),
        ("keys", 4): (Shape(32, 64, 4, 1), Shape(32, 64, 4, 1), Shape(16, 64, 4, 1)),
        ("decode", 4): (Shape(16, 32, 4, 2), Shape(16, 32, 4, 2), Shape(16, 32, 4, 2)),
        ("full decode", 4): (
            Shape(16, 32, 4, 2),
            Shape(16, 32, 4, 2),
            Shape(16, 32, 4, 1),
        ),
        ("biased decode", 4): (
            Shape(16, 32, 4, 2),
            Shape(16, 32, 4, 2),
            Shape(16, 32, 4, 1),
        ),
        ("map", 4): (Shape(64, 32, 4, 2), Shape(64, 32, 4, 2), Shape(64, 32, 4, 2)),
    },
    "blackwell": {  # as much as Hopper, but operands and products lie elsewhere
        ("forward", 2): (
            Shape(64, 128, 4, 3),
            Shape(128, 64, 8, 3),
            Shape(128, 64, 8, 2),
        ),
        ("biased", 2): (
            Shape(64, 128, 4, 3),
            Shape(128, 64, 8, 2),
            Shape(128, 32, 8, 2),
        ),
        ("queries", 2): (
            Shape(64, 64, 4, 3),
            Shape(128, 64, 8, 2),
            Shape(128, 32, 8, 1),
        ),
        ("keys", 2): (Shape(32, 128, 4, 3), Shape(64, 64, 4, 2), Shape(64, 64, 8, 1)),
        ("decode", 2): (
            Shape(16, 128, 4, 3),
            Shape(16, 128, 4, 3),
            Shape(16, 64, 4, 2),
        ),
        ("biased decode", 2): (
            Shape(16, 128, 4, 3),
            Shape(16, 128, 4, 2),
            Shape(16, 64, 4, 2),
        ),
        ("map", 2): (Shape(128, 64, 4, 2), Shape(128, 64, 4, 2), Shape(64, 64, 4, 2)),
        ("forward", 4): (Shape(64, 32, 4, 2), Shape(64, 32, 4, 1), Shape(32, 16, 4, 1)),
        ("queries", 4): (Shape(32, 32, 4, 1), Shape(32, 32, 4, 1), Shape(16, 16, 4, 1)),
        ("keys", 4): (Shape(32, 32, 4, 1), Shape(32, 32, 4, 1), Shape(16, 16, 4, 1)),
        ("decode", 4): (Shape(16, 32, 4, 2), Shape(16, 32, 4, 2), Shape(16, 32, 4, 1)),
        ("map", 4): (Shape(64, 32, 4, 2), Shape(64, 32, 4, 2), Shape(64, 32, 4, 1)),
    },
    "ampere": {  # 164 KB a program
        ("forward", 2): (
            Shape(128, 64, 4, 3),
            Shape(128, 64, 8, 3),
            Shape(64, 32, 4, 2),
        ),
        ("biased", 2): (
            Shape(128, 64, 4, 2),
            Shape(128, 64, 8, 2),
            Shape(64, 32, 4, 2),
        ),
        ("queries", 2): (Shape(64, 64, 4, 2), Shape(64, 64, 4, 2), Shape(64, 32, 4, 1)),
        ("keys", 2): (Shape(32, 64, 4, 2), Shape(32, 64, 4, 2), Shape(32, 32, 4, 1)),
        ("decode", 2): (Shape(16, 128, 4, 3), Shape(16, 64, 4, 3), Shape(16, 64, 4, 2)),
        ("map", 2): (Shape(128, 64, 4, 2), Shape(128, 64, 4, 2), Shape(64, 64, 4, 2)),
        ("forward", 4): (Shape(64, 32, 4, 2), Shape(64, 32, 4, 1), Shape(32, 16, 4, 1)),
        ("queries", 4): (Shape(32, 32, 4, 1), Shape(32, 32, 4, 1), Shape(16, 16, 4, 1)),
        ("keys", 4): (Shape(32, 32, 4, 1), Shape(32, 32, 4, 1), Shape(16, 16, 4, 1)),
        ("decode", 4): (Shape(16, 32, 4, 2), Shape(16, 32, 4, 2), Shape(16, 32, 4, 1)),
        ("map", 4): (Shape(64, 32, 4, 2), Shape(64, 32, 4, 2), Shape(32, 32, 4, 1)),
    },
    "small": {  # 99 KB: the GPUs of desks and of inference
        ("forward", 2): (
            Shape(128, 64, 4, 2),
            Shape(64, 32, 4, 2),
            Shape(64, 16, 4, 1),
        ),
        ("queries", 2): (Shape(64, 32, 4, 2), Shape(64, 32, 4, 1), Shape(32, 16, 4, 1)),
        ("keys", 2): (Shape(32, 64, 4, 1), Shape(32, 32, 4, 1), Shape(16, 32, 4, 1)),
        ("decode", 2): (Shape(16, 128, 4, 3), Shape(16, 64, 4, 3), Shape(16, 64, 4, 2)),
        ("full decode", 2): (
            Shape(16, 128, 4, 3),
            Shape(16, 64, 4, 3),
            Shape(16, 32, 4, 2),
        ),
        ("biased decode", 2): (
            Shape(16, 64, 4, 3),
            Shape(16, 32, 4, 3),
            Shape(16, 32, 4, 2),
        ),
        ("map", 2): (Shape(128, 64, 4, 2), Shape(128, 64, 4, 2), Shape(64, 64, 4, 2)),
        ("forward", 4): (Shape(64, 32, 4, 1), Shape(32, 32, 4, 1), Shape(16, 16, 4, 1)),
        ("queries", 4): (Shape(32, 32, 4, 1), Shape(32, 16, 4, 1), Shape(16, 16, 4, 1)),
        ("keys", 4): (Shape(32, 32, 4, 1), Shape(16, 32, 4, 1), Shape(16, 16, 4, 1)),
        ("decode", 4): (Shape(16, 32, 4, 2), Shape(16, 32, 4, 2), Shape(16, 32, 4, 1)),
        ("full decode", 4): (
            Shape(16, 32, 4, 2),
            Shape(16, 16, 4, 2),
            Shape(16, 16, 4, 1),
        ),
        ("biased decode", 4): (
            Shape(16, 32, 4, 2),
            Shape(16, 16, 4, 2),
            Shape(16, 16, 4, 1),
        ),
        ("map", 4): (Shape(64, 32, 4, 1), Shape(64, 16, 4, 1), Shape(32, 16, 4, 1)),
    },
}


LEAST = 16  # rows or keys of a tile: the sides of a matrix product
TENSOR_MEMORY = (10, 11)  # generations that keep products in a memory of their own, and a small one
_CHOSEN: dict[tuple[str, int, int, Card], Shape] = {}


def shape(kernel: str, width: int, itemsize: int, card: Card) -> Shape:
    """A kernel's, for a padded head width and the bytes of an element."""
    what = kernel, width, itemsize, card
    if what not in _CHOSEN:
        found = _tuned().get(card.name, {}).get(_key(kernel, width, itemsize))
        _CHOSEN[what] = Shape(**found) if found else default(*what)
    return _CHOSEN[what]


def fit(
    kernel: str,
    width: int,
    itemsize: int,
    card: Card,
    launch: Callable[[Shape], None],
    launches: Launches | None = None,
) -> Shape:
    """Launch with a kernel's shape, or with a smaller one where the GPU has no room for it.

    Returns the shape that ran, which this process uses from now on. `launches` forgets what was
    launched with a shape that failed.
    """
    first = tried = shape(kernel, width, itemsize, card)
    mark = (0, 0) if launches is None else launches.mark()
    while True:
        try:
            launch(tried)
        except OutOfResources as error:
            less = smaller(tried)
            if less is None:
                raise RuntimeError(
                    f"{card.name} has no room for the {kernel} kernel of heads {width} wide, "
                    f"{itemsize} bytes a number: its smallest tile takes {error.required} of "
                    f'{error.limit}, {error.name}; engine="streaming" has no tiles'
                ) from error
            if launches is not None:
                launches.back_to(mark)
            tried = less
            continue
        if tried != first:
            use(kernel, width, itemsize, card, tried)
        return tried


def smaller(large: Shape) -> Shape | None:
    """The next shape that takes less memory: fewer loads in flight, then fewer keys, then rows."""
    if large.stages > 1:
        return replace(large, stages=large.stages - 1)
    if large.keys > LEAST:
        return replace(large, keys=large.keys // 2)
    return replace(large, rows=large.rows // 2) if large.rows > LEAST else None


def loads_pairs(terms: Terms | Given) -> bool:
    """Whether a kernel loads something for each pair, which takes room beside keys and values."""
    return not (terms.bias is None and terms.dense is None and terms.relative is None)


def use(kernel: str, width: int, itemsize: int, card: Card, chosen: Shape) -> None:
    """Have this process use a shape from now on."""
    _CHOSEN[kernel, width, itemsize, card] = chosen
    calls.forget()


def default(kernel: str, width: int, itemsize: int, card: Card) -> Shape:
    """The table's choice, whatever was tuned."""
    if INTERPRETING:
        return _INTERPRETED.get(_LIKE.get(kernel, kernel), Shape(32, 32, 4, 1))
    room = "hopper" if card.shared >= 220_000 else "ampere" if card.shared >= 160_000 else "small"
    room = "blackwell" if card.major in TENSOR_MEMORY else room
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
    calls.forget()
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
