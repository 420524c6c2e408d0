"""The claims, one file per family of claims that share an experiment."""

from headwise.apps.lab.claim import TOPICS, Claim
from headwise.apps.lab.claims import (
    cost_layer,
    dot_cost,
    dot_quality,
    examples,
    heads_counted,
    heads_edges,
    heads_patterns,
    heads_rank,
    heads_removed,
    masking,
    paper,
    positions,
    qk_symmetry,
    qk_training,
    qkv_counted,
    recalling,
    rivals_phase,
    rivals_reach,
    rivals_scan,
    rivals_sharing,
    rivals_time,
    scale_assumed,
    scale_atlas,
    scale_depth,
    scale_overflow,
    scale_softmax,
    scale_training,
    scale_variance,
    settings,
    translation_quality,
)

FAMILIES = (
    *(scale_variance, scale_softmax, scale_overflow, scale_depth, scale_training, scale_assumed),
    scale_atlas,
    *(heads_counted, heads_patterns, heads_rank, heads_removed, heads_edges, translation_quality),
    *(positions, masking),
    *(qk_symmetry, qk_training, dot_cost, dot_quality, qkv_counted, recalling),
    *(rivals_reach, rivals_time, rivals_scan, rivals_sharing, rivals_phase),
    *(settings, cost_layer, paper, examples),
)

CLAIMS: tuple[Claim, ...] = tuple(
    claim
    for topic in TOPICS
    for family in FAMILIES
    for claim in family.CLAIMS
    if claim.topic == topic
)
"""Every claim, topic by topic."""
