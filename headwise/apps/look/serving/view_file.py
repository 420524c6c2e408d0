"""One view of the page as one file, without a model: the lab, or a report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.apps.look.pages import PAGES
from headwise.apps.look.serving.page_file import STATIC, template
from headwise.apps.look.session import Progress, Session
from headwise.files import write_whole
from headwise.messages import with_chinese


def write(view: str, answers: Mapping[str, Any], path: Path, static: Path = STATIC) -> int:
    """Write the page with this view alone, and the answers that it asks for; returns the size."""
    before, after = template(static)
    state = Session(progress=Progress("ready", None)).state()
    pages = {name: name == view for name in ("heads", *PAGES)}
    state |= {"pages": pages, "static": {"heads": [], "reasons": []}}
    told = {"/api/state": with_chinese(state), **answers}
    kept = {"version": state["version"], "answers": {x: {"json": y} for x, y in told.items()}}
    data = json.dumps(kept, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    content = (before + data + after).encode(errors="replace")
    write_whole(path.resolve(), content)
    return len(content)
