"""A hash of the code of an experiment, to tell whether a result comes from the code that is here.

It covers a function, everything of `headwise.apps.lab` that it uses by name (functions, classes,
constants), and what those use, but not the frame around experiments. Comments, docstrings and
formatting do not count, nor do the names of settings, the rule, the drawing and the texts of a
claim: a better wording does not make a measurement stale. Nor does the place of the code: a
function that moves to another module, or the whole lab to another folder, is the same code. The
rest of headwise is covered by its version.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import json
import re
import textwrap
import threading
import tokenize
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache, partial
from types import FunctionType, ModuleType
from typing import Any

from headwise.messages import Sentence

HERE = f"{__package__}."
OWN = "headwise_lab_claims_"
"""How the names of modules begin that a user's own claims are read into."""
WORDS = ("both", "Sentence")
"""Calls that make texts for people; a rule is the same rule with another wording."""
NAMED = re.compile(r"""\.pick\(["'][^"']*["'],""")
FRAME = {f"{HERE}{name}" for name in ("charts", "claim", "fingerprint", "laboratory")}
_ONE_AT_A_TIME = threading.Lock()  # Python 3.11's ast counts its depth for all threads together
PLAIN = (int, float, complex, str, tuple, list, dict, range, type(None))


def fingerprint(experiment: Any, settings: object = None) -> str:
    """Sixteen hexadecimal digits of the code of a function, and of settings ready for JSON.

    >>> from headwise.apps.lab.experiments.why_scale import drawn, jacobian_norm
    >>> fingerprint(drawn) == fingerprint(drawn) != fingerprint(jacobian_norm)
    True
    """
    parts = sorted((name.rpartition(".")[2], code) for name, code in covered(experiment).items())
    text = json.dumps([parts, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def covered(experiment: Any, read: Callable[[str], str] | None = None) -> dict[str, str]:
    """The functions, classes and constants that the fingerprint covers: their code by name.

    `read` turns a source into what counts of it, `bare` by default.
    """
    parts: dict[str, str] = {}
    _collect(experiment, "", parts, read or bare)
    return parts


def _collect(value: Any, name: str, parts: dict[str, str], read: Callable[[str], str]) -> None:
    """Add the source of a value, and of what it uses, to `parts`."""
    value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, partial):
        _collect(value.func, name, parts, read)
        parts[f"{name}()"] = repr((value.args, sorted(value.keywords.items())))
    elif isinstance(value, FunctionType | type):
        key = f"{value.__module__}.{value.__qualname__}"
        if not _counts(value.__module__) or key in parts:
            return
        if value.__name__ == "<lambda>":
            raise ValueError(f"{name} uses a lambda, whose code can't be told apart; use def")
        source = _source(value)
        parts[key] = read(source)
        for used, found in _used(value, source):
            _collect(found, used, parts, read)
    elif isinstance(value, PLAIN) or is_dataclass(value):
        parts[name] = _written(value)
        for inside in _functions_in(value):
            _collect(inside, name, parts, read)


def _counts(module: str) -> bool:
    return (module.startswith(HERE) and module not in FRAME) or module.startswith(OWN)


def _written(value: Any) -> str:
    """A constant as text, without sentences for people."""
    if isinstance(value, Sentence):
        return ""
    if isinstance(value, dict):
        return str([(key, _written(inside)) for key, inside in value.items()])
    if isinstance(value, list | tuple):
        return str([_written(inside) for inside in value])
    text = value.__qualname__ if isinstance(value, FunctionType | type) else repr(value)
    if " at 0x" in text:
        raise ValueError(f"{text[:80]} has another text in every process; name what it stands for")
    return text


def _functions_in(value: Any) -> list[FunctionType | type]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [found for inside in value for found in _functions_in(inside)]
    return [value] if isinstance(value, FunctionType | type) else []


def parsed(source: str) -> ast.Module:
    """The tree of a source, made by one thread at a time."""
    with _ONE_AT_A_TIME:
        return ast.parse(source)


@cache  # experiments share most of their code
def bare(source: str) -> str:
    """Source without comments, docstrings and white space: the same for every Python.

    >>> bare('def f(x):  # twice' + chr(10) + '    return 2 * x')
    'deff(x):return2*x'
    """
    dropped: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            dropped.append((token.start, token.end))
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            last = node.end_lineno or node.lineno  # whole lines: columns of ast count bytes
            dropped.append(((node.lineno, 0), (last, len(source.splitlines()[last - 1]))))
    kept = [
        letter
        for number, line in enumerate(source.splitlines(), 1)
        for column, letter in enumerate(line)
        if not any(start <= (number, column) < end for start, end in dropped)
    ]
    return NAMED.sub(".pick(", "".join("".join(kept).split()))


@cache
def unworded(source: str) -> str:
    """Bare source without the texts that it makes for people: what a rule decides by.

    >>> unworded('def f(x):' + chr(10) + '    return holds(both("it is {x}", "是 {x}", x=x))')
    'deff(x):returnholds(0)'
    """
    text, spans = source.encode(), list[tuple[int, int]]()  # columns of ast count bytes
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(parsed(source)):  # from the outside in
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in WORDS:
            assert node.end_lineno is not None and node.end_col_offset is not None
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[node.end_lineno - 1] + node.end_col_offset
            if not any(begun <= first < ended for begun, ended in spans):
                spans.append((first, last))
                text = text[:first] + b"0" + b" " * (last - first - 1) + text[last:]
    return bare(text.decode())


@cache
def _source(value: Any) -> str:
    return textwrap.dedent(inspect.getsource(value))


@cache
def _names(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names and the attributes in a source."""
    nodes = list(ast.walk(parsed(source)))
    names = frozenset(node.id for node in nodes if isinstance(node, ast.Name))
    return names, frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute))


def _used(value: Any, source: str) -> list[tuple[str, Any]]:
    """The globals that a function or class names, and what it names of modules of the lab."""
    names, attributes = _names(source)
    module = inspect.getmodule(value)
    around = getattr(value, "__globals__", vars(module) if module else {})
    found: list[tuple[str, Any]] = []
    for name in sorted(names & set(around)):
        each = around[name]
        if not isinstance(each, ModuleType):
            found.append((f"{value.__module__}.{name}", each))
        elif _counts(each.__name__):
            inside = vars(each)
            shared = sorted(attributes & set(inside))
            found += [(f"{each.__name__}.{name}", inside[name]) for name in shared]
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        found += [(f"{value.__qualname__}.{name}", cell.cell_contents) for name, cell in cells]
    return found
