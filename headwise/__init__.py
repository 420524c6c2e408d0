"""headwise: attention you can see inside, at full speed."""

from headwise import distributed, mask, models, nn
from headwise.api import attention, attention_map, explain, observe, partial
from headwise.bias import ALiBi, RelativeBuckets
from headwise.core.edges import Edge
from headwise.core.observation import STATISTICS, Observation
from headwise.core.partial import Partial, merge
from headwise.costs.calculate import cost
from headwise.costs.cost import Cost
from headwise.costs.workload import CacheLayout
from headwise.dropout import Dropout
from headwise.engines.plan import Plan
from headwise.maps.attention_map import AttentionMap
from headwise.score import Additive, Cosine, Dot, General
from headwise.training.loading import load
from headwise.version import __version__
from headwise.watching import Recording, Watch, knock_out, qk_clip, watch


def _show(seen: Recording, *given: object) -> object:
    from headwise.look.show import show  # the page's server or widget is an extra

    return show(seen, *given)  # type: ignore[arg-type]


Recording.opens_page = staticmethod(_show)  # the page is built on the recording, not beneath it

__all__ = [
    "STATISTICS",
    "ALiBi",
    "Additive",
    "AttentionMap",
    "CacheLayout",
    "Cosine",
    "Cost",
    "Dot",
    "Dropout",
    "Edge",
    "General",
    "Observation",
    "Partial",
    "Plan",
    "RelativeBuckets",
    "Watch",
    "__version__",
    "attention",
    "attention_map",
    "cost",
    "distributed",
    "explain",
    "knock_out",
    "load",
    "mask",
    "merge",
    "models",
    "nn",
    "observe",
    "partial",
    "qk_clip",
    "watch",
]
