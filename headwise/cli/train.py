"""`headwise train`: train, score and export small models."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.train_view import explained, progress, show_result, stopping
from headwise.training import presets
from headwise.training.data import download_cache as cache
from headwise.training.data.corpora import CORPORA
from headwise.training.evaluation import export as write
from headwise.training.evaluation import judge
from headwise.training.run_folder import Run
from headwise.training.setups import Setup
from headwise.training.start import train

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
Steps = Annotated[int | None, typer.Option(min=1, help="Number of steps instead of the preset's.")]
Minutes = Annotated[float | None, typer.Option(help="As many steps as fit into this time.")]
Seed = Annotated[int | None, typer.Option(help="Random seed instead of the preset's.")]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:1; by default a GPU if there is one.")
]
Watch = Annotated[
    int | None,
    typer.Option(min=1, help="Watch the heads every so many steps, for headwise watch."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print each measurement as a line of JSON.")]


def task_command(task: str, description: str, example: str) -> None:
    """Add the command that trains a task."""

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
            if resume:
                check_resume(
                    task, out, preset=preset, data=data, steps=steps, minutes=minutes, seed=seed
                )
            setup = None if resume else chosen(task, preset or "tiny", data, steps, seed)
            with stopping() as should_stop, progress(as_json, task, out) as report:
                model = train(
                    setup,
                    out,
                    device=device,
                    minutes=minutes,
                    report=report,
                    should_stop=should_stop,
                    watch_every=watch,
                )
        if model is None:
            again = f"headwise train {task} --out {out} --resume"
            typer.echo(f"stopped; to continue: {again}", err=True)
            raise typer.Exit(130)
        if not as_json:
            typer.echo(f"finished; to see its heads: headwise look {out}", err=True)


task_command(
    "translate",
    "Train a translator; --data takes lines [b]english TAB translation[/b].",
    "--data pairs.tsv --out runs/mine",
)
task_command(
    "language",
    "Train a language model; --data takes any UTF-8 text file.",
    "--data book.txt --out runs/book --watch 10",
)
task_command(
    "vision",
    "Train an image classifier; --data takes mnist or cifar-10.",
    "--data mnist --out runs/digits --minutes 5",
)


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
                "cached": cache.has(corpus),
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


def check_resume(task: str, out: Path, **given: object) -> None:
    """ValueError if a run can't be resumed as this task, or with these options."""
    if more := [f"--{name}" for name, value in given.items() if value is not None]:
        raise ValueError(f"--resume continues with the run's own settings; leave out {more[0]}")
    started = Run(out).settings().get("task")
    if started != task:
        raise ValueError(
            f"{out} holds a run of {started}; use headwise train {started} --out {out} --resume"
        )


def chosen(task: str, preset: str, data: str | None, steps: int | None, seed: int | None) -> Setup:
    """The preset, with the options that replace parts of it."""
    setup = presets.preset(task, preset)
    recipe = setup.recipe
    recipe = recipe if steps is None else replace(recipe, steps=steps)
    recipe = recipe if seed is None else replace(recipe, seed=seed)
    return replace(setup, recipe=recipe, data=setup.data if data is None else data)
