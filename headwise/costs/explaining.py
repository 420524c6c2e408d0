"""The explanation of a cost: each formula, with the numbers put in, in English and 中文."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

from headwise.costs.formula import Formula, Line, formula, size, total
from headwise.costs.words import LETTERS, translated_part
from headwise.costs.workload import Workload
from headwise.messages import Sentence, say

Language = Literal["en", "zh"]
"""The language of an explanation."""

TERMS = 8  # a longer formula is shown by its parts
DEPTH = 3  # levels of parts


class Explained(Protocol):
    """The part of a cost that an explanation reads."""

    @property
    def name(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def parts(self) -> Mapping[str, Any]: ...
    @property
    def lines(self) -> tuple[Line, ...]: ...
    @property
    def work(self) -> Workload: ...


def explanation(cost: Any, language: Language = "en") -> str:
    """The whole explanation as text, section by section."""
    if language not in ("en", "zh"):
        raise ValueError(f'language={language!r}; use "en" or "zh"')
    sentences: list[str | Sentence] = [_title(cost), _letters(cost), ""]
    sentences += _section(cost, "params", say("Parameters: {count:,}", count=cost.params))
    if cost.params_active != cost.params:
        sentences.append(say("  of which a token uses {count:,}", count=cost.params_active))
    sentences += ["", *_flops(cost), "", *_bytes(cost)]
    return "\n".join(_said(each, language) for each in sentences)


def _said(sentence: str, language: Language) -> str:
    return sentence.zh if language == "zh" and isinstance(sentence, Sentence) else str(sentence)


def _title(cost: Any) -> Sentence:
    work = cost.work
    ranks = (
        say("one rank of {ranks}", ranks=work.ranks) if work.ranks.count > 1 else say("one device")
    )
    return say(
        "The cost of {name} in {dtype}, {ranks}", name=cost.name, dtype=work.dtype, ranks=ranks
    )


def _letters(cost: Explained) -> Sentence:
    """The letters of all formulas, with their values."""
    found: dict[str, set[int]] = {}
    for line in _lines(cost):
        for symbol in line.formula.symbols:
            found.setdefault(symbol.name, set()).add(symbol.value)
        if line.times > cost.count:
            found.setdefault("l", set()).add(line.times // cost.count)
    english, chinese = [], []
    for letter, (word, theirs) in LETTERS.items():
        if letter in found:
            values = [f"{value:,}" for value in sorted(found[letter])]
            english.append(f"{letter} {word} {' or '.join(values)}")
            chinese.append(f"{letter} {theirs} {'、'.join(values)}")
    return Sentence(" · ".join(english), " · ".join(chinese))


def _flops(cost: Any) -> list[str | Sentence]:
    found: list[str | Sentence] = []
    heading = say(
        "Forward FLOPs (two per multiply-add, visible pairs): {count:,}", count=cost.flops
    )
    found += _section(cost, "flops", heading)
    found += [Sentence(f"  {note}", f"  {note.zh}") for note in missing_costs(cost)]
    found += _notes(cost)
    found += [
        say(
            "  every pair: {dense:,}; computed in tiles of {rows} × {keys}: {executed:,}",
            dense=cost.flops_dense,
            rows=cost.work.tile[0],
            keys=cost.work.tile[1],
            executed=cost.flops_executed,
        ),
        say("  exponentials, tanh and their like, apart: {count:,}", count=cost.special),
        say("Backward FLOPs (two products for each of the forward): {count:,}",
            count=cost.backward_flops),
        say("  computed by kernels: {count:,}{why}", count=cost.backward_flops_executed,
            why=_why(cost.work)),
    ]  # fmt: skip
    return found


def missing_costs(cost: Any) -> list[Sentence]:
    """A sentence for everything that FLOPs, bytes moved and times do not include."""
    return [
        say("not counted in FLOPs, bytes moved and times: {what}", what=what)
        for what in cost.left_out
    ]


def _why(work: Workload) -> Sentence:
    """The reason why kernels compute more than the convention counts."""
    if work.recompute is not None:
        return say("; what is recomputed counts again")
    if work.fused:
        return say("; fused attention computes its scores again, five products for two")
    return Sentence("")


def _bytes(cost: Any) -> list[str | Sentence]:
    work = cost.work
    how = say("fused attention") if work.fused else say("attention step by step")
    if work.recompute == "layers":
        how = say("layers recomputed")
    elif work.recompute == "attention":
        how = say("attention recomputed")
    heading = say(
        "Bytes saved for the backward ({how}, on {device}): {count:,}",
        how=how,
        device=work.device,
        count=cost.activations,
    )
    found = _section(cost, "activations", heading)
    if cost.kv_cache:
        found += ["", *_section(cost, "kv_cache", say("KV cache, bytes: {count:,}",
                                                      count=cost.kv_cache))]  # fmt: skip
    if cost.state:
        found += ["", *_section(cost, "state", say("Recurrent state, bytes: {count:,}",
                                                   count=cost.state))]  # fmt: skip
    found += [
        "",
        say(
            "Bytes moved by the forward: {count:,}; {intensity:.1f} FLOPs per byte",
            count=cost.bytes_moved,
            intensity=cost.intensity,
        ),
    ]
    return found


def _section(cost: Explained, figure: str, heading: Sentence) -> list[str | Sentence]:
    """A figure's heading, and its formula for every part that has one."""
    return [heading, *_rows(cost, figure, 1)]


