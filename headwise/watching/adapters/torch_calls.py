"""Attention that a model computes with PyTorch: its calls are seen while the model runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from headwise.api import attention
from headwise.nn.call import Call
from headwise.score import Dot
from headwise.watching.adapters import flex_calls, multi_head_calls
from headwise.watching.adapters.headwise_calls import OURS, Undo
from headwise.watching.adapters.hooks import Hook
from headwise.watching.adapters.mask_intervals import Memory
from headwise.watching.adapters.proof import prove
from headwise.watching.adapters.replacement import is_taken
from headwise.watching.adapters.scaled_dot_product import are_apart, kind_of, scaled_dot_product
from headwise.watching.adapters.written_out import PRODUCTS, SOFTMAXES, WrittenOut
from headwise.watching.layer import LARGEST
from headwise.watching.recorder import Recorder, matches, recomputing

_PLAIN = ("torch.nn.", "headwise.")
"""Modules of these packages call no attention function, but for those that are seen otherwise."""


def attach(model: nn.Module, recorder: Recorder) -> list[Undo]:
    """Let calls of PyTorch's attention in the model tell the recorder; returns what undoes it."""
    listener = Listener(recorder)
    undo: list[Undo] = [listener.leave_all]
    undo += multi_head_calls.attach(model, recorder, listener)  # first: it may refuse
    undo += flex_calls.attach(model, listener)
    for name, module in model.named_modules():
        if not isinstance(module, OURS) and type(module).__module__.startswith(_PLAIN):
            continue
        listener.names[id(module)] = name
        before = module.register_forward_pre_hook(Hook(listener.enter), with_kwargs=True)
        after = module.register_forward_hook(Hook(listener.leave), always_call=True)
        undo += [before.remove, after.remove]
    return undo


@dataclass
class Frame:
    """A module that is running; `quiet` where its calls are seen otherwise."""

    module: nn.Module
    name: str
    quiet: bool
    listening: bool  # it was this frame that began to listen
    sizes: tuple[int, ...]  # of the first tensor that the outermost module was called with
    written_out: WrittenOut = field(default_factory=WrittenOut)


