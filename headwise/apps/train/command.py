"""`headwise train`: train, score and export small models."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.apps.train import presets
from headwise.apps.train.command_view import explained, progress, show_result, stopping, unseen
from headwise.apps.train.data import download_cache as cache
from headwise.apps.train.data.corpora import CORPORA
from headwise.apps.train.ranks import TrainingRanks
from headwise.apps.train.runs import export as write
from headwise.apps.train.runs import judge, train
from headwise.apps.train.setups import LanguageSetup, Setup
from headwise.apps.train.torchrun import joined, own_device
from headwise.models.trained import Run

app = typer.Typer(
    name="train",
    help="Train a small model: translate, continue text, or classify images.",
    epilog="Start with: headwise train translate --preset tiny --out runs/first",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Preset = Annotated[
    str | None,
    typer.Option(help="tiny: minutes on two cores; small: needs a GPU.  [default: tiny]"),
]
Out = Annotated[Path, typer.Option(help="The run's folder.", show_default=False)]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]
Data = Annotated[
    str | None, typer.Option(help="A corpus by name, or your own file.", show_default=False)
]
Steps = Annotated[
    int | None, typer.Option(min=1, max=10**9, help="Number of steps instead of the preset's.")
]
Minutes = Annotated[
    float | None, typer.Option(max=10**6, help="As many steps as fit into this time.")
]
Seed = Annotated[int | None, typer.Option(help="Random seed instead of the preset's.")]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:1; by default a GPU if there is one.")
]
Watch = Annotated[
    int | None,
    typer.Option(min=1, max=10**9, help="Watch the heads every so many steps, for headwise watch."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print each measurement as a line of JSON.")]


Context = Annotated[
    int | None, typer.Option(min=2, max=10**9, help="Tokens per text instead of the preset's.")
]
ContextRanks = Annotated[
    int,
    typer.Option(
        min=1,
        help="Under torchrun: split each text between so many processes, for texts that are too "
        "long for one. The rest share the batch.",
    ),
]
Sharded = Annotated[
    bool,
    typer.Option(
        "--fsdp",
        help="Under torchrun: spread parameters and optimiser over all processes (FSDP2), for "
        "models that are too large for one. Without it each has a copy (DDP).",
    ),
]


def task_command(task: str, description: str, example: str) -> None:
    """Add the command that trains a task in one process."""

    @app.command(task, help=f"{description}\n\n[b]Example[/b]\n\nheadwise train {task} {example}")
    def command(
        out: Out,
        preset: Preset = None,
        data: Data = None,
        resume: Resume = False,
        steps: Steps = None,
        minutes: Minutes = None,
        seed: Seed = None,
        device: Device = None,
        watch: Watch = None,
        as_json: AsJson = False,
    ) -> None:
        with explained():
            setup = requested_setup(task, out, resume, minutes, preset, data, steps, seed)
            start(task, setup, out, minutes, device, watch, as_json)


task_command(
    "translate",
    "Train a translator; --data takes lines [b]english TAB translation[/b].",
    "--data pairs.tsv --out runs/mine",
)


LANGUAGE = (
    "Train a language model; --data takes any UTF-8 text file.",
    "torchrun trains it with many processes, which share every batch, so that the losses are those "
    "of one process. --resume also works with another number of them.",
    "[b]Examples[/b]",
    "headwise train language --data book.txt --out runs/book --watch 10",
    "torchrun --nproc-per-node 8 -m headwise train language --preset small --out runs/gpt",
    "torchrun --nproc-per-node 8 -m headwise train language --data book.txt --context 131072 "
    "--context-ranks 8 --fsdp --out runs/long",
)


@app.command(help="\n\n".join(LANGUAGE))
def language(
    out: Out,
    preset: Preset = None,
    data: Data = None,
    resume: Resume = False,
    steps: Steps = None,
    minutes: Minutes = None,
    seed: Seed = None,
    context: Context = None,
    device: Device = None,
    watch: Watch = None,
    context_ranks: ContextRanks = 1,
    fsdp: Sharded = False,
    as_json: AsJson = False,
) -> None:
    """Train a language model, with many processes under torchrun."""
    with explained():
        setup = requested_setup(
            "language", out, resume, minutes, preset, data, steps, seed, context
        )
        start("language", setup, out, minutes, device, watch, as_json, context_ranks, fsdp)


task_command(
    "vision",
    "Train an image classifier; --data takes mnist or cifar-10.",
    "--data mnist --out runs/digits --minutes 5",
)


def start(
    task: str,
    setup: Setup | None,
    out: Path,
    minutes: float | None,
    device: str | None,
    watch: int | None,
    as_json: bool,
    context_ranks: int = 1,
    fsdp: bool = False,
) -> None:
    """Train by a setup, or resume if it is None, with all processes of torchrun if there are any.

    The first process shows the progress.
    """
    where = own_device(device)
    # Signals are caught to the end: torchrun sends one to those that look for the rank that failed.
    with (
        stopping() as should_stop,
        joined(where, context=context_ranks, sharded=fsdp) as ranks,
    ):
        first, again = ranks.first, command_to_resume(task, out, ranks)
        with progress(as_json, task, out) if first else nullcontext(unseen) as report:
            model = train(
                setup,
                out,
                device=str(where),
                minutes=minutes,
                report=report,
                should_stop=should_stop,
                watch_every=watch,
                ranks=ranks,
            )
    if model is None:
        if first:
            typer.echo(f"stopped; to continue: {again}", err=True)
        raise typer.Exit(130)
    if first and not as_json:
        typer.echo(f"finished; to see its heads: headwise look {out}", err=True)


def command_to_resume(task: str, out: Path, ranks: TrainingRanks) -> str:
    """The command line that continues a run.

    >>> command_to_resume("language", Path("runs/gpt"), TrainingRanks())
    'headwise train language --out runs/gpt --resume'
    """
    command = f"headwise train {task} --out {out} --resume"
    if ranks.mesh is None:
        return command
    options = f" --context-ranks {ranks.together}" if ranks.together > 1 else ""
    options += " --fsdp" if ranks.sharded else ""
    return f"torchrun --nproc-per-node {ranks.count} -m {command}{options}"


@app.command()
def corpora(
    fetch: Annotated[
        list[str] | None, typer.Argument(help="Corpora to download now.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the corpora with their licences, and download those named."""
    with explained():
        for name in fetch or []:
            if name not in CORPORA:
                raise ValueError(f"there is no corpus {name!r}; there are {', '.join(CORPORA)}")
            for file in CORPORA[name].files:
                cache.path_of(CORPORA[name], file.name)
        listed: list[dict[str, Any]] = [
            {
                "name": corpus.name,
                "about": corpus.about,
                "licence": corpus.licence,
                "download": sum(package.size for package in corpus.packages),
                "packages": [f"{package.name} {package.version}" for package in corpus.packages],
                "cached": cache.is_cached(corpus),
            }
            for corpus in CORPORA.values()
        ]
    if as_json:
        typer.echo(json.dumps(listed, indent=2, ensure_ascii=False))
        return
    for each in listed:
        size = f"{each['download'] / 1e6:.0f} MB"
        typer.echo(f"{each['name']} ({'in the cache' if each['cached'] else size})")
        typer.echo(f"    {each['about']}\n    {each['licence']}")


