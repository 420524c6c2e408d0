"""Check that calls fit the memory of GPUs that are not here: `python -m tests.engines.fits`.

`python -m tests.engines.fits 86 "decode 128 bfloat16"` compiles the kernels of that call for that
generation, and prints the launches that do not fit at first: a launch would then try smaller tiles.
Without calls it checks all of them, which takes minutes; without a generation, all generations.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable

from headwise.engines import failures
from headwise.engines.triton.host import tile_shapes as shapes
from tests.engines.compiled_triton import stand_in
from tests.engines.kernel_calls import every, make

SHARED = {80: 166912, 86: 101376, 90: 232448, 100: 232448, 120: 101376}  # bytes per program


def refused(call: Callable[[], object]) -> list[str]:
    """Return the launches of a call that found no room."""
    found: list[str] = []
    smaller = shapes.smaller

    def heard(large: shapes.Shape) -> shapes.Shape | None:
        error = sys.exception()
        found.append(f"{large}: {error}")
        return smaller(large)

    shapes.smaller, shapes._CHOSEN = heard, {}
    try:
        call()
    except RuntimeError as error:
        found.append(str(error))
    finally:
        shapes.smaller = smaller
    return found


def check(call: str) -> list[str]:
    """Return the launches of a call that do not fit at first, or do not compile at all."""
    failures.forget()  # of the call before
    found = refused(lambda: make(call))
    return [*found, *failures.failed().values()]


def main(generation: int, calls: list[str]) -> None:
    stand_in(generation, SHARED[generation])
    for call in calls:
        print(json.dumps([generation, call, check(call)]), flush=True)


def asked() -> argparse.Namespace:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("generation", type=int, nargs="?", choices=SHARED)
    parser.add_argument("call", nargs="*", choices=[[], *every()], metavar="call")
    return parser.parse_args()


if __name__ == "__main__":
    given = asked()
    if given.generation is not None:
        main(given.generation, given.call or every())
    else:
        for each in SHARED:
            subprocess.run([sys.executable, "-m", "tests.engines.fits", str(each)], check=True)
