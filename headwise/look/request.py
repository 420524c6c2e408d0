"""What `headwise look` does with what was asked: draw, write or serve."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from headwise import devices
from headwise.look import session as sessions
from headwise.look import terminal_view as terminal
from headwise.look.atlas import Atlas
from headwise.look.readers import opening, sample
from headwise.look.readers.reader import Reader, Report, silent
from headwise.look.scene import Input
from headwise.look.session import Session
from headwise.look.show import displayed


@dataclass(frozen=True)
class Asked:
    """A model, what it reads, the heads to show, and where to run it."""

    model: str
    what: str | bytes | None
    heads: tuple[str, ...] = ()
    device: str | None = None

    def open(self) -> Reader:
        """The model, ready to read."""
        return opening.opened(self.model, self.device)

    def check(self) -> None:
        """ValueError where there is no such model or device, before anything is loaded."""
        opening.find(self.model)
        devices.chosen(self.device)


def draw(asked: Asked, every: bool, as_json: bool) -> None:
    """Print what the heads do, for someone to see or for a program to read."""
    asked.check()
    reader = asked.open()
    what = sessions.given(reader, asked.what)
    if what is sample.TEXT:  # more than a screen; a translator's is one sentence
        what = terminal.SENTENCE
    read = reader.read(what, silent)
    chosen = [read.find(name)[1] for name in asked.heads]
    if as_json:
        print(json.dumps(terminal.as_dictionary(read, chosen), indent=2, ensure_ascii=False))
    else:
        terminal.show(Console(), read, chosen, every)


def write(asked: Asked, out: Path | None, limit: int, picture: Path | None) -> None:
    """Write the page as a file, or a head as a picture, or both; say where and how large."""
    from headwise.look import pictures
    from headwise.look.serving import page_file as export

    asked.check()
    for path in (out, picture):
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            raise ValueError(f"{path} can't be written: name a file in a folder that is there")
    if picture is not None:
        pictures.check(picture)
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{out} is no page; its name may end in .html")
    with bar() as progress:
        session = Session(sample=asked.what is None)
        session.reader = reader = asked.open()
        read = reader.read(sessions.given(reader, asked.what), shown_in(progress))
        if out is not None:
            session.atlases["0"] = Atlas(read).prepare(shown_in(progress))
            session.progress = sessions.Progress("ready", None)
            size, heads = export.write(session, out, asked.heads, limit)
    if out is not None:
        print(f"{out}: {size / 1e6:.1f} MB, {len(read.main.rows):,} tokens")
        print(export.summary(heads, sum(len(group.heads) for group in read.groups)))
    if picture is not None:
        group, head_drawn = pictures.chosen(read, asked.heads)
        pictures.save(picture, reader.description.name, group, head_drawn)
        print(f"{picture}: head {head_drawn.name}")


def serve(asked: Asked, port: int, no_open: bool) -> None:
    """Serve the page until Ctrl-C."""
    from headwise.look.serving import server

    asked.check()
    bound = server.listening(port)
    address = server.address(bound)
    console = Console(stderr=True)
    print(f"{address}   (Ctrl-C stops it)", flush=True)
    session = Session(sample=asked.what is None)
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
                print(ready(next(reversed(session.atlases.values())).input), flush=True)

        session.heard = heard
        session.run = opening.watched(asked.model)
        if session.run is None or opening.trained_here(Path(asked.model)):
            session.start(asked.open, asked.what)
        else:
            session.tell(sessions.Progress("ready", None))
        if not no_open and displayed():
            webbrowser.open(address)
        with suppress(KeyboardInterrupt):
            server.serve(server.application(session), bound)
    if not session.stop(3):
        # Deep inside a model or a download, which hears of nothing; Python would abort.
        sys.stdout.flush()
        os._exit(0)


def ready(read: Input) -> str:
    """What can be looked at now, in a line."""
    heads = sum(len(group.heads) for group in read.groups)
    return "; ".join([f"{len(read.main.rows):,} tokens, {heads} heads are ready", *read.notes])


def bar(console: Console | None = None) -> Progress:
    """How far the work is, while it goes on."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console or Console(stderr=True), transient=True)


def shown_in(progress: Progress) -> Report:
    """A report that moves a bar."""
    tasks = {"": progress.add_task("loading the model", total=None)}

    def report(stage: str, done: float | None) -> None:
        total = None if done is None else 1.0
        progress.update(tasks[""], description=stage, completed=done or 0, total=total)

    return report