class Running(threading.local):
    """The modules that run in a thread; PyTorch's modes are a thread's own too."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []


class Listener(TorchFunctionMode):
    """Hears the attention calls of the modules that run; hooks tell it which those are."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.names: dict[int, str] = {}  # of the modules that tell when they run
        self.memory = Memory()
        self.thread = threading.get_ident()
        self.running = Running()
        self.proved: set[tuple[str, bool, bool]] = set()

    @property
    def frames(self) -> list[Frame]:
        """The modules that run in this thread, the innermost last."""
        return self.running.frames

    def enter(self, module: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A module starts to run."""
        name, quiet = self.names.get(id(module)), isinstance(module, OURS)
        if name is None:
            return
        if torch.compiler.is_compiling():
            refuse_compiled(name)
        self.refuse_other_threads(name)
        needed = self.recorder.active or bool(self.recorder.silenced)
        listening = not quiet and needed and not self.on
        sizes = self.frames[0].sizes if self.frames else _sizes(given, options)
        self.frames.append(Frame(module, name, quiet, listening, sizes))
        self.recorder.begin()
        if listening:
            self.__enter__()  # type: ignore[no-untyped-call]

    def refuse_other_threads(self, name: str) -> None:
        """ValueError where two threads would run the model under one watch."""
        if threading.get_ident() != self.thread and not recomputing():
            raise ValueError(
                f"{name or 'the watched model'} runs in another thread than the one that attached "
                "its watch, and a watch follows that thread alone; attach() it in the thread that "
                "runs the model"
            )

    @property
    def on(self) -> bool:
        """Whether calls are heard now."""
        depth: int = torch._C._len_torch_function_stack()
        return any(torch._C._get_function_stack_at(level) is self for level in range(depth))

    def leave(self, module: nn.Module, *_: object) -> None:
        """A module has run, well or not."""
        if torch.compiler.is_compiling() or not any(x.module is module for x in self.frames):
            return  # it was refused as it started
        while self.frames:
            frame = self.frames.pop()
            self.recorder.end()
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
        options = kwargs or {}
        if torch.compiler.is_compiling():  # a function of the model that is compiled by itself
            return func(*args, **options)
        if not self.frames or self.frames[-1].quiet or is_taken():
            return func(*args, **options)
        frame = self.frames[-1]
        if func is attention:
            return self.own(frame.name, *args, **options)
        out = func(*args, **options)
        if func is F.scaled_dot_product_attention:
            if self.recorder.wants(frame.name):
                call, kind = scaled_dot_product(self.memory, *args, **options)
                self.recorder.beside(frame.name, call, kind or kind_of(frame.name))
            return self.recorder.silence(frame.name, out)
        if func in SOFTMAXES:
            frame.written_out.softmax(out, args, options)
        elif frame.written_out.waiting and func in PRODUCTS:
            return self.product(frame, args, out)
        elif frame.written_out.waiting:
            frame.written_out.follow(func, out, args, options)
        return out

    def own(self, name: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """A call of hw.attention in a module of someone else's."""
        if q.ndim != 4 or not self.recorder.wants(name):
            out = attention(q, k, v, **options)
        else:
            call = Call(q, k, v, **(options | {"score": options["score"] or Dot()}))
            across = call.mask is None and are_apart(q, k)
            out = self.recorder.inside(name, call, "cross" if across else kind_of(name))
        return self.recorder.silence(name, out)

    def product(self, frame: Frame, given: tuple[Any, ...], out: Tensor) -> Tensor:
        """A product that may weigh values by a softmax: attention, written out."""
        name, recorder = frame.name, self.recorder
        wanted, silenced = recorder.wants(name), name in recorder.silenced
        try:
            found = frame.written_out.product(frame.module, name, given, frame.sizes)
            if found is not None and wanted and found.exact:
                heads = found.product.heads_first(out.detach(), found.call.q.shape[1])
                self.prove(name, found.call, heads.transpose(1, 2))
        except ValueError:
            if silenced or (wanted and self.asked_for(name)):
                raise
            return out  # what nobody asked for need not be understood
        if found is None:
            return out
        if wanted:
            across = found.call.mask is None and are_apart(*found.call[:2])
            few = found.call.q.shape[:3].numel() * found.call.k.shape[2] <= LARGEST
            recorder.beside(name, found.call, "cross" if across else kind_of(name), maps=few)
        if not silenced:
            return out
        heads = found.product.heads_first(out, found.call.q.shape[1])
        return found.product.as_it_was(recorder.silence(name, heads))

    def prove(self, name: str, call: Call, out: Tensor) -> None:
        """Once for every form of a layer's calls: it is what was computed, out (B, N, H, D)."""
        form = (name, call.mask is None, call.bias is None)
        if form in self.proved:
            return
        try:
            with torch.no_grad():
                proved = prove(call, out)
        except ValueError as error:
            raise ValueError(f"{name or 'the model'} can't be watched: {error}") from None
        if proved:
            self.proved.add(form)

    def asked_for(self, name: str) -> bool:
        """Whether a layer of this name would be one of those that are looked at."""
        wanted = self.recorder.looking.layers
        return wanted is None or matches(len(self.recorder.known()), name, wanted)


@_disable_dynamo  # torch.compiler.disable, but it imports the compiler only when it is called
def refuse_compiled(name: str) -> None:
    """Say at run time what a compiler would otherwise make of a watch: nothing good."""
    raise ValueError(
        f"{name or 'the watched model'} runs compiled, and compiled code can't be looked into; "
        "call the model that was given to torch.compile while it is watched"
    )


def _sizes(given: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, ...]:
    """The sizes of the first tensor among what a module is called with."""
    for x in tree_leaves((given, options)):
        if isinstance(x, Tensor) and not x.is_nested:
            return tuple(x.shape)
    return ()
