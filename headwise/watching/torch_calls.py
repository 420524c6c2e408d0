"""Attention that a model computes with PyTorch: its calls are seen while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.overrides import TorchFunctionMode

from headwise.mask import Mask, causal
from headwise.nn.call import Call
from headwise.place import four
from headwise.score import Dot
from headwise.watching import multi_head_calls
from headwise.watching.layer import Kind
from headwise.watching.own import OURS, Undo
from headwise.watching.recorder import Recorder
from headwise.watching.replacement import is_taken
from headwise.watching.stretches import Memory, read, split
from headwise.watching.written_out import PRODUCTS, SOFTMAXES, WrittenOut

_PLAIN = ("torch.nn.", "headwise.")
"""Modules of these packages call no attention function, but for those that are seen otherwise."""


def attach(model: nn.Module, recorder: Recorder) -> list[Undo]:
    """Let calls of PyTorch's attention in the model tell the recorder; returns what undoes it."""
    listener = Listener(recorder)
    undo: list[Undo] = [listener.leave_all]
    undo += multi_head_calls.attach(model, recorder, listener)  # first: it may refuse
    for name, module in model.named_modules():
        if not isinstance(module, OURS) and type(module).__module__.startswith(_PLAIN):
            continue
        listener.names[id(module)] = name
        undo.append(module.register_forward_pre_hook(listener.enter).remove)
        undo.append(module.register_forward_hook(listener.leave, always_call=True).remove)
    return undo


@dataclass
class Frame:
    """A module that is running; `quiet` where its calls are seen otherwise."""

    module: nn.Module
    name: str
    quiet: bool
    listening: bool  # it was this frame that began to listen
    written_out: WrittenOut = field(default_factory=WrittenOut)


class Listener(TorchFunctionMode):
    """Hears the attention calls of the modules that run; hooks tell it which those are."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.names: dict[int, str] = {}  # of the modules that tell when they run
        self.frames: list[Frame] = []
        self.memory = Memory()

    def __deepcopy__(self, memo: object) -> Listener:
        return self  # a copy of the model takes its hooks along, and is not the watched model

    def enter(self, module: nn.Module, given: object) -> None:
        """A module starts to run."""
        name, quiet = self.names.get(id(module)), isinstance(module, OURS)
        if name is None:
            return
        if torch.compiler.is_compiling():
            refuse_compiled(name)
        needed = self.recorder.active or bool(self.recorder.silenced)
        listening = not quiet and needed and not self.on
        self.frames.append(Frame(module, name, quiet, listening))
        if listening:
            self.__enter__()  # type: ignore[no-untyped-call]

    @property
    def on(self) -> bool:
        """Whether calls are heard now."""
        depth: int = torch._C._len_torch_function_stack()
        return any(torch._C._get_function_stack_at(level) is self for level in range(depth))

    def leave(self, module: nn.Module, *_: object) -> None:
        """A module has run, well or not."""
        while self.frames and id(module) in self.names:
            frame = self.frames.pop()
            if frame.listening:
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if frame.module is module:
                return

    def leave_all(self) -> None:
        """Nothing runs any more; a run that was interrupted may have left modules behind."""
        while self.frames:
            self.leave(self.frames[-1].module)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.frames or self.frames[-1].quiet or is_taken():
            return out
        frame = self.frames[-1]
        if func is F.scaled_dot_product_attention:
            if self.recorder.wants(frame.name):
                call = scaled_dot_product(self.memory, *args, **(kwargs or {}))
                self.recorder.beside(frame.name, call, kind_of(frame.name))
            out = self.recorder.silence(frame.name, out)
        elif func in SOFTMAXES:
            frame.written_out.softmax(out, args, kwargs or {})
        elif frame.written_out.waiting:
            if func in PRODUCTS:
                found = frame.written_out.product(frame.module, frame.name, args)
                if found is not None and self.recorder.wants(frame.name):
                    self.recorder.beside(frame.name, found, kind_of(frame.name))
                if found is not None:
                    heads = out.view(*found.q.shape[:2], *out.shape[-2:])
                    out = self.recorder.silence(frame.name, heads).view_as(out)
            else:
                frame.written_out.follow(out, args)
        return out


@_disable_dynamo  # torch.compiler.disable, but it imports the compiler only when it is called
def refuse_compiled(name: str) -> None:
    """Say at run time what a compiler would otherwise make of a watch: nothing good."""
    raise ValueError(
        f"{name or 'the watched model'} runs compiled, and compiled code can't be looked into; "
        "call the model that was given to torch.compile while it is watched"
    )


def scaled_dot_product(
    memory: Memory,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    """A call of F.scaled_dot_product_attention in our words; dropout does not change statistics."""
    q, k, v = (_with_heads(x.detach()) for x in (query, key, value))
    mask: Mask | None = None
    bias: Tensor | None = None
    if is_causal:
        mask = causal(offset=0)  # PyTorch aligns it at the start, also where N ≠ M
    elif attn_mask is not None:
        mask, bias = read_mask(memory, attn_mask, query)
    return Call(q, k, v, Dot(scale), mask, bias, None, None, 0.0, "auto")


def read_mask(memory: Memory, given: Tensor, query: Tensor) -> tuple[Mask | None, Tensor | None]:
    """A mask tensor, True = may attend or added to the logits, as mask and bias."""

    def made() -> tuple[Mask | None, Tensor | None]:
        fitting = _fitting(given.detach(), query)
        seen, bias = (fitting, None) if given.dtype == torch.bool else split(fitting)
        return None if seen is None else read(seen), bias

    return memory.recall(made, given, query.ndim)


def _with_heads(x: Tensor) -> Tensor:
    """(..., H, N, D) with one batch axis; (B, N, D) is one head."""
    if x.ndim == 3:
        return x[:, None]
    return x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])


def _fitting(mask: Tensor, query: Tensor) -> Tensor:
    """A mask for queries of three, four or more axes, with the axes of four."""
    if query.ndim == 3 and mask.ndim == 3:
        return mask[:, None]
    if query.ndim > 4 and mask.ndim > 4:
        mask = mask.expand(*query.shape[:-3], *mask.shape[-3:])
        return mask.reshape(-1, *mask.shape[-3:])
    return four(mask)


def kind_of(name: str) -> Kind:
    """Whether a module's name says that it looks at another sequence."""
    last = name.lower().rsplit(".", 1)[-1]
    across = ("cross" in last, "encoder_attn" in last, "encdec" in last, "multihead_attn" in last)
    return "cross" if any(across) else "self"
