"""Models of transformers: the calls of their attention interface, observed beside it."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from headwise.core.place import Place
from headwise.nn.call import Call
from headwise.watching.adapters import implementation as ours
from headwise.watching.adapters import traced, traced_masks
from headwise.watching.adapters.interface import (
    InterfaceCall,
    TokenSequence,
    is_causal,
    to_call,
)
from headwise.watching.adapters.module_forwards import Follower, follow, named_modules
from headwise.watching.adapters.paged_calls import is_paged, to_paged_call
from headwise.watching.adapters.patching import Replacement, Undo, unheard
from headwise.watching.adapters.scaled_dot_product import MaskMemo, lengths_differ
from headwise.watching.adapters.torch_calls import Listener
from headwise.watching.recorder.call_recorder import CallRecorder
from headwise.watching.recorder.changed_call import ChangedCall
from headwise.watching.recorder.held_call import DROPPED, Output
from headwise.watching.recorder.paged_record import PagedCall
from headwise.watching.recorder.proof import without_dropout
from headwise.watching.recorder.seen_call import Kind, kind_of

_EAGER = "eager_attention_forward"
_ENDINGS = ("id", "index")  # of the names that configs give the number of a token


_memo = MaskMemo()


@dataclass(eq=False)
class TransformersModules:
    """A watched model: its modules by identity, and the tokens of the parts that run."""

    names: dict[int, str]
    listener: Listener
    memo: MaskMemo = field(default_factory=MaskMemo)
    sequences: list[tuple[nn.Module, TokenSequence | None]] = field(default_factory=list)
    number: int = field(default_factory=count().__next__)
    begins: dict[str, Tensor] = field(default_factory=dict)  # by layer, from its prompt's mask

    @property
    def recorder(self) -> CallRecorder:
        """The recorder that the calls are shown to."""
        return self.listener.recorder

    def enter(self, module: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A model, or a part that is a model itself, starts to run."""
        named = _named(type(module), given) | options
        sequence = _sequence(named)
        if not self.sequences and self.recorder.active:
            ids = named.get("input_ids")
            known = isinstance(ids, Tensor) and ids.ndim == 2 and sequence is not None
            known = known and "read_index" not in named  # of continuous batching
            past = sequence.past if sequence is not None else 0
            cache = named.get("past_key_values")
            self.recorder.marked.note(ids if known else None, past, cache)
        self.sequences.append((module, sequence))

    def leave(self, module: nn.Module, *_: object) -> None:
        """It has run, with or without an error."""
        if any(running is module for running, _ in self.sequences):
            while self.sequences.pop()[0] is not module:
                pass

    def sequence(self, name: str) -> TokenSequence | None:
        """The tokens of the innermost part that runs, with what a layer's prompt said of them."""
        found = self.sequences[-1][1] if self.sequences else None
        if found is not None and found.begins is None and found.past > 0:
            return replace(found, begins=self.begins.get(name))
        return found

    def prove(
        self, name: str, function: Any, given: InterfaceCall, call: Call, out: Tensor
    ) -> Tensor | None:
        """Compare the function's output with this call, once for every form of a layer's calls.

        Where it dropped weights it runs once more without dropout; the model's random numbers
        stay as they were.
        """
        named = tuple(sorted(key for key, value in given.options.items() if value is not None))
        form = (given.implementation, given.mask is None, given.q.shape[2] == 1, named)

        def whole() -> Tensor:
            return _undropped(function, given) if given.option("dropout") else out.detach()

        return self.recorder.proofs.compare(name, form, call, whole)

    def remember(self, name: str, call: Call, sequence: TokenSequence | None) -> None:
        """Keep where sequences begin, for steps whose window no longer reaches there."""
        if sequence is not None and sequence.begins is None and call.mask is not None:
            start = call.mask.start(Place.of(call.q, call.k))
            if isinstance(start, Tensor):
                self.begins[name] = start.flatten()


def attach(model: nn.Module, listener: Listener) -> list[Undo]:
    """Show the calls of the attention interface to the recorder; returns the undoing."""
    if sys.modules.get("transformers") is None:
        return []  # then no module of the model is from there
    import transformers
    from transformers import AttentionInterface, PreTrainedModel

    masks = getattr(transformers, "AttentionMaskInterface", None)
    modules = TransformersModules(
        {id(module): name for name, module in named_modules(model)}, listener
    )
    undo: list[Undo] = [
        replacement.add(modules, modules.recorder.aside)
        for replacement in _replacements(AttentionInterface, masks, model)
    ]
    whole = {id(module) for module in model.modules() if isinstance(module, PreTrainedModel)}
    undo.append(modules.recorder.paged.release)
    undo += [graphs.add(modules) for graphs in _graphs()]
    return undo + follow(model, Follower(whole, modules.enter, modules.leave))


