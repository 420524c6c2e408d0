"""`headwise cost`: what a model takes before it runs; its options and its help."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headwise.apps.cli import cost_view
from headwise.apps.cli.cost_question import (
    Model,
    Sweep,
    chosen,
    parsed_mesh,
    parsed_room,
    parsed_size,
    parsed_sweep,
)
from headwise.apps.interface import pictures
from headwise.apps.interface.terminal import Zh, bar, explained, shown_in
from headwise.costs import (
    DEVICES,
    LONGEST,
    Language,
    Phase,
    Scenario,
    about_this_machine,
    find_device,
    measure_device,
    missing_costs,
    present_device,
    save_device,
)
from headwise.messages import say

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


app = typer.Typer()


@app.command(help=HELP)
def cost(
    models: Models = None,
    length: Length = None,
    batch: Batch = None,
    decode: Decode = False,
    training: Training = False,
    recompute: Recompute = False,
    dtype: Dtype = "bf16",
    cache: CacheType = None,
    device: DeviceName = None,
    mesh: Mesh = None,
    layers: Layers = None,
    width: Width = None,
    heads: Heads = None,
    kv_heads: KeyHeads = None,
    head_dim: HeadDim = None,
    hidden: Hidden = None,
    vocabulary: Vocabulary = None,
    window: Window = None,
    sweep: SweepOver = None,
    plot: Plot = None,
    fit: Fit = None,
    explain: Explain = False,
    measure: Measure = False,
    devices: Devices = False,
    as_json: AsJson = False,
    zh: Zh = False,
) -> None:
    """Count what a model takes before it runs: parameters, FLOPs, memory and time."""
    given = {
        "layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads,
        "head_dim": head_dim, "hidden": hidden, "vocabulary": vocabulary, "window": window,
    }  # fmt: skip
    output = Output(Console(), plot, fit, explain, zh, as_json)
    with explained(zh):
        if measure or devices:
            check_machines(models or None, *given.values(), length, batch, sweep, fit)
            show_machines(output, measure)
            return
        use = Scenario(
            phase(decode, training),
            Scenario.length if length is None else parsed_size("--length", length, 1024),
            batch or 1,
            dtype,
            cache,
            parsed_mesh(mesh),
            "layers" if recompute else None,
            None if device is None else find_device(device),
        )
        check_use(use, length, batch, sweep, output)
        asked = chosen(models or [], {name: x for name, x in given.items() if x is not None})
        uses = [use.within(each.architecture) if length is None else use for each in asked]
        swept = None if sweep is None else parsed_sweep(sweep)
        answer(list(zip(asked, uses, strict=True)), swept, output)


@dataclass(frozen=True)
class Output:
    """The form of the answer: a picture, a fit, formulas, and how they are printed."""

    console: Console
    plot: Path | None
    fit: str | None
    explain: bool
    zh: bool
    as_json: bool


def check_machines(*about_models: object) -> None:
    """Raise ValueError if an option about models came with one about machines."""
    if any(x is not None for x in about_models):
        raise ValueError(say("--measure and --devices are about machines; leave out models"))


def show_machines(output: Output, measure: bool) -> None:
    """Measure this machine, or list the known devices."""
    if measure:
        measured = run_measurement()
        show = lambda: cost_view.show_device(output.console, measured, output.zh)  # noqa: E731
        cost_view.say_or_show(measured, output.as_json, show)
        return
    table = [asdict(each) for each in DEVICES.values()]
    show = lambda: cost_view.show_devices(output.console, output.zh)  # noqa: E731
    cost_view.say_or_show(table, output.as_json, show)


def check_use(
    use: Scenario, length: str | None, batch: int | None, sweep: str | None, output: Output
) -> None:
    """Raise ValueError for options that would be ignored."""
    fit = output.fit
    if use.recompute is not None and use.phase != "training":
        raise ValueError(say("--recompute is about training; add --training"))
    if use.cache is not None and use.phase == "training":
        raise ValueError(say("training keeps no KV cache; leave out --cache"))
    if fit is not None and use.device is not None:
        raise ValueError(say("--fit is about memory, not time; leave out --device"))
    if length is not None and fit is not None:
        raise ValueError(say("--fit finds the length; leave out --length"))
    if length is not None and sweep is not None and sweep.strip().startswith("length"):
        raise ValueError(say("--sweep gives the lengths; leave out --length"))
    if batch is not None and sweep is not None and sweep.strip().startswith("batch"):
        raise ValueError(say("--sweep gives the batches; leave out --batch"))
    if output.explain and use.device is not None:
        raise ValueError(say("--explain has no times; leave out --device"))


def answer(asked: list[tuple[Model, Scenario]], sweep: Sweep | None, output: Output) -> None:
    """Print what was asked for: a fit, a sweep, formulas, or the figures."""
    check_answer(sweep, output)
    if output.fit is not None:
        room = parsed_room(output.fit)
        found = [fitted(*each, room) for each in asked]
        show = lambda: cost_view.show_fit(output.console, found, output.zh)  # noqa: E731
        cost_view.say_or_show(found, output.as_json, show)
    elif sweep is not None:
        show_sweep(asked, sweep, output)
    elif output.explain:
        language: Language = "zh" if output.zh else "en"
        costs = {each.name: use.cost(each.architecture) for each, use in asked}
        texts = {name: found.explain(language) for name, found in costs.items()}
        show = lambda: print("\n\n".join(texts.values()))  # noqa: E731
        cost_view.say_or_show(texts, output.as_json, show)
    else:
        figures = [
            {
                "model": each.name,
                "tokens": use.length,
                **use.figures(each.architecture),
                "left_out": [str(what) for what in use.cost(each.architecture).left_out],
                "parts": use.cost(each.architecture).to_dict()["parts"],
            }
            for each, use in asked
        ]
        show = lambda: cost_view.show_figures(output.console, asked, output.zh)  # noqa: E731
        cost_view.say_or_show(figures, output.as_json, show)


def check_answer(sweep: Sweep | None, output: Output) -> None:
    """Raise ValueError if two answers were asked for, or a picture of none."""
    wanted = {"--fit": output.fit, "--sweep": sweep, "--explain": output.explain or None}
    given = [name for name, value in wanted.items() if value is not None]
    if len(given) > 1:
        raise ValueError(
            say("{one} and {other} are two questions; ask one of them", one=given[0],
                other=given[1])
        )  # fmt: skip
    if output.plot is not None and sweep is None:
        raise ValueError(say("--plot draws a sweep; add --sweep length=1k..128k"))
    if output.plot is not None:
        pictures.check(output.plot)


def show_sweep(asked: list[tuple[Model, Scenario]], sweep: Sweep, output: Output) -> None:
    """Print a table for each model, and draw them if asked to."""
    caption = cost_view.described(asked[0][1], sweep.axis)
    rows = {each.name: sweep.rows(each, use) for each, use in asked}
    notes = {each.name: missing_costs(use.cost(each.architecture)) for each, use in asked}
    show = lambda: cost_view.show_sweep(  # noqa: E731
        output.console, rows, notes, caption, sweep, output.zh
    )
    cost_view.say_or_show(rows, output.as_json, show)
    if output.plot is not None:
        cost_view.save_picture(output.plot, rows, sweep.axis, caption)
        typer.echo(f"{output.plot}", err=True)


def fitted(model: Model, use: Scenario, room: int) -> dict[str, Any]:
    """The longest context of a model that fits into so many bytes."""
    fits = tokens = use.longest(model.architecture, room)
    stated = model.architecture.stated
    try:
        replace(use, length=tokens + 1).cost(model.architecture)
        limit = "memory" if tokens < LONGEST else "search"
    except ValueError:
        limit = "positions"
    if stated is not None and stated < tokens:
        tokens, limit = stated, "stated"
    phase = "training" if use.phase == "training" else "inference"
    return {
        "model": model.name, "tokens": tokens, "limit": limit, "fits": fits, "room": room,
        "batch": use.batch, "phase": phase,
    }  # fmt: skip


def phase(decode: bool, training: bool) -> Phase:
    """The use of the model that the flags name."""
    if decode and training:
        raise ValueError(say("--decode and --training are two uses; give one of them"))
    return "decode" if decode else "training" if training else "prefill"


def run_measurement() -> dict[str, Any]:
    """Measure this machine and keep the result."""
    where = present_device()
    with bar() as progress:
        found = measure_device(where, report=shown_in(progress))
    path = save_device(found, where, about_this_machine())
    return {**asdict(found), "file": str(path)}
