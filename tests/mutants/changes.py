"""The small changes that `tests.mutants` makes to a file, one at a time."""

from __future__ import annotations

import ast
import hashlib
import itertools
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

OPERATORS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"), ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}  # fmt: skip
SWAPPED = {"floor": "ceil", "any": "all", "argmin": "argmax"}
SWAPPED |= {"min": "max", "amin": "amax", "minimum": "maximum", "fmin": "fmax"}
SWAPPED |= {after: before for before, after in SWAPPED.items()} | {"sum": "mean", "mean": "sum"}


@dataclass(frozen=True)
class Change:
    """One change: where it is, what it replaces, and the lines whose tests may notice it."""

    file: str
    line: int
    column: int
    kind: str
    before: str
    after: str
    lines: tuple[int, int] | None
    """First and last line of the statement; None outside of functions: every test of the file."""
    start: int
    end: int
    text: str
    """The line, without its indentation."""

    @property
    def part(self) -> str:
        """The part of the package; what a watch does between ranks is tested with them."""
        return "distributed" if "/ranks/" in self.file else self.file.split("/")[1]

    @property
    def row(self) -> tuple[str, str, str]:
        """The file, the line and the change, as equivalent.txt names them."""
        return self.file, self.text, f"{self.before} → {self.after}"

    @property
    def name(self) -> str:
        """The same for the same change as long as the file does not change."""
        return f"{self.file}:{self.line}:{self.column} {self.before} → {self.after}"

    def compiles(self, source: str) -> bool:
        """True if the changed source is Python."""
        try:
            compile(self.applied(source), self.file, "exec")
        except SyntaxError:
            return False
        return True

    def applied(self, source: str) -> str:
        """Return the changed source."""
        text = source.encode()
        return (text[: self.start] + self.after.encode() + text[self.end :]).decode()


class Changes(ast.NodeVisitor):
    """Collects every change that one file offers."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.source = file, source.encode()
        self.offsets = [0]
        for line in self.source.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))
        self.statement: tuple[int, int] | None = None
        self.inside = 0  # of how many functions
        self.found: list[Change] = []
        self.visit(ast.parse(source))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else (node.end_lineno or node.lineno)
            self.statement = (node.lineno, max(last, node.lineno))
        super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.inside += 1
        for statement in node.body:
            self.visit(statement)
        self.inside -= 1
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "no error", "pass")  # what its message says is no behaviour

    def visit_Assert(self, node: ast.Assert) -> None:
        """Assertions narrow types."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Text for people."""

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        self.negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        self.add(node, "no statement", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(x, ast.Name) and x.id.startswith("__") for x in node.targets):
            return
        if all(isinstance(x, ast.Attribute | ast.Subscript) for x in node.targets):
            self.add(node, "no statement", "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "no statement", "pass")
        self.between(node.target, node.value, node.op)
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self.add(node, "loop", "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(node, "loop", "break")

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            self.between(left, right, operator)
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.between(node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        self.add(node, "boolean", f"({ast.unparse(other)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self.add(node, "no sign", f"({ast.unparse(node.operand)})")
        self.visit(node.operand) if not isinstance(node.operand, ast.Constant) else None

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, "constant", str(not node.value))
        elif isinstance(node.value, int):
            self.add(node, "constant", str(node.value + 1))
        elif isinstance(node.value, float):
            self.add(node, "constant", repr(node.value * 2 or 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func
        if isinstance(name, ast.Name) and name.id in SWAPPED:
            self.add(name, "name", SWAPPED[name.id])
        if isinstance(name, ast.Attribute) and name.attr in SWAPPED:
            self.add(name, "name", f"{ast.unparse(name.value)}.{SWAPPED[name.attr]}")
        self.generic_visit(node)

    def negate(self, test: ast.expr) -> None:
        """Take the other branch."""
        if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self.add(test, "other branch", f"(not ({ast.unparse(test)}))")

    def between(self, left: ast.expr, right: ast.expr, operator: ast.AST) -> None:
        """Change the operator between two expressions, whatever brackets surround it."""
        if type(operator) not in OPERATORS:
            return
        old, new = OPERATORS[type(operator)]
        text = self.source[self.end(left) : self.start(right)]
        if text.count(old.encode()) == 1:
            at = self.end(left) + text.index(old.encode())
            self.append("operator", at, at + len(old), new)

    def add(self, node: ast.expr | ast.stmt, kind: str, after: str) -> None:
        self.append(kind, self.start(node), self.end(node), after)

    def append(self, kind: str, start: int, end: int, after: str) -> None:
        before = " ".join(self.source[start:end].decode().split())
        line = bisect_right(self.offsets, start)
        place = (line, start - self.offsets[line - 1])
        lines = self.statement if self.inside else None
        text = self.source[self.offsets[line - 1] : self.offsets[line]].decode().strip()
        self.found.append(Change(self.file, *place, kind, before, after, lines, start, end, text))

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self.offsets[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offsets[node.end_lineno - 1] + node.end_col_offset


def changes(file: str, source: str) -> dict[str, Change]:
    """Return the changes of a file by their names, in the order of their places."""
    found = sorted(Changes(file, source).found, key=lambda c: (c.start, c.end, c.after))
    return {change.name: change for change in found}


def drawn(sources: dict[str, str], seed: int, count: int) -> list[Change]:
    """Draw changes of files that still compile.

    The order is by a hash of the line and the change, so that a draw stays what it was where
    other lines change or move.
    """
    every = [x for file, source in sources.items() for x in changes(file, source).values()]
    alike: Counter[tuple[str, ...]] = Counter()
    order = []
    for change in every:
        said = change.row[1:]
        alike[said] += 1
        told = "\0".join((str(seed), *said, str(alike[said])))
        order.append((hashlib.sha256(told.encode()).digest(), change))
    order.sort(key=lambda pair: pair[0])
    compiled = (x for _, x in order if x.compiles(sources[x.file]))
    return list(itertools.islice(compiled, count))
