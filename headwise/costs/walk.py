"""A walk through an architecture that puts every step on a tape: the counting, written once."""

from __future__ import annotations

from dataclasses import replace

from headwise.costs.attending import attend
from headwise.costs.cost import Cost
from headwise.costs.formula import Formula, formula, size
from headwise.costs.kernel import Kernel
from headwise.costs.layers import (
    AttentionLayer,
    Body,
    ConvolutionLayer,
    DropoutStep,
    EmbeddingLayer,
    FeedForwardLayer,
    LayeredModel,
    LayerStack,
    LinearLayer,
    LooseWeight,
    MatrixLayer,
    NormLayer,
    StackedLayer,
    Step,
    SubLayer,
    sharded,
)
from headwise.costs.letters import Tokens
from headwise.costs.tape import Flow, Tape
from headwise.costs.words import translated
from headwise.costs.workload import Workload, share
from headwise.messages import Sentence, say

DEFAULT_LENGTH = 4096


def count(architecture: LayeredModel, work: Workload) -> Cost:
    """The cost of an architecture at work."""
    tape = Tape(work, architecture.name)
    lengths = _lengths(architecture, work)
    decoding = lengths[-1][1] > lengths[-1][0]  # some tokens are in a cache
    context: Flow | None = None
    for place, stack in enumerate(architecture.stacks):
        final = place == len(architecture.stacks) - 1
        tokens = _tokens(work, *lengths[place])
        source = None
        if context is not None:
            seen = lengths[place - 1][1]
            source = replace(tokens, keys=seen, cached=decoding)
        with tape.idle(decoding and not final):  # the encoder has run before
            context = Walk(tape, tokens, context, source).stack(stack)
    return tape.cost()


def _lengths(architecture: LayeredModel, work: Workload) -> list[tuple[int, int]]:
    """Queries and keys of each stack, checked."""
    found = []
    for place, stack in enumerate(architecture.stacks):
        final = place == len(architecture.stacks) - 1
        whole = work.keys or work.queries
        asked = (work.queries or work.keys) if final else (work.context or whole)
        if stack.tokens is not None:
            if final and asked not in (None, stack.tokens):
                raise ValueError(
                    say(
                        "{name} always has {tokens} tokens, not queries={asked}; leave the length "
                        "out",
                        name=architecture.name,
                        tokens=stack.tokens,
                        asked=asked,
                    )
                )
            asked = stack.tokens
        if asked is None:
            asked = min(DEFAULT_LENGTH, stack.longest or DEFAULT_LENGTH)
        keys = asked if not final or work.keys is None else work.keys
        if stack.longest is not None and keys > stack.longest:
            raise ValueError(
                say(
                    "{keys} tokens are more than {name} has positions for in its {stack}, "
                    "{longest}",
                    keys=keys,
                    name=architecture.name,
                    stack=Sentence(stack.name, translated(stack.name)),
                    longest=stack.longest,
                )
            )
        found.append((asked, keys))
    return found


def _tokens(work: Workload, queries: int, keys: int) -> Tokens:
    """The tokens of one rank."""
    ranks = work.ranks
    batch = share(say("a batch"), work.batch, ranks.dp * ranks.fsdp, "dp·fsdp")
    local = share(say("a length"), queries, ranks.cp, "cp")
    if work.layout == "head_tail" and ranks.cp > 1:
        share(say("a rank's length"), local, 2, say("two parts per rank"))
    return Tokens(batch, local, keys, queries, cached=keys > queries)


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
                with self.tape.part("layers", copies):
                    x = self.layer(layer, x)
            return self.tape.settle(self.steps(stack.after, x))

    def steps(self, steps: tuple[Step, ...], x: Flow) -> Flow:
        for step in steps:
            if isinstance(step, DropoutStep) and not step.rate:
                continue
            with self.tape.part(_name(step)):
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
                return convolve(tape, step, x, self.tokens)
            case LooseWeight():
                tape.weight(step.label, *sides(step.shape, x.width))
                return Flow(self.tokens.rows, x.width)
            case LinearLayer():
                return self.project(step, x)

    def embed(self, step: EmbeddingLayer, x: Flow) -> Flow:
        """Look vectors up and add them to the stream, or start it."""
        tape, tokens = self.tape, self.tokens
        step = sharded(step, self.tp)
        letter = "V" if step.split else "m"
        width = x.width if step.width == x.width.value else formula(step.width)
        if not step.tied:
            tape.weight(step.label, size(letter, step.rows), width)
        rows = tokens.rows if step.per_batch else tokens.s
        tape.keep(f"indices of {step.label}", rows, 8)
        moved = (rows * width).value * tape.element
        tape.run(Kernel(step.label, "embedding", 0, moved, moved))
        tape.run(Kernel(step.label, "embedding", 0, moved, moved), True)
        if x.learns:
            return tape.add(x, Flow(x.rows, width), f"add {step.label}")
        return Flow(tokens.rows, width)

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
        for sub in layer.sublayers:
            with self.tape.part(sub.name):
                x = self.sublayer(sub, x)
        return x

    def sublayer(self, sub: SubLayer, x: Flow) -> Flow:
        """x + dropout(body(before(x))), normed by `post`."""
        tape = self.tape
        y = self.body(sub.body, self._before(sub, x))
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
                return feed_forward(self.tape, sharded(body, self.tp), x)
            case MatrixLayer():
                return matrices(self.tape, body, x, self.tokens)
            case ConvolutionLayer():
                return convolve(self.tape, body, x, self.tokens)

    def attention(self, layer: AttentionLayer, x: Flow) -> Flow:
        if layer.context is None:
            return attend(self.tape, x, layer, self.tokens, None)
        if self.source is None or self.context is None:
            raise ValueError("a cross-attention needs a stack before its own; give context=")
        return attend(self.tape, x, layer, self.source, self.context)


