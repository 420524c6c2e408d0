"""Tile shapes of the kernels, from a small measured table, so that no call has to be tuned.

On Hopper the 16-bit shapes of the forward and the two backward kernels are the fastest of
bench/results/gpu_shapes.json, measured on an NVIDIA H200; the others were compared there too. GPUs
with less shared memory get tiles that fit it. `headwise doctor --tune` measures on the GPU at hand
and stores the fastest shapes, which `shape` then returns. If a compiled kernel needs more memory
than expected, `fit` finds a smaller tile, once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from triton.runtime.errors import OutOfResources

from headwise.core.problem import Terms
from headwise.engines import calls
from headwise.engines.failures import KernelError
from headwise.engines.triton.host.cards import Card
from headwise.engines.triton.host.launches import Launches
from headwise.engines.triton.kernels.interpreter import INTERPRETING
from headwise.engines.triton.kernels.tile import Given
from headwise.files import cache_folder, write_whole

_LIKE = {  # the kernel whose shape serves if the table has none
    "narrow": "forward",
    "capped": "forward",
    "capped queries": "queries",
    "capped keys": "keys",
    "biased": "forward",
    "biased queries": "queries",
    "biased keys": "keys",
    "full decode": "decode",
    "biased decode": "decode",
    "effects": "map",
    "peaks": "map",
    "index": "map",
    "pages": "map",
}
KERNELS = ("forward", "queries", "keys", "narrow", "capped", "capped queries", "capped keys")
"""The kernels that `tuning` measures: the forward, the two backward kernels, the forward for rows
that see few keys, and the first three with a cap.

