"""The lab as one file: every claim with its recorded results, and the verdicts at other sizes."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

from headwise.apps.look.pages import PAGES
from headwise.apps.look.serving.page_file import STATIC, template
from headwise.apps.look.session import Progress, Session
from headwise.files import write_whole
from headwise.messages import with_chinese


def write(path: Path, static: Path = STATIC) -> int:
    """Write the page with the lab alone, without a model; returns the size."""
    before, after = template(static)
    state = Session(progress=Progress("ready", None)).state()
    pages = {name: name == "lab" for name in ("heads", *PAGES)}
    state |= {"pages": pages, "static": {"heads": [], "reasons": []}}
    recorded = import_module(PAGES["lab"].answers).recorded()
    answers = {"/api/state": with_chinese(state), **recorded}
    kept = {"version": state["version"], "answers": {x: {"json": y} for x, y in answers.items()}}
    data = json.dumps(kept, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    content = (before + data + after).encode(errors="replace")
    write_whole(path.resolve(), content)
    return len(content)
