"""Gradient checkpointing: a forward that a backward runs again must not be counted again."""

from __future__ import annotations

import torch


def recomputing() -> bool:
    """True if this forward runs inside a backward, as gradient checkpointing recomputes one."""
    inside: bool = torch._C._current_graph_task_id() != -1
    return inside
