"""headwise: attention you can see inside, at full speed.

Attention itself is loaded at once, with the operators and FLOP formulas that saved graphs and
counters look up by name. Everything else is loaded when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headwise import mask
from headwise.api import attention, attention_map, effect_map, explain, observe, partial
from headwise.bias import ALiBi, RelativeBuckets
from headwise.core.observation import STATISTICS, Observation
from headwise.core.partial import Partial, merge
from headwise.dropout import Dropout
from headwise.engines.plan import Plan
from headwise.maps.attention_map import AttentionMap
from headwise.maps.effect_map import EffectMap
from headwise.score import Additive, Cosine, Dot, General
from headwise.version import __version__

if TYPE_CHECKING:
    from headwise import costs as costs
    from headwise import distributed, models, nn, sparse
    from headwise import watching as watching
    from headwise.core.edges import Edge
    from headwise.costs.calculate import cost
    from headwise.costs.cost import Cost
    from headwise.costs.workload import CacheLayout
    from headwise.indexer import index_loss
    from headwise.models.trained import load
    from headwise.watching import Recording as Recording
    from headwise.watching import Watch, knock_out, qk_clip, sparsify, steer, watch

_PACKAGES = {"costs", "distributed", "models", "nn", "sparse", "watching"}
_LATER = {
    "CacheLayout": "headwise.costs.workload",
    "Cost": "headwise.costs.cost",
    "Edge": "headwise.core.edges",
    "Recording": "headwise.watching",
    "Watch": "headwise.watching",
    "cost": "headwise.costs.calculate",
    "index_loss": "headwise.indexer",
    "knock_out": "headwise.watching",
    "load": "headwise.models.trained",
    "qk_clip": "headwise.watching",
    "sparsify": "headwise.watching",
    "steer": "headwise.watching",
    "watch": "headwise.watching",
}

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
    "EffectMap",
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
    "effect_map",
    "explain",
    "index_loss",
    "knock_out",
    "load",
    "mask",
    "merge",
    "models",
    "nn",
    "observe",
    "partial",
    "qk_clip",
    "sparse",
    "sparsify",
    "steer",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