def _grouped(layers: tuple[StackedLayer, ...]) -> list[tuple[StackedLayer, int]]:
    """Equal layers together, in the order in which each kind first occurs."""
    found: dict[StackedLayer, int] = {}
    for layer in layers:
        found[layer] = found.get(layer, 0) + 1
    return list(found.items())


def _name(step: Step) -> str:
    match step:
        case NormLayer():
            return "norm"
        case DropoutStep():
            return "dropout"
        case _:
            return step.label


def feed_forward(tape: Tape, layer: FeedForwardLayer, x: Flow) -> Flow:
    """Up, activation and down; with a gate, silu(gate) · up."""
    f = hidden(layer)
    y = tape.linear(x, f, "up", layer.bias)
    if layer.gated:
        gate = tape.linear(x, f, "gate", layer.bias)
        y = tape.multiply(tape.activate(gate, layer.activation), y, "gated")
    else:
        y = tape.activate(y, layer.activation)
    y = tape.drop(y, layer.dropout)
    return tape.linear(y, x.width, "down", layer.bias)


def hidden(layer: FeedForwardLayer) -> Formula:
    """The hidden width: 4h where it is that, else a letter of its own."""
    whole = layer.hidden == 4 * layer.width
    return 4 * size("h", layer.width) if whole else size("f", layer.hidden)


def matrices(tape: Tape, layer: MatrixLayer, x: Flow, tokens: Tokens) -> Flow:
    """The matrices and the state."""
    b = tokens.b
    for matrix in layer.matrices:
        inputs = x if matrix.inputs == x.width.value else Flow(x.rows, size("i", matrix.inputs))
        tape.linear(
            inputs, size("o", matrix.outputs), matrix.label, matrix.bias, weight=not matrix.tied
        )
    if layer.state:
        tape.state("state", b * layer.state * tape.element)
    return Flow(x.rows, x.width)


def convolve(tape: Tape, step: ConvolutionLayer, x: Flow, tokens: Tokens) -> Flow:
    """A convolution, which is a matrix product over the entries that its kernel covers."""
    b = tokens.b
    made = step.outputs * (2 if step.gated else 1)
    o = x.width if made == x.width.value else size("o", made)
    i = x.width if step.inputs == x.width.value else size("i", step.inputs)
    k = size("c", step.kernel)
    tape.weight(step.label, o, i, k)
    if step.bias:
        tape.weight(f"{step.label} bias", o)
    rows = tokens.rows if step.tokens is None else b * size("n", step.tokens)
    tape.flops(step.label, 2 * rows * i * k * o)
    if step.entries is not None:
        tape.keep(f"input of {step.label}", b * size("x", step.entries))
    elif step.padding:
        padded = b * (tokens.s + step.padding) * i
        tape.keep(f"padded input of {step.label}", padded)
    else:
        tape.save(x, f"input of {step.label}")
    inner, learns = step.inputs * step.kernel, x.learns and step.learns_input
    tape.matmul(step.label, rows.value, made, inner, learns, kind="convolution")
    y = Flow(rows, o)
    if step.gated:
        tape.save(y, "input of the gate")
        tape.elementwise("gate", y.size, 1, 1, special=1)
        y = Flow(rows, size("h", step.outputs))
    return tape.activate(y, step.activation)


def sides(shape: tuple[int, ...], h: Formula) -> list[Formula]:
    """The sides of a weight, with the letter h where a side is the stream's width."""
    return [h if side == h.value else formula(side) for side in shape]