def _rows(cost: Explained, figure: str, depth: int) -> Iterator[Sentence]:
    own = whole(cost, figure)
    if depth == 1 and own is not None and own.terms:
        yield Sentence(f"  {_written(own)}")
    for name, part in cost.parts.items():
        each = whole(part, figure)
        if each is not None and not each.terms:
            continue
        times = part.count // cost.count
        copies = f" × {times}" if times > 1 else ""
        shown = f"{_value(part, figure):,}" if each is None else _written(each)
        mark = "  " * depth
        yield Sentence(
            f"{mark}{name}{copies}: {shown}", f"{mark}{translated_part(name)}{copies}：{shown}"
        )
        if depth < DEPTH and not _alone(part, figure):
            yield from _rows(part, figure, depth + 1)


def _value(cost: Explained, figure: str) -> int:
    """A figure of one copy of a part."""
    found = (line for line in _lines(cost) if line.figure == figure)
    return sum(line.formula.value * line.times for line in found) // cost.count


def _alone(cost: Explained, figure: str) -> bool:
    """True if one of the parts has all of a figure, so that it says nothing new."""
    inside = [part for part in cost.parts.values() if _value(part, figure)]
    own = any(line.figure == figure for line in cost.lines)
    return len(inside) == 1 and not own and inside[0].count == cost.count


def _written(written: Formula) -> str:
    """A formula, with its numbers put in, and its value."""
    if not written.symbols:
        return f"{written.value:,}"
    filled, value = written.filled(), f"{written.value:,}"
    return f"{written} = {value}" if filled == value else f"{written} = {filled} = {value}"


def whole(cost: Explained, figure: str) -> Formula | None:
    """The formula of one copy of a part; None if it is too long, or a letter has two values."""
    found = total(
        line.formula * _copies(line.times // cost.count)
        for line in _lines(cost)
        if line.figure == figure
    )
    letters = [symbol.name for symbol in found.symbols]
    long = len(found.terms) > TERMS
    return None if long or len(letters) != len(set(letters)) else found


def _copies(count: int) -> Formula:
    """l, the number of layers, where a part occurs more than once."""
    return formula(1) if count == 1 else size("l", count)


def _lines(cost: Explained) -> Iterator[Line]:
    yield from cost.lines
    for part in cost.parts.values():
        yield from _lines(part)


def _notes(cost: Explained) -> list[Sentence]:
    """The pair counts of the masks, each once."""
    found = {line.note: None for line in _lines(cost) if line.note is not None}
    return [Sentence(f"  {note}", f"  {note.zh}") for note in found]
