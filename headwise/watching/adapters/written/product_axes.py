"""The axes of weights, values and output where weights are multiplied with values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_OTHERS = "01234567"  # stand for "..." and for batch axes; einsum's own letters are never digits


@dataclass(frozen=True)
class Product:
    """The axes of weights, values and output, each named by one of "bhqkd".

    Without "h" the first axis is (B · H), or B if there is one head; without "b" there is neither.
    """

    weights: str
    values: str
    out: str

    def arranged(self, logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Permute to (B, H, N, M) and (B|1, H|1, M, D), or both without H; None if unfit."""
        if values.ndim != len(self.values) or logits.ndim != len(self.weights):
            return None
        lead = "bh" if "h" in self.weights else "b"
        logits = logits.permute([self.weights.index(x) for x in f"{lead}qk" if x in self.weights])
        values = values.permute([self.values.index(x) for x in f"{lead}kd" if x in self.values])
        for axis, name in enumerate(lead):
            logits = logits if name in self.weights else logits.unsqueeze(axis)
            values = values if name in self.values else values.unsqueeze(axis)
        if values.shape[-2] != logits.shape[-1]:
            return None
        for have, wanted in zip(values.shape, logits.shape[: len(lead)], strict=False):
            if have != wanted and 1 not in (have, wanted):
                return None
        sizes = torch.broadcast_shapes(logits.shape[: len(lead)], values.shape[: len(lead)])
        return logits.expand(*sizes, -1, -1), values

    def swapped(self) -> Product:
        """The same with heads before the batch: (H, B, N, M)."""
        other = str.maketrans("bh", "hb")
        return Product(*(x.translate(other) for x in (self.weights, self.values, self.out)))

    def heads_first(self, out: Tensor, heads: int) -> Tensor:
        """The output as (B, H, N, D)."""
        out = out if "b" in self.out else out[None]
        if "h" not in self.out:
            out = out.unflatten(self._with_batch.index("b"), (-1, heads))
        return out.permute([self._whole.index(x) for x in "bhqd"])

    def to_own_layout(self, out: Tensor) -> Tensor:
        """The output from (B, H, N, D) to the product's own layout."""
        out = out.permute(["bhqd".index(x) for x in self._whole])
        first = self._whole.index("b")
        out = out if "h" in self.out else out.flatten(first, first + 1)
        return out if "b" in self.out else out[0]

    @property
    def _with_batch(self) -> str:
        return self.out if "b" in self.out else f"b{self.out}"

    @property
    def _whole(self) -> str:
        return self._with_batch if "h" in self.out else self._with_batch.replace("b", "bh")


@dataclass(frozen=True)
class Equation:
    """Two operands and an output, as einsum writes them: one letter per axis, no "..."."""

    first: str
    second: str
    out: str

    @classmethod
    def of_matmul(cls, first: int, second: int) -> Equation:
        """first @ second, of so many axes.

        >>> Equation.of_matmul(4, 3)
        Equation(first='67ij', second='7jk', out='67ik')
        """
        lead = [_OTHERS[len(_OTHERS) - max(0, axes - 2) :] for axes in (first, second)]
        return cls(f"{lead[0]}ij", f"{lead[1]}jk", f"{max(lead, key=len)}ik")

    @classmethod
    def of_einsum(cls, written: str, first: int, second: int) -> Equation | None:
        """An einsum over operands of so many axes; None if it has not two operands.

        >>> Equation.of_einsum("...ij,...jd", 3, 3)
        Equation(first='7ij', second='7jd', out='7di')
        """
        given, arrow, out = written.replace(" ", "").partition("->")
        sides = given.split(",")
        if len(sides) != 2:
            return None
        a, b = _spelt(sides[0], first), _spelt(sides[1], second)
        dots = "".join(sorted({x for x in a + b if x in _OTHERS}))
        if arrow:
            return cls(a, b, out.replace("...", dots))
        once = {x for x in a + b if (a + b).count(x) == 1}
        return cls(a, b, dots + "".join(sorted(once - {*dots})))

    def swapped(self) -> Equation:
        """The same with the operands in the other order."""
        return Equation(self.second, self.first, self.out)

    def attends(self, axis: int) -> bool:
        """True if it sums over this axis of the first operand, as attention does over the keys.

        And the first has an axis of its own, the queries: else it gates what the second holds.

        >>> routes, gates = Equation("bnec", "bnd", "becd"), Equation("bne", "bned", "bnd")
        >>> Equation("bhqk", "bkhd", "bqhd").attends(-1), routes.attends(-1), gates.attends(-1)
        (True, False, False)
        """
        key, own = self.first[axis], set(self.first) - set(self.second)
        return key in self.second and key not in self.out and bool(own)

    def product(self, axis: int) -> Product | None:
        """The product of weights, the first operand, with keys on this axis; None if it is not one.

        >>> Equation("bhnm", "bmhd", "bnhd").product(-1)
        Product(weights='bhqk', values='bkhd', out='bqhd')
        """
        weights, values, out, key = self.first, self.second, self.out, self.first[axis]
        rest = [x for x in weights if x != key]
        alone = [x for x in rest if x not in values]
        width = [x for x in values if x not in weights]
        once = all(len({*side}) == len(side) for side in (weights, values))
        if len(width) != 1 or not self.attends(axis) or not once:
            return None
        query = rest[-1] if rest[-1] in alone else alone[0]
        rest.remove(query)
        if len(rest) > 2 or sorted(out) != sorted([*rest, query, *width]):
            return None
        names = dict(zip(rest, "bh", strict=False)) | {query: "q", key: "k", width[0]: "d"}
        return Product(*("".join(names[x] for x in side) for side in (weights, values, out)))


def _spelt(side: str, axes: int) -> str:
    """One side of an einsum with letters for "...", counted from the last."""
    before = axes - len(side.replace("...", ""))
    return side.replace("...", _OTHERS[len(_OTHERS) - before :] if before > 0 else "")
