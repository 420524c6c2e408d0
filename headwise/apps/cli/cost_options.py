"""The options of `headwise cost`, and its help."""

from pathlib import Path
from typing import Annotated

import typer

SKETCH = "A decoder of your own"

MOST = 10**6
"""The largest of most numbers: weights of three such factors are still counted exactly."""

HELP = """
Count what a model takes before it runs: parameters, FLOPs, memory and time.

Counts are exact. FLOPs are two per multiply-add, and of the pairs that the mask shows: a causal
layer has about half of those that other counters give.

[b]Examples[/b]

headwise cost gpt                                  the built-in model

headwise cost config.json --length 32k --device h100

headwise cost a/config.json b/config.json          side by side

headwise cost --layers 32 --width 4096 --heads 32 --kv-heads 8 --fit 80GB

headwise cost config.json --sweep length=1k..128k --plot cost.svg

headwise cost gpt --explain                        every formula; --zh: 中文

headwise cost --measure                            then: --device this

[b]Reading the figures[/b]

Prefill is limited by FLOPs, decoding by bytes: each token reads all weights and the whole KV
cache. A device with R FLOPs and B bytes per second waits for memory below R/B FLOPs per byte.
FLOPs of whole tiles are those that a kernel computes where the mask cuts through a tile;
exponentials and the like are operations other than multiply-adds, one each.
"""


def _number(help: str, most: int = MOST) -> typer.models.OptionInfo:
    """A number that describes a decoder of your own."""
    return _from_one(help, most, SKETCH)


def _from_one(help: str, most: int, panel: str | None = None) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(help=help, min=1, max=most, rich_help_panel=panel)
    return found


def _flag(name: str, help: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(name, help=help)
    return found


Models = Annotated[
    list[str] | None,
    typer.Argument(
        help="gpt, translate, a run's folder, a config.json, or a name on the hub; several "
        "stand side by side.",
        show_default=False,
    ),
]
Length = Annotated[
    str | None,
    typer.Option(help="Tokens per sequence: 8192, 32k; 4096, or as many as the model takes."),
]
Batch = Annotated[int | None, _from_one("Sequences at once; 1 by default.", 10**9)]
Decode = Annotated[bool, _flag("--decode", "One more token, the others in the KV cache.")]
Training = Annotated[bool, _flag("--training", "A forward and a backward, and Adam's memory.")]
Recompute = Annotated[bool, _flag("--recompute", "In training, keep only the inputs of layers.")]
Dtype = Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp64.")]
CacheType = Annotated[
    str | None, typer.Option(help="The KV cache's dtype: bf16, fp8, int8, int4, ...")
]
DeviceName = Annotated[
    str | None, typer.Option(help="Predict the time on it: h100, a100, this, ... (see --devices)")
]
Mesh = Annotated[
    str | None, typer.Option(help="Cost of one rank of a mesh: tp=4,cp=2,dp=2,fsdp=8.")
]
Layers = Annotated[int | None, _number("Layers.", 10**4)]
Width = Annotated[int | None, _number("Model width.")]
Heads = Annotated[int | None, _number("Query heads.")]
KeyHeads = Annotated[int | None, _number("Key and value heads; as many as heads.")]
HeadDim = Annotated[int | None, _number("Width of a head; width / heads.")]
Hidden = Annotated[int | None, _number("Feed-forward width; 8/3 of width.", 10**9)]
Vocabulary = Annotated[int | None, _number("Tokens it knows; 32000.", 10**9)]
Window = Annotated[int | None, _number("Keys each query sees.", 10**12)]
SweepOver = Annotated[
    str | None, typer.Option(help="length=1k..128k (doubling), batch=1,8,64, or heads=1..64.")
]
Plot = Annotated[
    Path | None, typer.Option(help="Draw --sweep as .svg, .pdf or .png.", show_default=False)
]
Fit = Annotated[
    str | None,
    typer.Option(help="The longest context that fits into 80GB, or into a device: h100."),
]
Explain = Annotated[bool, _flag("--explain", "Every formula, with the numbers put in.")]
Measure = Annotated[bool, _flag("--measure", "Measure this machine; --device this then uses it.")]
Devices = Annotated[bool, _flag("--devices", "List the known devices.")]
AsJson = Annotated[bool, _flag("--json", "Print JSON.")]
