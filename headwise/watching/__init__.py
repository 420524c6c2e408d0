"""Watching a model: the health of every attention head, while it trains or runs."""

from headwise.watching import head_types
from headwise.watching.alarms import Alarm
from headwise.watching.clipping import Clip, qk_clip
from headwise.watching.effects import log_probability, logit_difference, runner_up, sequence_loss
from headwise.watching.experiments import knock_out, sparsify, steer
from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.recording import Entry, Recording
from headwise.watching.requests import Request
from headwise.watching.rules import RULES, SpanWeight
from headwise.watching.runs.run_reader import WatchedRun, holds_run, open_run
from headwise.watching.runs.run_writer import RunWriter
from headwise.watching.runs.story import Chapter, Loss, Story
from headwise.watching.table import Table, scalars
from headwise.watching.watched_model import Watch, watch

__all__ = [
    "RULES",
    "Alarm",
    "Chapter",
    "Clip",
    "Entry",
    "Loss",
    "Recording",
    "Request",
    "RunWriter",
    "SpanWeight",
    "Story",
    "Table",
    "Watch",
    "WatchedLayer",
    "WatchedRun",
    "head_types",
    "holds_run",
    "knock_out",
    "log_probability",
    "logit_difference",
    "open_run",
    "qk_clip",
    "runner_up",
    "scalars",
    "sequence_loss",
    "sparsify",
    "steer",
    "watch",
]
