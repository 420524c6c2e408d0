"""The reference: every public name with its signature and its docstring, as pages for Sphinx."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import headwise

FURTHER = ("headwise.watching.rules", "headwise.watching.callbacks")
"""Modules that the guide names, and that no `__all__` lists."""

ABOUT = {
    "headwise": "`import headwise as hw`: attention, what it does, what it costs.",
    "headwise.mask": "Which keys a query may see. Masks combine with `&` and `|`.",
    "headwise.nn": "Layers on top of the functions: attention, positions, caches, blocks.",
    "headwise.models": "Models made of these layers.",
    "headwise.apps.train": "Training small models, as `headwise train` does.",
    "headwise.watching": "What `hw.watch` returns, and recorded runs.",
    "headwise.watching.rules": "The rules behind alarms.",
    "headwise.watching.callbacks": "Watching inside the trainers of other packages.",
}


@dataclass(frozen=True)
class PublicName:
    """A public name, the module that shows it, and what it stands for."""

    module: str
    name: str
    value: Any

    @property
    def path(self) -> str:
        """Its full name."""
        return f"{self.module}.{self.name}"


@cache
def modules() -> tuple[str, ...]:
    """The modules whose names are public: headwise, what lies directly in it, and FURTHER."""
    inner = (f"headwise.{each.name}" for each in pkgutil.iter_modules(headwise.__path__))
    listed = [name for name in inner if declares_names(name)]
    return ("headwise", *listed, *FURTHER)


def declares_names(module: str) -> bool:
    """True if a module says by `__all__` what others may use; it is not imported for that."""
    path = Path(headwise.__path__[0]).parent / module.replace(".", "/")
    package = path / "__init__.py"  # a folder may be left of a package that became a module
    source = package if package.exists() else path.with_suffix(".py")
    return "\n__all__ = [" in source.read_text(encoding="utf-8")


def public(module: str) -> list[PublicName]:
    """The public names of a module; what is a module itself has a page of its own."""
    loaded = importlib.import_module(module)
    names = [(name, getattr(loaded, name)) for name in exported(loaded)]
    return [PublicName(module, name, x) for name, x in names if not isinstance(x, ModuleType)]


def page(module: str) -> str:
    """The page of a module, in Markdown."""
    parts = [f"# {module}", ABOUT.get(module, ""), f":::{{py:module}} {module}\n:::"]
    everything = sorted(public(module), key=lambda each: each.name.lower())
    found = [each for each in everything if home(each) == module]
    functions = [x for x in found if inspect.isroutine(x.value)]
    classes = [x for x in found if inspect.isclass(x.value)]
    others = [x for x in found if x not in functions and x not in classes]
    for title, some in (("Functions", functions), ("Classes", classes), ("Values", others)):
        if some:
            parts += [f"## {title}", *(entry(each) for each in some)]
    if elsewhere := [each for each in everything if home(each) != module]:
        links = [f"{{py:obj}}`{home(each)}.{each.name}`" for each in elsewhere]
        parts += ["## Also here", ", ".join(links)]
    return "\n\n".join(part for part in parts if part) + "\n"


def home(name: PublicName) -> str:
    """The first of the modules that show the same object by this name: it has the entry."""
    for module in modules():
        shown = importlib.import_module(module)
        if getattr(shown, name.name, None) is name.value and name.name in exported(shown):
            return module
    return name.module


def exported(module: ModuleType) -> list[str]:
    """The names that a module shows: those of `__all__`, or its own."""
    own = (
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )
    return list(getattr(module, "__all__", own))


def entry(name: PublicName) -> str:
    """The entry of a public name: its signature, its docstring and, of a class, its members."""
    if inspect.isclass(name.value):
        inside = [markdown(name.value), *members(name.value)]
        return directive("class", f"{name.name}{signature(name.value)}", inside, 5)
    if inspect.isroutine(name.value):
        called = f"{name.name}{signature(name.value)}"
        return directive("function", called, [markdown(name.value)], 5)
    return directive("data", name.name, [value_docstring(name)], 5)


def members(found: type) -> Iterator[str]:
    """The public methods and properties that a class defines, in order."""
    for name, value in vars(found).items():
        inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if name.startswith("_") or not getattr(inner, "__doc__", None):
            continue
        if isinstance(inner, property):
            yield directive("property", name, [markdown(inner)], 4)
        elif inspect.isfunction(inner):
            yield directive("method", f"{name}{signature(inner)}", [markdown(inner)], 4)


def directive(kind: str, head: str, inside: list[str], colons: int) -> str:
    """A directive of Sphinx's Python domain around some Markdown."""
    fence = ":" * colons
    return "\n\n".join([f"{fence}{{py:{kind}}} {head}", *filter(None, inside), fence])


def signature(value: Callable[..., Any]) -> str:
    """The signature as the code writes it, without self.

    >>> def call(q: Tensor, *, scale: float | None = None) -> Tensor: ...
    >>> signature(call)
    '(q: Tensor, *, scale: float | None = None) -> Tensor'
    """
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return "()"
    shown = [
        parameter.replace(annotation=_Plain(parameter.annotation), default=_default(parameter))
        for parameter in found.parameters.values()
        if parameter.name not in ("self", "unknown") and not parameter.name.startswith("_")
    ]
    back = found.return_annotation
    ends = "" if inspect.isclass(value) or back in (None, "None", inspect.Signature.empty) else back
    text = str(inspect.Signature(shown))
    return text + (f" -> {_Plain(ends)!r}" if ends else "")


class _Plain:
    """An annotation that prints as it is written in the code."""

    def __new__(cls, annotation: Any) -> Any:
        if annotation is inspect.Parameter.empty:
            return annotation
        return super().__new__(cls)

    def __init__(self, annotation: Any) -> None:
        name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
        self.text = re.sub(r"\b(?:typing|collections\.abc|torch|headwise(?:\.\w+)*)\.", "", name)

    def __repr__(self) -> str:
        return self.text


class _Shown:
    """A default value that prints as a word."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _default(parameter: inspect.Parameter) -> Any:
    if parameter.default is inspect.Parameter.empty:
        return parameter.default
    text = repr(parameter.default)
    return _Shown(text if len(text) <= 40 and "<" not in text and "\n" not in text else "...")


def markdown(value: Any) -> str:
    """A docstring as Markdown: it is written so, and its examples become code."""
    lines = (inspect.getdoc(value) or "").splitlines()
    found: list[str] = []
    inside = False
    for line in lines:
        if line.lstrip().startswith(">>>") and not inside:
            found.append("```pycon")
            inside = True
        if inside and not line.strip():
            found.append("```")
            inside = False
        found.append(line)
    return "\n".join([*found, *(["```"] if inside else [])])


def value_docstring(name: PublicName) -> str:
    """The docstring below the definition of a value, in the module that it comes from."""
    source = Path(inspect.getfile(importlib.import_module(name.module))).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and name.name in {x.name for x in node.names}:
            inner = PublicName(str(node.module), name.name, name.value)
            return value_docstring(inner)
    return documented(source, name.name)


def documented(source: str, name: str) -> str:
    """The string that follows the assignment of a name.

    >>> documented('X = 1\\n"The first number."', "X")
    'The first number.'
    """
    body = ast.parse(source).body
    for node, after in itertools.pairwise(body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(x, ast.Name) and x.id == name for x in targets) and isinstance(
            after, ast.Expr
        ):
            return str(ast.literal_eval(after.value)) if _is_text(after.value) else ""
    return ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
