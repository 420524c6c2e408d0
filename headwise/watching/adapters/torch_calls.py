"""Attention that a model computes with PyTorch: its calls are heard while the model runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from headwise.api import attention
from headwise.core.options import Options
from headwise.nn.call import Call
from headwise.watching.adapters.headwise_calls import OURS
from headwise.watching.adapters.joint_attention import JointAttention
from headwise.watching.adapters.module_forwards import Follower, follow, named_modules
from headwise.watching.adapters.other_sequence import elsewhere, parameters
from headwise.watching.adapters.patching import ModelMode, Undo, is_unheard, unheard
from headwise.watching.adapters.scaled_dot_product import (
    SCALED_DOT_PRODUCT,
    MaskMemo,
    lengths_differ,
    scaled_dot_product,
    with_gradients,
)
from headwise.watching.adapters.written.logits_call import head_count, looks_across
from headwise.watching.adapters.written.softmax_results import STARTS
from headwise.watching.adapters.written.written_attention import (
    Operation,
    PartProduct,
    UnreadableError,
    WholeProduct,
    WrittenAttention,
)
from headwise.watching.adapters.written.written_out import WrittenOut
from headwise.watching.recorder.call_recorder import CallRecorder
from headwise.watching.recorder.changed_call import ChangedCall
from headwise.watching.recorder.checkpointing import recomputing
from headwise.watching.recorder.held_call import DROPPED, Output
from headwise.watching.recorder.layer import LARGEST
from headwise.watching.recorder.seen_call import Kind, kind_of

SILENT_PASSES, LISTEN_AGAIN = 2, 64
"""A module in which the mode heard nothing this often runs without it, until this many passes."""

_PLAIN = ("torch.nn.", "headwise.")
"""Modules of these packages call no attention function, except those that other adapters see."""


_FOLLOWED: list[dict[int, str]] = []
"""The modules of the listeners that watch; one that only serves experiments steps aside there."""

_CALLS = frozenset((attention, SCALED_DOT_PRODUCT))
"""Functions that are attention by themselves."""


def attach(model: nn.Module, listener: Listener) -> list[Undo]:
    """Let the listener know which of the model's modules run; returns the undoing."""
    for name, module in named_modules(model):
        if not _is_plain(module):
            listener.names[id(module)] = name
    follower = Follower(listener.names, listener.enter, listener.leave)
    undo = [listener.leave_all, *follow(model, follower)]
    if not listener.recorder.aside:
        _FOLLOWED.append(listener.names)
        undo.append(lambda: _forget(listener.names))
    return undo


def _forget(names: dict[int, str]) -> None:
    _FOLLOWED[:] = [x for x in _FOLLOWED if x is not names]


def may_attend(module: nn.Module) -> bool:
    """True unless it is certain that this module computes no attention itself."""
    return isinstance(module, nn.MultiheadAttention) or not _is_plain(module)


def _is_plain(module: nn.Module) -> bool:
    known = type(module).__module__.startswith(_PLAIN) and "forward" not in vars(module)
    return known and not isinstance(module, OURS)


@dataclass(slots=True)
class Frame:
    """A module that is running; `quiet` if another adapter sees its calls."""

    module: nn.Module
    name: str
    quiet: bool
    listening: bool  # the listener was switched on for this frame
    heard: bool  # its calls are heard, by this frame's listener or that of one around it
    sizes: tuple[int, ...]  # of the first tensor that the outermost module was called with
    attends: bool = False  # something was heard that is attention, or may be a part of it
    by_mode: bool = False  # and the mode alone heard it: no adapter replaced that function
    named_only: bool = False  # it gives calls of others their name, and hears nothing itself
    given: tuple[Any, ...] = ()  # the arguments that it was called with
    options: Mapping[str, Any] = field(default_factory=dict)


