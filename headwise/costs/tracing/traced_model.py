"""A model on the meta device; every question about its cost runs it once more."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from headwise.costs.cost import Cost
from headwise.costs.letters import Tokens
from headwise.costs.tally import CountedPart
from headwise.costs.tape import Tape
from headwise.costs.tracing import inputs, kernels
from headwise.costs.tracing.building import weights_of
from headwise.costs.tracing.inputs import cache_of, count_cache
from headwise.costs.tracing.layers import LayerList, RunsAgainError, Structure, structure_of
from headwise.costs.tracing.naming import SizeNames, field_of, text_config, widths_of
from headwise.costs.tracing.recorder import Recorder, storage_id
from headwise.costs.tracing.sharding import sharded
from headwise.costs.walk import DEFAULT_LENGTH
from headwise.costs.workload import Workload, share
from headwise.messages import Sentence, say

ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class PartTree:
    """Parts by the path of their module, made when they are first needed."""

    def __init__(self, modules: Mapping[str, nn.Module], root: CountedPart) -> None:
        self.modules, self.parts = modules, {"": root}

    def at(self, path: str) -> CountedPart:
        """The part of a module."""
        if path not in self.parts:
            made = self.parts[path] = CountedPart(path.rpartition(".")[2], 1)
            above = path.rpartition(".")[0]
            if isinstance(self.modules.get(above), nn.ModuleList):
                made.name = f"{above.rpartition('.')[2]}.{made.name}"
                above = above.rpartition(".")[0]
            self.at(above).children.append(made)
        return self.parts[path]

    def above(self, part: CountedPart) -> CountedPart:
        """The part around a part."""
        return next(each for each in self.parts.values() if any(x is part for x in each.children))

    def name_lists(self) -> None:
        """Call the only kind of a list's layers by the name of the list."""
        lists: dict[str, list[CountedPart]] = {}
        for path, part in self.parts.items():
            above = path.rpartition(".")[0]
            if isinstance(self.modules.get(above), nn.ModuleList):
                lists.setdefault(above, []).append(part)
        for path, parts in lists.items():
            if len(parts) == 1:
                parts[0].name = path.rpartition(".")[2]

    def count_weights(
        self,
        tape: Tape,
        names: SizeNames,
        repeats: set[str],
        used: Mapping[int, Fraction],
        config: Any,
    ) -> None:
        """Count parameters where they are first held; those of repeated layers with the first."""
        held: set[int] = set()
        usual = share_of_experts(config)
        for path, module in self.modules.items():
            repeated = _inside(path, repeats)
            for name, weight in module.named_parameters(recurse=False):
                if id(weight) in held:
                    continue
                held.add(id(weight))
                if repeated:
                    continue
                share = usual if ".experts" in path and "shared" not in path else Fraction(1)
                with tape.inside(self.at(path)):
                    tape.weight(name, *names.weight(weight.shape), used=used.get(id(weight), share))

    def idle(self, touched: set[int], repeats: set[str]) -> list[str]:
        """Outermost modules, all of whose parameters no operation has read."""
        found: list[str] = []
        for path, module in self.modules.items():
            if _inside(path, repeats) or any(path.startswith(f"{each}.") for each in found):
                continue
            weights = list(module.parameters())
            if path and weights and not any(storage_id(each) in touched for each in weights):
                found.append(path)
        return found


def share_of_experts(config: Any) -> Fraction:
    """The share of the experts that a token uses, as the configuration has it."""
    text = text_config(config)

    def first(names: tuple[str, ...]) -> int:
        return next((found for name in names if (found := field_of(text, name))), 0)

    active, experts = first(ACTIVE), first(EXPERTS)
    return Fraction(min(active, experts), experts) if active and experts else Fraction(1)


def _inside(path: str, repeats: set[str]) -> bool:
    """True for a repeated layer and everything in it."""
    while path and path not in repeats:
        path = path.rpartition(".")[0]
    return bool(path)


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16,
          "fp16": torch.float16}  # fmt: skip
REMEMBERED = 64  # costs of one model, by their work

Given = tuple[Sequence[Any], Mapping[str, Any]]


class Pass:
    """One run of the model: who counts it, into which parts."""

    def __init__(self, model: TracedModel, tape: Tape, names: SizeNames) -> None:
        self.recorder = Recorder(tape, names, weights_of(model.model))
        self.layers = LayerList(self.recorder)
        self.parts = PartTree(model.modules, tape.root)


