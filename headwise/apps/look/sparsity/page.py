"""The page's "Sparse": a report of `headwise sparse`, as it was recorded."""

from __future__ import annotations

from pathlib import Path

from headwise.apps.interface.page import Route
from headwise.apps.interface.reply import Answer, Query, Refusal, as_json
from headwise.apps.look.serving import view_file
from headwise.apps.look.session import Session
from headwise.apps.look.sparse_report import SparseReport
from headwise.messages import say


def write(report: SparseReport, path: Path) -> int:
    """Write the report as a page in one file; returns the size."""
    return view_file.write("sparse", {"/api/sparse": answer(report)}, path)


def answer(report: SparseReport) -> dict[str, object]:
    """The report as the page reads it."""
    return report.as_dictionary() | {"policies": report.policies}


def sparse(session: Session, query: Query) -> Answer:
    """The report that the session was opened with."""
    if session.sparse is None:
        hint = say("open one with headwise look REPORT.json; headwise sparse --json writes it")
        raise Refusal(404, say("there is no report of headwise sparse"), hint)
    return as_json(answer(session.sparse))


ROUTES: tuple[Route, ...] = ((r"/api/sparse", sparse),)
