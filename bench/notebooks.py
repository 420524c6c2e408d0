"""Run the notebooks of the documentation and keep their outputs: python -m bench.notebooks [name]

Cells run in order in one namespace, as in Jupyter: the value of a last expression is an output, and
so is every figure that is drawn. Outputs are written back, so that readers need no kernel.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import time
from pathlib import Path
from typing import Any

from bench import described

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "notebooks"
DPI = 72
"""Pixels per inch of a kept figure: small enough for the repository."""


def names() -> list[str]:
    """The notebooks there are."""
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> dict[str, Any]:
    """A notebook as a dictionary."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return found


def run(notebook: dict[str, Any], name: str = "notebook") -> None:
    """Run all code cells and put their outputs into the notebook; an error of a cell is raised.

    >>> made = {"cells": [{"cell_type": "code", "source": ["print(6 * 7)\\n", "'so'"]}]}
    >>> run(made)
    >>> [output["output_type"] for output in made["cells"][0]["outputs"]]
    ['stream', 'execute_result']
    """
    import matplotlib

    matplotlib.use("agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        cell["execution_count"] = number
        cell["outputs"] = _outputs("".join(cell["source"]), f"{name}, cell {number}", namespace)
        for output in cell["outputs"]:
            if output["output_type"] == "execute_result":
                output["execution_count"] = number


def _outputs(source: str, name: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one cell; its printed text, its figures and the value of its last expression."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value = None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    found: list[dict[str, Any]] = []
    if text := printed.getvalue():
        found.append({"output_type": "stream", "name": "stdout", "text": _lines(text)})
    found += _figures()
    if value is not None:
        shown = {"text/plain": _lines(repr(value))}
        found.append({"output_type": "execute_result", "data": shown, "metadata": {}})
    return found


def _figures() -> list[dict[str, Any]]:
    """The figures that were drawn, as pictures; they are closed."""
    import matplotlib.pyplot as plt

    found = []
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=DPI, bbox_inches="tight")
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
        found.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return found


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    """Run the notebooks with these names, or all, and write their outputs."""
    parser = described(__doc__)
    parser.add_argument("name", nargs="*", help=", ".join(names()))
    chosen = parser.parse_args().name
    if unknown := set(chosen) - set(names()):
        parser.error(f"there is no notebook {', '.join(sorted(unknown))}")
    for name in chosen or names():
        began, notebook = time.perf_counter(), read(name)
        run(notebook, name)
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        (FOLDER / f"{name}.ipynb").write_text(text, encoding="utf-8")
        print(f"{name}: {time.perf_counter() - began:.1f} s, {len(text) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
