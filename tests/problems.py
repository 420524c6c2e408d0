"""Generated attention calls, each with an account of what it may see that owes nothing to headwise.

A `Recipe` names one kind of everything a call is made of, and a seed for the numbers. Hypothesis
draws recipes freely (`recipes`); `every_pair` lists few that hold each pair of kinds.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import headwise as hw
from headwise.core import schedule
from headwise.engines.streaming import forward_loop, loop

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

KINDS: dict[str, tuple[str, ...]] = {
    "score": ("dot", "scaled", "odd scale", "additive", "general", "cosine"),
    "mask": (
        *("none", "causal", "offsets", "window", "prefix-lm", "padding", "documents", "between"),
        *("sinks and window", "dense", "dense and causal", "blind rows", "rows alike", "any"),
    ),
    "bias": ("none", "alibi", "buckets", "tensor", "hiding"),
    "softcap": ("none", "cap"),
    "sinks": ("none", "sinks"),
    "dropout": ("none", "dropout"),
    "heads": ("equal", "grouped", "one"),
    "widths": ("equal", "wide values", "narrow values"),
    "lengths": ("square", "more keys", "more queries", "one query", "one key"),
    "layout": ("packed", "heads last", "strided", "expanded"),
    "logits": ("usual", "huge", "tiny"),
    "dtype": ("float64", "float32", "bfloat16", "float16"),
    "parameters": ("same dtype", "float32"),
}

SHORT = 64  # keys; documents, windows and prefixes of longer calls are longer too
HUGE = 60.0  # of q and of k: the logits of a scaled dot product then have a deviation of 3600
TINY = 1e-3
Sees = Callable[[int, int, int, int], bool]  # (batch entry, query head, query, key)


@dataclass(frozen=True)
class Sizes:
    """The axes of a call."""

    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    queries: int = 8
    keys: int = 8
    width: int = 8
    value_width: int = 8

    @property
    def offset(self) -> int:
        """What an unstated alignment means: the last query stands beside the last key."""
        return self.keys - self.queries

    def pairs(self) -> Iterator[tuple[int, int, int, int]]:
        """Every (batch entry, head, query, key)."""
        axes = self.batch, self.heads, self.queries, self.keys
        return itertools.product(*map(range, axes))


@dataclass(frozen=True)
class Rule:
    """A mask, and in plain Python which key each query sees and where it stands."""

    mask: hw.mask.Mask | None
    sees: Sees
    pieces: int = 1  # intervals per row; 0 for a dense mask
    stands: Callable[[int, int], int] | None = None  # (batch entry, query) -> key position

    def __and__(self, other: Rule) -> Rule:
        assert None not in (self.mask, other.mask)
        return Rule(
            self.mask & other.mask,
            lambda *pair: self.sees(*pair) and other.sees(*pair),
            self.pieces * other.pieces,
            self.stands or other.stands,
        )

    def __or__(self, other: Rule) -> Rule:
        assert None not in (self.mask, other.mask)
        return Rule(
            self.mask | other.mask,
            lambda *pair: self.sees(*pair) or other.sees(*pair),
            self.pieces + other.pieces if self.pieces and other.pieces else 0,
            self.stands or other.stands,
        )

    @lru_cache(maxsize=64)  # noqa: B019 - a few rules, kept for the copies of a call
    def matrix(self, sizes: Sizes) -> Tensor:
        """Who sees whom, pair by pair, bool (B, Hq, N, M)."""
        flat = [self.sees(*pair) for pair in sizes.pairs()]
        shape = sizes.batch, sizes.heads, sizes.queries, sizes.keys
        return torch.tensor(flat, dtype=torch.bool).reshape(shape)

    def positions(self, sizes: Sizes) -> Tensor:
        """The key position beside which each query stands, (B, N)."""
        stands = self.stands or (lambda b, i: i + sizes.offset)
        rows = [[stands(b, i) for i in range(sizes.queries)] for b in range(sizes.batch)]
        return torch.tensor(rows, dtype=torch.int64).reshape(sizes.batch, sizes.queries)


def everything() -> Rule:
    return Rule(None, lambda b, h, i, j: True)


def causal(sizes: Sizes, offset: int | list[int] | None = None) -> Rule:
    stands = _stands(sizes, offset)
    return Rule(hw.mask.causal(offset), lambda b, h, i, j: j <= stands(b, i), 1, stands)


def window(sizes: Sizes, left: int, right: int, offset: int | list[int] | None = None) -> Rule:
    stands = _stands(sizes, offset)

    def sees(b: int, h: int, i: int, j: int) -> bool:
        return stands(b, i) - left <= j <= stands(b, i) + right

    return Rule(hw.mask.window(left, right, offset), sees, 1, stands)


def prefix(length: int | list[int]) -> Rule:
    return Rule(hw.mask.prefix(length), lambda b, h, i, j: j < _entry(length, b))


def lengths(length: int | list[int] | Tensor) -> Rule:
    return Rule(hw.mask.lengths(length), lambda b, h, i, j: j < _entry(length, b))


def between(sizes: Sizes, first: Tensor, last: Tensor) -> Rule:
    whole = sizes.batch, sizes.heads, sizes.queries
    low, high = first.expand(whole).tolist(), last.expand(whole).tolist()
    return Rule(hw.mask.between(first, last), lambda b, h, i, j: low[b][h][i] <= j < high[b][h][i])


def documents(sizes: Sizes, ids: Tensor) -> Rule:
    """A change of id starts a document; equal ids that are not neighbours are different ones."""
    rows = ids.expand(sizes.batch, sizes.keys).tolist()

    def sees(b: int, h: int, i: int, j: int) -> bool:
        own = i + sizes.offset
        if not 0 <= own < sizes.keys:  # before the first key there is no document
            return False
        low, high = min(own, j), max(own, j)
        return len(set(rows[b][low : high + 1])) == 1

    return Rule(hw.mask.documents(ids), sees)


def dense(sizes: Sizes, seen: Tensor) -> Rule:
    whole = seen.expand(sizes.batch, sizes.heads, sizes.queries, sizes.keys).tolist()
    return Rule(hw.mask.dense(seen), lambda b, h, i, j: whole[b][h][i][j], 0)


def _stands(sizes: Sizes, offset: int | list[int] | None) -> Callable[[int, int], int]:
    return lambda b, i: i + (sizes.offset if offset is None else _entry(offset, b))


def _entry(values: int | list[int] | Tensor, b: int) -> int:
    return values if isinstance(values, int) else int(values[b])


def rule(kind: str, sizes: Sizes, dice: random.Random) -> Rule:
    """A rule of this kind with drawn numbers."""
    M, N, B = sizes.keys, sizes.queries, sizes.batch
    if kind == "any":
        return any_rule(sizes, dice)
    made: dict[str, Callable[[], Rule]] = {
        "none": everything,
        "causal": lambda: causal(sizes),
        "offsets": lambda: causal(sizes, [dice.randint(-1, M) for _ in range(B)]),
        "window": lambda: (
            causal(sizes) & window(sizes, dice.randint(0, M), dice.randint(0, 2))
            if dice.random() < 0.5
            else window(sizes, dice.randint(-1, M), dice.randint(1, 3), _offset(sizes, dice))
        ),
        "prefix-lm": lambda: causal(sizes) | prefix(_each(sizes, dice)),
        "padding": lambda: lengths(_each(sizes, dice)),
        "documents": lambda: documents(sizes, _ids(sizes, dice)),
        "between": lambda: between(sizes, *_bounds(sizes, dice)),
        "sinks and window": lambda: (
            causal(sizes)
            & (
                window(sizes, dice.randint(0, 4 if M <= SHORT else M // 2), 0)
                | prefix(dice.randint(1, 3 if M <= SHORT else M // 2))
            )
        ),
        "dense": lambda: dense(sizes, _booleans(sizes, dice)),
        "dense and causal": lambda: dense(sizes, _booleans(sizes, dice)) & causal(sizes),
        "rows alike": lambda: _alike(sizes, dice),
        "blind rows": lambda: dense(sizes, torch.arange(N)[:, None].expand(N, M) % 2 == 1),
    }
    return made[kind]()


def _alike(sizes: Sizes, dice: random.Random) -> Rule:
    """Every row of a head sees the same keys: padding on either side, or any keys."""
    if dice.random() < 0.4:
        seen = [dice.random() < 0.6 for _ in range(sizes.keys)]
        return dense(sizes, torch.tensor(seen, dtype=torch.bool).reshape(1, 1, 1, sizes.keys))
    first = [[[dice.randint(0, sizes.keys)]] for _ in range(sizes.batch)]
    low = torch.tensor(first, dtype=torch.int64).reshape(sizes.batch, 1, 1)
    found = between(sizes, low, torch.tensor(sizes.keys))
    return found if dice.random() < 0.5 else found & lengths(_each(sizes, dice))


def any_rule(sizes: Sizes, dice: random.Random, depth: int = 3) -> Rule:
    """Masks joined by & and | as they come, with at most two intervals per row."""
    simple = (
        *("causal", "offsets", "window", "padding", "documents", "between", "dense", "rows alike"),
    )
    found = rule(dice.choice(simple), sizes, dice)
    for _ in range(dice.randint(0, depth)):
        other = rule(dice.choice(simple), sizes, dice)
        if dice.random() < 0.5 and found.pieces * other.pieces <= 2:
            found = found & other if dice.random() < 0.5 else other & found
        elif 0 in (found.pieces, other.pieces) or found.pieces + other.pieces <= 2:
            found = found | other if dice.random() < 0.5 else other | found
    return found


def _each(sizes: Sizes, dice: random.Random) -> int | list[int]:
    """One length for all, or one for each batch entry; none and more than all included."""
    if dice.random() < 0.3:
        return dice.randint(0, sizes.keys + 1)
    return [dice.randint(0, sizes.keys + 1) for _ in range(sizes.batch)]


def _offset(sizes: Sizes, dice: random.Random) -> int | list[int] | None:
    kind, low, high = dice.randrange(3), -2, sizes.keys + 1
    if kind == 0:
        return None
    return (
        dice.randint(low, high)
        if kind == 1
        else [dice.randint(low, high) for _ in range(sizes.batch)]
    )


def _ids(sizes: Sizes, dice: random.Random) -> Tensor:
    rows = dice.choice((1, sizes.batch))
    if sizes.keys <= SHORT:
        return torch.tensor([[dice.randrange(2) for _ in range(sizes.keys)] for _ in range(rows)])
    often = dice.choice((0.5, 0.05, 0.01))
    starts = [[dice.random() < often for _ in range(sizes.keys)] for _ in range(rows)]
    return torch.tensor(starts).cumsum(-1)


def _shape(sizes: Sizes, dice: random.Random, *axes: int) -> tuple[int, ...]:
    """The axes, some of them one."""
    return tuple(axis if dice.random() < 0.6 else 1 for axis in axes)


def _bounds(sizes: Sizes, dice: random.Random) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(dice.getrandbits(32))
    shapes = [_shape(sizes, dice, sizes.batch, sizes.heads, sizes.queries) for _ in range(2)]
    first, last = (
        torch.randint(-1, sizes.keys + 2, shape, generator=numbers, dtype=dtype)
        for shape, dtype in zip(shapes, (torch.int64, torch.int32), strict=True)
    )
    return first, last


def _booleans(sizes: Sizes, dice: random.Random) -> Tensor:
    numbers = torch.Generator().manual_seed(dice.getrandbits(32))
    shape = _shape(sizes, dice, sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    shape = shape[dice.randint(0, 2) :] if dice.random() < 0.3 else shape
    return torch.rand(shape, generator=numbers) < 0.6


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of hw.attention as plain values, and what they mean."""

    sizes: Sizes
    rule: Rule
    q: Tensor
    k: Tensor
    v: Tensor
    score: str = "dot"
    weight: Tensor | None = None  # the score's: additive, general, or a temperature
    scale: float | None = None
    bias: str = "none"
    table: Tensor | None = None  # the bias's: slopes, buckets or the tensor itself
    bidirectional: bool = True
    max_distance: int = 13
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0

    @property
    def visible(self) -> Tensor:
        """Who sees whom by the mask alone, bool (B, Hq, N, M)."""
        return self.rule.matrix(self.sizes)

    @property
    def positions(self) -> Tensor:
        """The key position beside which each query stands, (B, N)."""
        return self.rule.positions(self.sizes)

    def options(self) -> dict[str, object]:
        """The keywords of hw.attention."""
        made: dict[str, object] = {}
        if self.score == "scaled":
            made["score"] = hw.Dot(self.scale)
        elif self.score != "dot":
            kind = {"additive": hw.Additive, "general": hw.General, "cosine": hw.Cosine}[self.score]
            made["score"] = kind(self.weight)
        if self.rule.mask is not None:
            made["mask"] = self.rule.mask
        if self.bias == "alibi":
            made["bias"] = hw.ALiBi(self.table)
        elif self.bias == "buckets":
            made["bias"] = hw.RelativeBuckets(self.table, self.bidirectional, self.max_distance)
        elif self.bias != "none":
            made["bias"] = self.table
        if self.softcap is not None:
            made["softcap"] = self.softcap
        if self.sinks is not None:
            made["sinks"] = self.sinks
        if self.dropout:
            made["dropout"] = hw.Dropout(self.dropout, self.seed)
        return made

    def learnable(self) -> dict[str, Tensor]:
        """Every tensor that has a gradient."""
        named = {name: getattr(self, name) for name in ("q", "k", "v", "weight", "table", "sinks")}
        return {name: x for name, x in named.items() if x is not None}

    def copy(
        self, dtype: torch.dtype | None = None, device: str = "cpu", learn: bool = True
    ) -> Call:
        """The same call on leaves that ask for gradients, of another dtype if given."""
        made = {}
        for name, x in self.learnable().items():
            leaf = x.detach() if dtype is None else x.detach().to(dtype)  # the layout stays
            made[name] = leaf.to(device).requires_grad_(learn)
        return replace(self, **made)

    def attention(self, engine: str) -> Tensor:
        return hw.attention(self.q, self.k, self.v, engine=engine, **self.options())

    def observe(self, engine: str, **more: object) -> tuple[Tensor, hw.Observation]:
        return hw.observe(self.q, self.k, self.v, engine=engine, **self.options(), **more)

    def explain(self, **more: object) -> hw.Plan:
        return hw.explain(self.q, self.k, self.v, **self.options(), **more)


