"""headwise: attention you can see inside, at full speed.

Attention itself is loaded at once, with the operators and FLOP formulas that saved graphs and
counters look up by name. Everything else is loaded when it is first asked for; so is attention in
the command `headwise`, whose help then needs no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.version import __version__

if TYPE_CHECKING:
    from headwise import costs as costs
    from headwise import distributed, mask, models, nn, sparse
    from headwise import watching as watching
    from headwise.api import attention, attention_map, effect_map, explain, observe, partial
    from headwise.bias import ALiBi, RelativeBuckets
    from headwise.core.edges import Edge
    from headwise.core.observation import STATISTICS, Observation
    from headwise.core.partial import Partial, merge
    from headwise.costs.calculate import cost
    from headwise.costs.cost import Cost
    from headwise.costs.workload import CacheLayout
    from headwise.dropout import Dropout
    from headwise.engines.plan import Plan
    from headwise.indexer import index_loss
    from headwise.maps.attention_map import AttentionMap
    from headwise.maps.effect_map import EffectMap
    from headwise.models.trained import load
    from headwise.score import Additive, Cosine, Dot, General
    from headwise.watching import Recording as Recording
    from headwise.watching import Watch, knock_out, qk_clip, sparsify, steer, watch

_PACKAGES = {"costs", "distributed", "mask", "models", "nn", "sparse", "watching"}
_ATTENTION = {
    "headwise.api": "attention attention_map effect_map explain observe partial",
    "headwise.bias": "ALiBi RelativeBuckets",
    "headwise.core.observation": "STATISTICS Observation",
    "headwise.core.partial": "Partial merge",
    "headwise.dropout": "Dropout",
    "headwise.engines.plan": "Plan",
    "headwise.maps.attention_map": "AttentionMap",
    "headwise.maps.effect_map": "EffectMap",
    "headwise.score": "Additive Cosine Dot General",
}
_LATER = {
    "headwise.core.edges": "Edge",
    "headwise.costs.calculate": "cost",
    "headwise.costs.cost": "Cost",
    "headwise.costs.workload": "CacheLayout",
    "headwise.indexer": "index_loss",
    "headwise.models.trained": "load",
    "headwise.watching": "Recording Watch knock_out qk_clip sparsify steer watch",
}
_MODULES = {
    name: module for module, names in (_ATTENTION | _LATER).items() for name in names.split()
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
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _runs_as_command() -> bool:
    """True where Python was started as `headwise` or `python -m headwise`.

    >>> _runs_as_command()
    False
    """
    if sys.argv[:1] == ["-m"]:  # the module is still being found
        return ("-m", __name__) in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    return bool(sys.argv) and Path(sys.argv[0]).stem == __name__


if not _runs_as_command():
    for _names in _ATTENTION.values():
        for _name in _names.split():
            __getattr__(_name)
