"""A claim: a sentence from the textbooks, the experiment that tests it, the rule that judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headwise.apps.lab.charts import Shown
from headwise.apps.lab.fingerprint import OWN
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import Move
from headwise.messages import Sentence
from headwise.messages import both as both  # for claims, those of users too

Figures = Mapping[str, Any]
"""The measurements of an experiment by name: numbers, texts, and lists and mappings of them."""

VERDICTS: Mapping[str, Sentence] = {
    "holds": Sentence("✓ holds", "✓ 成立"),
    "holds when": Sentence("◐ holds when", "◐ 有条件成立"),
    "does not hold": Sentence("✗ does not hold", "✗ 不成立"),
    "right": Sentence("✓ right", "✓ 正确"),
    "wrong": Sentence("✗ wrong", "✗ 错误"),
    "undecided": Sentence("? undecided", "? 未定"),
}
"""Each verdict with its sign, so that nobody has to tell it by its colour alone.

`right` and `wrong` are for what a paper is said to say; the others are for what was measured.
"""


KINDS: Mapping[str, Sentence] = {
    "derived": Sentence("derived", "推导"),
    "read": Sentence("read", "查阅"),
    "measured": Sentence("measured", "实测"),
}
"""What a result is: an identity that is checked numerically, so that only a bug could flip it; a
quotation with its place; or a measurement that could have come out otherwise."""


@dataclass(frozen=True)
class Verdict:
    """A verdict, the sentence of figures that gave it, and the condition of a "holds when".

    A sentence that is right in one of two readings has a condition too. `interval` is that of the
    comparison that decided, `power` the probability with which it shows a difference that matters.
    """

    verdict: str
    because: Sentence
    condition: Sentence | None = None
    interval: Mapping[str, Any] | None = None
    power: float | None = None

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"{self.verdict!r} is not a verdict; use {', '.join(VERDICTS)}")
        needed, allowed = self.verdict == "holds when", self.verdict in ("holds when", "right")
        if (needed and self.condition is None) or (self.condition is not None and not allowed):
            raise ValueError(
                f"{self.verdict!r} with the condition {self.condition!r}; "
                'a condition belongs to "holds when", and to no other verdict but "right"'
            )


@dataclass(frozen=True)
class Revision:
    """A verdict that was recorded until this date, and the reason why it no longer is."""

    date: str
    verdict: str
    reason: Sentence


@dataclass(frozen=True)
class Claim:
    """One sentence, where it comes from, how it is tested, how it is judged, how it is drawn.

    `notes` are the letters of the notes that make the claim. `derivation` is the proof on paper of
    what the experiment measures, where there is one. `gpu` is True where the full form trains a
    Transformer or measures time; what counts, draws or trains a small reader runs on the CPU.
    `kind` is one of `KINDS`; `moves` are the sizes by which a reader may cut the recorded figures.
    A claim of your own needs an id, a sentence (one language is enough), an experiment and a rule.
    """

    id: str
    sentence: Sentence
    experiment: Callable[[Lab], Figures]
    rule: Callable[[Figures], Verdict]
    shows: Callable[[Figures], tuple[Shown, ...]] = field(default=lambda figures: ())
    notes: str = ""
    derivation: Sentence | None = None
    gpu: bool = False
    kind: str = "measured"
    moves: tuple[Move, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}; use {', '.join(KINDS)}")
        zh = getattr(self.sentence, "zh", None)  # a plain text in a user's own file
        object.__setattr__(self, "sentence", Sentence(self.sentence, zh))

    @property
    def source(self) -> str:
        """The file of the experiment, from the root of the repository or, of your own, its name."""
        return f"{self.experiment.__module__.removeprefix(OWN).replace('.', '/')}.py"

    @property
    def own(self) -> bool:
        """True for a claim in a file of a user."""
        return self.experiment.__module__.startswith(OWN)

    @property
    def command(self) -> str:
        """The command that runs it: by its id, or by its file if it is a claim of your own."""
        return f"headwise lab run {self.source if self.own else self.id}"

    @property
    def topic(self) -> str:
        """The first word of the id, a key of `TOPICS`."""
        return self.id.partition("-")[0]


def holds(because: Sentence) -> Verdict:
    """The claim holds as it is written."""
    return Verdict("holds", because)


def holds_when(condition: Sentence, because: Sentence) -> Verdict:
    """The claim holds under a condition that it does not state."""
    return Verdict("holds when", because, condition)


def does_not_hold(because: Sentence) -> Verdict:
    """The claim is false."""
    return Verdict("does not hold", because)


def undecided(because: Sentence) -> Verdict:
    """The figures do not settle it."""
    return Verdict("undecided", because)


def attributed(said: bool, because: Sentence, reading: Sentence | None = None) -> Verdict:
    """Right or wrong, of a sentence that is attributed to a paper; right in this reading alone."""
    return Verdict("right" if said else "wrong", because, reading if said else None)


TOPICS: Mapping[str, Sentence] = {
    "scale": Sentence("Why √d_k", "为什么除以 √d_k"),
    "heads": Sentence("Why many heads, and narrow ones", "为什么要多头，又为什么每个头更窄"),
    "position": Sentence("Where tokens stand", "词元的位置"),
    "mask": Sentence("What a query may see", "查询可以看到什么"),
    "qk": Sentence("Why Q and K have separate matrices", "为什么 Q 和 K 用不同的矩阵"),
    "dot": Sentence("Dot product against additive attention", "点积注意力与加性注意力"),
    "qkv": Sentence("Q, K and V against fixed weights", "QKV 与直接学习的权重"),
    "rivals": Sentence("Attention against recurrence and convolution", "注意力与 RNN、CNN"),
    "cost": Sentence("What a layer costs", "一层的代价"),
    "paper": Sentence("What the 2017 paper is said to say", "被归于 2017 年论文的说法"),
    "example": Sentence("The two example sentences", "两个例句"),
}
"""The topics in the order of someone who learns attention."""

NOTES: Mapping[str, Sentence] = {
    "A": Sentence("the formula and the parameter count", "公式与参数量"),
    "B": Sentence("self-attention against RNN and CNN", "自注意力与 RNN、CNN 的比较"),
    "C": Sentence("many heads, Q ≠ K, dot or additive, scaling", "多头、Q ≠ K、点乘或加法、缩放"),
    "D": Sentence("why √d_k", "为什么除以 √d_k"),
    "E": Sentence("why a head is narrower", "为什么每个头要降维"),
    "F": Sentence("papers and tutorials besides the notes", "笔记之外的论文与教程"),
}
"""The notes that make the claims."""
