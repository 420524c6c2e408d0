"""`headwise cost`: what a model takes before it runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from headwise.apps.cli import cost_options as options
from headwise.apps.cli import cost_picture, cost_view
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

app = typer.Typer()


@app.command(help=options.HELP)
def cost(
    models: options.Models = None,
    length: options.Length = None,
    batch: options.Batch = None,
    decode: options.Decode = False,
    training: options.Training = False,
    recompute: options.Recompute = False,
    dtype: options.Dtype = "bf16",
    cache: options.CacheType = None,
    device: options.DeviceName = None,
    mesh: options.Mesh = None,
    layers: options.Layers = None,
    width: options.Width = None,
    heads: options.Heads = None,
    kv_heads: options.KeyHeads = None,
    head_dim: options.HeadDim = None,
    hidden: options.Hidden = None,
    vocabulary: options.Vocabulary = None,
    window: options.Window = None,
    sweep: options.SweepOver = None,
    plot: options.Plot = None,
    fit: options.Fit = None,
    explain: options.Explain = False,
    measure: options.Measure = False,
    devices: options.Devices = False,
    as_json: options.AsJson = False,
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
        cost_picture.save(output.plot, rows, sweep.axis, caption)
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
