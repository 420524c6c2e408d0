"""The graph that the compiler is tracing, searched for attention that no adapter has read."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Node

from headwise import version

_KEEPING = frozenset(
    (
        *("dropout", "to", "type", "type_as", "float", "half", "bfloat16", "contiguous", "clone"),
        *("detach", "masked_fill", "nan_to_num", "view", "reshape", "flatten", "unflatten"),
        *("expand", "unsqueeze", "squeeze", "getitem", "mul", "truediv", "div"),
    )
)
"""Functions after which the weights of a softmax are still weights."""
_STEPS = 16  # back from a product to its softmax, at most
_FRAME = re.compile(r'File "(.+)", line (\d+)')
_ROOT = re.compile(r"^.*?\]\.?")  # L['self'].
_LIBRARIES = tuple(f"{Path(x).parent}{os.sep}" for x in (torch.__file__, version.__file__))
"""The folders of torch and headwise. A name in a path tells nothing: it may be a user's."""
Plain = TypeVar("Plain", bool, str)
_SEARCHED = "headwise_searched"  # a key of the nodes that were looked at


@dataclass(frozen=True)
class UnreadCall:
    """A call of attention that no adapter has read, and the device that computes it."""

    reason: str
    device: torch.device


def unread_call() -> UnreadCall | None:
    """The first unread call that was traced since the last time this was asked; None if none was.

    Adapters ask before and after a call that they read, and forget what was found in between.
    """
    output = _output()
    if output is None:
        return None
    found: UnreadCall | None = None
    for node in reversed(output.graph.nodes):
        if _SEARCHED in node.meta:
            break
        node.meta[_SEARCHED] = True
        what = _attention(node)
        if what is not None:
            found = UnreadCall(f"{what} in compiled code{_place(node)}", _device(node))
    return found


def constant(function: Callable[..., Plain]) -> Callable[..., Plain]:
    """Let a function run while a graph is traced, where its result is a constant.

    This is the mark of torch.compiler.assume_constant_result, which itself imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def is_in_main_graph() -> bool:
    """True unless the body of a checkpoint or of another function is traced as a graph apart."""
    output = _output()
    return output is not None and output.current_tracer.parent is None


def counts_by_one(node: Any) -> bool:
    """True for a node that is arange(…), or that plus a number.

    The position ids that a model makes for itself: they number one sequence, whatever its length.
    """
    while isinstance(node, Node):
        value = node.meta.get("example_value")
        if not isinstance(value, Tensor) or value._version:  # written to since it was made
            return False
        name, others = name_of(node), (*node.args[1:], *node.kwargs.values())
        if name == "arange":
            counted = len(node.args) < 3 and "step" not in node.kwargs
            return counted and not value.dtype.is_floating_point
        if name not in ("unsqueeze", "expand", "add") or any(_axes(x) is not None for x in others):
            return False
        node = node.args[0]
    return False


def nodes() -> Iterator[Any]:
    """The nodes of the graph that is being traced, the last one first."""
    output = _output()
    return iter(()) if output is None else iter(reversed(output.graph.nodes))


def running_paths() -> list[str]:
    """The modules that are being traced, innermost first, as "layers.0.attention".

    The names begin at the module whose forward is compiled, or at what its function finds it by.
    """
    output = _output()
    last = None if output is None else next(iter(reversed(output.graph.nodes)), None)
    stack = {} if last is None else last.meta.get("nn_module_stack") or {}
    return [_ROOT.sub("", path) for path, _ in reversed(stack.values())]


def _output() -> Any:
    """The compiler's record of what it is tracing; None if it traces nothing."""
    traces: Any = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        return traces.InstructionTranslator.current_tx().output
    except AttributeError:
        return None


def _attention(node: Node) -> str | None:
    """A description of a node that is attention; None if it is not."""
    name = name_of(node)
    if name in ("flex_attention", "multi_head_attention_forward") or "flash_att" in name:
        return f"it calls {name}"
    if name == "scaled_dot_product_attention":
        return "it calls scaled_dot_product_attention by a name that headwise does not follow"
    if _weights_values(node):
        return "its attention is written out, a softmax that is multiplied with values,"
    return None


def _weights_values(node: Node) -> bool:
    """True if a node multiplies the weights of a softmax with values that all rows share."""
    name = name_of(node)
    if name not in ("matmul", "bmm", "baddbmm", "einsum"):
        return False
    given = node.args[1:] if name in ("baddbmm", "einsum") else node.args
    if len(given) == 1 and isinstance(given[0], tuple | list):  # einsum's operands
        given = tuple(given[0])
    if len(given) < 2 or not _are_weights(given[0]) or (_axes(given[1]) or 0) < 3:
        return False
    equation = node.args[0]
    if name != "einsum" or not isinstance(equation, str):
        return True
    weights, values = equation.replace(" ", "").split("->")[0].split(",")[:2]
    return weights[-2:-1] not in values  # else each row has values of its own


def _axes(factor: Any) -> int | None:
    """The number of a tensor's axes; None if it is not a tensor."""
    value = factor.meta.get("example_value") if isinstance(factor, Node) else None
    return value.ndim if isinstance(value, Tensor) else None


def _are_weights(factor: Any) -> bool:
    """True if a factor is the result of a softmax, or what a few functions make of one."""
    node = factor
    for _ in range(_STEPS):
        if not isinstance(node, Node):
            return False
        name = name_of(node)
        if name == "softmax":
            return (_axes(node) or 0) > 2
        if name not in _KEEPING:
            return False
        node = node.args[0] if node.args else None
    return False


def name_of(node: Any) -> str:
    """The name of the function that a node calls; "" for anything else."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return ""
    function = node.target
    return function if isinstance(function, str) else str(getattr(function, "__name__", ""))


def _place(node: Node) -> str:
    """The line of the model's code that a node comes from, " (model.py, line 12)"."""
    frames = _FRAME.findall(node.stack_trace or "")
    own = [x for x in frames if not x[0].startswith(_LIBRARIES)]
    return f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""


def _device(node: Node) -> torch.device:
    """The device of a node's inputs."""
    for one in node.all_input_nodes:
        value = one.meta.get("example_value")
        if isinstance(value, Tensor):
            return value.device
    return torch.device("cpu")
