"""`headwise cost`: the options of the command."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headwise.cli import cost_view
from headwise.cli.cost_question import (
    Model,
    Sweep,
    chosen,
    parsed_mesh,
    parsed_room,
    parsed_size,
    parsed_sweep,
)
from headwise.cli.look import bar, shown_in
from headwise.costs.explaining import Language
from headwise.costs.machines import measure as measuring
from headwise.costs.machines import this_machine
from headwise.costs.machines.hardware import DEVICES
from headwise.costs.uses.scenario import LONGEST, Phase, Scenario
from headwise.look import cost_picture

app = typer.Typer()

SKETCH = "A decoder of your own"


@app.command()
def cost(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="gpt, translate, a run's folder, a config.json, or a name on the hub; several "
            "stand side by side.",
            show_default=False,
        ),
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(help="Tokens per sequence: 8192, 32k; 4096, or as many as the model takes."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.", min=1)] = 1,
    decode: Annotated[
        bool, typer.Option("--decode", help="One more token, the others in the KV cache.")
    ] = False,
    training: Annotated[
        bool, typer.Option("--training", help="A forward and a backward, and Adam's memory.")
    ] = False,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="In training, keep only the inputs of layers.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp64.")] = "bf16",
    cache: Annotated[
        str | None, typer.Option(help="The KV cache's dtype: bf16, fp8, int8, int4, ...")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Predict the time on it: h100, a100, this, ... (see --devices)"),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Cost of one rank of a mesh: tp=4,cp=2,dp=2,fsdp=8.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Layers.", min=1, rich_help_panel=SKETCH)
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Model width.", min=1, rich_help_panel=SKETCH)
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="Query heads.", min=1, rich_help_panel=SKETCH)
    ] = None,
    kv_heads: Annotated[
        int | None,
        typer.Option(help="Key and value heads; as many as heads.", min=1, rich_help_panel=SKETCH),
    ] = None,
    head_dim: Annotated[
        int | None,
        typer.Option(help="Width of a head; width / heads.", min=1, rich_help_panel=SKETCH),
    ] = None,
    hidden: Annotated[
        int | None,
        typer.Option(help="Feed-forward width; 8/3 of width.", min=1, rich_help_panel=SKETCH),
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="Tokens it knows; 32000.", min=1, rich_help_panel=SKETCH)
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Keys each query sees.", min=1, rich_help_panel=SKETCH)
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="length=1k..128k (doubling), batch=1,8,64, or heads=1..64."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw --sweep as .svg, .pdf or .png.", show_default=False)
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(help="The longest context that fits into 80GB, or into a device: h100."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Every formula, with the numbers put in.")
    ] = False,
    chinese: Annotated[bool, typer.Option("--zh", help="Explain in Chinese (中文).")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure this machine; --device this then uses it."),
    ] = False,
    devices: Annotated[bool, typer.Option("--devices", help="List the known devices.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count what a model takes before it runs: parameters, FLOPs, memory and time.

    Counts are exact. FLOPs are two per multiply-add, and of the pairs that the mask shows: a causal
    layer has about half of those that other counters give.

    [b]Examples[/b]

    headwise cost gpt                                  the built-in model

    headwise cost config.json --length 32k --device h100

    headwise cost a/config.json b/config.json          side by side

    headwise cost --layers 32 --width 4096 --heads 32 --kv-heads 8 --fit 80GB

    headwise cost config.json --sweep length=1k..128k --plot cost.svg

    headwise cost gpt --explain                        every formula

    headwise cost --measure                            then: --device this

    [b]Reading the figures[/b]

    Prefill is limited by FLOPs, decoding by bytes: each token reads all weights and the whole KV
    cache. A device with R FLOPs and B bytes per second waits for memory below R/B FLOPs per byte.
    """
    console = Console()
    try:
        if measure:
            measured = run_measurement()
            cost_view.say(measured, as_json, lambda: cost_view.show_device(console, measured))
            return
        if devices:
            table = [asdict(each) for each in DEVICES.values()]
            cost_view.say(table, as_json, lambda: cost_view.show_devices(console))
            return
        use = Scenario(
            phase=phase(decode, training),
            length=Scenario.length if length is None else parsed_size("--length", length, 1024),
            batch=batch,
            dtype=dtype,
            cache=cache,
            mesh=parsed_mesh(mesh),
            recompute="layers" if recompute else None,
            device=None if device is None else this_machine.find(device),
        )
        given = {
            "layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads,
            "head_dim": head_dim, "hidden": hidden, "vocabulary": vocabulary, "window": window,
        }  # fmt: skip
        asked = chosen(models or [], {name: x for name, x in given.items() if x is not None})
        uses = [use.within(each.architecture) if length is None else use for each in asked]
        output = Output(plot, fit, explain, "zh" if chinese else "en", as_json)
        swept = None if sweep is None else parsed_sweep(sweep)
        answer(console, list(zip(asked, uses, strict=True)), swept, output)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error