The others are "map", "effects" (a map's, with gradients and values), "peaks" (its totals), "index"
(an indexer's loss), "decode", alone, "full" (with all the rows that it takes) or "biased", and the
first three "biased". A biased kernel loads data for each pair (`loads_pairs`).
"""


@dataclass(frozen=True)
class Shape:
    """A kernel's tile, rows by keys, its warps, and its pipeline stages.

    Decoding ignores `rows` and takes those of the call.
    """

    rows: int
    keys: int
    warps: int
    stages: int


_INTERPRETED = {  # small, so that small problems have masked and unmasked tiles
    "decode": Shape(16, 16, 4, 1),
    "map": Shape(32, 16, 4, 1),
}

_TABLE = {  # kernel, bytes per element: shapes for padded widths up to 64, 128 and 256
    "hopper": {
        ("forward", 2): (Shape(64, 128, 4, 3), Shape(128, 128, 8, 3), Shape(128, 64, 8, 2)),
        ("narrow", 2): (Shape(64, 128, 4, 3), Shape(64, 64, 4, 3), Shape(128, 64, 8, 2)),
        ("capped", 2): (Shape(64, 64, 4, 2), Shape(128, 128, 8, 3), Shape(128, 64, 8, 2)),
        ("biased", 2): (Shape(128, 64, 4, 3), Shape(128, 64, 8, 3), Shape(128, 32, 8, 2)),
        ("queries", 2): (Shape(128, 64, 4, 3), Shape(128, 64, 8, 3), Shape(128, 32, 8, 2)),
        ("capped queries", 2): (Shape(64, 64, 4, 3), Shape(128, 64, 8, 3), Shape(128, 32, 8, 2)),
        ("biased queries", 2): (Shape(128, 64, 4, 3), Shape(128, 64, 8, 2), Shape(128, 32, 8, 2)),
        ("keys", 2): (Shape(32, 128, 4, 3), Shape(64, 64, 4, 2), Shape(64, 64, 8, 2)),
        ("capped keys", 2): (Shape(64, 64, 4, 3), Shape(64, 64, 4, 2), Shape(64, 64, 8, 2)),
        ("decode", 2): (Shape(16, 128, 4, 3), Shape(16, 128, 4, 3), Shape(16, 64, 4, 2)),
        ("biased decode", 2): (Shape(16, 128, 4, 3), Shape(16, 128, 4, 2), Shape(16, 64, 4, 2)),
        ("map", 2): (Shape(128, 64, 4, 2), Shape(128, 64, 4, 2), Shape(64, 64, 4, 2)),
        ("effects", 2): (Shape(128, 64, 8, 2), Shape(128, 64, 8, 2), Shape(64, 64, 8, 2)),
        ("peaks", 2): (Shape(128, 64, 8, 2), Shape(128, 64, 8, 2), Shape(64, 64, 8, 2)),
        ("index", 2): (Shape(128, 64, 8, 2), Shape(128, 64, 8, 2), Shape(64, 64, 8, 2)),
        ("forward", 4): (Shape(128, 64, 8, 2), Shape(128, 64, 8, 2), Shape(64, 32, 8, 1)),
        ("queries", 4): (Shape(64, 32, 4, 1), Shape(64, 32, 4, 1), Shape(64, 16, 4, 1)),
        ("keys", 4): (Shape(32, 64, 4, 1), Shape(32, 64, 4, 1), Shape(16, 64, 4, 1)),
        ("decode", 4): (Shape(16, 32, 4, 2), Shape(16, 32, 4, 2), Shape(16, 32, 4, 2)),
        ("full decode", 4): (Shape(16, 32, 4, 2), Shape(16, 32, 4, 2), Shape(16, 32, 4, 1)),
        ("biased decode", 4): (Shape(16, 32, 4, 2), Shape(16, 32, 4, 2), Shape(16, 32, 4, 1)),
        ("map", 4): (Shape(64, 32, 4, 2), Shape(64, 32, 4, 2), Shape(64, 32, 4, 2)),
        ("pages", 4): (Shape(64, 32, 4, 2), Shape(64, 32, 4, 2), Shape(64, 16, 4, 2)),
    },
    "blackwell": {  # as much as Hopper, but products lie in tensor memory
        ("forward", 2): (Shape(64, 128, 4, 3), Shape(128, 64, 8, 3), Shape(128, 64, 8, 2)),
        ("biased", 2): (Shape(64, 128, 4, 3), Shape(128, 64, 8, 2), Shape(128, 32, 8, 2)),
        ("queries", 2): (Shape(64, 64, 4, 3), Shape(128, 64, 8, 2), Shape(128, 32, 8, 1)),
        ("keys", 2): (Shape(32, 128, 4, 3), Shape(64, 64, 4, 2), Shape(64, 64, 8, 1)),
        ("decode", 2): (Shape(16, 128, 4, 3), Shape(16, 128, 4, 3), Shape(16, 64, 4, 2)),
        ("biased decode", 2): (Shape(16, 128, 4, 3), Shape(16, 128, 4, 2), Shape(16, 64, 4, 2)),
        ("map", 2): (Shape(128, 64, 4, 2), Shape(128, 64, 4, 2), Shape(64, 64, 4, 2)),
        ("forward", 4): (Shape(64, 32, 4, 2), Shape(64, 32, 4, 1), Shape(32, 16, 4, 1)),
        ("queries", 4): (Shape(32, 32, 4, 1), Shape(32, 32, 4, 1), Shape(16, 16, 4, 1)),
        ("keys", 4): (Shape(32, 32, 4, 1), Shape(32, 32, 4, 1), Shape(16, 16, 4, 1)),
        ("decode", 4): (Shape(16, 32, 4, 2), Shape(16, 32, 4, 2), Shape(16, 32, 4, 1)),
        ("map", 4): (Shape(64, 32, 4, 2), Shape(64, 32, 4, 2), Shape(64, 32, 4, 1)),
    },
    "ampere": {  # 164 KB per program
        ("forward", 2): (Shape(128, 64, 4, 3), Shape(128, 64, 8, 3), Shape(64, 32, 4, 2)),
        ("biased", 2): (Shape(128, 64, 4, 2), Shape(128, 64, 8, 2), Shape(64, 32, 4, 2)),
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
    "small": {  # 99 KB: desktop and inference GPUs
        ("forward", 2): (Shape(128, 64, 4, 2), Shape(64, 32, 4, 2), Shape(64, 16, 4, 1)),
        ("queries", 2): (Shape(64, 32, 4, 2), Shape(64, 32, 4, 1), Shape(32, 16, 4, 1)),
        ("keys", 2): (Shape(32, 64, 4, 1), Shape(32, 32, 4, 1), Shape(16, 32, 4, 1)),
        ("decode", 2): (Shape(16, 128, 4, 3), Shape(16, 64, 4, 3), Shape(16, 64, 4, 2)),
        ("full decode", 2): (Shape(16, 128, 4, 3), Shape(16, 64, 4, 3), Shape(16, 32, 4, 2)),
        ("biased decode", 2): (Shape(16, 64, 4, 3), Shape(16, 32, 4, 3), Shape(16, 32, 4, 2)),
        ("map", 2): (Shape(128, 64, 4, 2), Shape(128, 64, 4, 2), Shape(64, 64, 4, 2)),
        ("pages", 2): (Shape(64, 64, 4, 2), Shape(64, 64, 4, 2), Shape(64, 32, 4, 2)),
        ("forward", 4): (Shape(64, 32, 4, 1), Shape(32, 32, 4, 1), Shape(16, 16, 4, 1)),
        ("queries", 4): (Shape(32, 32, 4, 1), Shape(32, 16, 4, 1), Shape(16, 16, 4, 1)),
        ("keys", 4): (Shape(32, 32, 4, 1), Shape(16, 32, 4, 1), Shape(16, 16, 4, 1)),
        ("decode", 4): (Shape(16, 32, 4, 2), Shape(16, 32, 4, 2), Shape(16, 32, 4, 1)),
        ("full decode", 4): (Shape(16, 32, 4, 2), Shape(16, 16, 4, 2), Shape(16, 16, 4, 1)),
        ("biased decode", 4): (Shape(16, 32, 4, 2), Shape(16, 16, 4, 2), Shape(16, 16, 4, 1)),
        ("map", 4): (Shape(64, 32, 4, 1), Shape(64, 16, 4, 1), Shape(32, 16, 4, 1)),
    },
}


LEAST = 16  # rows or keys of a tile: the smallest side of a matrix product
TENSOR_MEMORY = (10, 11)  # GPU generations whose products lie in tensor memory, which is small
_CHOSEN: dict[tuple[str, int, int, Card], Shape] = {}


def shape(kernel: str, width: int, itemsize: int, card: Card) -> Shape:
    """Return a kernel's shape for a padded head width and the bytes per element."""
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
    """Launch with a kernel's shape, or with a smaller one if the GPU has no room for it.

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
                raise KernelError(
                    f"{card.name} has no room for the {kernel} kernel at head width {width} with "
                    f"{itemsize} bytes per number: its smallest tile needs {error.required} of "
                    f'{error.limit}, {error.name}; use engine="streaming"'
                ) from error
            if launches is not None:
                launches.back_to(mark)
            tried = less
            continue
        if tried != first:
            use(kernel, width, itemsize, card, tried)
        return tried


def smaller(large: Shape) -> Shape | None:
    """Return the next smaller shape: fewer stages, then fewer keys, then fewer rows, then None."""
    if large.stages > 1:
        return replace(large, stages=large.stages - 1)
    if large.keys > LEAST:
        return replace(large, keys=large.keys // 2)
    return replace(large, rows=large.rows // 2) if large.rows > LEAST else None


def loads_pairs(terms: Terms | Given) -> bool:
    """Return whether a kernel loads data for each pair, which takes shared memory too."""
    pairs = terms.bias, terms.dense, terms.relative, getattr(terms, "words", None)
    return any(x is not None for x in pairs)


def use(kernel: str, width: int, itemsize: int, card: Card, chosen: Shape) -> None:
    """Have this process use a shape from now on."""
    _CHOSEN[kernel, width, itemsize, card] = chosen
    calls.forget()


def default(kernel: str, width: int, itemsize: int, card: Card) -> Shape:
    """Return the shape of the table, whatever was tuned."""
    if INTERPRETING:
        return _INTERPRETED.get(_LIKE.get(kernel, kernel), Shape(32, 32, 4, 1))
    room = "hopper" if card.shared >= 220_000 else "ampere" if card.shared >= 160_000 else "small"
    room = "blackwell" if card.major in TENSOR_MEMORY else room
    table = _TABLE[room]
    kernel = kernel if (kernel, itemsize) in table else _LIKE[kernel]
    return table[kernel, itemsize][0 if width <= 64 else 1 if width <= 128 else 2]


def tuned_file() -> Path:
    """Return the file of tuned shapes, in the user's cache folder."""
    return cache_folder() / "shapes.json"


def remember(card: Card, found: dict[tuple[str, int, int], Shape]) -> Path:
    """Store a GPU's fastest shapes by kernel, width and bytes per element, beside other GPUs'."""
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
    """Return the tuned shapes of each GPU; none if the file is missing or can't be read."""
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
