"""The notebooks as pages: their text, their code, and the outputs that are kept in them.

The text of a cell is English; its 中文 is in the metadata of the cell, as "zh".
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from website.contents import Language


def read_notebook(file: Path, language: Language) -> dict[str, Any]:
    """A notebook with its text in a language."""
    notebook: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            chinese = cell["metadata"].pop("zh")
            cell["source"] = chinese if language == "zh" else cell["source"]
    return notebook


def notebook_page(notebook: dict[str, Any], name: str, folder: Path, language: Language) -> str:
    """A notebook in Markdown; its figures are written to `folder`, beside the page."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[str] = []
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for count, output in enumerate(cell["outputs"]):
            parts.append(_output(output, folder, f"{name}-{number}-{count}.png"))
    own = f'<a href="{name}.ipynb">{name}.ipynb</a>'
    own = f"笔记本文件：{own}。" if language == "zh" else f"The notebook itself: {own}."
    return "\n\n".join([*parts, own]) + "\n"


def _output(output: dict[str, Any], folder: Path, picture: str) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        (folder / picture).write_bytes(base64.b64decode(data["image/png"]))
        return f"![a figure of this cell]({picture})"
    text = "".join(output.get("text") or data["text/plain"])
    return f"```text\n{text.rstrip()}\n```"
