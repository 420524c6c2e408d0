"""Heads of the built-in models removed or scrambled: heads-prune, heads-shuffle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise import attention_map
from headwise.apps.lab.charts import Chart, Listing, Series
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, holds_when
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import Move
from headwise.models.trained import load
from headwise.nn import MultiHeadAttention

CHOOSING = (
    "The old bridge over the river was built by hand more than two hundred years ago. Every stone "
    "was carried up the hill by horses, and the men who laid them slept in tents beside the water. "
    "When the work was done, the people of both villages met in the middle and danced until dawn. ",
    "Water boils at a lower temperature on a mountain than it does beside the sea, because the air "
    "above a mountain presses less upon it. For the same reason an egg takes longer to cook. ",
)
"""Texts on which heads are ranked."""
TESTING = (
    "The museum opened in the spring of the next year. Its first visitors were the children of the "
    "school across the street, who had watched the building grow from their windows. They liked "
    "the stone lions best, and the smallest of the children asked whether the lions were asleep. ",
    "A candle needs air to burn. If a glass is put over it, the flame becomes small and goes out "
    "after a short time, since the air under the glass has been used up. A larger glass holds more "
    "air, so the flame lives longer under it. ",
    "In the election of that year three parties won seats in the council, and none of them had a "
    "majority. After two weeks of talks two of the parties agreed to work together. ",
)
"""Other texts, on which the model without these heads is tested."""
SENTENCES = (
    "The cat is black and the dog is white.",
    "I would like a glass of water, please.",
    "We do not know where the children are.",
    "The old man reads a book in the garden.",
    "She bought three red apples at the market.",
    "If it rains tomorrow, we will stay at home.",
)
"""English for the translator: the first half ranks, the second tests."""
STEPS = 8
"""How many times heads are taken out, until none is left."""


class Subject(NamedTuple):
    """A model, its heads as (layer, number), and its loss on texts to rank by and on others."""

    name: str
    layers: Sequence[MultiHeadAttention]
    ranking: Callable[[], Tensor]
    testing: Callable[[], Tensor]

    def heads(self) -> list[tuple[int, int]]:
        """Every head."""
        return [(at, head) for at, layer in enumerate(self.layers) for head in range(layer.heads)]


def layers_of(model: nn.Module) -> list[MultiHeadAttention]:
    """The attention layers of a model, in its order."""
    return [each for each in model.modules() if isinstance(each, MultiHeadAttention)]


def reader(lab: Lab) -> Subject:
    """The built-in GPT, with the loss of the next token."""
    gpt = load("gpt", lab.device)

    def loss(texts: Sequence[str]) -> Tensor:
        losses = []
        for text in texts[: lab.pick(tiny=1, quick=None)]:
            ids = gpt.encode(text)
            losses.append(F.cross_entropy(gpt.model(ids)[0, :-1], ids[0, 1:], reduction="none"))
        return torch.cat(losses).mean()

    return Subject("gpt", layers_of(gpt.model), lambda: loss(CHOOSING), lambda: loss(TESTING))


def translator(lab: Lab) -> Subject:
    """The built-in translator, with the loss of what it says when it is whole."""
    built_in = load("translate", lab.device)
    pairs = []
    for sentence in SENTENCES[:: lab.pick(tiny=3, quick=1)]:
        (said,) = built_in.translate(sentence)
        pairs.append((built_in.encode(sentence), built_in.encode_target(said)))

    def loss(some: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        losses = [
            F.cross_entropy(built_in.model(source, target)[0, :-1], target[0, 1:], reduction="none")
            for source, target in some
        ]
        return torch.cat(losses).mean()

    half = len(pairs) // 2
    return Subject(
        "translate",
        layers_of(built_in.model),
        lambda: loss(pairs[:half]),
        lambda: loss(pairs[half:]),
    )


@contextmanager
def without(subject: Subject, heads: Sequence[tuple[int, int]]) -> Iterator[None]:
    """The model without these heads: they add nothing to the output of their layers."""
    with ExitStack() as stack:
        for at, layer in enumerate(subject.layers):
            if mine := [head for place, head in heads if place == at]:
                stack.enter_context(layer.drop_heads(mine))
        yield


def loss_without(subject: Subject, heads: Sequence[tuple[int, int]]) -> float:
    """The loss on the testing texts without these heads."""
    with torch.no_grad(), without(subject, heads):
        return float(subject.testing())


def by_gradient(subject: Subject) -> list[float]:
    """How important each head is by Michel, Levy and Neubig: |∂loss/∂gate| at a gate of one."""
    gates = []
    for layer in subject.layers:
        layer.head_gate = torch.ones(layer.heads, device=layer.out.weight.device).requires_grad_()
        gates.append(layer.head_gate)
    try:
        found = torch.autograd.grad(subject.ranking(), gates)
    finally:
        for layer in subject.layers:
            layer.head_gate = None
    return torch.cat(found).abs().tolist()


def pruning(lab: Lab) -> Figures:
    """Heads removed one at a time, and more and more of them by importance and at random."""
    rows, alone = [], []
    for subject in (reader(lab), translator(lab)):
        heads = subject.heads()
        whole = loss_without(subject, [])
        for head in lab.each(heads[:: lab.pick(tiny=16, quick=1)], f"{subject.name}, head"):
            harm = loss_without(subject, [head]) - whole
            alone.append({"model": subject.name, "head": f"{head[0]}.{head[1]}", "harm": harm})
        important = by_gradient(subject)
        orders = {"least important first": sorted(range(len(heads)), key=important.__getitem__)}
        for draw in range(lab.pick("draws", tiny=1, quick=5)):
            numbers = torch.Generator().manual_seed(draw)
            orders[f"random {draw}"] = torch.randperm(len(heads), generator=numbers).tolist()
        orders["most important first"] = orders["least important first"][::-1]
        for name, order in lab.each(list(orders.items()), f"{subject.name}, order"):
            for step in range(0, STEPS + 1, lab.pick(tiny=4, quick=1)):
                count = len(heads) * step // STEPS
                lost = loss_without(subject, [heads[x] for x in order[:count]]) - whole
                row = {"model": subject.name, "order": name.split(" ")[0], "share": step / STEPS}
                rows.append(row | {"draw": name, "lost": lost})
    bearable = lab.pick("bearable", tiny=0.1, quick=0.1)
    return {"rows": rows, "alone": alone, "bearable": bearable}


def removable(figures: Figures, model: str, order: str) -> float:
    """The largest share of heads up to which no draw of an order loses more than is bearable."""
    worst: dict[float, float] = {}
    for row in figures["rows"]:
        if (row["model"], row["order"]) == (model, order):
            worst[row["share"]] = max(worst.get(row["share"], 0.0), row["lost"])
    good = 0.0
    for share in sorted(worst):
        if worst[share] > figures["bearable"]:
            break
        good = share
    return good


def judge_prune(figures: Figures) -> Verdict:
    """Most: more than half of the heads together, on texts that they were not ranked on."""
    models = list(dict.fromkeys(row["model"] for row in figures["rows"]))
    least = {model: removable(figures, model, "least") for model in models}
    chance = {model: removable(figures, model, "random") for model in models}
    harms = [row["harm"] for row in figures["alone"] if row["model"] in models]
    because = both(
        "of {heads} heads of {models}, {idle} cost less than {little} nats per token when each is "
        "removed alone, and the costliest {most:.2f}; removed together, the least important "
        "first, {shares} of all heads can go until {bearable} nats are lost, at random {chances}",
        "{models} 的 {heads} 个头，单独去掉时有 {idle} 个使每词元损失增加不到 {little} nat，"
        "代价最大的增加 {most:.2f}；"
        "一起去掉、最不重要的在先，损失增加 {bearable} nat 之前可以去掉全部头的 {shares}，"
        "随机去掉则是 {chances}",
        heads=len(harms),
        models=" / ".join(models),
        idle=sum(harm < LITTLE for harm in harms),
        little=LITTLE,
        most=max(harms, default=0.0),
        shares=" / ".join(f"{share:.0%}" for share in least.values()),
        bearable=figures["bearable"],
        chances=" / ".join(f"{share:.0%}" for share in chance.values()),
    )
    if min(least.values()) > 0.5:
        return holds(because)
    singly = sum(harm < LITTLE for harm in harms) > len(harms) / 2
    if singly:
        condition = both(
            "one head is removed and the others stay: heads stand in for one another, so that of "
            "many removed together each costs more",
            "只去掉一个头而保留其余的：头与头可以互相替代，一起去掉许多个时，每个的代价都更大",
        )
        return holds_when(condition, because)
    return does_not_hold(because)


LITTLE = 0.01
"""Nats per token below which the loss of a head is little."""

ORDERS = {
    "least": both("least important first", "最不重要的在先"),
    "random": both("at random, mean of the draws", "随机，各次平均"),
    "most": both("most important first", "最重要的在先"),
}
MODELS = {
    "gpt": both("the built-in GPT", "内置 GPT"),
    "translate": both("the built-in translator", "内置翻译模型"),
}


def show_prune(figures: Figures) -> tuple[Chart | Listing, ...]:
    """The loss against the share of heads removed, for each model; each head alone."""
    models = dict.fromkeys(row["model"] for row in figures["rows"])

    def curve(model: str, order: str) -> Series:
        lost: dict[float, list[float]] = {}
        for row in figures["rows"]:
            if (row["model"], row["order"]) == (model, order):
                lost.setdefault(row["share"], []).append(row["lost"])
        means = [sum(x) / len(x) for x in lost.values()]
        low, high = [min(x) for x in lost.values()], [max(x) for x in lost.values()]
        spread = order == "random"
        return Series(
            ORDERS[order], list(lost), means, low if spread else None, high if spread else None
        )

    charts = tuple(
        Chart(
            both("Heads removed from {model}", "从{model}去掉头", model=MODELS[model]),
            both("share of heads removed", "去掉的头的比例"),
            both("nats per token lost", "每词元多出的 nat"),
            tuple(curve(model, order) for order in ORDERS),
        )
        for model in models
    )
    sorted_alone = {
        model: sorted(
            (row["harm"] for row in figures["alone"] if row["model"] == model), reverse=True
        )
        for model in models
    }
    alone = Chart(
        both("One head removed", "去掉一个头"),
        both("heads, the costliest first", "头，代价大的在先"),
        both("nats per token lost", "每词元多出的 nat"),
        tuple(
            Series(MODELS[model], list(range(1, len(harms) + 1)), harms)
            for model, harms in sorted_alone.items()
        ),
    )
    return (*charts, alone)


@contextmanager
def scrambled(layer: MultiHeadAttention, heads: Sequence[int], seed: int) -> Iterator[None]:
    """The layer with the weights of each row of these heads permuted among the keys it sees."""

    def forward(x: Tensor, context: Any = None, **given: Any) -> Tensor:
        call = layer.prepare(x, context, **given)
        out = call.attend().clone()  # (B, H, N, D)
        amap = attention_map(call.q, call.k, call.v, **call.given.of_weights())
        p = amap.to_tensor()  # (B, H, N, M)
        numbers = torch.Generator().manual_seed(seed)
        noise = torch.rand(p.shape, generator=numbers).to(p.device)
        noise = noise.masked_fill(p == 0, 2.0)  # hidden keys come last and stay there
        # The rank-th visible key gets the weight of the key that the noise puts at this rank.
        seen = (p == 0).int().sort(dim=-1, stable=True).indices
        moved = torch.zeros_like(p).scatter(-1, seen, p.gather(-1, noise.argsort(-1)))
        for head in heads:
            out[:, head] = moved[:, head] @ call.v[:, head]
        return layer.join(out)

    layer.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del layer.forward


def shuffling(lab: Lab) -> Figures:
    """How far a prediction moves when weights are permuted: of one head, of a layer, of all."""
    gpt = load("gpt", lab.device)
    layers = layers_of(gpt.model)
    rows = []
    texts = (*CHOOSING, *TESTING)[: lab.pick("texts", tiny=1, quick=5)]
    for number, text in enumerate(texts, 1):
        ids = gpt.encode(text)

        def predicted(ids: Tensor = ids) -> Tensor:
            with torch.no_grad():
                logits: Tensor = gpt.model(ids)[0]  # (N, V)
            return logits.softmax(-1)

        whole = predicted()

        def moved(heads: Sequence[tuple[int, int]], whole: Tensor = whole) -> float:
            """Half the summed difference of the predictions, the mean of all rows."""
            with ExitStack() as stack:
                for at, layer in enumerate(layers):
                    if mine := [head for place, head in heads if place == at]:
                        stack.enter_context(scrambled(layer, mine, seed=at))
                return float((predicted() - whole).abs().sum(-1).mean() / 2)

        every = [(at, head) for at, layer in enumerate(layers) for head in range(layer.heads)]
        for head in lab.each(every[:: lab.pick(tiny=16, quick=1)], f"text {number}, head"):
            rows.append({"text": number, "what": "head", "moved": moved([head])})
        for at in range(len(layers)):
            mine = [head for head in every if head[0] == at]
            rows.append({"text": number, "what": "layer", "moved": moved(mine)})
        rows.append({"text": number, "what": "model", "moved": moved(every)})
    return {"rows": rows, "heads": len(every), "hardly": lab.pick("hardly", tiny=0.05, quick=0.05)}


def medians(figures: Figures) -> dict[str, float]:
    """The median of what moves, for one head, one layer and the whole model."""
    found: dict[str, list[float]] = {}
    for row in figures["rows"]:
        found.setdefault(row["what"], []).append(row["moved"])
    return {what: sorted(x)[len(x) // 2] for what, x in found.items()}


def judge_shuffle(figures: Figures) -> Verdict:
    """Hardly: under a twentieth of the probability moves. One head, and all of them, are judged."""
    middle, hardly = medians(figures), figures["hardly"]
    worst = max(row["moved"] for row in figures["rows"] if row["what"] == "head")
    because = both(
        "of the probability of the next token, permuting the weights of one head moves {head:.1%} "
        "in the middle one of {heads} heads and {worst:.0%} in the most sensitive; of all heads "
        "of a layer {layer:.0%}, of all heads of the model {model:.0%}",
        "把一个头每行的权重打乱，下一词元的概率移动的比例：{heads} 个头中居中的是 {head:.1%}，"
        "最敏感的是 {worst:.0%}；打乱一层的全部头是 {layer:.0%}，打乱整个模型的头是 {model:.0%}",
        head=middle["head"],
        heads=figures["heads"],
        worst=worst,
        layer=middle["layer"],
        model=middle["model"],
    )
    if middle["head"] >= hardly:
        return does_not_hold(because)
    if middle["model"] < hardly:
        return holds(because)
    condition = both(
        "one head at a time is permuted; of a whole layer or model, what a prediction says depends "
        "on where its heads look",
        "每次只打乱一个头；打乱整层或整个模型时，预测取决于各个头看向哪里",
    )
    return holds_when(condition, because)


def show_shuffle(figures: Figures) -> tuple[Chart | Listing, ...]:
    """Heads from the most sensitive on; the middle of heads and layers, and the whole model."""
    texts = sorted({row["text"] for row in figures["rows"]})
    curves = tuple(
        Series(both("text {n}", "文本 {n}", n=text), list(range(1, len(harms) + 1)), harms)
        for text in texts
        if (
            harms := sorted(
                (
                    row["moved"]
                    for row in figures["rows"]
                    if (row["text"], row["what"]) == (text, "head")
                ),
                reverse=True,
            )
        )
    )
    title = both("Weights of one head permuted", "打乱一个头的权重")
    place = both("heads, the most sensitive first", "头，敏感的在先")
    share = both("probability moved", "移动的概率")
    names = {
        "head": both("one head (median)", "一个头（中位）"),
        "layer": both("all heads of a layer (median)", "一层的全部头（中位）"),
        "model": both("all heads of the model", "模型的全部头"),
    }
    rows = tuple((names[what], found) for what, found in medians(figures).items())
    headings = both("permuted", "打乱的是"), share
    return (
        Chart(title, place, share, curves),
        Listing(
            both("Probability of the next token that moves", "下一词元移动的概率"), headings, rows
        ),
    )


CLAIMS = (
    Claim(
        id="heads-prune",
        sentence=both(
            "Most heads of a trained model can be removed with little loss.",
            "训练好的模型，大部分头都可以去掉而损失很小。",
        ),
        notes="F",
        experiment=pruning,
        rule=judge_prune,
        shows=show_prune,
        moves=(Move("model", both("model", "模型"), "model", ("rows", "alone"), how="only"),),
    ),
    Claim(
        id="heads-shuffle",
        sentence=both(
            "Attention weights are no explanation: permuting them hardly changes a prediction.",
            "注意力权重不是解释：把它们打乱，预测也几乎不变。",
        ),
        notes="F",
        experiment=shuffling,
        rule=judge_shuffle,
        shows=show_shuffle,
        moves=(Move("text", both("text", "文本"), "text", how="only"),),
    ),
)