def marked_tokens(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The numbers of the tokens that stand for images and videos, by the names of their spans."""
    if sys.modules.get("transformers") is None:
        return {}
    from transformers import PreTrainedModel

    parts = [x for x in model.modules() if isinstance(x, PreTrainedModel) and _takes_tokens(x)]
    found: dict[str, tuple[int, ...]] = {}
    for name in ("image", "video"):
        ids = {getattr(x.config, f"{name}_token_{end}", None) for x in parts for end in _ENDINGS}
        if numbers := tuple(sorted(id for id in ids if isinstance(id, int) and id >= 0)):
            found[name] = numbers
    return found


def towers(model: nn.Module) -> tuple[str, ...]:
    """The names of parts that take no tokens, such as a vision tower, if the model takes tokens."""
    if sys.modules.get("transformers") is None:
        return ()
    from transformers import PreTrainedModel

    parts = {name: x for name, x in named_modules(model) if isinstance(x, PreTrainedModel)}
    if not parts or not _takes_tokens(next(iter(parts.values()))):
        return ()
    return tuple(name for name, part in parts.items() if not _takes_tokens(part))


def _takes_tokens(part: nn.Module) -> bool:
    return not {"input_ids", "inputs_embeds"}.isdisjoint(_parameters(type(part).forward))


@functools.cache
def _graphs() -> tuple[Replacement[TransformersModules], ...]:
    """Replacements that keep the CUDA graphs of continuous batching apart.

    A graph repeats what was captured: one from before a watch shows it nothing, and one that was
    captured under a watch writes to its tensors, which end with it.
    """
    try:
        from transformers.generation.continuous_batching.utils import CudaGraphBuffer as Graphs
    except ImportError:
        return ()

    def make(original: Any, users: list[TransformersModules]) -> Callable[..., Any]:
        @functools.wraps(original)
        def of_these_watches(self: Any, key: tuple[int, ...], *graph: Any) -> Any:
            return original(self, (*key, *(-1 - user.number for user in users)), *graph)

        return of_these_watches

    return Replacement(Graphs, "get_graph", make), Replacement(Graphs, "set_graph", make)


def _replacements(
    interface: type, masks: type | None, model: nn.Module
) -> Iterator[Replacement[TransformersModules]]:
    """Replacements for every way in which a model gets a function: by item and `get_interface`.

    Before transformers 5 there was only the first, and not for "eager": its function is a global
    of the file that defines the model's attention.
    """
    yield _replacement(interface, "__getitem__")
    if masks is not None:
        yield _replacement(masks, "__getitem__")
    if hasattr(interface, "get_interface"):
        yield _replacement(interface, "get_interface")
        return
    for file in dict.fromkeys(type(module).__module__ for module in model.modules()):
        if hasattr(sys.modules.get(file), _EAGER):
            yield _replacement(sys.modules[file], _EAGER)


@functools.cache  # watches share a replacement
def _replacement(owner: Any, name: str) -> Replacement[TransformersModules]:
    if name == "__getitem__":
        masks = owner.__name__ == "AttentionMaskInterface"
        return Replacement(owner, name, _make_mask_getitem if masks else _make_getitem)
    return Replacement(owner, name, _make_eager if name == _EAGER else _make_get_interface)


def _make_mask_getitem(original: Any, users: list[TransformersModules]) -> Callable[..., Any]:
    @functools.wraps(original)
    def getitem(self: Any, key: str) -> Any:
        function = original(self, key)
        return _noted(function) if torch.compiler.is_compiling() else function

    return getitem


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A mask function of transformers whose masks need not be read from their tensors."""

    def mask(*given: Any, **options: Any) -> Any:
        made = function(*given, **options)
        traced_masks.note(made, options)
        return made

    return mask


def _make_get_interface(original: Any, users: list[TransformersModules]) -> Callable[..., Any]:
    made: dict[tuple[Any, str], Any] = {}  # every layer asks in every pass

    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Any) -> Any:
        function, name = (
            original(self, attn_implementation, default),
            attn_implementation or "eager",
        )
        if torch.compiler.is_compiling():
            # All but the default comes through __getitem__, which is replaced too; torch 2.11 loses
            # the mark on a function that is made while it traces.
            return _beside(function, name, users) if function is default else function
        if (function, name) not in made:
            made[function, name] = _beside(function, name, users)
        return made[function, name]

    return get_interface


