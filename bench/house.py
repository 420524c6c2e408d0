"""The size of the package, and the number of its files that a call passes through.

python -m bench.house                   a table
python -m bench.house --json            the same as JSON
python -m bench.house --root FOLDER     another checkout
python -m bench.house --keep after      into bench/results/house.json, under "after"

Calls are counted in fresh processes on a CPU: the first call, and the second, when everything is
prepared. The GPU engine runs on Triton's interpreter.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "house.json"


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--root", type=Path, default=HERE.parent, help="the checkout to measure")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--keep", choices=("before", "after"), help="keep the result")
    parser.add_argument("--path", choices=PATHS, help=argparse.SUPPRESS)  # in a child process
    given = parser.parse_args()
    if given.path:
        print(json.dumps(crossed(PATHS[given.path])))
        return
    root = given.root.resolve()
    found = {**size(root / "headwise"), "paths": {name: measured(root, name) for name in PATHS}}
    if given.keep:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**kept, given.keep: found}, indent=1) + "\n")
    print(json.dumps(found, indent=1) if given.json else table(found))


def size(package: Path) -> dict[str, Any]:
    """Lines and modules of a package, and the names that occur more than once."""
    modules = sorted(package.rglob("*.py"))
    names: dict[str, list[str]] = defaultdict(list)
    classes: dict[str, list[str]] = defaultdict(list)
    folders: Counter[str] = Counter()
    lines = 0
    for path in modules:
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(package))
        lines += text.count("\n")
        folders[str(path.parent.relative_to(package.parent))] += 1
        if path.stem not in ("__init__", "__main__"):
            names[path.stem].append(name)
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(name)
    return {
        "lines": lines,
        "modules": len(modules),
        "modules_per_folder": dict(sorted(folders.items())),
        "duplicate_modules": {key: where for key, where in names.items() if len(where) > 1},
        "duplicate_classes": {key: where for key, where in classes.items() if len(where) > 1},
    }


def measured(root: Path, name: str) -> dict[str, Any]:
    """Count a call in a process of its own, which imports headwise from `root`."""
    environ = {**os.environ, "PYTHONPATH": str(root), "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    environ.pop("TRITON_INTERPRET", None)
    if name == "observe_triton":
        environ["TRITON_INTERPRET"] = "1"
    # -P: the folder of this file is not on the path, where its neighbours would hide packages.
    command = [sys.executable, "-P", __file__, "--path", name]
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    counts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counts


def crossed(prepare: Callable[[], Callable[[], object]]) -> dict[str, Any]:
    """Count the files of headwise, and the calls in them, of a first and of a second call."""
    import headwise

    package = str(Path(headwise.__file__).parent) + os.sep
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(package):
            calls[code.co_filename.removeprefix(package)] += 1

    threading.setprofile(count)  # of the threads that start from here on
    call = prepare()
    found: dict[str, Any] = {}
    for which in ("first", "second"):
        calls.clear()
        sys.setprofile(count)
        call()
        sys.setprofile(None)
        found[which] = {"files": len(calls), "calls": sum(calls.values())}
    return {**found, "second_files": sorted(calls)}


def attention() -> Callable[[], object]:
    import torch

    import headwise as hw

    q, k, v = torch.randn(3, 1, 4, 64, 32).unbind(0)
    return lambda: hw.attention(q, k, v, mask=hw.mask.causal())


def observe() -> Callable[[], object]:
    import torch

    import headwise as hw

    q, k, v = torch.randn(3, 1, 4, 64, 32).unbind(0)
    return lambda: hw.observe(q, k, v, mask=hw.mask.causal())


def observe_triton() -> Callable[[], object]:
    import torch

    import headwise as hw

    q, k, v = torch.randn(3, 1, 2, 64, 32).unbind(0)
    return lambda: hw.observe(q, k, v, mask=hw.mask.causal(), engine="triton")


def watched_forward() -> Callable[[], object]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import headwise as hw

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model, ids = LlamaForCausalLM(config).eval(), torch.randint(64, (1, 16))

    def forward() -> None:
        with torch.no_grad(), hw.watch(model):
            model(ids)

    return forward


def tile() -> Callable[[], object]:
    port = free_port()
    words = ["look", "gpt", "--text", "to be or not to be " * 60, "--no-open", "--port", str(port)]
    sys.argv = ["headwise", *words]
    threading.Thread(target=command_line(), daemon=True).start()
    while not state(port):
        time.sleep(0.2)
    drops = itertools.count(1)  # another drop every time: an answer is kept

    def tile() -> None:
        ask(port, f"inputs/0/map/self/5/1/tile/0/0/0?how=max&drop={next(drops)}")

    return tile


def command_line() -> Callable[[], object]:
    """The command `headwise`, which was one module before it was a folder."""
    try:
        found: Callable[[], object] = importlib.import_module("headwise.cli.main").main
    except ModuleNotFoundError:
        found = importlib.import_module("headwise.cli").main
    return found


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def state(port: int) -> bool:
    """True once the server has read its text."""
    try:
        found = json.loads(ask(port, "state"))
    except OSError:
        return False
    return found["state"] == "ready" and not found["stage"] and bool(found["inputs"])


def ask(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/{path}") as reply:
        content: bytes = reply.read()
        return content


PATHS: dict[str, Callable[[], Callable[[], object]]] = {
    "attention": attention,
    "observe": observe,
    "observe_triton": observe_triton,
    "watched_forward": watched_forward,
    "tile": tile,
}


def table(found: dict[str, Any]) -> str:
    """The result for a reader."""
    lines = [f"{found['lines']:,} lines in {found['modules']} modules"]
    lines += [f"  {count:>3}  {folder}" for folder, count in found["modules_per_folder"].items()]
    for kind in ("duplicate_modules", "duplicate_classes"):
        lines.append(f"{kind.replace('_', ' ')}: {len(found[kind])}")
        lines += [f"  {name}: {', '.join(where)}" for name, where in found[kind].items()]
    lines.append("files of headwise (and calls in them), first and second call")
    for name, counts in found["paths"].items():
        first, second = (
            f"{counts[which]['files']} ({counts[which]['calls']:,})"
            for which in ("first", "second")
        )
        lines.append(f"  {name:<16} {first:>12} {second:>12}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
