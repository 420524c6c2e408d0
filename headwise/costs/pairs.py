"""The pairs of attention calls: of the busiest rank, and their FLOPs as formulas."""

from __future__ import annotations

from dataclasses import replace

from headwise.core.intervals import Mask
from headwise.core.place import Place
from headwise.costs.formula import Formula, size
from headwise.costs.kernel import AttentionShape
from headwise.costs.tape import Tape
from headwise.costs.visible import Pairs, closed_form, count_pairs
from headwise.costs.workload import Tokens, Workload
from headwise.messages import Sentence, say


def pairs_of_a_rank(mask: Mask | None, place: Place, tokens: Tokens, work: Workload) -> Pairs:
    """The pairs of the busiest rank of context parallelism."""
    if work.ranks.cp == 1:
        return count_pairs(mask, place, work.tile)
    cuts = 2 if work.layout == "head_tail" else 1
    length = tokens.queries // cuts
    counts = [
        count_pairs(
            mask,
            replace(place, queries=length, first_query=start, whole=False),
            work.tile,
        )
        for start in range(0, tokens.all_queries, length)
    ]
    if cuts == 2:
        counts = [
            Pairs(
                a.visible + b.visible,
                a.executed + b.executed,
                a.dense + b.dense,
                max(a.touched, b.touched),
            )
            for a, b in zip(counts[: work.ranks.cp], reversed(counts[work.ranks.cp :]), strict=True)
        ]
    return max(counts, key=lambda pairs: pairs.visible)


def pairs_of_a_head(
    mask: Mask | None, visible: int, every: int, tokens: Tokens, work: Workload
) -> tuple[Formula, Sentence | None]:
    """The visible pairs of one head and sequence, of so many, and how they are counted."""
    if visible == every == tokens.queries * tokens.keys:
        return tokens.s * tokens.t, None
    count = size("P", visible)
    written = closed_form(mask, tokens.all_queries, tokens.keys)
    if written is not None and work.ranks.cp == 1:
        return count, say("P, the visible pairs of a head: {written} = {count:,}",
                          written=written, count=visible)  # fmt: skip
    return count, say("P, the visible pairs of a head under {mask}: {count:,}", mask=mask,
                      count=visible)  # fmt: skip


def count_pair_flops(
    tape: Tape, shape: AttentionShape, width: int, pairs: Pairs, tokens: Tokens
) -> None:
    """Record the formula of the FLOPs between pairs, in a model of this width."""
    h, a, d = size("h", width), size("a", shape.heads), size("d", shape.head_dim)
    v = d if shape.value_dim == shape.head_dim else size("v", shape.value_dim)
    calls, note = shape.batch * shape.heads, None
    per_pair = (4 if shape.additive else 2) * d + 2 * v
    if pairs.visible % calls:  # some sequences or heads see more than others
        note = say("P, the visible pairs of all heads and sequences under {mask}: {count:,}",
                   mask=shape.mask, count=pairs.visible)  # fmt: skip
        tape.flops("scores and values", per_pair * size("P", pairs.visible), note)
        return
    every = tokens.queries * tokens.keys
    count, note = pairs_of_a_head(shape.mask, pairs.visible // calls, every, tokens, tape.work)
    whole = tokens.b * count * a * per_pair
    if (a * d).value == width and v == d and not shape.additive:
        whole = 4 * tokens.b * count * h
    tape.flops("scores and values", whole, note)