@app.command()
def score(
    what: Annotated[str, typer.Argument(help="gpt, translate, or a run's folder.")],
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score a trained model on the test part of its corpus."""
    with explained():
        figures = judge(what, device)
    show_result(figures, as_json)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    out: Annotated[Path, typer.Option(help="The folder for the model.", show_default=False)],
) -> None:
    """Copy a run's weights alone, in half precision, into a folder for headwise.load."""
    with explained():
        size = write(run, out)
    typer.echo(f"{out}: {size / 1e6:.1f} MB")


def requested_setup(
    task: str,
    out: Path,
    resume: bool,
    minutes: float | None,
    preset: str | None,
    data: str | None,
    steps: int | None,
    seed: int | None,
    context: int | None = None,
) -> Setup | None:
    """The setup that options ask for, or None to resume; ValueError if they contradict a run."""
    if not resume:
        return varied_preset(task, preset or "tiny", data, steps, seed, context)
    given = {"preset": preset, "data": data, "steps": steps, "minutes": minutes, "seed": seed}
    check_resume(task, out, **given, context=context)
    return None


def check_resume(task: str, out: Path, **given: object) -> None:
    """ValueError if a run can't be resumed as this task, or with these options."""
    if more := [f"--{name}" for name, value in given.items() if value is not None]:
        raise ValueError(f"--resume continues with the run's own settings; leave out {more[0]}")
    started = Run(out).settings().get("task")
    if started != task:
        raise ValueError(
            f"{out} holds a run of {started}; use headwise train {started} --out {out} --resume"
        )


def varied_preset(
    task: str,
    preset: str,
    data: str | None,
    steps: int | None,
    seed: int | None,
    context: int | None = None,
) -> Setup:
    """The preset, with the options that replace parts of it."""
    setup = presets.preset(task, preset)
    recipe = setup.recipe
    recipe = recipe if steps is None else replace(recipe, steps=steps)
    recipe = recipe if seed is None else replace(recipe, seed=seed)
    if context is not None and isinstance(setup, LanguageSetup):
        setup = replace(setup, model=replace(setup.model, context=context))
    return replace(setup, recipe=recipe, data=setup.data if data is None else data)
