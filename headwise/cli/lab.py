"""`headwise lab`: list the claims with their verdicts, run their experiments, show one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headwise import devices
from headwise.cli import lab_view
from headwise.lab import handbook, record
from headwise.lab.claims import CLAIMS
from headwise.lab.drawing import available
from headwise.lab.laboratory import Lab
from headwise.lab.runner import find, run
from headwise.messages import said_by

app = typer.Typer(
    name="lab",
    rich_markup_mode="rich",
    invoke_without_command=True,
)

Out = Annotated[
    Path | None,
    typer.Option(help="The folder of your results; by default one in your cache."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Zh = Annotated[bool, typer.Option("--zh", help="In 中文.")]


@contextmanager
def explained(zh: bool) -> Iterator[None]:
    """Print an expected error as one sentence instead of a traceback."""
    try:
        yield
    except (ValueError, OSError, ModuleNotFoundError) as error:
        said = said_by(error)
        raise typer.BadParameter(said.zh if zh else str(said)) from error


@app.callback()
def listing(
    context: typer.Context, out: Out = None, as_json: AsJson = False, zh: Zh = False
) -> None:
    """Test what textbooks say about attention: every claim is an experiment with a verdict.

    Without a command it lists the claims with their verdicts: your own
    results, and the recorded ones that come with headwise.

    [b]Examples[/b]

    headwise lab                            the claims and their verdicts
    headwise lab show scale-variance        the figures behind one of them
    headwise lab run scale-variance         run its experiment here
    headwise lab run scale                  all claims of a topic
    headwise lab run --all                  every claim, in minutes on two cores
    headwise lab run --all --full           at full size, on a GPU
    headwise lab handbook                   a text to learn from, written from the results
    """
    if context.invoked_subcommand is not None:
        return
    folders = [out or record.own_folder(), record.RECORDED]
    with explained(zh):
        found = [(claim, record.best(claim, folders)) for claim in CLAIMS]
    if as_json:
        typer.echo(lab_view.as_json([record.described(*each) for each in found]))
    else:
        lab_view.show_list(Console(), found, zh)


@app.command("run")
def run_claims(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Claims or topics.", show_default=False)
    ] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="Every claim.")] = False,
    full: Annotated[bool, typer.Option("--full", help="At full size: needs a GPU.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Also run what has a current result.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda; by default cpu, and with --full a GPU if there is one."),
    ] = None,
    out: Out = None,
    as_json: AsJson = False,
    zh: Zh = False,
) -> None:
    """Run experiments, write their results and pictures, and print the verdicts.

    An interrupted run continues when the same command is given again.

    [b]Examples[/b]

    headwise lab run scale-variance scale-saturation

    headwise lab run --all --out results
    """
    if all_of_them == bool(ids):
        raise typer.BadParameter("name claims or topics, or use --all; headwise lab lists them")
    folder = out or record.own_folder()
    form = "full" if full else "quick"
    results = []
    with explained(zh), lab_view.progress(as_json) as tell:
        claims = list(CLAIMS) if all_of_them else find(ids or [])
        lab = Lab(form, devices.chosen(device if device or full else "cpu"))
        try:
            for result in run(claims, lab, folder, again=again, tell=tell):
                results.append(result)
                if not as_json:
                    tell.finished(result, zh)
        except KeyboardInterrupt:
            typer.echo(
                f"stopped; {len(results)} of {len(claims)} results are in {folder}; "
                "the same command continues",
                err=True,
            )
            raise typer.Exit(130) from None
    if as_json:
        entries = [record.described(find([result.id])[0], result) for result in results]
        typer.echo(lab_view.as_json(entries))
    if len(results) < len(claims):
        raise typer.Exit(1)
    if as_json:
        return
    pictures = "results and pictures" if available() else "results (pictures need matplotlib)"
    typer.echo(f"{pictures} in {folder}; to see one: headwise lab show {claims[0].id}", err=True)


@app.command()
def show(
    id: Annotated[str, typer.Argument(help="A claim.", show_default=False)],
    out: Out = None,
    as_json: AsJson = False,
    zh: Zh = False,
) -> None:
    """Show one claim: its sentence, its derivation, the figures and the verdict.

    [b]Example[/b]

    headwise lab show scale-variance
    """
    with explained(zh):
        claims = find([id])
        if len(claims) > 1:
            raise typer.BadParameter(
                f"{id} is a topic; show one of {', '.join(claim.id for claim in claims)}"
            )
        (claim,) = claims
        result = record.best(claim, [out or record.own_folder(), record.RECORDED])
    if as_json:
        typer.echo(json.dumps(record.described(claim, result), indent=2, ensure_ascii=False))
    else:
        lab_view.show_claim(Console(), claim, result, zh)


@app.command("handbook")
def write_handbook(
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("handbook"),
    results: Annotated[
        Path | None,
        typer.Option(help="A folder of your results; the recorded ones fill in what it lacks."),
    ] = None,
) -> None:
    """Write the handbook, which explains attention with the verdicts and figures of the lab.

    Its pages are Markdown, in English and in 中文, with pictures.

    [b]Example[/b]

    headwise lab handbook --out docs/handbook
    """
    folders = [record.RECORDED] if results is None else [results, record.RECORDED]
    with explained(zh=False):
        written = handbook.write(out, folders)
    typer.echo(f"{len(written)} files in {out}; begin with {out / 'index.md'}")