class TracedModel:
    """A model that is counted by what PyTorch does for it.

    `given` are the arguments of its forward; without them a model of transformers gets those of
    its kind.
    """

    def __init__(self, name: str, model: nn.Module, given: Given | None = None) -> None:
        self.name, self.model, self.given = name, model, given
        self.modules = dict(model.named_modules())
        self.config: Any = getattr(model, "config", None)
        self.pair = inputs.is_pair(model)
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
        return self.given is not None or (not self.pair and inputs.own_length(self.model))

    @functools.cached_property
    def longest(self) -> int | None:
        """The most tokens that it has positions for; None if any number has."""
        return inputs.longest(self.model)

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
            self._ranks[ranks] = TracedModel(self.name, sharded(self.model, ranks), self.given)
        return self._ranks[ranks]

    def _counted(self, work: Workload) -> Cost:
        tokens = self._tokens(work)
        self.model.to(DTYPES[work.dtype]).train()
        reasons: list[ValueError] = []
        tried = inputs.EXTRAS if self.given is None else inputs.EXTRAS[:1]
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
        names = SizeNames(tokens, widths_of(self.config))
        tape = Tape(work, self.name)
        args, kwargs = self._arguments(work, tokens, names, extras)
        with self._recording(tape, names) as made:
            recorder = made.recorder
            with saved_tensors_hooks(recorder.pack, lambda x: x), recorder:
                out = self._run(args, kwargs)
        cached = cache_of(out)
        if cached is not None:
            count_cache(tape, names, cached[1], made.layers)
        elif not extras.cache and self.given is None and getattr(self.config, "use_cache", False):
            tape.leave_out(say("the cache, which transformers can't make for it"))
        made.parts.count_weights(tape, names, made.layers.repeats, recorder.used, self.config)
        recorder.settle(made.parts.above)
        made.parts.name_lists()
        if recorder.hides_unknown:
            tape.leave_out(say("what a mask hides that could not be read: all its pairs count"))
        idle = made.parts.idle(recorder.touched, made.layers.repeats)
        if idle and not (self.pair and tokens.cached):
            tape.leave_out(say("{parts}, which these inputs do not run", parts=", ".join(idle)))
        return tape.cost()

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The model's outputs; ValueError with the reason if it can't be traced."""
        try:
            return self.model(*args, **kwargs)
        except RunsAgainError:
            raise
        except Exception as error:
            message = " ".join(str(error).split())[:300] or type(error).__name__
            reason = say("{name} can't be traced without its numbers: {message}", name=self.name,
                         message=message)  # fmt: skip
            if self.given is None:
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

    def _arguments(
        self, work: Workload, tokens: Tokens, names: SizeNames, extras: inputs.Extras
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments of the call, with a cache of the tokens before it."""
        dtype = DTYPES[work.dtype]
        if self.given is not None:
            args, kwargs = self.given
            return [in_dtype(x, dtype) for x in args], {k: in_dtype(x, dtype) for k, x in
                                                        kwargs.items()}  # fmt: skip
        context = work.context or work.keys or work.queries
        options = {"use_cache": extras.cache} if hasattr(self.config, "use_cache") else {}
        take = functools.partial(inputs.inputs_of, self.model, tokens.batch, context=context,
                                 dtype=dtype, extras=extras)  # fmt: skip
        if not tokens.cached:
            return (), {**take(tokens.queries, tokens.keys), **options}
        with (
            self._recording(Tape(work, self.name), names) as first,
            torch.no_grad(),
            first.recorder,
        ):
            before = tokens.keys - tokens.queries
            out = self._run((), {**take(before, before), **options})
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
        return (), given

    @contextmanager
    def _recording(self, tape: Tape, names: SizeNames) -> Iterator[Pass]:
        made = self._pass = Pass(self, tape, names)
        try:
            with kernels.counting(made.recorder):
                yield made
        finally:
            self._pass = None

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
                made.layers.again(path)
            elif path in self._structures:
                part = functools.partial(made.parts.at, path)
                structure = self._structures[path]
                return made.layers.run(path, module, structure, part, forward, args, kwargs)
            with recorder.tape.inside(made.parts.at(path)):
                return forward(*args, **kwargs)


def encoded(source: Any) -> Any:
    """The output of an encoder, as a decoder takes it."""
    outputs: Any = import_module("transformers.modeling_outputs")
    return outputs.BaseModelOutput(last_hidden_state=source)


def in_dtype(given: Any, dtype: torch.dtype) -> Any:
    """An argument in the dtype of the model, if it is a tensor of numbers with fractions."""
    if isinstance(given, Tensor) and given.is_floating_point():
        return torch.empty_like(given, dtype=dtype, requires_grad=given.requires_grad)
    return given
