"""The GPU engines compared with other kernels on one NVIDIA GPU: `python -m bench.gpu`.

Each figure is the median over rounds in which the contenders alternate, of whole calls as a user
makes them. Each section prints its rows, and the end the targets that were met or missed. All
numbers go to bench/results/gpu.json; from that file `--targets` prints the targets again, and
`--tables` the tables of docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from bench.gpu_additive import adding
from bench.gpu_calls import calls, first_calls
from bench.gpu_decoding import decoding
from bench.gpu_fused import capped, masked, observing, plain, precise, seeing
from bench.gpu_maps import mapping
from bench.gpu_tables import tables
from bench.gpu_targets import Results, figures
from bench.gpu_timing import Row
from bench.pairs import RESULTS, say_figures

SECTIONS: dict[str, Callable[[], list[Row]]] = {
    "calls": calls,
    "precise": precise,
    "plain": plain,
    "seeing": seeing,
    "capped": capped,
    "masked": masked,
    "observing": observing,
    "mapping": mapping,
    "decoding": decoding,
    "adding": adding,
    "first calls": first_calls,
}


def main() -> None:
    """Measure and print, and write the JSON after every section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--seconds", type=float, default=600, help="start no section after this")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--targets", action="store_true", help="print the targets of the file")
    parser.add_argument("--tables", action="store_true", help="print the tables of docs/gpu.md")
    given = parser.parse_args()
    results: Results = {}
    if given.tables:
        print("\n\n".join("\n".join(rows) for rows in tables(json.loads(given.json.read_text()))))
        return
    if given.targets:
        results = json.loads(given.json.read_text())
    elif not torch.cuda.is_available():
        sys.exit("bench.gpu needs an NVIDIA GPU, and PyTorch finds none here")
    else:
        results = measured(given.only, given.seconds, given.json)
    say_figures(figures(results))


def measured(only: list[str], seconds: float, file: Path) -> Results:
    """The rows of every section."""
    import torch._dynamo
    import torch._functorch.config
    import triton

    torch._dynamo.config.recompile_limit = 64  # all variants of FlexAttention share one cache limit
    torch._functorch.config.donated_buffer = False  # its backward is run more than once
    torch.manual_seed(0)
    stop = time.monotonic() + seconds
    results: Results = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    for name in only:
        if time.monotonic() > stop:
            print(f"{name}: no time left")
            continue
        print(f"{name}, after {seconds - stop + time.monotonic():.0f} s", flush=True)
        results[name] = SECTIONS[name]()
        _write(results, file)
    results["figures"] = [asdict(figure) for figure in figures(results)]
    _write(results, file)
    return results


def _write(results: Results, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
