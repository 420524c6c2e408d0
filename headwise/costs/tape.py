"""What a forward and its backward take, part by part: parameters, kernels and saved tensors.

Every size is a formula, so that each count can be explained by the formula that made it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction

from headwise.costs.cost import Cost
from headwise.costs.formula import Formula, Line, formula
from headwise.costs.kernel import AttentionShape, Kernel
from headwise.costs.tally import CountedPart, summed
from headwise.costs.workload import Workload
from headwise.messages import Sentence


class Tape:
    """Counts the steps of one forward and its backward, part by part."""

    def __init__(self, work: Workload, name: str) -> None:
        self.work = work
        self._root = CountedPart(name, 1)
        self._open = [self._root]

    # parts

    @property
    def root(self) -> CountedPart:
        """The whole."""
        return self._root

    @property
    def current(self) -> CountedPart:
        """The part that is counted now."""
        return self._open[-1]

    @contextmanager
    def inside(self, part: CountedPart) -> Iterator[None]:
        """Count what follows in a part that is there already."""
        self._open.append(part)
        try:
            yield
        finally:
            self._open.pop()

    def child(self, name: str) -> CountedPart:
        """The part of this name in the current one."""
        for part in self.current.children:
            if part.name == name:
                return part
        self.current.children.append(CountedPart(name, 1))
        return self.current.children[-1]

    @property
    def element(self) -> int:
        """Bytes of one number."""
        return self.work.element

    # records

    def weight(self, label: str, *shape: Formula, used: Fraction = Fraction(1)) -> None:
        """A parameter of this shape, of which a token uses this fraction; FSDP shards axis 0."""
        whole = formula(1)
        for side in shape:
            whole = whole * side
        ranks, held = self.work.ranks.fsdp, whole
        if ranks > 1:
            first = shape[0].value if shape else 1
            if first % ranks:
                rest = whole.value // first
                held = formula(-(-first // ranks) * rest)
            else:
                held = whole * Fraction(1, ranks)
        part = self._open[-1]
        part.lines.append(Line("params", label, held))
        part.active += int(held.value * used)

    def keep(self, label: str, count: Formula) -> None:
        """Save so many bytes for the backward."""
        self._open[-1].saved.append(Line("activations", label, count))

    def cached(self, label: str, size: Formula, times: int = 1) -> None:
        """Count bytes of the cache."""
        self._open[-1].lines.append(Line("kv_cache", label, size, times))

    def state(self, label: str, size: Formula) -> None:
        """Count bytes of a recurrent state."""
        self._open[-1].lines.append(Line("state", label, size))

    def leave_out(self, what: Sentence) -> None:
        """Record work that no count of FLOPs, bytes moved or time includes."""
        if what not in self._open[-1].left_out:
            self._open[-1].left_out.append(what)

    def run(self, kernel: Kernel, backward: bool = False) -> None:
        """Add a kernel to the forward or the backward."""
        part = self._open[-1]
        path = ".".join([node.name for node in self._open[1:]] + [kernel.name])
        kernel = replace(kernel, name=path, dtype=self.work.dtype, backward=backward)
        (part.backward if backward else part.forward).append(kernel)

    def flops(self, label: str, count: Formula, note: Sentence | None = None) -> None:
        """Record the formula of a kernel's FLOPs."""
        self._open[-1].lines.append(Line("flops", label, count, note=note))

    def attention(
        self, shape: AttentionShape, label: str, extra_bytes: int, read: int, learns: bool
    ) -> None:
        """The kernels of fused attention; its backward, if it has one, computes the scores again.

        `read` are the bytes of keys and values, `extra_bytes` those of masks and the like.
        """
        e = self.element
        score = 4 if shape.additive else 2
        per_pair = score * shape.head_dim + 2 * shape.value_dim
        dense = shape.batch * shape.heads * shape.queries * shape.keys
        rows = shape.batch * shape.queries
        q, out = (rows * shape.heads * width * e for width in (shape.head_dim, shape.value_dim))
        lse = 4 * rows * shape.heads
        special = 1 + shape.softcap + (shape.head_dim if shape.additive else 0)
        forward = Kernel(
            label,
            "attention",
            flops=shape.pairs * per_pair,
            flops_dense=dense * per_pair,
            flops_executed=shape.executed_pairs * per_pair,
            bytes_read=q + read + extra_bytes,
            bytes_written=out + lse,
            special=shape.pairs * special,
            shape=shape,
        )
        self.run(forward)
        if not learns:
            return
        self.run(
            replace(
                forward,
                flops=2 * forward.flops,
                flops_dense=2 * forward.flops_dense,
                flops_executed=forward.flops_executed * 5 // 2,
                bytes_read=q + read + 2 * out + lse + extra_bytes,
                bytes_written=q + read,
            ),
            True,
        )

    # the result

    def cost(self) -> Cost:
        """The tree of parts, counted."""
        return summed(self._root, 1, self.work)