def _make_getitem(original: Any, users: list[TransformersModules]) -> Callable[..., Any]:
    made: dict[tuple[Any, str], Any] = {}  # every layer asks in every pass

    @functools.wraps(original)
    def getitem(self: Any, key: str) -> Any:
        function = original(self, key)
        if torch.compiler.is_compiling():
            return _beside(function, key, users)
        if (function, key) not in made:
            made[function, key] = _beside(function, key, users)
        return made[function, key]

    return getitem


def _make_eager(original: Any, users: list[TransformersModules]) -> Callable[..., Any]:
    attend: Callable[..., Any] = _beside(original, "eager", users)
    return attend


def _beside(function: Any, implementation: str, users: list[TransformersModules]) -> Any:
    """The function; calls from the modules of watched models are observed beside it."""
    if hasattr(function, "__watched__"):
        return function

    @functools.wraps(function)
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *more: Any,
        **options: Any,
    ) -> Any:
        if more:
            options |= dict(zip(_parameters(function)[5:], more, strict=False))
        given = InterfaceCall(implementation, module, query, key, value, attention_mask, options)
        if torch.compiler.is_compiling():
            return _traced(function, given)
        for modules in users:
            if id(module) in modules.names:
                return _observed(modules, function, given)
        return _run(function, given)

    attend.__watched__ = True  # type: ignore[attr-defined]
    return attend


def _run(function: Callable[..., Any], given: InterfaceCall, **more: Any) -> Any:
    """The function's own result."""
    return function(given.module, given.q, given.k, given.v, given.mask, **given.options, **more)


def _undropped(function: Callable[..., Any], given: InterfaceCall) -> Tensor:
    """The output without dropout, whether the function or its module would drop."""
    plain = replace(given, options={**given.options, "dropout": 0.0})
    with without_dropout(given.module, given.q.device), unheard():
        out: Tensor = _run(function, plain)[0]
    return out


def _observed(
    modules: TransformersModules, function: Callable[..., Any], given: InterfaceCall
) -> Any:
    """The function's own result; its call is shown to the recorder."""
    name, recorder = modules.names[id(given.module)], modules.recorder
    if is_paged(given):
        return _of_requests(modules, function, given)
    kind, sequence = _kind(given, name), modules.sequence(name)
    modules.listener.note_attention()
    if kind == "self":
        kind = modules.listener.kind(name, given.k.shape[2], given.mask is not None)
    padding = None if sequence is None else sequence.padding(given.q)
    forgotten = None if sequence is None else sequence.forgotten(given.q, given.k, kind)
    changes = recorder.interventions
    if function is ours.attend and (recorder.wants(name) or changes.wants(name)):
        made: list[ChangedCall] = []

        def look(call: Call) -> Tensor:
            changed = changes.change(name, call, kind, forgotten)
            made.extend([] if changed is None else [changed])
            if recorder.wants(name):
                return recorder.inside(name, call, kind, padding, forgotten, changed)
            return (call if changed is None else changed).attend()

        with unheard():  # its engine may be PyTorch's
            out, weights = _run(function, given, look=look)
        return out, weights if weights is None or not made else made[0].weights()
    with unheard():
        call = changed = None
        if changes.wants(name):
            call = to_call(given, kind, sequence, modules.memo)
            changed = changes.change(name, call, kind, forgotten)
        if changed is None:
            result = _run(function, given)
        else:
            result = _changed(modules, function, given, changed)
    silenced = (changes.silence(name, result[0], axis=-2), *result[1:])
    if not recorder.wants(name):
        return silenced
    with recorder.unread.reading(name, f"attn_implementation={given.implementation!r}: "):
        call = to_call(given, kind, sequence, modules.memo) if call is None else call
        proof = None
        if changed is None:
            proof = modules.prove(name, function, given, call, result[0])
        modules.remember(name, call, sequence)
        dropped = given.option("dropout")
        out = None if dropped else result[0].transpose(1, 2)
        output = DROPPED if dropped else Output(result[0], lambda grad: grad.transpose(1, 2))
        recorder.beside(
            name, call, kind, padding, out, forgotten=forgotten, proof=proof, changed=changed,
            output=output,
        )  # fmt: skip
    return silenced


