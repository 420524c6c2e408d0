"""Comparison with BertViz on the same model and text: `python -m bench.bertviz`.

A model of MiniLM's shape (6 layers × 12 heads, random weights) reads texts of 64, 512 and 4096
tokens. Each tool, in its own process, writes a page of all heads as one file, and a browser opens
it. BertViz's page loads three scripts from the network; --scripts names a folder that has them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.look import BROWSER, renderers, resident
from bench.pairs import RESULTS, machine

LENGTHS = (64, 512, 4096)
MEMORY = 8 << 30  # the most bytes a tool may use
PATIENCE = 60  # the most seconds a browser may take
SEEN = {
    # true once the heads are drawn
    "bertviz": "() => document.querySelectorAll('svg rect').length > 0",
    "headwise": "() => document.querySelectorAll('canvas').length > 0"
    " && document.body.innerText.includes('72')",
}


def make(tool: str, tokens: int, path: Path) -> dict[str, Any]:
    """Write a tool's page in this process, and time it from the model to the file."""
    import torch
    from transformers import BertConfig, BertModel

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=4096,
        attn_implementation="eager" if tool == "bertviz" else "sdpa",
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    ids = torch.randint(1000, (1, tokens))
    names = [f"w{token}" for token in ids[0].tolist()]
    start, burnt = time.perf_counter(), time.process_time()
    with torch.no_grad():
        (bertviz if tool == "bertviz" else headwise)(model, ids, names, path)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - burnt,
        "megabytes": peak,
    }


def bertviz(model: Any, ids: Any, names: list[str], path: Path) -> None:
    from bertviz import head_view

    attentions = model(ids, output_attentions=True).attentions
    html = head_view(attentions, names, html_action="return").data
    network = "https://cdnjs.cloudflare.com/ajax/libs/require.js/2.3.6/require.min.js"
    path.write_text(f'<!doctype html><meta charset="utf-8"><script src="{network}"></script>{html}')


def headwise(model: Any, ids: Any, names: list[str], path: Path) -> None:
    import headwise as hw
    from headwise.apps.look.serving import page_file as export
    from headwise.apps.look.show import session_of

    with hw.watch(model) as seen:
        model(ids)
    export.write(session_of(seen, names), path, (), 20_000_000)


def opens(tool: str, path: Path, scripts: Path | None) -> dict[str, Any]:
    """Open the page in a browser: success, seconds and memory."""
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        if scripts is not None:
            page.route(
                re.compile("^https:"),
                lambda route: route.fulfill(path=scripts / route.request.url.rpartition("/")[2]),
            )
        start = time.perf_counter()
        try:
            page.goto(path.as_uri(), timeout=1000 * PATIENCE)
            page.wait_for_function(SEEN[tool], timeout=1000 * PATIENCE)
            found = {"opens": True, "shown_after": time.perf_counter() - start}
            found["browser_megabytes"] = max(map(resident, renderers()))
        except Error as error:
            found = {"opens": False, "why": str(error).splitlines()[0][:120]}
        browser.close()
    return found


def measured(tool: str, tokens: int, scripts: Path | None) -> dict[str, Any]:
    """Write and open the page of one tool on one text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        command = [sys.executable, "-m", "bench.bertviz", "--make", tool, str(tokens), str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        row: dict[str, Any] = {"tool": tool, "tokens": tokens}
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["killed"])[-1]
            return {**row, "opens": False, "why": f"within {MEMORY >> 30} GiB: {last[:120]}"}
        row |= json.loads(done.stdout.splitlines()[-1])
        row["file_megabytes"] = path.stat().st_size / 1e6
        return row | opens(tool, path, scripts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scripts", type=Path, help="require.min.js, d3.min.js, jquery.min.js")
    parser.add_argument("--make", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.make:
        tool, tokens, path = chosen.make
        print(json.dumps(make(tool, int(tokens), Path(path))))
        return
    for package in ("bertviz", "playwright"):
        if importlib.util.find_spec(package) is None:
            sys.exit(f"nothing was measured: pip install {package} first")
    rows = []
    for tokens in LENGTHS:
        for tool in ("bertviz", "headwise"):
            rows.append(measured(tool, tokens, chosen.scripts))
            print(json.dumps(rows[-1]), flush=True)
    content = {"machine": machine(), "rows": rows}
    (RESULTS / "bertviz.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
