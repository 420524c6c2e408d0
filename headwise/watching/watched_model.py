"""A model being watched."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_post_hook

from headwise.core.arguments import is_integer
from headwise.core.edges import Edges
from headwise.core.observation import check_sink_keys, check_statistics
from headwise.core.policies import Policy
from headwise.core.spans import SPAN_PREFIX, Spans, check_spans
from headwise.maps.effect_map import EffectMap
from headwise.maps.sparse_losses import SparsePolicies
from headwise.watching.adapters import torch_calls
from headwise.watching.adapters.attachment import attach, detach
from headwise.watching.adapters.joint_attention import joint_parts
from headwise.watching.adapters.module_forwards import find_module
from headwise.watching.adapters.patching import Undo, uncompiled
from headwise.watching.adapters.transformers_calls import marked_tokens
from headwise.watching.alarms import chosen_rules
from headwise.watching.effects import Tokens, largest_edges
from headwise.watching.experiments import importance, knock_out
from headwise.watching.head_weights import head_place, symmetry
from headwise.watching.ranks.joined_steps import JoinedSteps
from headwise.watching.ranks.sharded_weights import whole_weights
from headwise.watching.recorder.call_recorder import CallRecorder
from headwise.watching.recorder.checkpointing import recomputing
from headwise.watching.recorder.interventions import WATCHED, WatchedModel
from headwise.watching.recorder.unread import described
from headwise.watching.recorder.watch_options import WatchOptions, matches
from headwise.watching.requests import Request
from headwise.watching.rules import Rule
from headwise.watching.runs import manifest
from headwise.watching.runs.run_writer import RunWriter, save_recording
from headwise.watching.table import Table, Value
from headwise.watching.training_steps import SteppedRecording


def watch(
    model: nn.Module,
    *,
    stats: Iterable[str] | None = None,
    rows: int | None = None,
    layers: int | str | Iterable[int | str] | None = None,
    heads: int | Iterable[int] | None = None,
    every: int = 1,
    maps: bool = True,
    sink_keys: int = 1,
    alarms: bool | Rule | Iterable[Rule] = False,
    strict: bool = False,
    spans: Spans | None = None,
    sparse: Policy | Iterable[Policy] = (),
    mesh: DeviceMesh | None = None,
    effects: bool = False,
) -> Watch:
    """Watch every attention layer of any model while it trains or runs; the model is unchanged.

    As a context manager it watches until the block ends; `attach()` and `detach()` do the same
    without one. Each step of an optimiser that holds the model's parameters ends a training step;
    in a loop without one `step()` does. `every=100` looks at every hundredth step only.
    `stats` names some of the statistics, `rows=64` looks at a sample of the query rows, `layers`
    are numbers or names (* matches any part of a name), `heads` are numbers. `maps=False` keeps no
    queries and keys for `seen.map`. `spans={"image": (4, 580)}` adds the weight on ranges of keys,
    the figure span_image_mean; `seen.spans` has it row by row. `sparse=[hw.sparse.TopK(64)]` adds
    what a row would lose if it kept only these keys: the weight that they hold, kept_top_64_mean,
    the error of its output, ‖o_S − o‖ / ‖o‖, error_top_64_mean, and the number of keys that hold
    95 % of its weight, needed_95_mean; give it `rows=` too, because it takes several passes over
    the keys. `alarms=True` checks each step by
    the rules of `headwise.watching`, or give it some of them; alarms are in `seen.alarms` and in
    the log.

    `effects=True` also tells which edges mattered. After a backward pass through any scalar,
    `seen.effects(layer, head)` has the effect of every edge on it, `seen.edges(20)` the largest of
    the whole model, and `seen.heads()` the effect of switching each head off. Until then queries,
    keys and values of the last pass are held, and then the gradients of its outputs too:
    `seen.effect_bytes`. A compiled model runs as it would without torch.compile.

    With `mesh`, a DeviceMesh, the figures of a step are those of all its ranks. They are joined
    when a step ends, so every rank must end the same steps; until then they are this rank's own.
    Ranks along a dimension named "tp" have other heads of the same layers, along "pp" other layers,
    and the table has the numbers of the whole model. The first rank looks for alarms and writes
    folders.

    The model's own attention still computes its output; headwise observes beside it. headwise's own
    attention is observed in the same pass. Whatever goes wrong while looking is reported once, and
    the model runs on: modules whose attention can't be read are in `seen.unread`, below the table
    of heads and in one warning. `strict=True` raises ValueError instead.

    >>> import headwise as hw
    >>> gpt = hw.load("gpt")
    >>> with hw.watch(gpt.model) as seen:
    ...     _ = gpt.model(gpt.encode("to be or not to be"))
    >>> seen
    <Watch of 6 layers, 48 heads>
    >>> seen.heads().sort("entropy_mean")[0]["layer"]
    0
    >>> seen.map(layer=5, head=1)
    <AttentionMap 1 × 1 × 7 × 7>
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"hw.watch takes a torch.nn.Module, not {type(model).__name__}")
    if not any(torch_calls.may_attend(module) for module in model.modules()):
        raise ValueError(
            f"there is nothing to watch in this {type(model).__name__}: none of its modules can "
            "compute attention"
        )
    check_sink_keys(sink_keys)
    numbers: tuple[tuple[str, object], ...] = (("rows", rows), ("every", every))
    for name, value in numbers:
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"hw.watch({name}={value!r}): it must be a whole number, at least 1")
    named, policies = check_spans(spans), _policies(sparse)
    marked = {
        name: ids
        for name, ids in (marked_tokens(model) | joint_parts(model)).items()
        if name not in named
    }
    more = (*(SPAN_PREFIX + x for x in (*named, *marked)), *policies.figures([*policies.named]))
    options = WatchOptions(
        (*check_statistics(stats), *more),
        rows,
        _several("layers", layers, int | str, "numbers or names of layers"),
        _several("heads", heads, int, "numbers of heads"),
        every,
        maps,
        sink_keys,
        strict,
        bool(effects),
        named,
        marked,
        policies,
    )
    ranks = None if mesh is None else JoinedSteps(mesh)
    return Watch(model, options, chosen_rules(alarms, options.stats, maps), ranks)