def _of_requests(
    modules: TransformersModules, function: Callable[..., Any], given: InterfaceCall
) -> Any:
    """The function's own result in a step of continuous batching, which is observed."""
    name, recorder = modules.names[id(given.module)], modules.recorder
    modules.listener.note_attention()
    if recorder.interventions.wants(name):
        raise ValueError(
            f"{name} runs by continuous batching, whose attention experiments can't change; use "
            "model.generate"
        )
    if not recorder.wants(name):
        return _run(function, given)
    if function is ours.attend:
        with unheard():  # its engine may be PyTorch's
            return _run(function, given, step=lambda call: recorder.of_requests(name, call))
    made: list[tuple[PagedCall, InterfaceCall]] = []
    with recorder.unread.reading(name, f"attn_implementation={given.implementation!r}: "):
        made.append(to_paged_call(given, beside=True))
    if not made:
        return _run(function, given)
    call, other = made[0]
    with unheard():
        result = _run(function, other)
    with recorder.unread.reading(name, f"attn_implementation={given.implementation!r}: "):
        form, proof = (given.implementation, "requests", call.batch.longest == 1), None
        if not recorder.proofs.known(name, form):
            whole = call.batch.whole()
            proof = recorder.proofs.compare(name, form, whole, lambda: result[0].detach())
        recorder.of_requests(name, call, proof)
    return result


def _changed(
    modules: TransformersModules,
    function: Callable[..., Any],
    given: InterfaceCall,
    changed: ChangedCall,
) -> tuple[Tensor, Tensor | None]:
    """The result of a call that experiments have changed, computed by headwise.

    The first call of each form is compared with the function's own result before it is changed.
    """
    name, own = modules.names[id(given.module)], changed.own
    form = (given.implementation, given.mask is None, given.q.shape[2] == 1)
    with torch.no_grad():
        compare = modules.recorder.interventions.proofs.compare
        compare(name, form, own, lambda: _undropped(function, given))
    out = changed.dropping(given.option("dropout") or 0.0).attend()
    few = own.q.shape[:3].numel() * own.k.shape[2] <= ours.WEIGHTS
    shown = given.option("output_attentions") or (given.implementation == "eager" and few)
    return out.transpose(1, 2).contiguous(), changed.weights() if shown else None


def _traced(function: Callable[..., Any], given: InterfaceCall) -> Any:
    """The function's own result in compiled code, with its figures."""
    module = given.module
    across = _kind(given, "") == "cross" or traced.looks_elsewhere(
        module, given.k.shape[2], given.mask is not None
    )
    if function is ours.attend:
        return _run(function, given, look=lambda call: traced.inside(module, call, across))
    with traced.uncounted():
        result = _run(function, given)
    kind: Kind = "cross" if across else "self"
    call = traced.read_or_count(module, lambda: to_call(given, kind, None, _memo), given.q)
    if call is not None:
        dropped = bool(given.option("dropout"))
        traced.beside(module, call, across, out=None if dropped else result[0].transpose(1, 2))
    return result


def _kind(given: InterfaceCall, name: str) -> Kind:
    """The kind of attention of a module: does it look at the keys of another sequence?"""
    module = given.module
    if getattr(module, "is_cross_attention", False):
        return "cross"
    if given.mask is None and not is_causal(given) and lengths_differ(given.q, given.k):
        return "cross"
    stated = _stated_kind if torch.compiler.is_compiling() else _known_kind
    return stated(type(module).__name__, name)


def _stated_kind(kind: str, name: str) -> Kind:
    """The kind that the class of a module or the last two parts of its name state."""
    across = any(kind_of(part) == "cross" for part in name.split(".")[-2:])
    return "cross" if across or "cross" in kind.lower() else "self"


_known_kind = functools.lru_cache(maxsize=4096)(_stated_kind)  # every call asks


def _sequence(named: dict[str, Any]) -> TokenSequence | None:
    """The tokens of a model's forward, from its arguments."""
    tokens = named.get("input_ids")
    tokens = named.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        return None
    queries, mask, cache = (
        tokens.shape[1],
        named.get("attention_mask"),
        named.get("past_key_values"),
    )
    if isinstance(mask, Tensor) and mask.ndim == 2:
        if mask.shape[1] < queries:
            return None  # of something else
        shown = mask.bool()
        if bool(shown.all()):  # the model asks the same, so that it waits in any case
            return TokenSequence(queries, mask.shape[1], None, 0)
        begins = shown.view(torch.uint8).argmax(-1).int()
        return TokenSequence(queries, mask.shape[1], shown, begins)
    length = getattr(cache, "get_seq_length", None)
    past = 0 if length is None else int(length())
    return TokenSequence(queries, past + queries, None, 0 if mask is None else None)


@functools.cache
def _parameters(function: Any) -> tuple[str, ...]:
    names = tuple(inspect.signature(getattr(function, "forward", function)).parameters)
    return names[1:] if isinstance(function, type) else names  # without self


def _named(function: Any, given: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments by the names that a function, or a module's forward, gives them."""
    return dict(zip(_parameters(function), given, strict=False)) if given else {}
