"""The claims, one file per family of claims that share an experiment."""

from headwise.lab.claim import Claim
from headwise.lab.claims import (
    cost_layer,
    dot_cost,
    example_cat,
    heads_counted,
    heads_patterns,
    paper,
    qk_symmetry,
    qkv_counted,
    rivals_reach,
    rivals_sharing,
    rivals_time,
    scale_depth,
    scale_overflow,
    scale_softmax,
    scale_variance,
)

FAMILIES = (
    *(scale_variance, scale_softmax, scale_overflow, scale_depth),
    *(heads_counted, heads_patterns),
    *(qk_symmetry, dot_cost, qkv_counted),
    *(rivals_reach, rivals_time, rivals_sharing),
    *(cost_layer, paper, example_cat),
)

CLAIMS: tuple[Claim, ...] = tuple(claim for family in FAMILIES for claim in family.CLAIMS)
"""Every claim, topic by topic."""