@dataclass(frozen=True)
class Recipe:
    """One kind of everything, and a seed for the numbers."""

    score: str = "dot"
    mask: str = "none"
    bias: str = "none"
    softcap: str = "none"
    sinks: str = "none"
    dropout: str = "none"
    heads: str = "equal"
    widths: str = "equal"
    lengths: str = "square"
    layout: str = "packed"
    logits: str = "usual"
    dtype: str = "float64"
    parameters: str = "same dtype"
    seed: int = 0
    longest: int = 40

    def __str__(self) -> str:
        said = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)]
        plain = [f"{f.name}={f.default}" for f in fields(self)]
        return ", ".join(x for x in said if x not in plain) or "plain"

    def call(self) -> Call:
        """The call, the same one every time."""
        dice = random.Random(self.seed)
        sizes = self._sizes(dice)
        numbers = torch.Generator().manual_seed(dice.getrandbits(32))
        dtype = getattr(torch, self.dtype)
        size = {"usual": 1.0, "huge": HUGE, "tiny": TINY}[self.logits]
        width = sizes.width
        if self.score == "general" and dice.random() < 0.5:  # keys of another width
            width, sizes = width + 3, replace(sizes, value_width=sizes.value_width + 3)

        def tensor(heads: int, length: int, last: int, times: float = 1.0) -> Tensor:
            return _laid_out(self.layout, (sizes.batch, heads, length, last), times, dtype, numbers)

        q = tensor(sizes.heads, sizes.queries, sizes.width, size)
        k = tensor(sizes.key_heads, sizes.keys, width, size)
        v = tensor(sizes.key_heads, sizes.keys, sizes.value_width)
        learned = dtype
        if self.parameters == "float32" and dtype.itemsize < 4:
            learned = torch.float32
        made = {"score": self.score} | _parts(self, sizes, width, dice, numbers)
        made = {n: x.to(learned) if isinstance(x, Tensor) else x for n, x in made.items()}
        return Call(sizes, rule(self.mask, sizes, dice), q, k, v, **made)

    def _sizes(self, dice: random.Random) -> Sizes:
        queries = dice.randint(2, self.longest)
        more = queries + dice.randint(1, 9)
        queries, keys = {
            "square": (queries, queries),
            "more keys": (queries, more),
            "more queries": (more, queries),
            "one query": (1, queries),
            "one key": (queries, 1),
        }[self.lengths]
        heads, key_heads = {
            "equal": (3, 3),
            "grouped": dice.choice(((4, 2), (6, 2))),
            "one": (4, 1),
        }[self.heads]
        width = dice.choice((4, 7, 8))
        wider = {"equal": 0, "wide values": 5, "narrow values": -3}[self.widths]
        return Sizes(dice.randint(1, 2), heads, key_heads, queries, keys, width, width + wider)


