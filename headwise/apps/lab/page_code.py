"""The code of an experiment as the page shows it: a function, and what it uses of its file."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from headwise.apps.lab.fingerprint import FRAME, HERE, parsed


@dataclass(frozen=True)
class Piece:
    """A definition at the top of a file: a function, a class or a constant."""

    file: str
    line: int
    source: str


def code(function: Callable[..., Any]) -> list[Piece]:
    """The source of a function and of what it uses in the lab, each before what it uses itself.

    >>> from headwise.apps.lab.experiments.why_scale import drawn
    >>> code(drawn)[0].source.partition("(")[0]
    'def drawn'
    """
    if isinstance(function, partial):
        return code(function.func)
    plain = inspect.unwrap(function)
    waiting = [(plain.__module__, plain.__qualname__)]
    found: dict[tuple[str, str], Piece] = {}
    while waiting:
        module, name = waiting.pop(0)
        if (module, name) in found or name not in _definitions(module):
            continue
        node, piece = _definitions(module)[name]
        found[module, name] = piece
        waiting += _uses(module, node)
    return list(found.values())


@lru_cache(maxsize=256)
def _definitions(module: str) -> dict[str, tuple[ast.stmt, Piece]]:
    """The definitions at the top of a module's file, by name."""
    source = inspect.getsource(sys.modules[module])
    lines = source.splitlines()
    found = {}
    for node in parsed(source).body:
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        text = "\n".join(lines[first - 1 : node.end_lineno])
        for name in _names(node):
            found[name] = (node, Piece(module.replace(".", "/") + ".py", first, text))
    return found


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _uses(module: str, node: ast.stmt) -> list[tuple[str, str]]:
    """The definitions of the lab that a definition names, in the order it names them."""
    imported = _imports(module)
    found = []
    for each in _in_order(node):
        if isinstance(each, ast.Name):
            found.append(imported.get(each.id, (module, each.id)))
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            found.append((".".join(imported.get(each.value.id, ())), each.attr))
    return [
        (where, name)
        for where, name in found
        if where.startswith(HERE) and where not in FRAME and where in sys.modules
    ]


@lru_cache(maxsize=256)
def _imports(module: str) -> dict[str, tuple[str, str]]:
    """The names that a module imports: the module that each comes from, and its name there."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in parsed(inspect.getsource(sys.modules[module])).body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _in_order(node: ast.AST) -> list[ast.AST]:
    """A node and what is inside it, as it is read: from the top down."""
    return [node, *(each for child in ast.iter_child_nodes(node) for each in _in_order(child))]
