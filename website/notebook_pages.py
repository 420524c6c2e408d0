"""The notebooks as pages: their text, their code, and the outputs that are kept in them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any


def notebook_page(file: Path, folder: Path) -> str:
    """A notebook in Markdown; its figures are written to `folder`, beside the page."""
    folder.mkdir(parents=True, exist_ok=True)
    name = file.stem
    parts: list[str] = []
    for number, cell in enumerate(json.loads(file.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for count, output in enumerate(cell["outputs"]):
            parts.append(_output(output, folder, f"{name}-{number}-{count}.png"))
    own = f'The notebook itself: <a href="{name}.ipynb">{name}.ipynb</a>.'
    return "\n\n".join([*parts, own]) + "\n"


def _output(output: dict[str, Any], folder: Path, picture: str) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        (folder / picture).write_bytes(base64.b64decode(data["image/png"]))
        return f"![a figure of this cell]({picture})"
    text = "".join(output.get("text") or data["text/plain"])
    return f"```text\n{text.rstrip()}\n```"