def _parts(
    recipe: Recipe, sizes: Sizes, key_width: int, dice: random.Random, numbers: torch.Generator
) -> dict[str, object]:
    """The learnable parts of a call and its numbers."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, dtype=torch.float64)

    made: dict[str, object] = {}
    H, D = sizes.heads, sizes.width
    if recipe.score == "scaled":
        made["scale"] = dice.choice((0.2, 1.0))
    elif recipe.score == "odd scale":
        made |= {"score": "scaled", "scale": dice.choice((-0.3, 0.0))}
    elif recipe.score == "additive":
        made["weight"] = dice.choice((normal(D), normal(H, D)))
    elif recipe.score == "general":
        made["weight"] = dice.choice((normal(D, key_width), normal(H, D, key_width))) / D
    elif recipe.score == "cosine":
        made["weight"] = dice.choice((normal(1)[0], normal(H))) * 4
    if recipe.bias != "none":
        made["bias"] = recipe.bias
    if recipe.bias == "alibi":
        made["table"] = normal(H).abs() / 4
    elif recipe.bias == "buckets":
        made["table"] = normal(8, H)
        made["bidirectional"] = dice.random() < 0.5
        made["max_distance"] = dice.choice((11, 13))
    elif recipe.bias in ("tensor", "hiding"):
        shape = _shape(sizes, dice, sizes.batch, H, sizes.queries, sizes.keys)
        shape = shape[dice.randint(0, 2) :] if dice.random() < 0.3 else shape
        made["table"] = normal(*shape)
        if recipe.bias == "hiding":
            hidden = torch.rand(shape, generator=numbers) < 0.3
            made["table"] = made["table"].masked_fill(hidden, -torch.inf)
    if recipe.softcap == "cap":
        made["softcap"] = dice.choice((0.7, 20.0))
    if recipe.sinks == "sinks":
        made["sinks"] = normal(H) * (100 if recipe.logits == "huge" else 1)
    if recipe.dropout == "dropout":
        made |= {"dropout": dice.choice((0.1, 0.5)), "seed": dice.getrandbits(31)}
    return made


def _laid_out(
    layout: str,
    shape: tuple[int, int, int, int],
    times: float,
    dtype: torch.dtype,
    numbers: torch.Generator,
) -> Tensor:
    """Normal numbers of this shape, in memory as the layout says."""
    B, H, L, D = shape

    def normal(*axes: int) -> Tensor:
        return (times * torch.randn(axes, generator=numbers, dtype=torch.float64)).to(dtype)

    if layout == "heads last":
        return normal(B, L, H, D).transpose(1, 2)
    if layout == "strided":
        return normal(B, H, L + 2, 2 * D)[:, :, 1 : L + 1, ::2]
    if layout == "expanded":
        return normal(1, H, L, D).expand(B, H, L, D)
    return normal(B, H, L, D)


def recipes(longest: int = 40, **kinds: tuple[str, ...] | str) -> SearchStrategy[Recipe]:
    """Recipes of every kind, or of these kinds where some are named."""
    from hypothesis import strategies as st  # `tests.gpu_fuzz` goes without it

    chosen = {}
    for name, known in KINDS.items():
        some = kinds.get(name, known)
        chosen[name] = st.sampled_from((some,) if isinstance(some, str) else some)
    return st.builds(Recipe, **chosen, seed=st.integers(0, 2**32 - 1), longest=st.just(longest))


def every_pair(
    taken: Callable[[Recipe], bool] = lambda recipe: True, **kinds: tuple[str, ...]
) -> list[Recipe]:
    """A short list of recipes in which each pair of kinds meets at least once.

    A pair is left out if even alone it is not `taken`.
    """
    axes, attempts = KINDS | kinds, Counter[frozenset[tuple[str, str]]]()
    missing = {
        frozenset(((a, x), (b, y))): None
        for a, b in itertools.combinations(axes, 2)
        for x in axes[a]
        for y in axes[b]
    }  # a dict, as it keeps its order
    made: list[Recipe] = []
    dice = random.Random(0)
    while missing:
        first = next(iter(missing))
        chosen = dict(sorted(first))
        for name in dice.sample(list(axes), len(axes)):
            if name not in chosen:  # the kind that meets most of the chosen ones for the first time
                news = [
                    sum(frozenset(((name, kind), one)) in missing for one in chosen.items())
                    for kind in axes[name]
                ]
                best = [kind for kind, n in zip(axes[name], news, strict=True) if n == max(news)]
                chosen[name] = dice.choice(best)
        attempts[first] += 1
        if attempts[first] == 3:  # the others are not taken with it
            chosen = dict(first)
            del missing[first]
        recipe = Recipe(**chosen, seed=len(made), longest=24)
        if not taken(recipe):
            continue
        for pair in itertools.combinations(chosen.items(), 2):
            missing.pop(frozenset(pair), None)
        made.append(recipe)
    return made


@contextmanager
def small_blocks(rows: int = 16, keys: int = 8, block: int = 1) -> Iterator[None]:
    """Blocks so small that a small problem has many of them."""
    sizes = {"ROWS": rows, "WINDOW_ROWS": rows, "KEYS": keys, "BLOCK": block}
    places = [(module, name) for module in (schedule, forward_loop, loop) for name in sizes]
    places = [(module, name) for module, name in places if hasattr(module, name)]
    before = [getattr(module, name) for module, name in places]
    try:
        for module, name in places:
            setattr(module, name, sizes[name])
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)
