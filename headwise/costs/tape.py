"""A symbolic forward pass: each step adds its parameters, kernels and saved tensors to a part.

Every size is a formula, so that each count can be explained by the formula that made it. Tensors
are saved for the backward by the rules of PyTorch's autograd: a storage counts once, however many
steps save it, and parameters do not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction

from headwise.costs.cost import Cost
from headwise.costs.formula import Formula, Line, formula
from headwise.costs.kernel import AttentionShape, Kernel, Kind, MatmulShape
from headwise.costs.layers import Activation, NormLayer
from headwise.costs.tally import CountedPart, again, summed, tree
from headwise.costs.workload import Workload
from headwise.messages import Sentence

SPECIAL = {"gelu": 1, "silu": 1, "tanh": 1, "sigmoid": 1}  # functions per element


@dataclass(eq=False)
class Flow:
    """A tensor (rows, width) on its way through a model; the object stands for its storage."""

    rows: Formula
    width: Formula
    learns: bool = True  # a gradient flows back through it
    heads_apart: bool = False  # stored (batch, heads, tokens, width): joining the heads copies
    home: CountedPart | None = None  # the part that saves it, whichever part uses it

    @property
    def size(self) -> Formula:
        """Numbers in the tensor."""
        return self.rows * self.width


class Tape:
    """Counts the steps of one forward and its backward, part by part."""

    def __init__(self, work: Workload, name: str) -> None:
        self.work = work
        self._root = CountedPart(name, 1)
        self._open = [self._root]
        self._saved: set[int] = set()
        self._kept_alive: list[Flow] = []  # ids of saved flows stay unique while they exist
        self._idle = False

    # parts

    @contextmanager
    def part(self, name: str, copies: int = 1) -> Iterator[None]:
        """Count what follows as a part of the current one that occurs `copies` times."""
        made = CountedPart(name, copies)
        self._open[-1].children.append(made)
        self._open.append(made)
        try:
            yield
        finally:
            self._open.pop()

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

    @contextmanager
    def idle(self, when: bool = True) -> Iterator[None]:
        """Count only the parameters of what follows: it ran before, or never runs."""
        before, self._idle = self._idle, self._idle or when
        try:
            yield
        finally:
            self._idle = before

    @contextmanager
    def recomputed(self, *inputs: Flow) -> Iterator[None]:
        """Save only the inputs of what follows, and compute it once more in the backward."""
        part = self._open[-1]
        before = {id(node): (len(node.saved), len(node.forward)) for node in tree(part)}
        known, alive = set(self._saved), len(self._kept_alive)
        yield
        for node in tree(part):
            saved, ran_before = before.get(id(node), (0, 0))
            del node.saved[saved:]
            ran = node.forward[ran_before:]
            node.backward += [again(kernel) for kernel in ran]
        self._saved = known | {id(flow) for flow in self._kept_alive[alive:] if flow.home}
        for flow in inputs:
            self.save(flow, "input of a recomputed part")

    def settle(self, flow: Flow) -> Flow:
        """A tensor that the current part saves once, whoever uses it."""
        flow.home = self._open[-1]
        return flow

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

    def keep(
        self, label: str, size: Formula, each: int | None = None, home: CountedPart | None = None
    ) -> None:
        """Save `size` numbers of `each` bytes (the model's dtype by default) for the backward."""
        if self._idle:
            return
        count = size * (self.element if each is None else each)
        (home or self._open[-1]).saved.append(Line("activations", label, count))

    def save(self, flow: Flow, label: str, each: int | None = None) -> None:
        """Save a tensor for the backward, unless its storage is saved already."""
        if id(flow) not in self._saved and not self._idle:
            self._saved.add(id(flow))
            self._kept_alive.append(flow)
            self.keep(label, flow.size, each, flow.home)

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
        if self._idle:
            return
        part = self._open[-1]
        path = ".".join([node.name for node in self._open[1:]] + [kernel.name])
        kernel = replace(kernel, name=path, dtype=self.work.dtype, backward=backward)
        (part.backward if backward else part.forward).append(kernel)

    def flops(self, label: str, count: Formula, note: Sentence | None = None) -> None:
        """Record the formula of a kernel's FLOPs."""
        if not self._idle:
            self._open[-1].lines.append(Line("flops", label, count, note=note))

    # steps

    def linear(
        self,
        x: Flow,
        outputs: Formula,
        label: str,
        bias: bool = False,
        weight: bool = True,
        saves: bool = True,
    ) -> Flow:
        """x times a matrix; `weight` is False if the matrix is another layer's."""
        if weight:
            self.weight(label, outputs, x.width)
            if bias:
                self.weight(f"{label} bias", outputs)
        count = 2 * x.rows * x.width * outputs
        self.flops(label, count)
        if saves:
            self.save(x, f"input of {label}")
        self.matmul(label, x.rows.value, outputs.value, x.width.value, x.learns)
        return Flow(x.rows, outputs)

    def matmul(
        self,
        label: str,
        m: int,
        n: int,
        k: int,
        learns: bool,
        batch: int = 1,
        weights: int = 1,
        kind: Kind = "matmul",
    ) -> None:
        """`batch` products of (m, k) with `weights` learned matrices (k, n), and their backward."""
        e, count = self.element, 2 * batch * m * n * k
        x, w, y = batch * m * k * e, weights * k * n * e, batch * m * n * e
        shape = MatmulShape(m, n, k, batch)
        self.run(Kernel(label, kind, count, x + w, y, shape=shape))
        if learns:
            shape = MatmulShape(m, k, n, batch)
            self.run(Kernel(f"{label} (input)", kind, count, y + w, x, shape=shape), True)
        shape = MatmulShape(k, n, m, batch)
        self.run(Kernel(f"{label} (weight)", kind, count, x + y, w, shape=shape), True)

    def norm(self, x: Flow, norm: NormLayer, label: str, width: Formula, rows: Formula) -> Flow:
        """A norm over vectors of this width, `rows` of them in x."""
        if norm.scale:
            self.weight(f"{label} scale", width)
        if norm.bias and norm.kind == "layer":
            self.weight(f"{label} shift", width)
        work = self.work
        if norm.kind == "layer":
            self.save(x, f"input of {label}")
            # A CPU keeps mean and deviation in the dtype of the input, a GPU in float32.
            self.keep(f"statistics of {label}", 2 * rows, self.element if _cpu(work) else work.wide)
        elif _cpu(work):  # not fused: the input in float32, and the normed input
            if work.element < 4:
                self.keep(f"input of {label} in float32", x.size, 4)
            else:
                self.save(x, f"input of {label}")
            self.keep(f"statistics of {label}", rows, work.wide)
            if norm.scale:
                self.keep(f"normed input of {label}", x.size, work.wide)
        else:
            self.save(x, f"input of {label}")
            self.keep(f"statistics of {label}", rows, work.wide)
        size = x.size.value * self.element
        self.run(Kernel(label, "norm", 0, size, size))
        self.run(Kernel(label, "norm", 0, 2 * size, size), True)
        return Flow(x.rows, x.width)

    def activate(self, x: Flow, activation: Activation, label: str = "activation") -> Flow:
        """An activation function; some save their output, the others their input."""
        if activation == "none":
            return x
        out = Flow(x.rows, x.width)
        kept_output = activation in ("relu", "tanh", "sigmoid")
        self.save(out if kept_output else x, f"output of {label}" if kept_output else label)
        self.elementwise(label, x.size, 1, 1, special=SPECIAL.get(activation, 0))
        return out

    def multiply(self, a: Flow, b: Flow, label: str) -> Flow:
        """The product of two tensors, entry by entry, which saves both."""
        self.save(a, f"first factor of {label}")
        self.save(b, f"second factor of {label}")
        self.elementwise(label, a.size, 2, 1)
        return Flow(a.rows, a.width)

    def drop(self, x: Flow, rate: float, label: str = "dropout") -> Flow:
        """Dropout, which saves what it keeps: a byte per number on a GPU, a number on a CPU."""
        if not rate:
            return x
        self.keep(f"mask of {label}", x.size, self.element if _cpu(self.work) else 1)
        self.elementwise(label, x.size, 1, 1)
        return Flow(x.rows, x.width)

    def add(self, x: Flow, y: Flow, label: str = "residual") -> Flow:
        """A sum, which saves nothing."""
        self.elementwise(label, x.size, 2, 1)
        return Flow(x.rows, x.width, learns=x.learns or y.learns)

    def elementwise(
        self, label: str, size: Formula, reads: int, writes: int, special: int = 0
    ) -> None:
        """A kernel that reads and writes `size` numbers some times, and its backward."""
        count = size.value
        read, written = reads * count * self.element, writes * count * self.element
        self.run(Kernel(label, "elementwise", 0, read, written, special * count))
        self.run(Kernel(label, "elementwise", 0, written, read), True)

    def attention(
        self, shape: AttentionShape, label: str, extra_bytes: int = 0, read: int | None = None
    ) -> None:
        """The kernels of fused attention; its backward computes the scores again."""
        e = self.element
        score = 4 if shape.additive else 2
        per_pair = score * shape.head_dim + 2 * shape.value_dim
        dense = shape.batch * shape.heads * shape.queries * shape.keys
        rows = shape.batch * shape.queries
        q, out = (rows * shape.heads * width * e for width in (shape.head_dim, shape.value_dim))
        keys = shape.batch * shape.keys * shape.kv_heads * (shape.head_dim + shape.value_dim) * e
        keys = keys if read is None else read
        lse = 4 * rows * shape.heads
        special = 1 + shape.softcap + (shape.head_dim if shape.additive else 0)
        forward = Kernel(
            label,
            "attention",
            flops=shape.pairs * per_pair,
            flops_dense=dense * per_pair,
            flops_executed=shape.executed_pairs * per_pair,
            bytes_read=q + keys + extra_bytes,
            bytes_written=out + lse,
            special=shape.pairs * special,
            shape=shape,
        )
        self.run(forward)
        self.run(
            replace(
                forward,
                flops=2 * forward.flops,
                flops_dense=2 * forward.flops_dense,
                flops_executed=forward.flops_executed * 5 // 2,
                bytes_read=q + keys + 2 * out + lse + extra_bytes,
                bytes_written=q + keys,
            ),
            True,
        )

    # the result

    def cost(self) -> Cost:
        """The tree of parts, counted."""
        return summed(self._root, 1, self.work)


def _cpu(work: Workload) -> bool:
    return work.device == "cpu"
