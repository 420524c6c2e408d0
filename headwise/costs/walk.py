"""A walk through an architecture that puts every step on a tape: the counting, written once."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from headwise.costs.attending import Tokens, attend
from headwise.costs.cost import Cost
from headwise.costs.formula import Formula, formula, size
from headwise.costs.kernel import Kernel
from headwise.costs.layers import (
    Architecture,
    AttentionLayer,
    Body,
    ConvolutionLayer,
    DropoutStep,
    EmbeddingLayer,
    ExpertsLayer,
    FeedForwardLayer,
    LayerStack,
    LinearLayer,
    LooseWeight,
    NormLayer,
    RecurrentLayer,
    StackedLayer,
    Step,
    SubLayer,
)
from headwise.costs.sharding import sharded
from headwise.costs.tape import Flow, Tape
from headwise.costs.workload import Workload, share

DEFAULT_LENGTH = 4096


def count(architecture: Architecture, work: Workload) -> Cost:
    """The cost of an architecture at work."""
    tape = Tape(work, architecture.name)
    lengths = _lengths(architecture, work)
    decoding = lengths[-1][1] > lengths[-1][0]
    context: Flow | None = None
    for place, stack in enumerate(architecture.stacks):
        final = place == len(architecture.stacks) - 1
        tokens = _tokens(work, *lengths[place])
        source = None
        if context is not None:
            seen = lengths[place - 1][1]
            source = replace(tokens, keys=seen, remembered=decoding)
        with tape.idle(decoding and not final):  # the encoder has run before
            context = Walk(tape, tokens, context, source).stack(stack)
    return tape.cost()


def _lengths(architecture: Architecture, work: Workload) -> list[tuple[int, int]]:
    """Queries and keys of each stack, checked."""
    found = []
    for place, stack in enumerate(architecture.stacks):
        final = place == len(architecture.stacks) - 1
        asked = work.queries if final else (work.context or work.queries)
        if stack.tokens is not None:
            if final and asked not in (None, stack.tokens):
                raise ValueError(
                    f"{architecture.name} always has {stack.tokens} tokens, not queries={asked}; "
                    "leave queries= out"
                )
            asked = stack.tokens
        if asked is None:
            asked = min(DEFAULT_LENGTH, stack.longest or DEFAULT_LENGTH)
        keys = asked if not final or work.keys is None else work.keys
        if stack.longest is not None and keys > stack.longest:
            raise ValueError(
                f"{keys} tokens are more than {architecture.name} has positions for in its "
                f"{stack.name}, {stack.longest}"
            )
        found.append((asked, keys))
    return found


def _tokens(work: Workload, queries: int, keys: int) -> Tokens:
    """The tokens of one rank."""
    ranks = work.ranks
    batch = share("a batch", work.batch, ranks.dp * ranks.fsdp, "dp·fsdp")
    local = share("a length", queries, ranks.cp, "cp")
    if work.layout == "head_tail" and ranks.cp > 1:
        share("a rank's length", local, 2, "two parts per rank")
    return Tokens(batch, local, keys, queries)


class Walk:
    """Runs the layers of one stack on a tape."""

    def __init__(
        self, tape: Tape, tokens: Tokens, context: Flow | None, source: Tokens | None
    ) -> None:
        self.tape, self.tokens, self.context, self.source = tape, tokens, context, source
        self.tp = tape.work.ranks.tp

    def stack(self, stack: LayerStack) -> Flow:
        """Run a stack on its tokens, and return its output."""
        x = Flow(self.tokens.rows, size("h", stack.width), learns=not stack.reads_tokens)
        with self.tape.part(stack.name):
            x = self.steps(stack.before, x)
            for layer, copies in _grouped(stack.layers):
                with self.tape.part(layer.label or "layers", copies):
                    x = self.layer(layer, x)
            return self.tape.settle(self.steps(stack.after, x))

    def steps(self, steps: tuple[Step, ...], x: Flow) -> Flow:
        for step in steps:
            with self.tape.part(step.label if hasattr(step, "label") else _name(step)):
                x = self.step(step, x)
        return x

    def step(self, step: Step, x: Flow) -> Flow:
        tape = self.tape
        match step:
            case EmbeddingLayer():
                return self.embed(step, x)
            case NormLayer():
                return tape.norm(x, step, "norm", x.width, x.rows)
            case DropoutStep():
                return tape.drop(x, step.rate)
            case ConvolutionLayer():
                return self.convolve(step, x)
            case LooseWeight():
                tape.weight(step.label, *_sides(step.shape, x.width))
                return Flow(self.tokens.rows, x.width)
            case LinearLayer():
                return self.project(step, x)

    def embed(self, step: EmbeddingLayer, x: Flow) -> Flow:
        """Look vectors up and add them to the stream, or start it."""
        tape, tokens = self.tape, self.tokens
        step = sharded(step, self.tp)
        letter = "V" if step.split else "m"
        width = x.width if step.width == x.width.value else size("w", step.width)
        if not step.tied:
            tape.weight(step.label, size(letter, step.rows), width)
        rows = tokens.rows if step.per_batch else tokens.s
        if step.looked_up:
            tape.keep(f"indices of {step.label}", rows, 8)
        moved = (rows * width).value * tape.element
        tape.run(Kernel(step.label, "embedding", 0, moved, moved))
        tape.run(Kernel(step.label, "embedding", 0, moved, moved), True)
        if x.learns:
            return tape.add(x, Flow(x.rows, width), f"add {step.label}")
        return Flow(tokens.rows, width)

    def convolve(self, step: ConvolutionLayer, x: Flow) -> Flow:
        """A convolution, which is a matrix product over the entries that its kernel covers."""
        tape, b = self.tape, self.tokens.b
        made = step.outputs * (2 if step.gated else 1)
        o = x.width if made == x.width.value else size("o", made)
        i = x.width if step.inputs == x.width.value else size("i", step.inputs)
        k = size("k", step.kernel)
        tape.weight(step.label, o, Fraction(1, step.groups) * i, k)
        if step.bias:
            tape.weight(f"{step.label} bias", o)
        rows = self.tokens.rows if step.tokens is None else b * size("n", step.tokens)
        tape.flops(step.label, 2 * rows * Fraction(1, step.groups) * i * k * o)
        if step.entries is not None:
            tape.keep(f"input of {step.label}", b * size("x", step.entries))
        elif step.padding:
            padded = b * (self.tokens.s + step.padding) * i
            tape.keep(f"padded input of {step.label}", padded)
        else:
            tape.save(x, f"input of {step.label}")
        inner = step.inputs * step.kernel // step.groups
        learns = x.learns and step.learns_input
        tape.matmul(step.label, rows.value, made, inner, learns)
        y = Flow(rows, o)
        if step.gated:
            tape.save(y, "input of the gate")
            tape.elementwise("gate", y.size, 1, 1, special=1)
            y = Flow(rows, size("h", step.outputs))
        return tape.activate(y, step.activation)

    def project(self, step: LinearLayer, x: Flow) -> Flow:
        tape = self.tape
        step = sharded(step, self.tp)
        letter = "V" if step.split == "columns" else "o"
        stream = x
        out = x.width if step.outputs == x.width.value else size(letter, step.outputs)
        if step.inputs != x.width.value:
            x = Flow(x.rows, size("i", step.inputs))
        if step.first_only:  # the storage of the whole sequence is saved with its first token
            tape.save(x, f"input of {step.label}")
            x = Flow(self.tokens.b, x.width, x.learns)
            y = tape.linear(x, out, step.label, step.bias, weight=not step.tied, saves=False)
        else:
            y = tape.linear(x, out, step.label, step.bias, weight=not step.tied)
        if step.tied and step.bias:
            tape.weight(f"{step.label} bias", out)
        y = tape.activate(y, step.activation)
        return stream if step.aside else y

    def layer(self, layer: StackedLayer, x: Flow) -> Flow:
        if self.tape.work.recompute != "layers":
            return self._layer(layer, x)
        inputs = [x] if self.context is None else [x, self.context]
        with self.tape.recomputed(*inputs):
            return self._layer(layer, x)

    def _layer(self, layer: StackedLayer, x: Flow) -> Flow:
        tape = self.tape
        for weight in layer.extra:
            tape.weight(weight.label, *_sides(weight.shape, x.width))
        if not layer.parallel:
            for sub in layer.sublayers:
                with tape.part(sub.name):
                    x = self.sublayer(sub, x)
            return x
        normed = x
        if layer.shared_norm is not None:
            normed = tape.norm(x, layer.shared_norm, "norm", x.width, x.rows)
        for sub in layer.sublayers:
            with tape.part(sub.name):
                y = self.body(sub.body, self._before(sub, normed))
                x = tape.add(x, tape.drop(y, sub.dropout))
        return x

    def sublayer(self, sub: SubLayer, x: Flow) -> Flow:
        """x + dropout(after(body(before(x)))), normed by `post`."""
        tape = self.tape
        y = self.body(sub.body, self._before(sub, x))
        if sub.after is not None:
            y = tape.norm(y, sub.after, "norm after", y.width, y.rows)
        if sub.scales:
            tape.weight("scale", size("h", sub.scales))
            tape.save(y, "scaled output")
            tape.elementwise("scale", y.size, 1, 1)
            y = Flow(y.rows, y.width)
        y = tape.drop(y, sub.dropout)
        if sub.residual:
            y = tape.add(x, y)
        if sub.post is not None:
            y = tape.norm(y, sub.post, "norm", y.width, y.rows)
        return y

    def _before(self, sub: SubLayer, x: Flow) -> Flow:
        if sub.before is None:
            return x
        return self.tape.norm(x, sub.before, "norm", x.width, x.rows)

    def body(self, body: Body, x: Flow) -> Flow:
        match body:
            case AttentionLayer():
                return self.attention(sharded(body, self.tp), x)
            case FeedForwardLayer():
                return self.feed_forward(sharded(body, self.tp), x)
            case ExpertsLayer():
                return self.experts(sharded(body, self.tp), x)
            case RecurrentLayer():
                return self.recurrence(body, x)
            case ConvolutionLayer():
                return self.convolve(body, x)

    def attention(self, layer: AttentionLayer, x: Flow) -> Flow:
        if layer.context is None:
            return attend(self.tape, x, layer, self.tokens, None)
        if self.source is None or self.context is None:
            raise ValueError("a cross-attention needs a stack before its own; give context=")
        return attend(self.tape, x, layer, self.source, self.context)

    def feed_forward(self, layer: FeedForwardLayer, x: Flow, label: str = "") -> Flow:
        """Up, activation and down; with a gate, silu(gate) · up."""
        tape = self.tape
        f = hidden(layer)
        y = tape.linear(x, f, f"{label}up", layer.bias)
        if layer.gated:
            gate = tape.linear(x, f, f"{label}gate", layer.bias)
            y = tape.multiply(tape.activate(gate, layer.activation), y, "gated")
        else:
            y = tape.activate(y, layer.activation)
        y = tape.drop(y, layer.dropout)
        out = tape.linear(y, x.width, f"{label}down")
        if layer.bias:
            tape.weight(f"{label}down bias", x.width)
        return out

    def experts(self, layer: ExpertsLayer, x: Flow) -> Flow:
        """The router, `active` experts per token, and those that see every token."""
        tape, expert = self.tape, layer.expert
        count, active = size("E", layer.experts), size("k", layer.active)
        f, h = hidden(expert), x.width
        scores = tape.linear(x, count, "router", layer.router_bias)
        tape.keep("weights of the experts", scores.size)
        used = Fraction(layer.active, layer.experts)
        matrices = (("up", f, h), ("down", h, f))
        if expert.gated:
            matrices = (("gate", f, h), *matrices)
        chosen = Flow(x.rows * active, h)
        tape.elementwise("sort by expert", chosen.size, 1, 1)
        inner = Flow(chosen.rows, f)
        for label, outputs, inputs in matrices:
            tape.weight(f"experts {label}", count, outputs, inputs, used=used)
            if expert.bias:
                tape.weight(f"experts {label} bias", count, outputs, used=used)
            tape.flops(f"experts {label}", 2 * chosen.rows * inputs * outputs)
            tape.save(inner if label == "down" else chosen, f"input of experts {label}")
            read = min(layer.experts, chosen.rows.value)
            tape.matmul(f"experts {label}", chosen.rows.value, outputs.value, inputs.value, True,
                        weights=read)  # fmt: skip
        up = tape.activate(Flow(chosen.rows, f), expert.activation)
        if expert.gated:
            tape.multiply(up, Flow(chosen.rows, f), "gated")
        for weight in layer.extra:
            tape.weight(weight.label, *_sides(weight.shape, h))
        out = tape.add(Flow(x.rows, h), Flow(x.rows, h), "sum of experts")
        if layer.shared is not None:
            shared = self.feed_forward(layer.shared, x, "shared ")
            if layer.shared_gate:
                gate = tape.linear(x, formula(1), "shared gate")
                tape.elementwise("shared gate", gate.size, 1, 1, special=1)
            out = tape.add(out, shared, "shared")
        return out

    def recurrence(self, layer: RecurrentLayer, x: Flow) -> Flow:
        """The matrices and the state; the recurrence itself is not counted."""
        tape, b = self.tape, self.tokens.b
        for matrix in layer.matrices:
            inputs = x if matrix.inputs == x.width.value else Flow(x.rows, size("i", matrix.inputs))
            tape.linear(inputs, size("o", matrix.outputs), matrix.label, matrix.bias)
        for weight in layer.others:
            tape.weight(weight.label, *_sides(weight.shape, x.width))
        tape.state("state", b * size("n", layer.state) * tape.element)
        if layer.wide_state:
            tape.state("state in float32", b * size("n", layer.wide_state) * 4)
        return Flow(x.rows, x.width)


def hidden(layer: FeedForwardLayer) -> Formula:
    """The hidden width: 4h where it is that, else a letter of its own."""
    whole = layer.hidden == 4 * layer.width
    return 4 * size("h", layer.width) if whole else size("f", layer.hidden)


def _grouped(layers: tuple[StackedLayer, ...]) -> list[tuple[StackedLayer, int]]:
    """Equal layers together, in the order in which each kind first occurs."""
    found: dict[StackedLayer, int] = {}
    for layer in layers:
        found[layer] = found.get(layer, 0) + 1
    return list(found.items())


def _sides(shape: tuple[int, ...], h: Formula) -> list[Formula]:
    return [h if side == h.value else formula(side) for side in shape]


def _name(step: Step) -> str:
    return "norm" if isinstance(step, NormLayer) else "dropout"
