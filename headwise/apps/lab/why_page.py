"""The page's "Why": runs a small experiment at the settings of its sliders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch

from headwise.apps.interface import settings
from headwise.apps.interface.page import Host, Route
from headwise.apps.interface.reply import Answer, Query, refused
from headwise.apps.lab.experiments import dot_and_additive as comparing
from headwise.apps.lab.experiments import many_heads as heads
from headwise.apps.lab.experiments import shared_projection as sharing
from headwise.apps.lab.experiments import why_scale as scale
from headwise.messages import say


@dataclass(frozen=True)
class Experiment:
    """The settings of an experiment, and the function that measures: it gives a dataclass."""

    settings: Mapping[str, settings.Setting]
    measure: Callable[..., Any]


EXPERIMENTS: Mapping[str, Experiment] = {
    "scale": Experiment(scale.SETTINGS, scale.measure),
    "heads": Experiment(heads.SETTINGS, heads.measure),
    "scores": Experiment(comparing.SETTINGS, comparing.measure),
    "sharing": Experiment(sharing.SETTINGS, sharing.measure),
}
# One experiment at a time, so that no timing measures its neighbour; on one core, which for these
# sizes is faster than two that wait for each other.
_worker = ThreadPoolExecutor(1, "why", torch.set_num_threads, (1,))


def answer(name: str, asked: Mapping[str, str]) -> str:
    """The experiment's result as JSON: its settings with their bounds, and its measurements.

    >>> answered = json.loads(answer("heads", {"width": "64", "heads": "4"}))
    >>> answered["settings"]["heads"]
    {'value': 4, 'default': 8, 'least': 1, 'most': 64, 'doubling': True}
    >>> answered["found"]["rank"]
    16
    """
    if name not in EXPERIMENTS:
        there = ", ".join(EXPERIMENTS)
        raise ValueError(
            say("there is no experiment {name!r}; there are {there}", name=name, there=there)
        )
    return _answer(name, tuple(settings.read_settings(EXPERIMENTS[name].settings, asked).items()))


@lru_cache(maxsize=256)
def _answer(name: str, values: tuple[tuple[str, Any], ...]) -> str:
    experiment = EXPERIMENTS[name]
    found = _worker.submit(experiment.measure, **dict(values)).result()
    described = {
        setting: {"value": value, **asdict(experiment.settings[setting])}
        for setting, value in values
    }
    return json.dumps({"settings": described, "found": asdict(found)}, allow_nan=False)


def experiment(host: Host, query: Query, name: str) -> Answer:
    """The measurements of an experiment at the settings of its sliders."""
    with refused():
        return Answer(answer(name, query.given).encode())


ROUTES: tuple[Route, ...] = ((r"/api/why/(\w+)", experiment),)
