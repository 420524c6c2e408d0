"""Parts while they are counted, and their sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from headwise.costs.cost import Cost
from headwise.costs.formula import Line
from headwise.costs.kernel import Kernel
from headwise.costs.workload import Workload
from headwise.messages import Sentence


@dataclass
class CountedPart:
    """A part being counted; its own figures, without those of its children."""

    name: str
    copies: int
    lines: list[Line] = field(default_factory=list)
    forward: list[Kernel] = field(default_factory=list)
    backward: list[Kernel] = field(default_factory=list)
    saved: list[Line] = field(default_factory=list)
    active: int = 0
    left_out: list[Sentence] = field(default_factory=list)
    children: list[CountedPart] = field(default_factory=list)


def tree(part: CountedPart) -> Iterator[CountedPart]:
    """A part and everything inside it."""
    yield part
    for child in part.children:
        yield from tree(child)


def recomputed_kernel(kernel: Kernel) -> Kernel:
    """A forward kernel that the backward runs once more; model FLOPs do not count it."""
    name = f"{kernel.name} (again)"
    return replace(kernel, name=name, flops=0, flops_dense=0, backward=True)


def summed(part: CountedPart, copies: int, work: Workload) -> Cost:
    """The cost of a part that occurs `copies` times."""
    copies *= part.copies
    while len(part.children) == 1 and not (part.lines or part.saved or part.forward):
        (child,) = part.children  # a part that is all of its whole takes its place
        part = replace(child, name=part.name)
        copies *= part.copies
    children = [summed(child, copies, work) for child in part.children]
    lines = [replace(line, times=line.times * copies) for line in part.lines + part.saved]
    found = {name: _sum(lines, name) for name in ("params", "activations", "kv_cache", "state")}
    forward = [replace(kernel, count=kernel.count * copies) for kernel in part.forward]
    backward = [replace(kernel, count=kernel.count * copies) for kernel in part.backward]
    figures = {
        name: own + sum(getattr(child, name) for child in children) for name, own in found.items()
    }
    active = part.active * copies + sum(child.params_active for child in children)
    return Cost(
        part.name,
        copies,
        **figures,
        params_active=active,
        weights=figures["params"] * work.element,
        forward=tuple(forward) + tuple(k for child in children for k in child.forward),
        backward=tuple(backward) + tuple(k for child in children for k in child.backward),
        parts=_named(children),
        lines=tuple(lines),
        work=work,
        left_out=_once([*part.left_out, *(x for child in children for x in child.left_out)]),
    )


def _named(parts: Sequence[Cost]) -> dict[str, Cost]:
    """Parts by name; a name that occurs again is numbered."""
    found: dict[str, Cost] = {}
    for part in parts:
        name, number = part.name, 2
        while name in found:
            name, number = f"{part.name} {number}", number + 1
        found[name] = part
    return found


def _once(sentences: Sequence[Sentence]) -> tuple[Sentence, ...]:
    return tuple(dict.fromkeys(sentences))


def _sum(lines: Sequence[Line], figure: str) -> int:
    wanted = [line for line in lines if line.figure == figure]
    return sum(line.formula.value * line.times for line in wanted)
