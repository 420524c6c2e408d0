"""A model on the meta device; every question about its cost runs it once more."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from headwise.costs.cost import Cost
from headwise.costs.formula import formula
from headwise.costs.tape import Tape
from headwise.costs.tracing import inputs, kernels
from headwise.costs.tracing.inputs import cache_of, count_cache
from headwise.costs.tracing.layers import LayerList, RunsAgainError, Structure, structure_of
from headwise.costs.tracing.naming import SizeNames, field_of, text_config, widths_of
from headwise.costs.tracing.own_calls import ATTENTION, OwnCall, across
from headwise.costs.tracing.part_tree import PartTree
from headwise.costs.tracing.recorder import OwnAttention, Recorder, storage_id
from headwise.costs.tracing.sharding import own_rank, sharded
from headwise.costs.workload import Tokens, Workload, share
from headwise.messages import Sentence, say
from headwise.nn.swap import TorchCall

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16,
          "fp16": torch.float16}  # fmt: skip
DEFAULT_LENGTH = 4096
REMEMBERED = 64  # costs of one model, by their work

Given = tuple[Sequence[Any], Mapping[str, Any]]


class Pass:
    """One run of the model: who counts it, into which parts."""

    def __init__(self, model: TracedModel, tape: Tape, names: SizeNames) -> None:
        self.recorder = Recorder(tape, names, model.numbers)
        self.layers = LayerList(self.recorder)
        self.parts = PartTree(model.modules, model.weights, tape.root)


class TracedModel:
    """A model that is counted by what PyTorch does for it.

    `given` are the arguments of its forward; without them a model of transformers gets those of
    its kind, and a module of headwise or PyTorch those that `own` says.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        given: Given | None = None,
        own: OwnCall | None = None,
    ) -> None:
        self.name, self.model, self.given, self.own = name, model, given, own
        self.modules = dict(model.named_modules())
        self.weights = {  # by the path of the module that holds them
            path: held
            for path, module in self.modules.items()
            if (held := list(module.named_parameters(recurse=False)))
        }
        self.numbers: list[Tensor] = []  # its parameters and buffers
        self.dtype: torch.dtype | None = None  # of its floating numbers now
        self.config: Any = getattr(model, "config", None)
        self.pair = inputs.is_pair(model) if own is None else own.pair
        self._pass: Pass | None = None
        self.extras: inputs.Extras | None = None  # what it needs, once that is known
        self._known: dict[Workload, Cost] = {}
        self._ranks: dict[int, TracedModel] = {}
        self._structures: dict[str, Structure] = {}
        owned: set[int] = set()
        for path, module in self.modules.items():
            if isinstance(self.modules.get(path.rpartition(".")[0]), nn.ModuleList):
                self._structures[path] = structure_of(module, owned)
            owned |= {id(weight) for weight in module.parameters(recurse=False)}
            if path:
                self._wrap(path, module)

    def _wrap(self, path: str, module: nn.Module) -> None:
        forward = module.forward

        @functools.wraps(forward)
        def traced(*args: Any, **kwargs: Any) -> Any:
            return self._call(path, module, forward, args, kwargs)

        module.forward = traced

    def give(self, given: Given) -> None:
        """Take these arguments from now on."""
        self.given = given
        self._known.clear()
        self._ranks.clear()

    @property
    def own_length(self) -> bool:
        """True if every call has the same length, such as an image's."""
        if self.own is not None:
            return self.own.own_length
        return self.given is not None or (not self.pair and inputs.own_length(self.model))

    @functools.cached_property
    def longest(self) -> int | None:
        """The most tokens that it has positions for; None if any number has."""
        return inputs.longest(self.model) if self.own is None else self.own.longest

    @property
    def stated(self) -> int | None:
        """The positions that its configuration states."""
        found = field_of(text_config(self.config), "max_position_embeddings")
        return found if found and found > 0 else None

    def cost(self, work: Workload) -> Cost:
        """The cost of the work."""
        if work.ranks.tp > 1:
            return self._rank(work.ranks.tp).cost_of(work)
        return self.cost_of(work)

    def cost_of(self, work: Workload) -> Cost:
        """The cost of the work with the weights that are here."""
        if work not in self._known:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[work] = self._counted(work)
        return self._known[work]

    def _rank(self, ranks: int) -> TracedModel:
        if ranks not in self._ranks:
            if self.own is None:
                self._ranks[ranks] = TracedModel(self.name, sharded(self.model, ranks), self.given)
            else:
                part = own_rank(self.model, ranks)
                own = OwnCall(part, self.own.crosses)
                self._ranks[ranks] = TracedModel(self.name, part, own=own)
        return self._ranks[ranks]

    def _counted(self, work: Workload) -> Cost:
        tokens = self._tokens(work)
        if self.dtype != DTYPES[work.dtype]:
            self.dtype = DTYPES[work.dtype]
            self.model.to(self.dtype).train()
            self.numbers = [*self.model.parameters(), *self.model.buffers()]
        reasons: list[ValueError] = []
        guessed = self.given is None and self.own is None
        tried = inputs.EXTRAS if guessed else inputs.EXTRAS[:1]
        for extras in [self.extras] if self.extras else tried:
            try:
                found = self._traced(work, tokens, extras)
            except RunsAgainError:
                self._structures.clear()  # every layer is counted for itself
                return self._counted(work)
            except ValueError as error:
                reasons.append(error)
            else:
                self.extras = extras
                return found
        raise reasons[0]

    def _traced(self, work: Workload, tokens: Tokens, extras: inputs.Extras) -> Cost:
        widths = widths_of(self.config) if self.own is None else self.own.widths
        names = SizeNames(tokens, widths)
        tape = Tape(work, self.name)
        call = self._whole_call(work, tokens, names, extras)
        with self._recording(tape, names) as made:
            recorder = made.recorder
            with saved_tensors_hooks(recorder.pack, lambda x: x), recorder:
                out = self._run(functools.partial(self._root, made, call))
        cached = cache_of(out) if self.own is None else None
        if cached is not None:
            count_cache(tape, names, cached[1], made.layers)
        elif not extras.cache and self.given is None and getattr(self.config, "use_cache", False):
            tape.leave_out(say("the cache, which transformers can't make for it"))
        if self.own is not None and (state := self.own.state(tokens.batch)):
            tape.state("state", formula(state * work.element))
        made.parts.count_weights(tape, names, made.layers.repeats, recorder.used, self.config)
        recorder.settle(made.parts.above)
        made.parts.name_lists()
        if recorder.hides_unknown:
            tape.leave_out(say("what a mask hides that could not be read: all its pairs count"))
        idle = made.parts.idle(recorder.touched, made.layers.repeats)
        runs = self.own is None or self.own.runs
        if idle and runs and not (self.pair and tokens.cached):
            tape.leave_out(say("{parts}, which these inputs do not run", parts=", ".join(idle)))
        return tape.cost()

    def _run(self, call: Callable[[], Any]) -> Any:
        """The model's outputs; ValueError with the reason if it can't be traced."""
        try:
            return call()
        except RunsAgainError:
            raise
        except Exception as error:
            message = " ".join(str(error).split())[:300] or type(error).__name__
            reason = say("{name} can't be traced without its numbers: {message}", name=self.name,
                         message=message)  # fmt: skip
            if self.given is None and self.own is None:
                reason = say("{reason}; if it needs other arguments, give them as inputs=",
                             reason=reason)  # fmt: skip
            raise ValueError(reason) from None

    def _tokens(self, work: Workload) -> Tokens:
        """The tokens of one rank, checked."""
        ranks, longest = work.ranks, self.longest
        asked, keys = work.queries or work.keys, work.keys
        if self.own_length:
            if asked is not None:
                raise ValueError(
                    say("{name} always reads as much; leave the length out", name=self.name)
                )
            asked = keys = 1
        if asked is None:
            asked = min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH)
        keys = asked if keys is None else keys
        if longest is not None and keys > longest and not self.own_length:
            raise ValueError(
                say("{keys} tokens are more than {name} has positions for in its {stack}, "
                    "{longest}", keys=keys, name=self.name, longest=longest,
                    stack=Sentence("decoder", "解码器"))
            )  # fmt: skip
        batch = share(say("a batch"), work.batch, ranks.dp * ranks.fsdp, "dp·fsdp")
        local = share(say("a length"), asked, ranks.cp, "cp")
        if work.layout == "head_tail" and ranks.cp > 1:
            share(say("a rank's length"), local, 2, say("two parts per rank"))
        return Tokens(batch, local, keys, asked, cached=keys > asked)

    def _whole_call(
        self, work: Workload, tokens: Tokens, names: SizeNames, extras: inputs.Extras
    ) -> functools.partial[Any]:
        """The call of the model, with a cache of the tokens before it."""
        dtype = DTYPES[work.dtype]
        if self.own is not None:
            length = work.context or tokens.keys
            if self.pair:
                length = share(say("a length"), length, work.ranks.cp, "cp")
            return self.own.run(tokens, length, dtype)
        if self.given is not None:
            args, kwargs = self.given
            named = {k: in_dtype(x, dtype) for k, x in kwargs.items()}
            return functools.partial(self.model, *(in_dtype(x, dtype) for x in args), **named)
        context = work.context or work.keys or work.queries
        options = {"use_cache": extras.cache} if hasattr(self.config, "use_cache") else {}
        take = functools.partial(inputs.inputs_of, self.model, tokens.batch, context=context,
                                 dtype=dtype, extras=extras)  # fmt: skip
        if not tokens.cached:
            return functools.partial(self.model, **take(tokens.queries, tokens.keys), **options)
        with (
            self._recording(Tape(work, self.name), names) as first,
            torch.no_grad(),
            first.recorder,
        ):
            before = tokens.keys - tokens.queries
            out = self._run(functools.partial(self.model, **take(before, before), **options))
            cached, source = cache_of(out), getattr(out, "encoder_last_hidden_state", None)
            if cached is None or (self.pair and source is None):
                raise ValueError(
                    say("{name} keeps no cache; leave out keys, or make them the queries",
                        name=self.name)
                )  # fmt: skip
        given = {**take(tokens.queries, tokens.keys), cached[0]: cached[1], **options}
        if self.pair:  # the encoder has run before
            del given[inputs.main_name(self.model)]
            given["encoder_outputs"] = encoded(source)
        return functools.partial(self.model, **given)

    @contextmanager
    def _recording(self, tape: Tape, names: SizeNames) -> Iterator[Pass]:
        made = self._pass = Pass(self, tape, names)
        try:
            with kernels.counting(made.recorder):
                yield made
        finally:
            self._pass = None

    def _root(self, made: Pass, call: functools.partial[Any]) -> Any:
        """The outputs of a call of the whole; a module that is one layer runs as one."""
        if self.own is None:
            return call()
        with self._attending(made.recorder, "", self.model, call.args, call.keywords):
            if not self.own.is_layer or made.recorder.work.recompute != "layers":
                return call()
            root = functools.partial(made.parts.at, "")
            return made.layers.run("", self.model, (), root, call.func, call.args, call.keywords)

    def _call(self, path: str, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        made = self._pass
        if made is None:
            return forward(*args, **kwargs)
        recorder = made.recorder
        masks = [
            (recorder.masks[storage_id(x)], x.shape[-2], x.shape[-1])
            for x in (*args, *kwargs.values())
            if isinstance(x, Tensor) and x.ndim == 4 and storage_id(x) in recorder.masks
        ]
        with recorder.under(masks):
            for call in recorder.calls:
                call.strays = call.strays or not path.startswith(f"{call.path}.")
            if path in made.layers.ran:
                made.layers.run_again(path)
            elif path in self._structures:
                part = functools.partial(made.parts.at, path)
                structure = self._structures[path]
                return made.layers.run(path, module, structure, part, forward, args, kwargs)
            with (
                recorder.tape.inside(made.parts.at(path)),
                self._attending(recorder, path, module, args, kwargs),
            ):
                return forward(*args, **kwargs)

    @contextmanager
    def _attending(
        self, recorder: Recorder, path: str, module: nn.Module, args: Any, kwargs: Any
    ) -> Iterator[None]:
        """Tell the recorder which attention of headwise or PyTorch runs."""
        before = recorder.attending
        if self.own is not None and isinstance(module, ATTENTION):
            swapped = isinstance(self.modules.get(path.rpartition(".")[0]), TorchCall)
            caches = self.own.caches(path) and not swapped
            recorder.attending = OwnAttention(across(module, args, kwargs), caches)
        try:
            yield
        finally:
            recorder.attending = before


def encoded(source: Any) -> Any:
    """The output of an encoder, as a decoder takes it."""
    outputs: Any = import_module("transformers.modeling_outputs")
    return outputs.BaseModelOutput(last_hidden_state=source)


def in_dtype(given: Any, dtype: torch.dtype) -> Any:
    """An argument in the dtype of the model, if it is a tensor of numbers with fractions."""
    if isinstance(given, Tensor) and given.is_floating_point():
        return torch.empty_like(given, dtype=dtype, requires_grad=given.requires_grad)
    return given
