"""From an engine's sums to the statistics of an `Observation`."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.observation import STATISTICS
from headwise.core.problem import Problem
from headwise.core.single_weights import weight_on
from headwise.core.sums import DISTANCE, ENTROPY, LOG_TOTAL, MOMENTS, Sums

_NEEDS = {
    "entropy": ENTROPY,
    "effective_keys": ENTROPY,
    "distance": DISTANCE,
    "logit_mean": MOMENTS,
    "logit_var": MOMENTS,
    "top_prob": LOG_TOTAL,
    "sink_mass": LOG_TOTAL,
    "self_mass": LOG_TOTAL,
    "previous_mass": LOG_TOTAL,
}


def wanted(stats: tuple[str, ...]) -> int:
    """The sums over pairs that these statistics need."""
    wants = 0
    for name in stats:
        wants |= _NEEDS.get(name, 0)
    return wants


def complete(
    problem: Problem, sums: Sums, stats: tuple[str, ...], sink_keys: int
) -> dict[str, Tensor]:
    """The named statistics, (B, Hq, N) each, from an engine's sums."""
    asked = set(stats)
    found = {"lse": sums.lse, "max_logit": sums.max_logit, "entropy": sums.entropy}
    found |= {"distance": sums.distance, "logit_mean": sums.logit_mean, "logit_var": sums.logit_var}
    with torch.no_grad():
        if "effective_keys" in asked:
            found["effective_keys"] = sums.entropy.exp()
        if "output_norm" in asked:
            wide = torch.promote_types(sums.out.dtype, torch.float32)
            found["output_norm"] = torch.linalg.vector_norm(sums.out, dim=-1, dtype=wide)
        found |= _from_weights(problem, sums, asked, sink_keys)
    return {name: found[name] for name in STATISTICS if name in asked}


def _from_weights(
    problem: Problem, sums: Sums, asked: set[str], sink_keys: int
) -> dict[str, Tensor]:
    """The statistics that are single weights, or sums of a few."""
    found: dict[str, Tensor] = {}
    if not any(_NEEDS.get(name) == LOG_TOTAL for name in asked):
        return found
    terms, totals, diagonal = problem.terms(), sums.totals(), problem.diagonal()
    own = (terms.position - terms.first_key)[:, None]  # (B|1, 1, N): the key beside the query
    if "top_prob" in asked:
        found["top_prob"] = totals.weight(sums.max_logit)
    if "self_mass" in asked:
        found["self_mass"] = weight_on(problem, terms, totals, own, diagonal)
    if "previous_mass" in asked:
        before = None if diagonal is None else diagonal - 1
        found["previous_mass"] = weight_on(problem, terms, totals, own - 1, before)
    if "sink_mass" in asked:
        start = problem.start()
        first = start if isinstance(start, Tensor) else own.new_full((1, 1, 1), start)
        found["sink_mass"] = sum(
            (weight_on(problem, terms, totals, first + step) for step in range(sink_keys)),
            torch.zeros_like(sums.lse),
        )
    return found
