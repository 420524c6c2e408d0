"""Measures what a language model loses when its rows see fewer keys, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.apps.look.readers.builtin import TextReader
from headwise.apps.look.readers.reader import Reader, Report
from headwise.apps.look.readers.transformers_reader import TransformersTextReader
from headwise.apps.look.sparse_report import (
    NAMES,
    SINKS,
    HeadNeeds,
    LayerNeeds,
    Point,
    SparseReport,
)
from headwise.messages import Sentence, say
from headwise.nn import GrowingCache
from headwise.sparse import Blocks, Evicted, Policy, TopK, Window
from headwise.watching import WatchedLayer, sparsify, watch

ByLayer = Mapping[int | str, Policy]
FEW = ("entropy",)  # statistics: the maps are what is wanted


class Language:
    """A language model and some tokens: losses of the second half, whole or after a prompt."""

    def __init__(self, reader: Reader, text: str, tokens: int) -> None:
        if isinstance(reader, TextReader):
            self.model: nn.Module = reader.loaded.model
            ids = reader.loaded.encode(text)
        elif isinstance(reader, TransformersTextReader) and reader.whole is not None:
            self.model = reader.whole
            ids = torch.tensor([reader.tokeniser(text, verbose=False)["input_ids"]])
            ids = ids.to(reader.whole.device)
            masked = type(reader.whole).__name__.endswith("ForMaskedLM")
            if masked or reader.whole is reader.model:  # which has no output layer
                raise ValueError(_needs_language(reader))
        else:
            raise ValueError(_needs_language(reader))
        self.built_in = isinstance(reader, TextReader)
        self.ids = ids[:, :tokens]
        self.half = self.ids.shape[1] // 2
        if self.ids.shape[1] < 32:
            found = self.ids.shape[1]
            raise ValueError(say("the text has {found} tokens, and a report needs 32", found=found))

    def loss(self) -> float:
        """The mean loss of the tokens of the second half, in nats."""
        logits = self._logits(self.ids, None)
        return self._scored(logits[0, self.half : -1])

    def prompt(self) -> Any:
        """Read the first half; return a cache that holds it."""
        memory: Any = None
        if self.built_in:
            memory = [GrowingCache() for _ in self.model.blocks]  # type: ignore[union-attr]
            self.model(self.ids[:, : self.half], caches=memory)
        else:
            found = self.model(self.ids[:, : self.half], use_cache=True)
            memory = found.past_key_values
        return memory

    def loss_after(self, memory: Any) -> float:
        """The loss of the second half, read after the prompt that a cache holds."""
        return self._scored(self._logits(self.ids[:, self.half :], memory)[0, :-1])

    def _logits(self, ids: Tensor, memory: Any) -> Tensor:
        if self.built_in:
            logits: Tensor = self.model(ids, caches=memory)
            return logits
        found: Tensor = self.model(ids, past_key_values=memory, use_cache=memory is not None).logits
        return found

    def _scored(self, logits: Tensor) -> float:
        """The mean loss of the rows that predict the second half without its first token."""
        return F.cross_entropy(logits.float(), self.ids[0, self.half + 1 :]).item()


def _needs_language(reader: Reader) -> Sentence:
    name = reader.description.name
    return say("{name} does not predict the next token of a text; give a language model", name=name)


class Survey:
    """Measures a model, step by step; every step is reported."""

    def __init__(self, reader: Reader, text: str, tokens: int, report: Report) -> None:
        self.name, self.language, self.report = (
            reader.description.name,
            Language(reader, text, tokens),
            report,
        )
        self.model = self.language.model
        self.steps = self.done = 0

    def measure(self, budgets: list[int], block: int, share: float, allowed: float) -> SparseReport:
        """The report for these budgets."""
        language = self.language
        tokens, half = language.ids.shape[1], language.half
        budgets = sorted({x for x in budgets if x < tokens})
        if not budgets:
            raise ValueError(
                say("no budget is below the {tokens} tokens of the text", tokens=tokens)
            )
        with torch.no_grad():
            with watch(self.model, stats=FEW) as seen:
                self.report(say("all keys"), 0)
                whole = language.loss()
            layers = [x for x in seen.layers if x.map().shape[2] == x.map().shape[3] == tokens]
            if not layers:
                raise ValueError(say("no layer's attention over the whole text could be read"))
            self.steps = 6 * len(budgets) + len(layers) * (len(budgets) + 1) + 4
            heads = [row for layer in layers for row in self.needs(layer, budgets, share, half)]
            methods = self.methods(budgets, block, whole)
            alone = {x.number: self.alone(x, budgets, whole) for x in layers}
            chosen, suggestion = self.suggest(alone, allowed, whole)
        needs = [
            LayerNeeds(x.number, x.name, alone[x.number], chosen.get(x.number)) for x in layers
        ]
        return SparseReport(
            self.name, tokens, tokens - half - 1, block, share, whole, methods, heads, needs,
            allowed, suggestion,
        )  # fmt: skip

    def needs(
        self, layer: WatchedLayer, budgets: list[int], share: float, half: int
    ) -> Iterator[HeadNeeds]:
        """What each head of a layer needs, over the rows of the second half."""
        self.step(say("{layer}: keys that rows need", layer=layer.name))
        amap = layer.map()
        needed = amap.needed(share)[0, :, half:].double()
        kept = amap.kept(budgets)[0, :, half:].double().mean(1)
        for head in range(needed.shape[0]):
            by_budget = dict(zip(budgets, kept[head].tolist(), strict=True))
            mean, most = needed[head].mean().item(), int(needed[head].max())
            yield HeadNeeds(layer.number, layer.name, head, mean, most, by_budget)

    def methods(self, budgets: list[int], block: int, whole: float) -> dict[str, list[Point]]:
        """The loss of each method at each budget."""
        kinds: dict[str, Callable[[int], Policy]] = {
            "top-k": TopK,
            "blocks, exact": lambda budget: Blocks(block, budget // block, by="exact"),
            "blocks, max": lambda budget: Blocks(block, budget // block, by="max"),
            "blocks, mean": lambda budget: Blocks(block, budget // block, by="mean"),
            "window + sinks": lambda budget: Window(budget - SINKS - 1, SINKS),
        }
        found: dict[str, list[Point]] = {}
        for method, policy in kinds.items():
            least = block if method.startswith("blocks") else SINKS + 1 if "sinks" in method else 1
            for budget in budgets:
                self.step(say("{method}, {budget} keys", method=NAMES[method], budget=budget))
                if budget >= least:
                    loss = self.sparse(policy(budget))
                    point = Point(budget, loss, loss - whole)
                    found.setdefault(method, []).append(point)
        found["eviction"] = list(self.evictions(budgets, whole))
        return found

    def evictions(self, budgets: list[int], whole: float) -> Iterator[Point]:
        """The loss of the second half when so many keys of the first are left in the cache."""
        recent = max(1, min(16, self.language.half // 4))
        with watch(self.model, stats=FEW) as seen:
            self.language.prompt()
        scores = {x.number: x.map().eviction_scores(recent, smooth=5) for x in seen.layers}
        for budget in budgets:
            self.step(say("{method}, {budget} keys", method=NAMES["eviction"], budget=budget))
            if budget < self.language.half:
                memory = self.language.prompt()  # a cache can be read on once
                policies: ByLayer = {number: Evicted(x, budget) for number, x in scores.items()}
                with sparsify(self.model, policies):
                    loss = self.language.loss_after(memory)
                yield Point(budget, loss, loss - whole)

    def alone(self, layer: WatchedLayer, budgets: list[int], whole: float) -> list[Point]:
        """The loss at each budget when this layer alone keeps its k largest."""
        found = []
        for budget in budgets:
            self.step(say("{layer} alone, {budget} keys", layer=layer.name, budget=budget))
            loss = self.sparse({layer.number: TopK(budget)})
            found.append(Point(budget, loss, loss - whole))
        return found

    def suggest(
        self, alone: Mapping[int, list[Point]], allowed: float, whole: float
    ) -> tuple[dict[int, int], Point]:
        """Budgets by layer whose loss together is at most `allowed` above the whole one, measured.

        The sum of what each layer costs alone is only a guess; if together they cost more, less is
        spent and measured again. Layers that are not named keep all keys.
        """
        spend, tokens = allowed, self.language.ids.shape[1]
        for _ in range(4):
            self.step(say("the suggested budgets together"))
            chosen = cheapest(alone, spend)
            policies: ByLayer = {number: TopK(budget) for number, budget in chosen.items()}
            loss = self.sparse(policies) if chosen else whole
            if loss - whole <= allowed:
                break
            spend /= 2
        else:
            chosen, loss = {}, whole
        mean = sum(chosen.get(number, tokens) for number in alone) / len(alone)
        return chosen, Point(round(mean), loss, loss - whole)

    def sparse(self, policy: Policy | ByLayer) -> float:
        """The loss under a policy."""
        with sparsify(self.model, policy):
            return self.language.loss()

    def step(self, what: str) -> None:
        """Report what is measured next."""
        self.done += 1
        self.report(what, min(1.0, self.done / max(1, self.steps)))


def cheapest(alone: Mapping[int, list[Point]], spend: float) -> dict[int, int]:
    """Budgets by layer, as small as a sum of increases allows; without the layers that keep all.

    It takes the largest budget for each layer, and then, again and again, the step down that costs
    least per key. A layer that loses too much at its largest budget keeps all keys.

    >>> flat, steep = ([Point(k, 0, x / k) for k in (1, 2, 4)] for x in (0.0, 4.0))
    >>> cheapest({0: flat, 1: steep}, 2.5)
    {0: 1, 1: 2}
    """
    chosen: dict[int, int] = {}  # the place among a layer's points
    spent = 0.0
    order = sorted(alone, key=lambda number: alone[number][-1].increase)
    for number in order:
        cost = max(0.0, alone[number][-1].increase)
        if spent + cost <= spend:
            chosen[number], spent = len(alone[number]) - 1, spent + cost
    while True:
        steps = []
        for number, place in chosen.items():
            points = alone[number]
            if place:
                cost = max(0.0, points[place - 1].increase) - max(0.0, points[place].increase)
                saved = points[place].budget - points[place - 1].budget
                if spent + cost <= spend:
                    steps.append((cost / saved, number, cost))
        if not steps:
            return {number: alone[number][place].budget for number, place in sorted(chosen.items())}
        _, number, cost = min(steps)
        chosen[number], spent = chosen[number] - 1, spent + cost
