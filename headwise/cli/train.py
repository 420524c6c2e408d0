"""`headwise train`: what can be asked at a terminal."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.training.progress import show_result, shown, stopping, told

if TYPE_CHECKING:
    from headwise.training.setups import Setup

app = typer.Typer(
    name="train",
    help="Train a small model: translate, continue text, or name images.",
    epilog="Start with: headwise train translate --preset tiny --out runs/first",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Preset = Annotated[
    str | None,
    typer.Option(help="tiny learns on two cores in minutes, small wants a GPU.  [default: tiny]"),
]
Out = Annotated[Path, typer.Option(help="The run's folder.", show_default=False)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
Data = Annotated[
    str | None, typer.Option(help="A corpus by its name, or your own file.", show_default=False)
]
Steps = Annotated[int | None, typer.Option(min=1, help="Another number of steps.")]
Minutes = Annotated[float | None, typer.Option(help="As many steps as fit into this time.")]
Seed = Annotated[int | None, typer.Option(help="Another seed.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; the GPU if there is one.")]
Watch = Annotated[
    int | None, typer.Option(min=1, help="Look at the heads every so many steps: headwise watch.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Every measurement as a line of JSON.")]


@app.command()
def translate(
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
    """Translate: --data takes lines [b]english TAB translation[/b]."""
    start("translate", preset, out, data, resume, steps, minutes, seed, device, watch, as_json)


@app.command()
def language(
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
    """Continue text: --data takes any UTF-8 file."""
    start("language", preset, out, data, resume, steps, minutes, seed, device, watch, as_json)


@app.command()
def vision(
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
    """Name images: --data takes mnist or cifar-10."""
    start("vision", preset, out, data, resume, steps, minutes, seed, device, watch, as_json)


@app.command()
def corpora(
    fetch: Annotated[
        list[str] | None, typer.Argument(help="Corpora to fetch now.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The same for a program to read.")
    ] = False,
) -> None:
    """List the corpora, their licences and whether they are in the cache; fetch those named."""
    with told():
        from headwise.training.data import download_cache as cache
        from headwise.training.data.corpora import CORPORA

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
    as_json: AsJson = False,
) -> None:
    """Judge a trained model on the test part of what it was trained on."""
    with told():
        from headwise.training.evaluation import judge

        figures = judge(what, device)
    show_result(figures, as_json)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    out: Annotated[Path, typer.Option(help="Where to put the model.", show_default=False)],
) -> None:
    """Leave all but the weights behind, in half precision: a folder for headwise.load."""
    with told():
        from headwise.training.evaluation import export as write

        size = write(run, out)
    typer.echo(f"{out}: {size / 1e6:.1f} MB")


def start(
    task: str,
    preset: str | None,
    out: Path,
    data: str | None,
    resume: bool,
    steps: int | None,
    minutes: float | None,
    seed: int | None,
    device: str | None,
    watch: int | None,
    as_json: bool,
) -> None:
    """Train as asked, show it, and say how to go on where it was interrupted."""
    with told():
        from headwise.training.start import train

        if resume:
            check_resume(
                task, out, preset=preset, data=data, steps=steps, minutes=minutes, seed=seed
            )
        setup = None if resume else chosen(task, preset or "tiny", data, steps, seed)
        with stopping() as should_stop, shown(as_json) as report:
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
        typer.echo(f"stopped; headwise train {task} --out {out} --resume goes on", err=True)
        raise typer.Exit(130)


def check_resume(task: str, out: Path, **given: object) -> None:
    """A run goes on as it was started, and as what it was started."""
    from headwise.training.run_folder import Run

    if more := [f"--{name}" for name, value in given.items() if value is not None]:
        raise ValueError(f"--resume goes on with what the run was asked; leave out {more[0]}")
    started = Run(out).asked().get("task")
    if started != task:
        raise ValueError(f"{out} holds a run of {started}: headwise train {started} --resume")


def chosen(
    task: str, preset: str, data: str | None, steps: int | None, seed: int | None
) -> "Setup":
    """The preset, with what was asked otherwise."""
    from headwise.training import presets

    setup = presets.preset(task, preset)
    recipe = setup.recipe
    recipe = recipe if steps is None else replace(recipe, steps=steps)
    recipe = recipe if seed is None else replace(recipe, seed=seed)
    return replace(setup, recipe=recipe, data=setup.data if data is None else data)
