"""Watching a model: the health of every head, while it trains or runs."""

from headwise.watching.layer import Layer
from headwise.watching.recording import Entry, Recording
from headwise.watching.table import Table
from headwise.watching.watch import Watch, watch

__all__ = ["Entry", "Layer", "Recording", "Table", "Watch", "watch"]
