"""Formulas that are numbers: sums of products of named sizes, each with its value.

A count is written once, as a formula. Its `value` is the count and its text is the explanation, so
the two can't disagree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from headwise.messages import Sentence

Monomial = tuple[tuple["Symbol", int], ...]  # the sizes of a product and their exponents

SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
ORDER = "blsntPQhadgvrfV"  # the order in which papers write these letters


@dataclass(frozen=True, order=True)
class Symbol:
    """A named size, such as h = 768."""

    name: str
    value: int


class Formula:
    """A sum of products of symbols with rational factors.

    >>> h, f = size("h", 64), size("f", 256)
    >>> both = 2 * h * f + f + h
    >>> str(both), both.value
    ('2hf + h + f', 33088)
    """

    __slots__ = ("terms",)

    def __init__(self, terms: dict[Monomial, int | Fraction]) -> None:
        self.terms = {powers: factor for powers, factor in terms.items() if factor}

    @property
    def value(self) -> int:
        """The number; ValueError if it is not whole."""
        total: int | Fraction = 0
        for powers, factor in self.terms.items():
            for symbol, exponent in powers:
                factor *= symbol.value**exponent
            total += factor
        if total.denominator != 1:
            raise ValueError(f"{self} = {total} is not a whole number")
        return int(total)

    def __add__(self, other: Formula | int | Fraction) -> Formula:
        terms = dict(self.terms)
        for powers, factor in formula(other).terms.items():
            terms[powers] = terms.get(powers, 0) + factor
        return Formula(terms)

    def __mul__(self, other: Formula | int | Fraction) -> Formula:
        terms: dict[Monomial, int | Fraction] = {}
        for mine, factor in self.terms.items():
            for theirs, by in formula(other).terms.items():
                powers = _product(mine, theirs)
                terms[powers] = terms.get(powers, 0) + factor * by
        return Formula(terms)

    def __sub__(self, other: Formula | int | Fraction) -> Formula:
        return self + formula(other) * -1

    __radd__, __rmul__ = __add__, __mul__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """The sizes that the formula names, in the order of papers."""
        found = {symbol for powers in self.terms for symbol, _ in powers}
        return tuple(sorted(found, key=_place))

    def __str__(self) -> str:
        return self._written({symbol: symbol.name for symbol in self.symbols})

    def filled(self) -> str:
        """The formula with numbers in place of letters.

        >>> h = size("h", 64)
        >>> (4 * h * h + 4 * h).filled()
        '4·64² + 4·64'
        """
        return self._written({symbol: f"{symbol.value:,}" for symbol in self.symbols}, "·")

    def __repr__(self) -> str:
        return f"{self} = {self.value:,}"

    def _written(self, names: dict[Symbol, str], times: str = "") -> str:
        parts = []
        ordered = sorted(self.terms.items(), key=lambda term: _degree(term[0]))
        for powers, factor in ordered:
            inner = [
                names[symbol] + (str(exponent).translate(SUPERSCRIPTS) if exponent > 1 else "")
                for symbol, exponent in sorted(powers, key=lambda power: _place(power[0]))
            ]
            joined = times.join(inner)
            number = str(abs(factor))
            if joined and abs(factor) == 1:
                number = ""
            elif joined and (times or factor.denominator != 1 or joined[0].isdigit()):
                number += "·"
            sign = "-" if factor < 0 else "+"
            parts.append((sign, number + joined))
        if not parts:
            return "0"
        first = ("-" if parts[0][0] == "-" else "") + parts[0][1]
        return first + "".join(f" {sign} {text}" for sign, text in parts[1:])


@dataclass(frozen=True)
class Line:
    """One line of an explanation: the figure that it belongs to, and its formula."""

    figure: str  # a figure of a cost, such as params
    label: str  # the piece of it, such as "query projection"
    formula: Formula
    times: int = 1  # copies of the part
    note: Sentence | None = None


def size(name: str, value: int) -> Formula:
    """The formula that is one named size."""
    return Formula({((Symbol(name, value), 1),): 1})


def formula(value: Formula | int | Fraction) -> Formula:
    """A number as a formula without letters; a formula as it is."""
    return value if isinstance(value, Formula) else Formula({(): value})


def total(formulas: Iterable[Formula]) -> Formula:
    """The sum of formulas."""
    whole = formula(0)
    for each in formulas:
        whole = whole + each
    return whole


def _product(a: Monomial, b: Monomial) -> Monomial:
    powers = dict(a)
    for symbol, exponent in b:
        powers[symbol] = powers.get(symbol, 0) + exponent
    return tuple(sorted(power for power in powers.items() if power[1]))


def _place(symbol: Symbol) -> tuple[int, str, int]:
    letter = ORDER.find(symbol.name[0])
    return (letter if letter >= 0 else len(ORDER), symbol.name, symbol.value)


def _degree(powers: Monomial) -> tuple[int, list[tuple[tuple[int, str, int], int]]]:
    degree = sum(exponent for _, exponent in powers)
    return -degree, sorted((_place(symbol), exponent) for symbol, exponent in powers)
