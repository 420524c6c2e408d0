"""Feed-forward layers, layers of matrices and convolutions on a tape."""

from __future__ import annotations

from headwise.costs.formula import Formula, formula, size
from headwise.costs.layers import (
    ConvolutionLayer,
    FeedForwardLayer,
    MatrixLayer,
)
from headwise.costs.letters import Tokens
from headwise.costs.tape import Flow, Tape


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
