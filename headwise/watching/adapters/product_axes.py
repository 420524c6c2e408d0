"""Which axis is which where weights are multiplied with values, by matmul or by einsum."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

_BATCH, _HEAD, _QUERY, _KEY, _WIDTH = "bhqkd"
_OTHERS = "01234567"  # what "..." stands for; einsum's own are letters


@dataclass(frozen=True)
class Product:
    """The axes of weights, values and output, each named by one of "bhqkd"; no "h": (B · H, …)."""

    weights: str
    values: str
    out: str

    def arranged(self, logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """As (B, H, N, M) and (B|1, H|1, M, D), or both without H; None: they don't fit."""
        heads = _HEAD if _HEAD in self.weights else ""
        logits = logits.permute([self.weights.index(x) for x in f"b{heads}qk"])
        if values.ndim != len(self.values):
            return None
        values = values.permute([self.values.index(x) for x in f"b{heads}kd" if x in self.values])
        for axis, name in enumerate(_BATCH + heads):
            if name not in self.values:
                values = values.unsqueeze(axis)
            if values.shape[axis] not in (1, logits.shape[axis]):
                return None
        return (logits, values) if values.shape[-2] == logits.shape[-1] else None

    def swapped(self) -> Product:
        """The same with heads before the batch: (H, B, N, M)."""
        other = str.maketrans(_BATCH + _HEAD, _HEAD + _BATCH)
        return Product(*(x.translate(other) for x in (self.weights, self.values, self.out)))

    def heads_first(self, out: Tensor, heads: int) -> Tensor:
        """The output as (B, H, N, D)."""
        if _HEAD not in self.out:
            out = out.unflatten(self.out.index(_BATCH), (-1, heads))
        return out.permute([self._whole.index(x) for x in "bhqd"])

    def as_it_was(self, out: Tensor) -> Tensor:
        """The output from (B, H, N, D) to the product's own layout."""
        out = out.permute(["bhqd".index(x) for x in self._whole])
        first = self.out.index(_BATCH)
        return out if _HEAD in self.out else out.flatten(first, first + 1)

    @property
    def _whole(self) -> str:
        return self.out if _HEAD in self.out else self.out.replace(_BATCH, _BATCH + _HEAD)


def of_matmul(weights: int, values: int) -> Product | None:
    """weights @ values, of so many axes; None: one is repeated for the axes of the other."""
    if weights == values == 3:
        return Product("bqk", "bkd", "bqd")
    known = {3: Product("bhqk", "hkd", "bhqd"), 4: Product("bhqk", "bhkd", "bhqd")}
    return known.get(values) if weights == 4 else None


def weighs(written: str, first: bool = True) -> bool:
    """Whether an einsum sums over the weights' last axis, as attention does and routing does not.

    >>> weighs("bhqk,bkhd->bqhd"), weighs("bnec,bnd->becd")
    (True, False)
    """
    given, _, out = written.replace(" ", "").partition("->")
    ours, _, theirs = given.partition(",")
    ours, theirs = (ours, theirs) if first else (theirs, ours)
    return ours[-1:] in theirs and ours[-1:] not in out


def of_einsum(written: str, weights: int, values: int, first: bool = True) -> Product | None:
    """What an einsum over weights and values of so many axes does; None: no known one.

    The weights' last axis is that of the keys, and the values have no axis for queries. `first`
    says that the weights stand before the values.

    >>> of_einsum("bhnm,bmhd->bnhd", 4, 4)
    Product(weights='bhqk', values='bkhd', out='bqhd')
    >>> of_einsum("...ij,...jd->...id", 3, 3)
    Product(weights='bqk', values='bkd', out='bqd')
    """
    given, arrow, out = written.replace(" ", "").partition("->")
    sides = given.split(",")
    if len(sides) != 2:
        return None
    ours, theirs = sides if first else reversed(sides)
    ours, theirs = _spelt(ours, weights), _spelt(theirs, values)
    dots = "".join(sorted({x for x in ours + theirs if x in _OTHERS}))
    if arrow:
        out = out.replace("...", dots)
    else:
        once = {x for x in ours + theirs if (ours + theirs).count(x) == 1}
        out = dots + "".join(sorted(once - {*dots}))
    names = _named(ours, theirs, out)
    if names is None:
        return None
    return Product(*("".join(names[x] for x in side) for side in (ours, theirs, out)))


def _named(weights: str, values: str, out: str) -> dict[str, str] | None:
    """By an einsum's letter: which axis it is; None where the three are no attention."""
    rest, key = list(weights[:-1]), weights[-1]
    alone = [x for x in rest if x not in values]
    width = [x for x in values if x not in weights]
    once = all(len({*side}) == len(side) for side in (weights, values))
    if len(width) != 1 or key not in values or not once or not alone:
        return None
    query = rest[-1] if rest[-1] in alone else alone[0]
    rest.remove(query)
    if len(rest) not in (1, 2) or sorted(out) != sorted([*rest, query, *width]):
        return None
    names = dict(zip(rest, (_BATCH, _HEAD), strict=False))
    return names | {query: _QUERY, key: _KEY, width[0]: _WIDTH}


def _spelt(side: str, axes: int) -> str:
    """One side of an einsum with letters for "...", counted from the last."""
    before = axes - len(side.replace("...", ""))
    return side.replace("...", _OTHERS[len(_OTHERS) - before :] if before > 0 else "")