@dataclass(frozen=True)
class Output:
    """The form of the answer: a picture, a fit, formulas, and how they are printed."""

    plot: Path | None
    fit: str | None
    explain: bool
    language: Language
    as_json: bool


def answer(
    console: Console, asked: list[tuple[Model, Scenario]], sweep: Sweep | None, output: Output
) -> None:
    """Print what was asked for: a fit, a sweep, formulas, or the figures."""
    if output.plot is not None and sweep is None:
        raise ValueError("--plot draws a sweep; add --sweep length=1k..128k")
    if output.fit is not None:
        found = [fitted(*each, parsed_room(output.fit)) for each in asked]
        cost_view.say(found, output.as_json, lambda: cost_view.show_fit(console, found))
    elif sweep is not None:
        caption = cost_view.described(asked[0][1], sweep.axis)
        rows = {each.name: sweep.rows(each, use) for each, use in asked}
        show = lambda: cost_view.show_sweep(console, rows, caption, sweep)  # noqa: E731
        cost_view.say(rows, output.as_json, show)
        if output.plot is not None:
            cost_picture.save(output.plot, rows, sweep.axis, caption)
            typer.echo(f"{output.plot}", err=True)
    elif output.explain:
        texts = {
            each.name: use.cost(each.architecture).explain(output.language) for each, use in asked
        }
        cost_view.say(texts, output.as_json, lambda: print("\n\n".join(texts.values())))
    else:
        figures = [
            {
                "model": each.name,
                "tokens": use.length,
                **use.figures(each.architecture),
                "parts": use.cost(each.architecture).to_dict()["parts"],
            }
            for each, use in asked
        ]
        cost_view.say(figures, output.as_json, lambda: cost_view.show_figures(console, asked))


def fitted(model: Model, use: Scenario, room: int) -> dict[str, Any]:
    """The longest context of a model that fits into so many bytes."""
    tokens = use.longest(model.architecture, room)
    try:
        replace(use, length=tokens + 1).cost(model.architecture)
        limit = "memory" if tokens < LONGEST else "search"
    except ValueError:
        limit = "positions"
    phase = "training" if use.phase == "training" else "inference"
    return {
        "model": model.name, "tokens": tokens, "limit": limit, "room": room, "batch": use.batch,
        "phase": phase,
    }  # fmt: skip


def phase(decode: bool, training: bool) -> Phase:
    """The use of the model that the flags name."""
    if decode and training:
        raise ValueError("--decode and --training are two uses; give one of them")
    return "decode" if decode else "training" if training else "prefill"


def run_measurement() -> dict[str, Any]:
    """Measure this machine and keep the result."""
    where = this_machine.present()
    with bar() as progress:
        found = measuring.measure(where, report=shown_in(progress))
    path = this_machine.save(found, where, measuring.about_now())
    return {**asdict(found), "file": str(path)}