class Running(threading.local):
    """The modules that run in a thread; PyTorch's modes belong to one thread too."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.written_out = WrittenOut()
        self.serves = False  # continuous batching


class Listener(ModelMode):
    """Hears the attention calls of the modules that run; hooks tell it which those are."""

    def __init__(self, recorder: CallRecorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.names: dict[int, str] = {}  # of the modules with hooks
        self.memo = MaskMemo()
        self.thread = threading.get_ident()
        self.joint = JointAttention()
        self.running = Running()
        self.readers: dict[Any, Callable[..., None]] = {}  # of functions that other adapters read
        self.heard_nothing: dict[int, int] = {}  # how often, by module
        self.needless: dict[int, int] = {}  # how often adapters heard all attention, by module
        self.names_only: dict[int, Frame] = {}  # the frames of those modules

    @property
    def frames(self) -> list[Frame]:
        """The modules that run in this thread, the innermost last."""
        return self.running.frames

    def enter(self, module: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A module starts to run."""
        key, frames = id(module), self.running.frames
        if self.heard_nothing.get(key, 0) >= SILENT_PASSES and frames and not self.on:
            frames.append(self.names_only[key])  # most modules, in most passes
            return
        name, quiet = self.names.get(key), isinstance(module, OURS)
        if name is None:
            return
        aside = self.recorder.aside and any(key in x for x in _FOLLOWED)
        quiet = quiet or aside
        if "read_index" in options:  # continuous batching runs the model in a thread of its own
            self.running.serves = True
        self.refuse_other_threads(name)
        recorder = self.recorder
        if not frames and recorder.passes.count % LISTEN_AGAIN == 0:
            self.listen_again()
        on = self.on
        listening = not (on or quiet or self.hears_nothing(key)) and self.may_listen(module)
        sizes = frames[0].sizes if frames else _sizes(given, options)
        frame = Frame(module, name, quiet, listening, (on or listening) and not aside, sizes)
        frame.given, frame.options = given, options
        frames.append(frame)
        recorder.passes.begin()
        if listening:
            self.__enter__()  # type: ignore[no-untyped-call]

    def hears_nothing(self, module: int) -> bool:
        """True if the mode would hear nothing in a module, or only what adapters hear too."""
        most = max(self.heard_nothing.get(module, 0), self.needless.get(module, 0))
        return most >= SILENT_PASSES

    def may_listen(self, module: nn.Module) -> bool:
        """True if this pass is watched, and the mode may be on while the module runs."""
        recorder = self.recorder
        changed = recorder.interventions.running
        if not (recorder.active or changed):
            return False
        # The compiler can't trace through a mode: modules that hold compiled ones go without.
        return changed or recorder.options.effects or not is_compiled(module)

    def listen_again(self) -> None:
        """Forget in which modules the mode hears nothing."""
        self.heard_nothing.clear()
        self.needless.clear()

    def refuse_other_threads(self, name: str) -> None:
        """Raise ValueError if the model runs in another thread than its watch."""
        known = threading.get_ident() == self.thread or self.running.serves
        if not known and not recomputing():
            raise ValueError(
                f"{name or 'the watched model'} runs in another thread than the one that attached "
                "its watch, and a watch follows that thread alone; attach() it in the thread that "
                "runs the model"
            )

    @property
    def on(self) -> bool:
        """True if calls are heard now."""
        depth: int = torch._C._len_torch_function_stack()
        if depth == 0:
            return False
        return any(torch._C._get_function_stack_at(level) is self for level in range(depth))

    def leave(self, module: nn.Module, *_: object) -> None:
        """A module has run, with or without an error."""
        frames = self.running.frames
        if frames and frames[-1].module is module:
            frame = frames.pop()
            if not frame.named_only:
                self.close(frame)
            return
        if not any(x.module is module for x in frames):
            return  # it was refused as it started
        while frames:
            frame = frames.pop()
            if not frame.named_only:
                self.close(frame)
            if frame.module is module:
                return

    def close(self, frame: Frame) -> None:
        """End what was begun for a module that has run."""
        if frame.listening:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        key = id(frame.module)
        if frame.heard and not frame.attends:
            self.heard_nothing[key] = self.heard_nothing.get(key, 0) + 1
            frame.given, frame.options = (), {}
            self.names_only[key] = replace(frame, listening=False, heard=False, named_only=True)
        elif frame.heard:
            self.needless[key] = 0 if frame.by_mode else self.needless.get(key, 0) + 1
        elif not frame.attends and key in self.needless:
            self.listen_again()  # it may attend in another way now
        if self.frames:
            self.running.written_out.leave()
        else:
            self.report_unused()
        self.recorder.passes.end()

    def report_unused(self) -> None:
        """Report softmaxes that look like attention and were never multiplied with values."""
        for origin in self.running.written_out.unused():
            self.recorder.interventions.refuse(origin.names[-1], "no values met its softmax")
            if self.recorder.wants(origin.names[-1]):
                said = f"no values were found for {origin.missing or 'any'} of the weights "
                said += f"{origin.shape} of its softmax"
                self.recorder.unread.fail(origin.names[-1], ValueError(said))

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
        options, running = kwargs or {}, self.running
        heard = func in STARTS or func in _CALLS or func in self.readers
        # Most functions are no part of any attention; a model may also be compiled in part.
        if not (heard or running.written_out.waiting) or torch.compiler.is_compiling():
            return func(*args, **options)
        if not running.frames or running.frames[-1].quiet or is_unheard():
            return func(*args, **options)
        frame = running.frames[-1]
        self.note_attention(by_mode=True)
        if func is attention:
            return self.own(frame.name, *args, **options)
        if func is SCALED_DOT_PRODUCT:
            return self.scaled_dot_product(func, args, options)
        with unheard() if func in self.readers else nullcontext():  # it may call another of these
            out = func(*args, **options)
        if func in self.readers:
            self.recorder.interventions.refuse(frame.name, f"it calls {func.__name__}")
            if frame.name in self.recorder.interventions.silenced:
                raise ValueError(f"{frame.name}: a head of {func.__name__} can't be switched off")
            if self.recorder.wants(frame.name):
                with self.recorder.unread.reading(frame.name), unheard():
                    self.readers[func](frame.name, *args, **options)
            return out
        if func in STARTS or self.running.written_out.waiting:
            return self.written(func, out, args, options)
        return out

    @property
    def listens(self) -> bool:
        """True if a call of the module that runs should be looked at."""
        return bool(self.frames) and not self.frames[-1].quiet and not is_unheard()

    def note_attention(self, by_mode: bool = False) -> None:
        """Go on following the modules that run: one of them attends."""
        for frame in self.running.frames:
            frame.attends = True
            frame.by_mode = frame.by_mode or by_mode

    def scaled_dot_product(
        self, original: Callable[..., Tensor], given: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Tensor:
        """A call of F.scaled_dot_product_attention; its output."""
        name, changes = self.frames[-1].name, self.recorder.interventions
        self.note_attention()
        changed: ChangedCall | None = None

        def read() -> tuple[Call, Kind]:
            call, kind = scaled_dot_product(self.memo, self.heads, *given, **options)
            return call, kind or self.kind_of_call(name, call)

        with unheard():
            if changes.wants(name):
                call, kind = read()
                changed = changes.change(name, with_gradients(call, *given, **options), kind)
            if changed is None:
                out = original(*given, **options)
            else:
                query, v = (given[0] if given else options["query"]), changed.own.v
                out = changed.attend().reshape(*query.shape[:-1], v.shape[-1])
        if self.recorder.wants(name):
            with self.recorder.unread.reading(name):
                call, kind = read()
                parts = self.joint.parts(self.frames, call)
                kind = kind if parts is None else "self"
                whole = out.reshape(*call.q.shape[:3], -1)
                shape = whole.shape
                output = Output(out, lambda grad: grad.reshape(shape))
                self.recorder.beside(
                    name, call, kind, out=whole, changed=changed, output=output, marked=parts
                )
        if out.ndim == 3 and name in changes.silenced:
            split = out.unflatten(0, (-1, self.heads(out)))  # (B, H, N, D)
            return changes.silence(name, split).flatten(0, 1)
        return changes.silence(name, out)

    def heads(self, x: Tensor) -> int:
        """The number of heads in queries or outputs (B · H, N, D) of the module that runs.

        ValueError if nothing states it.
        """
        if self.frames[0].sizes[:2] == x.shape[:2]:
            return 1  # (B, N, D), as the model's input
        return head_count([frame.module for frame in self.frames[:-3:-1]], x.shape, ())

    def kind(self, name: str, keys: int, masked: bool) -> Kind:
        """The kind of a call whose lengths do not tell it, by the module's name and arguments."""
        frame = next((x for x in reversed(self.frames) if x.name == name), None)
        if frame is not None:
            names = parameters(type(frame.module).forward)
            found = elsewhere(names, frame.given, frame.options)
            if found.holds(keys, masked):
                return "cross"
        return kind_of(name)

    def kind_of_call(self, name: str, call: Call) -> Kind:
        """The same of a call that was read."""
        return self.kind(name, call.k.shape[2], call.mask is not None)

    def own(self, name: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """A call of hw.attention in somebody's own module."""
        recorder = self.recorder
        if q.ndim == 3 and recorder.interventions.wants(name):  # without a batch
            return self.own(name, q[None], k[None], v[None], **options)[0]
        if q.ndim != 4 or not (recorder.wants(name) or recorder.interventions.wants(name)):
            out = attention(q, k, v, **options)
        else:
            call = Call(q, k, v, Options(**options))
            across = call.mask is None and lengths_differ(q, k)
            kind: Kind = "cross" if across else self.kind_of_call(name, call)
            changed = recorder.interventions.change(name, call, kind)
            with unheard():  # rows that are steered apart are calls of hw.attention, too
                if recorder.wants(name):
                    out = recorder.inside(name, call, kind, changed=changed)
                else:
                    out = (call if changed is None else changed).attend()
        return recorder.interventions.silence(name, out)

    def written(
        self, func: Callable[..., Any], out: Any, given: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Any:
        """Any function, which may be a part of attention that is written out; its output."""
        running, recorder = self.running.written_out, self.recorder
        changes = recorder.interventions
        modules = {frame.name: frame.module for frame in self.frames}
        op = Operation(func, out, given, options, modules, self.frames[0].sizes)
        try:
            with torch.no_grad():
                if func in STARTS:
                    running.start(op)
                    return out
                found = running.follow(op)
        except Exception as error:
            name = error.name if isinstance(error, UnreadableError) else self.frames[-1].name
            if name in changes.silenced or changes.wants(name):
                raise
            recorder.unread.fail(name, error)
            return out
        if found is None:
            return out
        changes.refuse(found.name, "its attention is written out, softmax and all")
        if found.call is not None and recorder.wants(found.name):
            with recorder.unread.reading(found.name):
                self.observe_written(found, found.call, out)
        head = changes.silenced.get(found.name)
        return out if head is None else found.without(out, head)

    def observe_written(self, found: WrittenAttention, call: Call, out: Tensor) -> None:
        """Hand over attention that is written out, after the product that completes it."""
        result, out = out, out.detach()
        output: Output | str | None = None
        known: Mapping[str, Tensor] = {}
        across = looks_across(call)
        kind: Kind = "cross" if across else self.kind_of_call(found.name, call)
        proof = whole = None
        if isinstance(found, WholeProduct) and found.exact:
            whole = found.heads_first(out)
            output = Output(result, found.gradient)
            proof = self.prove(found.name, call, whole.transpose(1, 2))
        elif isinstance(found, WholeProduct):
            output = DROPPED
        if isinstance(found, PartProduct):
            windowed, known = found.windows.known(self.recorder.options.sink_keys)
            kind = "window" if windowed else kind
        few = call.q.shape[:3].numel() * call.k.shape[2] <= LARGEST
        self.recorder.beside(
            found.name, call, kind, out=whole, maps=few, known=known, proof=proof, output=output
        )

    def prove(self, name: str, call: Call, out: Tensor) -> Tensor | None:
        """Compare out (B, N, H, D) with the call, once for every form of a layer's calls."""
        form = (call.mask is None, call.bias is None)
        return self.recorder.proofs.compare(name, form, call, lambda: out)


def is_compiled(module: nn.Module) -> bool:
    """True if a module, or one inside it, runs as compiled code."""
    return any(
        part._compiled_call_impl is not None or hasattr(part, "_orig_mod")
        for part in module.modules()
    )


def _sizes(given: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, ...]:
    """The sizes of the first tensor among a module's arguments."""
    for x in tree_leaves((given, options)):
        if isinstance(x, Tensor) and not x.is_nested:
            return tuple(x.shape)
    return ()