def _policies(sparse: object) -> SparsePolicies:
    """The policies of `sparse`; ValueError for anything else."""
    many = (sparse,) if isinstance(sparse, Policy) or not isinstance(sparse, Iterable) else sparse
    found = tuple(many)
    if not all(isinstance(policy, Policy) for policy in found):
        raise ValueError(f"hw.watch(sparse={sparse!r}): give policies such as hw.sparse.TopK(64)")
    return SparsePolicies(found)


def _several(name: str, given: Any, kind: Any, wanted: str) -> tuple[Any, ...] | None:
    """One or more values of a type as a tuple; ValueError for anything else."""
    if given is None:
        return None
    many = (given,) if isinstance(given, kind) or not isinstance(given, Iterable) else tuple(given)
    if not many or not all(isinstance(one, kind) for one in many):
        raise ValueError(f"hw.watch({name}={given!r}): use {wanted}")
    return many


class Watch(SteppedRecording):
    """A model being watched, and what was seen of it so far; `hw.watch` makes one."""

    def __init__(
        self,
        model: nn.Module,
        options: WatchOptions,
        rules: tuple[Rule, ...] = (),
        ranks: JoinedSteps | None = None,
    ) -> None:
        model = getattr(model, "_orig_mod", model)  # in what torch.compile returns
        super().__init__(model, CallRecorder(options), rules, ranks)
        self.options = options
        self._undo: list[Undo] = []  # takes off what lets the watch see the model
        self._unfollow: Undo | None = None  # ends following the optimisers
        self._modules: set[nn.Module] = set()
        self._eager = ExitStack()  # while effects are watched, nothing runs compiled

    @property
    def attached(self) -> bool:
        """True while the model is watched, also in steps that are passed over."""
        return self._unfollow is not None

    def attach(self) -> Self:
        """Begin to watch; ValueError if the model is watched already."""
        modules = set(self.model.modules())
        if not modules.isdisjoint(WATCHED):
            raise ValueError(
                f"this {type(self.model).__name__} is being watched already; "
                "detach() the other watch first"
            )
        self._modules = modules
        seen = WatchedModel(weakref.ref(self.model), self.options, self._recorder.registry)
        WATCHED.update(dict.fromkeys(modules, seen))
        self._unfollow = register_optimizer_step_post_hook(self.optimised).remove
        try:
            if self.options.effects:
                self._eager.enter_context(uncompiled())
            self._reserve()
            self._look(self.steps % self.options.every == 0)
            self._meter.begin()
        except BaseException:
            self.detach()
            raise
        return self

    def _reserve(self) -> None:
        """Make the board where the model is: if there is no memory left, that is known now."""
        first = next(self.model.parameters(), None)
        if first is not None and not first.is_meta:
            self._recorder.registry.board(first.device)

    def _look(self, looking: bool) -> None:
        """Look at the step that begins, or pass it over: then the watch is nowhere in the model."""
        super()._look(looking)
        if not looking or not self.attached:
            self._unhook()
        elif not self._undo:
            self._undo = attach(self.model, self._recorder, self._enter)

    def _enter(self, _: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A pass of the whole model begins."""
        self._recorder.passes.begin(given, options)
        if not recomputing():
            with self._going_on("noting a pass"):
                self._meter.add(given, options)

    def _unhook(self) -> None:
        detach(self._undo)

    def detach(self) -> None:
        """End watching; the model is as it was before."""
        self._unhook()
        self._eager.close()
        if self._unfollow is not None:
            self._unfollow()
        self._unfollow = None
        for module in self._modules:
            WATCHED.pop(module, None)
        self._modules = set()
        self._settle()

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.detach()
        if kind is not None:
            return
        if not self.steps:
            self.check()
        if self._alarms.rules and any(layer.recorded for layer in self.layers):
            with self._going_on("looking for alarms"):
                self._alarms.look(self.steps, self.heads(), self.layers, last=True)

    def record(self, folder: Path | str, **options: Any) -> RunWriter:
        """Write every closed step into a folder, until the writer is closed; see `RunWriter`.

        The series in memory keeps the last 1000 steps, or fewer of a model with many heads.

        >>> import tempfile, torch, headwise as hw
        >>> model, folder = hw.nn.MultiHeadAttention(64, 8), tempfile.mkdtemp()
        >>> watch = hw.watch(model)
        >>> with watch, watch.record(folder):
        ...     for _ in range(3):
        ...         _ = model(torch.randn(1, 10, 64))
        ...         watch.step()
        >>> hw.watching.open_run(folder)
        <WatchedRun of 1 layers, 8 heads, 3 steps>
        """
        about = manifest.describe(self.model, self.options, self._alarms.rules)
        writer = RunWriter(folder, about, pending=self._settle, **options)
        # A kill may have come after the folder was written and before a checkpoint was.
        self._alarms.know(writer.alarms_before(self.steps))
        self._runs.append(writer)
        return writer

    def save(self, folder: Path | str, maps: Iterable[tuple[int, int]] = ()) -> None:
        """Write the recording into a folder that `hw.watching.open_run` reads.

        `maps` lists the (layer, head) whose maps are saved with it.
        """
        about = manifest.describe(self.model, self.options, self._alarms.rules)
        save_recording(self, self.steps, about, folder, maps)

    def heads(self) -> Table:
        self.check()
        if not (self.layers or self.series or self._recorder.others.kinds):
            raise ValueError(
                f"nothing was seen of this {type(self.model).__name__}: it did not run while it "
                "was watched, or it runs compiled code"
            )
        return super().heads()

    def effects(self, layer: int | str, head: int | None = None, batch: int = 0) -> EffectMap:
        """The effects of a head's edges on what was differentiated, (1, 1, N, M), on demand.

        Without a head they are those of the layer's heads, (1, H, N, M), which `.pool(64)` and the
        like compute at once. They are of the last pass, and of all backward passes through it
        together, as in `.grad`.
        Of a sequence that is split between ranks, every rank asks for the same map.

        >>> import headwise as hw
        >>> gpt = hw.load("gpt")
        >>> ids = gpt.encode("to be or not to be")
        >>> with hw.watch(gpt.model, effects=True) as seen:
        ...     hw.watching.runner_up(gpt.model(ids)).backward()
        >>> seen.effects(layer=5, head=1)
        <EffectMap 1 × 1 × 7 × 7>
        >>> seen.effects(5).pool(4, how="max").shape
        torch.Size([1, 8, 4, 4])
        """
        self._ask_for_effects(f"effects({layer!r}, {head!r})")
        found = self.layer(layer)
        own = None if head is None else found.own_head(head)
        held = found.held
        why = "its calls were not seen in eager code" if held is None else held.refusal()
        if held is None or why is not None:
            raise ValueError(f"the effects of {found.title} are not known: {why}")
        batches = len(held.call.q) if held.call is not None else 0
        if not -batches <= batch < batches:
            raise ValueError(f"there is no batch entry {batch}; there are {batches}")
        if own is None:
            return held.map().entry(batch)
        if held.rows.split is not None:
            return held.of_head(own).map().head(batch, 0)
        return held.map().head(batch, own)

    def edges(
        self,
        count: int = 20,
        tokens: Sequence[str] | None = None,
        source: Sequence[str] | None = None,
        *,
        batch: int | None = None,
    ) -> Table:
        """The edges with the largest effects in the whole model, largest magnitude first.

        One row per edge: layer, name, kind, head, batch entry, positions of query and key, the
        tokens if they are known, weight, effect. `tokens` and `source` name the pieces of the text,
        as for `show`; `batch` asks for one batch entry. With `rows=64` in the watch, only so many
        sampled rows are looked at.

        >>> import headwise as hw
        >>> gpt = hw.load("gpt")
        >>> with hw.watch(gpt.model, effects=True) as seen:
        ...     hw.watching.runner_up(gpt.model(gpt.encode("to be or not to be"))).backward()
        >>> seen.edges(3).columns[:7]
        ['layer', 'name', 'kind', 'head', 'batch', 'query', 'key']
        """
        self._ask_for_effects(f"edges({count!r})")
        if not is_integer(count) or count < 1:
            raise ValueError(f"edges({count!r}): count must be an integer, at least 1")
        if isinstance(tokens, str) or isinstance(source, str):
            raise ValueError(
                "seen.edges: tokens and source are lists of pieces, not a text; gpt.pieces(text) "
                "cuts a text up"
            )
        return largest_edges(
            self.layers, self.options, count, Tokens(self.tokens, tokens, source), batch
        )

    @property
    def explained(self) -> bool:
        """True if the effects of some layer's edges are known: a backward pass has come by."""
        held = (layer.held for layer in self.layers)
        return any(each is not None and each.refusal() is None for each in held)

    @property
    def effect_bytes(self) -> int:
        """The bytes of queries, keys, values and gradients that are held for effects."""
        return sum(layer.held.nbytes for layer in self.layers if layer.held is not None)

    def _ask_for_effects(self, call: str) -> None:
        if not self.options.effects:
            raise ValueError(
                f"seen.{call}: nothing was held for effects; use hw.watch(model, effects=True)"
            )
        self.check()

    @property
    def requests(self) -> dict[str, Request]:
        """The requests of a model that generates by continuous batching, by their names.

        Those that run, and the last that ended. Each is a recording: its table of heads, its maps,
        `show()`, and `received(layer)`, by which keys can be evicted.
        """
        held = self._recorder.paged.held()
        return {name: Request(each, self.layers) for name, each in held.items()}

    def symmetry(self) -> Table:
        """The symmetry of W_qᵀ W_k, one row per head: 1 if i scores j as j scores i, −1 if it
        scores the opposite, 0 if the two are unrelated.
        """
        rows: list[dict[str, Value]] = []
        for layer in self.layers:
            module = find_module(self.model, layer.module)
            first, heads = head_place(module, layer.heads, layer.width) or (0, layer.heads)
            whole = symmetry(whole_weights(module, layer.module, heads))
            found = whole[first : first + layer.heads]
            rows += [layer.place(head) | {"symmetry": x} for head, x in enumerate(found.tolist())]
        return Table(rows)

    def importance(self, measure: Callable[[], float | Tensor]) -> Table:
        """The importance of each head: `measure()`, such as a loss, with its output switched off.

        One row per head: the measure without it, and by how much that is larger. A module that runs
        at several depths is switched off at all of them, and has one row per head.

        >>> import torch, headwise as hw
        >>> gpt = hw.load("gpt")
        >>> ids = gpt.encode("to be or not to be, that is the question")
        >>> def loss():
        ...     logits = gpt.model(ids[:, :-1])
        ...     return torch.nn.functional.cross_entropy(logits[0], ids[0, 1:])
        >>> with hw.watch(gpt.model, layers=5) as seen:
        ...     table = seen.importance(loss)
        >>> table.columns
        ['layer', 'name', 'kind', 'head', 'without', 'importance']
        """
        if not self.attached:
            raise ValueError("importance switches heads off in a watched model; attach() first")
        looking = self._recorder.active
        self._look(True)
        try:
            with uncompiled():
                if not self._recorder.registry.layers:
                    measure()  # shows the layers
                self.check()
                return importance(self.model, self._recorder, measure)
        finally:
            self._look(looking)

    @contextmanager
    def knock_out(self, edges: Edges) -> Iterator[None]:
        """Hide chosen keys from chosen heads while the block runs; see `hw.knock_out`.

        What is recorded in the block is what heads do without these edges.
        """
        if not self.attached:
            raise ValueError(f"this {type(self.model).__name__} is not watched")
        with knock_out(self.model, edges):
            yield

    def check(self) -> None:
        """Raise ValueError if the model ran, and no attention or not the one asked for was seen."""
        recorder, known = self._recorder, list(self._recorder.registry.shown)
        unseen = not known and recorder.active and not self.series
        if (unseen or self.options.strict) and self.unread:  # which a strict one raises by itself
            raise ValueError(
                f"no attention could be read in this {type(self.model).__name__}; "
                + described(recorder.unread.reasons)
            )
        if unseen and recorder.passes.count and not recorder.others.kinds:
            raise ValueError(
                f"no attention was found in this {type(self.model).__name__}. headwise reads its "
                "own modules, nn.MultiheadAttention, F.scaled_dot_product_attention, "
                "flex_attention, transformers' attention interface, and a softmax that is "
                "multiplied with values"
            )
        most = max((layer.total for layer in self.layers), default=0)
        if self.ranks is not None:  # other ranks may have what is missing here
            most = max((layer.heads for layer in self.ranks.layers), default=0)
            known = self.ranks.names
        for head in self.options.heads or () if most else ():
            if not 0 <= head < most:
                raise ValueError(f"there is no head {head}; heads are 0 to {most - 1}")
        for wanted in self.options.layers or () if known else ():
            if not any(matches(number, name, (wanted,)) for number, name in enumerate(known)):
                there = ", ".join(f"{number} {name}" for number, name in enumerate(known))
                raise ValueError(f"there is no layer {wanted!r} in this model; there are {there}")
