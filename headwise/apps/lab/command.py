"""`headwise lab`: list the claims with their verdicts, run their experiments, show one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from headwise import devices
from headwise.apps.interface.terminal import Zh, explained, json_text
from headwise.apps.lab import ablations, design, handbook, own_claims, record
from headwise.apps.lab import command_view as lab_view
from headwise.apps.lab.claim import TOPICS, Claim
from headwise.apps.lab.claims import CLAIMS
from headwise.apps.lab.drawing import available
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.runner import find, run
from headwise.apps.lab.sessions import long_runs, pieces
from headwise.apps.lab.sessions.long_runs import LabSession
from headwise.apps.lab.sessions.pool import Ended
from headwise.messages import say

app = typer.Typer(
    name="lab",
    rich_markup_mode="rich",
    invoke_without_command=True,
)


def begun_names(incomplete: str) -> list[tuple[str, str]]:
    """Claims, topics and files that a shell completes a name to, with what they are about."""
    about = {claim.id: str(claim.sentence) for claim in CLAIMS} | {x: y for x, y in TOPICS.items()}
    about |= {str(file): "" for file in Path().glob("*.py")}
    return [(name, text) for name, text in about.items() if name.startswith(incomplete)]


def begun_settings(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """The settings of the named claims that a shell completes to, with what they are."""
    there = {
        f"{name}=": design.written(sizes["quick"])
        for claim in CLAIMS
        if claim.id in (context.params.get("ids") or ())
        for name, sizes in design.settings(claim).items()
    }
    return [(name, text) for name, text in there.items() if name.startswith(incomplete)]


Out = Annotated[
    Path | None,
    typer.Option(help="The folder of your results; by default one in your cache."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AT_ONCE = 3
"""Stacks of translators in training: while one is measured, others keep the GPU busy."""

Minutes = Annotated[
    float | None,
    typer.Option(max=10**6, help="Stop after so many minutes; the same command continues."),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="Processes that share the work; by default one per core."),
]
Form = Annotated[str | None, typer.Option(hidden=True)]


def device_for(form: str, name: str | None) -> torch.device:
    """The device of a form: a GPU for the full one, unless another is named."""
    if form != "full" and name is None:
        return devices.chosen("cpu")
    device = devices.chosen(name)
    if form == "full" and name is None and device.type == "cpu":
        raise ValueError(
            say(
                "the full form takes hours without a GPU, and there is none here; --device cpu "
                "runs it all the same"
            )
        )
    return device


def session(
    form: str, device: str | None, folder: Path, minutes: float, workers: int | None
) -> LabSession:
    """A session of long work; what ends is printed line by line."""

    def tell(ended: Ended) -> None:
        how = "failed: " if ended.code else ""
        typer.echo(f"{ended.name:<28} {ended.seconds:7.1f} s  {how}{ended.last_line}")

    def watch(name: str, line: str) -> None:
        typer.echo(f"{name:<28}   {line}")

    lab = Lab(form, device_for(form, device), folder)
    return LabSession(lab, workers or devices.usable_cores(), 60 * minutes, tell, watch)


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
    headwise lab run qk-gradient --seeds 20 --set steps=50     with sizes of yours
    headwise lab run my_claim.py            a claim of your own
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
        typer.echo(json_text([record.described(*each) for each in found]))
    else:
        lab_view.show_list(Console(), found, zh)


@app.command("run")
def run_claims(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            help="Claims, topics, or files of your own claims.",
            show_default=False,
            autocompletion=begun_names,
        ),
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
    seeds: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="Trainings of each model.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, max=10**9, help="Steps of each training.")
    ] = None,
    set_to: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Another setting, as name=value; commas join several values. headwise lab show "
            "lists those of a claim.",
            autocompletion=begun_settings,
        ),
    ] = None,
    minutes: Minutes = None,
    workers: Workers = None,
    only_read: Annotated[bool, typer.Option("--only-read", hidden=True)] = False,
    form: Form = None,
    out: Out = None,
    as_json: AsJson = False,
    zh: Zh = False,
) -> None:
    """Run experiments, write their results and pictures, and print the verdicts.

    An interrupted run continues when the same command is given again. With
    --minutes it stops by itself after so long, and several processes share
    the work: what takes long is done in pieces that are kept.

    With settings of yours a claim is another experiment than the one that was
    registered: its result goes to a folder of its own, named after them. A
    file that ends in .py may define claims of your own.

    [b]Examples[/b]

    headwise lab run scale-variance scale-saturation

    headwise lab run --all --out results

    headwise lab run --all --full --minutes 9 --workers 16

    headwise lab run dot-small --seeds 5 --steps 400 --set d_k=4,256

    headwise lab run my_claim.py
    """
    if all_of_them == bool(ids):
        raise typer.BadParameter("name claims or topics, or use --all; headwise lab lists them")
    folder = out or record.own_folder()
    form = form or ("full" if full else "quick")
    with explained(zh):
        claims = list(CLAIMS) if all_of_them else find(ids or [], files=True)
        settings = design.read_settings(claims, texts_of(seeds, steps, set_to or []))
    if settings:
        folder /= ",".join(f"{name}={design.written(x)}" for name, x in settings.items())
    if minutes is not None and settings:
        raise typer.BadParameter("--minutes runs the registered sizes; leave out your settings")
    if minutes is not None:
        with explained(zh):
            held = session(form, device, folder, minutes, workers)
            left = long_runs.run_claims(held, claims)
        tell_rest(claims, left, folder)
        return
    with explained(zh):
        lab = Lab(form, device_for(form, device), only_reads=only_read, settings=settings)
        results = run_all(claims, lab, folder, again, as_json, zh)
    if as_json:
        by_id = {claim.id: claim for claim in claims}
        entries = [record.described(by_id[result.id], result) for result in results]
        typer.echo(json_text(entries))
    if len(results) < len(claims):
        raise typer.Exit(1)
    if as_json:
        return
    pictures = "results and pictures" if available() else "results (pictures need matplotlib)"
    where = "" if folder == record.own_folder() else f" --out {shlex.quote(str(folder))}"
    shown = next((id for id in ids or [] if id.endswith(".py")), claims[0].id)
    typer.echo(f"{pictures} in {folder}; to see one: headwise lab show {shown}{where}", err=True)


def texts_of(seeds: int | None, steps: int | None, set_to: Sequence[str]) -> dict[str, str]:
    """The settings that were given, by name."""
    given = {"seeds": seeds, "steps": steps}
    texts = {name: str(value) for name, value in given.items() if value is not None}
    for each in set_to:
        name, equals, value = each.partition("=")
        if not equals:
            raise ValueError(say("--set {each} has no value; write --set name=value", each=each))
        texts[name.strip()] = value.strip()
    return texts


def run_all(
    claims: list[Claim], lab: Lab, folder: Path, again: bool, as_json: bool, zh: bool
) -> list[record.Result]:
    """Run the claims one after the other, with their progress, and return those that ended."""
    results = []
    by_id = {claim.id: claim for claim in claims}
    varied = bool(lab.settings) or any(claim.own for claim in claims)
    with lab_view.progress(as_json) as tell:
        try:
            for result in run(claims, lab, folder, again=again, tell=tell):
                results.append(result)
                if not as_json:
                    tell.finished(result, zh)
                    if lab.settings:
                        tell.beside_recorded(by_id[result.id], result, zh)
        except KeyboardInterrupt:
            typer.echo(
                f"stopped; {len(results)} of {len(claims)} results are in {folder}; "
                "the same command continues",
                err=True,
            )
            raise typer.Exit(130) from None
        except (ArithmeticError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            if not varied:
                raise
            raise own_claims.failure(tell.named, error) from error
    return results


def tell_rest(claims: Sequence[Claim], left: Sequence[Claim], folder: Path) -> None:
    """Print which of the claims have results and which are left for the next session."""
    typer.echo(f"{len(claims) - len(left)} of {len(claims)} claims have results in {folder}")
    if left:
        typer.echo(f"the same command continues with {', '.join(x.id for x in left)}")


@app.command()
def show(
    id: Annotated[
        str,
        typer.Argument(
            help="A claim, or a file of your own claims.",
            show_default=False,
            autocompletion=begun_names,
        ),
    ],
    out: Out = None,
    as_json: AsJson = False,
    zh: Zh = False,
) -> None:
    """Show one claim: its sentence, its derivation, the figures and the verdict.

    [b]Example[/b]

    headwise lab show scale-variance
    """
    with explained(zh):
        claims = find([id], files=True)
        if len(claims) > 1 and id in TOPICS:
            raise typer.BadParameter(
                f"{id} is a topic; show one of {', '.join(claim.id for claim in claims)}"
            )
        folders = [out or record.own_folder(), record.RECORDED]
        found = [(claim, record.best(claim, folders)) for claim in claims]
    if as_json:
        entries = [record.described(*each) for each in found]
        typer.echo(json_text(entries if len(entries) > 1 else entries[0]))
        return
    for claim, result in found:
        lab_view.show_claim(Console(), claim, result, zh)


@app.command()
def table(
    minutes: Annotated[
        float,
        typer.Option(max=10**6, help="Stop after so many minutes; the same command continues."),
    ] = 9.0,
    workers: Workers = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default a GPU if there is one.")
    ] = None,
    form: Form = None,
    out: Out = None,
) -> None:
    """Train the translators of the translation table, several at a time, and write the table.

    Each gets the rate that suits it best, and all its seeds are trained as
    one stack of models; --workers processes share the GPU. What is finished
    is kept, and the same command continues. The table, with all runs and the
    time they took, is translation.full.json in the folder.

    [b]Example[/b]

    headwise lab table --minutes 9 --workers 3 --out results
    """
    folder = out or record.own_folder()
    with explained(zh=False):
        held = session(form or "full", device, folder, minutes, workers or AT_ONCE)
        done, planned = long_runs.train_table(held)
    typer.echo(f"{done} of {planned} rows are trained; the table is in {folder}")
    if done < planned:
        typer.echo("the same command continues")


@app.command(hidden=True)
def piece(
    names: Annotated[list[str], typer.Argument()],
    full: Annotated[bool, typer.Option("--full")] = False,
    form: Form = None,
    device: Annotated[str | None, typer.Option()] = None,
    out: Out = None,
) -> None:
    """Make pieces of a long experiment: what the processes of a session run."""
    with explained(zh=False):
        lab = Lab(form or ("full" if full else "quick"), devices.chosen(device), out)
        known = {each.name: each for each in pieces.every(lab)}
        for name in names:
            if name not in known:
                raise ValueError(f"there is no piece {name!r}; there are {', '.join(known)}")
    for name in names:
        known[name].make(lab)


@app.command(hidden=True)
def register() -> None:
    """Register the designs of all claims as they stand, before their experiments run."""
    changed = design.register(CLAIMS, table=ablations.design_hash())
    typer.echo(f"{len(changed)} designs are new or changed: {', '.join(changed) or 'none'}")


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
