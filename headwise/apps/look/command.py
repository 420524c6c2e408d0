"""`headwise look`: serves the page, writes it to a file, or draws in the terminal."""

from __future__ import annotations

import json
import os
import re
import select
import stat
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headwise import devices
from headwise.apps.interface.pictures import check
from headwise.apps.interface.terminal import bar, explained, shown_in
from headwise.apps.look import pictures, terminal_view
from headwise.apps.look import session as sessions
from headwise.apps.look.atlas import Atlas
from headwise.apps.look.fit import remarks
from headwise.apps.look.pages import PAGES
from headwise.apps.look.places import check_place
from headwise.apps.look.readers import opening
from headwise.apps.look.readers.reader import SAMPLE_TEXT, Given, Illustrated, Reader, silent
from headwise.apps.look.serving import page_file, view_file
from headwise.apps.look.session import Session
from headwise.apps.look.show import displayed
from headwise.apps.look.sparsity import page as sparsity
from headwise.messages import printable
from headwise.models.trained import holds_trained_model

app = typer.Typer()


def _hidden_default(help: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(help=help, show_default=False)
    return found


Model = Annotated[
    str,
    typer.Argument(
        help="gpt, translate, a run's folder, a transformers model's folder or name, or a report "
        "of headwise sparse."
    ),
]
Text = Annotated[str | None, _hidden_default("The text to read.")]
File = Annotated[
    typer.FileText | None,
    typer.Option(
        help="A UTF-8 file to read; - is standard input.", encoding="utf-8", show_default=False
    ),
]
Images = Annotated[
    list[Path] | None,
    _hidden_default(
        "A PNG or JPEG for a vision model; with --text for one that reads both, which may be given "
        "several."
    ),
]
Heads = Annotated[list[str] | None, _hidden_default("A head by layer and number: 5.1, cross:0.3.")]
Beside = Annotated[
    Path | None, _hidden_default("Of a run's folder: another run to compare it with.")
]
Spans = Annotated[
    list[str] | None, _hidden_default("Show the weight on a range of tokens: system=0:57.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; the GPU if there is one.")]
Port = Annotated[int, typer.Option(help="0 takes any free port.", min=0, max=65535)]
NoOpen = Annotated[bool, typer.Option("--no-open", help="Open no browser.")]
Out = Annotated[Path | None, _hidden_default("Write the page as one file.html.")]
Limit = Annotated[str, typer.Option(help="The largest file that --out writes.")]
Picture = Annotated[Path | None, _hidden_default("Draw --head as an .svg, .pdf or .png.")]
OfLab = Annotated[
    bool, typer.Option("--lab", help="With --out: write the lab, with every claim, and no model.")
]
InTerminal = Annotated[bool, typer.Option("--terminal", help="Draw in the terminal.")]
Every = Annotated[bool, typer.Option("--all", help="With --terminal: list every head.")]
Reason = Annotated[
    str | None,
    _hidden_default("List the edges behind the prediction at this token, or at its number."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print tokens, figures and, with --head, maps.")
]


@dataclass(frozen=True)
class Asked:
    """A model, its input, the heads to show, and the device to run it on."""

    model: str
    input: Given | None
    heads: tuple[str, ...] = ()
    device: str | None = None
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def open(self) -> Reader:
        """Load the model."""
        return opening.opened(self.model, self.device)

    def check(self) -> None:
        """ValueError if there is no such model or device, before anything is loaded."""
        opening.find(self.model)
        devices.chosen(self.device)


@app.command()
def look(
    model: Model = "gpt",
    text: Text = None,
    file: File = None,
    image: Images = None,
    head: Heads = None,
    span: Spans = None,
    beside: Beside = None,
    device: Device = None,
    port: Port = 0,
    no_open: NoOpen = False,
    out: Out = None,
    limit: Limit = "20MB",
    picture: Picture = None,
    in_terminal: InTerminal = False,
    every: Every = False,
    why: Reason = None,
    lab: OfLab = False,
    as_json: AsJson = False,
) -> None:
    """See what a model's attention heads do with a text, on a page in your browser.

    The built-in [b]gpt[/b] reads English. The built-in [b]translate[/b] shows which English token
    each French one looks at. The page is served to this machine alone.

    [b]Examples[/b]

    headwise look

    headwise look translate --text 'The cat is black.'

    headwise look gpt --file speech.txt --out speech.html

    headwise look --text 'to be or not to be' --head 5.1 --picture head.svg

    headwise look --lab --out lab.html

    headwise look report.json    of headwise sparse --json > report.json

    headwise look --terminal --text 'to be or not to be' --head 5.1

    headwise look --terminal --text 'to be or not to be' --span start=0:3

    headwise look --text 'My dog chased the ball. My dog' --why dog
    """
    if (in_terminal or as_json) and (out is not None or picture is not None):
        raise typer.BadParameter("--terminal and --json print; --out and --picture write")
    if lab and out is None:
        raise typer.BadParameter("--lab goes with --out lab.html; the page always has the lab")
    spans = dict(map(named_span, span or ()))
    asked = Asked(model, given(text, file, image), tuple(head or ()), device, spans)
    with explained(zh=False):
        asked.check()
        if lab and out is not None:
            check_place(out, page=True)
            size = view_file.write("lab", import_module(PAGES["lab"].answers).recorded(), out)
            print(f"{out}: {size / 1e6:.1f} MB")
        elif why is not None:
            explain(asked, why, as_json)
        elif in_terminal or as_json:
            draw(asked, every, as_json)
        elif out is not None or picture is not None:
            write(asked, out, number_of_bytes(limit), picture, beside)
        else:
            serve(asked, port, no_open, beside)


def explain(asked: Asked, token: str, as_json: bool) -> None:
    """Print the edges behind a prediction, as a table or as JSON."""
    reader = asked.open()
    what = sessions.given(reader, asked.input)
    if what is SAMPLE_TEXT:
        what = terminal_view.SENTENCE
    told = terminal_view.explained(reader.read(what, silent), token)
    if as_json:
        print(json.dumps(told.to_dict(terminal_view.LISTED), indent=2, ensure_ascii=False))
    else:
        terminal_view.show_reasons(Console(), told)


def draw(asked: Asked, every: bool, as_json: bool) -> None:
    """Print the heads, as figures in the terminal or as JSON."""
    reader = asked.open()
    what = sessions.given(reader, asked.input)
    if what is SAMPLE_TEXT:  # more than a screen
        what = terminal_view.SENTENCE
    read = reader.read(what, silent).marked(asked.spans)
    chosen = [read.find(name)[1] for name in asked.heads]
    if as_json:
        print(json.dumps(terminal_view.as_dictionary(read, chosen), indent=2, ensure_ascii=False))
    else:
        terminal_view.show(Console(), read, chosen, every)


def write(
    asked: Asked, out: Path | None, limit: int, picture: Path | None, beside: Path | None = None
) -> None:
    """Write the page as a file, or a head as a picture, or both; print their names and sizes."""
    for path in (out, picture):
        if path is not None:
            check_place(path, page=path == out)
    if picture is not None:
        check(picture)
    report = opening.report(asked.model)
    if out is not None and report is not None:
        print(f"{out}: {sparsity.write(report, out) / 1e6:.1f} MB")
        return
    run = opening.watched(asked.model)
    if out is not None and run is not None and not holds_trained_model(Path(asked.model)):
        print(f"{out}: {view_file.write_run(run.folder, out, beside, limit) / 1e6:.1f} MB")
        return
    with bar() as progress:
        session = Session(sample=asked.input is None)
        session.reader = reader = asked.open()
        read = reader.read(sessions.given(reader, asked.input), shown_in(progress))
        read = read.marked(asked.spans)
        if out is not None:
            session.atlases["0"] = Atlas(read).prepare(shown_in(progress))
            session.progress = sessions.Progress("ready", None)
            size, heads = page_file.write(session, out, asked.heads, limit)
    if out is not None:
        print(f"{out}: {size / 1e6:.1f} MB, {len(read.main.rows):,} tokens")
        print(page_file.summary(heads, sum(len(group.heads) for group in read.groups)))
    if picture is not None:
        group, head = pictures.chosen(read, asked.heads)
        boxes = pictures.save(picture, reader.description.name, group, head)
        print(f"{picture}: head {head.name}")
        if boxes:
            said = (
                f"no font here has {boxes[:20]}, drawn as boxes: install Noto Sans CJK, or use .svg"
            )
            typer.echo(said, err=True)


def serve(asked: Asked, port: int, no_open: bool, beside: Path | None = None) -> None:
    """Serve the page until Ctrl-C."""
    from headwise.apps.look.serving import server  # needs the extra headwise[look]

    bound = server.listening(port)
    address = server.address(bound)
    console = Console(stderr=True)
    print(f"{address}   (Ctrl-C stops it)", flush=True)
    session = Session(sample=asked.input is None, spans=asked.spans)
    with bar(console) as progress:
        report = shown_in(progress)

        def heard(now: sessions.Progress) -> None:
            if now.stage is not None:
                report(now.stage, now.done)
                return
            progress.stop()
            if now.problem is not None:
                console.print(now.problem.error, style="red", markup=False)
            elif session.atlases:
                read = next(reversed(session.atlases.values())).input
                heads = sum(len(group.heads) for group in read.groups)
                ready = f"{len(read.main.rows):,} tokens, {heads} heads are ready"
                notes = map(printable, (*read.notes, *remarks(read)))
                print("; ".join([ready, *notes]), flush=True)

        session.heard = heard
        session.run = opening.watched(asked.model)
        session.sparse = opening.report(asked.model)
        if beside is not None:
            session.beside = opening.watched(str(beside))
            if session.beside is None or session.run is None:
                wrong = beside if session.beside is None else asked.model
                raise ValueError(f"--beside compares two watched runs, and {wrong} is none")
        alone = session.run is None and session.sparse is None
        if alone or holds_trained_model(Path(asked.model)):
            session.start(asked.open, asked.input)
        else:
            session.tell(sessions.Progress("ready", None))
        if not no_open and displayed():
            webbrowser.open(address)
        with suppress(KeyboardInterrupt):
            server.serve(server.application(session), bound)
    if not session.stop(3):
        # The thread is deep inside a model or a download; Python would wait for it and abort.
        sys.stdout.flush()
        os._exit(0)


def given(
    text: str | None, file: typer.FileText | None, images: Sequence[Path] | None
) -> Given | None:
    """The input of the command line: --text or --file, --image, both, or what is piped in."""
    if text is not None and file is not None:
        raise typer.BadParameter("give one of --text and --file")
    try:
        written = text if file is None else file.read()
        if images:
            read = tuple(image.read_bytes() for image in images)
            if written is None and len(read) > 1:
                raise typer.BadParameter(f"{len(read)} images need a --text about them")
            return read[0] if written is None else Illustrated(read, written)
        if file is not None:
            return written
        if text is None and piped():
            return sys.stdin.buffer.read().decode() or None
    except UnicodeDecodeError as error:
        name = "standard input" if file is None else file.name
        raise typer.BadParameter(f"{name} is not text in UTF-8: {error}") from error
    except OSError as error:
        raise typer.BadParameter(f"the input can't be read: {error}") from error
    return text


def piped() -> bool:
    """True if another program or a file has begun to feed standard input."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or replaced by an object without a file descriptor
        return False
    if stat.S_ISFIFO(mode):
        # Reading a pipe that nobody writes to would wait for ever.
        begun = sys.platform != "win32" and bool(select.select([sys.stdin], [], [], 1)[0])
        if not begun:
            said = "standard input was silent for a second and is ignored; --file - waits for it"
            typer.echo(said, err=True)
        return begun
    return stat.S_ISREG(mode)


def named_span(written: str) -> tuple[str, tuple[int, int]]:
    """Parse a span such as system=0:57: its name, its first token and the one after its last.

    >>> named_span("system=0:57")
    ('system', (0, 57))
    """
    match = re.fullmatch(r"([\w.-]+)=(\d{1,9}):(\d{1,9})", written)
    if match is None or int(match[2]) >= int(match[3]):
        raise typer.BadParameter(f"--span {written[:40]!r} is not a span; try system=0:57")
    return match[1], (int(match[2]), int(match[3]))


def number_of_bytes(written: str) -> int:
    """Parse a size such as 20MB, 512kB or 1 GB.

    >>> number_of_bytes("1.5MB")
    1500000
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?)b?\s*", written, re.IGNORECASE)
    if match is None or len(match[1]) > 15:
        raise typer.BadParameter(f"--limit {written[:40]!r} is not a size; try 20MB")
    return int(float(match[1]) * 1000 ** " kmg".index(match[2].lower() or " "))
