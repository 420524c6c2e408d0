"""The claims, one file per family of claims that share an experiment."""

from headwise.lab.claim import Claim
from headwise.lab.claims import scale_variance

FAMILIES = (scale_variance,)

CLAIMS: tuple[Claim, ...] = tuple(claim for family in FAMILIES for claim in family.CLAIMS)
"""Every claim."""
