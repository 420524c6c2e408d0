"""The page's "Cost": what a model takes at the settings of its form, and over its lengths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from headwise import Cost
from headwise.apps.interface import settings
from headwise.apps.interface.page import Route
from headwise.apps.interface.reply import Answer, Query, refused
from headwise.apps.interface.settings import Choice, Setting, Whole
from headwise.apps.look.session import Session
from headwise.costs import DEVICES, Architecture, Scenario, Sketch, find_device, read_architecture

LENGTHS = tuple(1 << step for step in range(7, 21))
"""The lengths of the curves: 128 to a million."""

SKETCH: Mapping[str, Setting] = {
    "layers": Whole(32, 1, 128),
    "width": Whole(4096, 256, 16384, doubling=True),
    "heads": Whole(32, 1, 128, doubling=True),
    "kv_heads": Whole(8, 1, 128, doubling=True),
    "window": Choice("none", ("none", "1024", "4096")),
    "vocabulary": Whole(32768, 256, 262144, doubling=True),
}
"""The settings of a decoder that does not exist yet."""

SETTINGS: Mapping[str, Setting] = {
    "model": Choice("sketch", ("sketch", "opened")),
    **SKETCH,
    "phase": Choice("prefill", ("prefill", "decode", "training")),
    "length": Whole(8192, LENGTHS[0], LENGTHS[-1], doubling=True),
    "batch": Whole(1, 1, 256, doubling=True),
    "dtype": Choice("bf16", ("bf16", "fp32")),
    "cache": Choice("dtype", ("dtype", "int8", "int4")),
    "device": Choice("h100", ("this", *DEVICES)),
}


KINDS = {
    "pairs": ("scores and values",),
    "projections": ("attention", "attn"),
    "feed_forward": ("feed", "mlp", "ffn", "expert", "moe"),
    "other": ("",),
}
"""The kinds of work, by words in the path of a part; a fused call of attention is pairs."""


class Part(NamedTuple):
    """A part of a model: its path, and its figures."""

    path: str
    params: int
    flops: int
    kept: int  # bytes of its KV cache, or in training of what it saves


def answer(asked: Mapping[str, str], opened: nn.Module | None) -> str:
    """Settings with their bounds, figures at these settings, and curves over the length, as JSON.

    >>> found = json.loads(answer({"layers": "9", "length": "1024"}, None))
    >>> found["settings"]["length"]["value"], found["opened"]
    (1024, False)
    >>> sorted(found["found"])
    ['curve', 'device', 'explanation', 'figures', 'longest', 'parts', 'positions']
    """
    known = dict(SETTINGS)
    if opened is not None and not SKETCH.keys() & asked.keys():
        known["model"] = Choice("opened", ("opened", "sketch"))
    values = settings.read_settings(known, asked)
    if opened is None:
        values["model"] = "sketch"
    architecture = _read(opened) if values["model"] == "opened" and opened is not None else None
    found = _found(tuple(values.items()), architecture)
    described = {name: {"value": value, **asdict(known[name])} for name, value in values.items()}
    whole = {"settings": described, "opened": opened is not None, "found": found}
    return json.dumps(whole, allow_nan=False, ensure_ascii=False)


@lru_cache(maxsize=4)
def _read(model: nn.Module) -> Architecture:
    return read_architecture(model)


@lru_cache(maxsize=256)
def _found(values: tuple[tuple[str, Any], ...], opened: Architecture | None) -> dict[str, Any]:
    asked = dict(values)
    architecture = _sketched(tuple((name, asked[name]) for name in SKETCH))
    architecture = architecture if opened is None else opened
    use = Scenario(
        asked["phase"],
        asked["length"],
        asked["batch"],
        asked["dtype"],
        None if asked["cache"] == "dtype" else asked["cache"],
        device=find_device(asked["device"]),
    )
    use = use.within(architecture)
    assert use.device is not None
    cost = use.cost(architecture)
    return {
        "figures": use.figures(architecture),
        "parts": [part._asdict() for part in _parts(cost, use.phase == "training")],
        "curve": [] if use.length is None else _curve(architecture, use),
        "device": {"name": use.device.name, "memory": use.device.memory},
        "longest": None if use.length is None else _longest(architecture, use),
        "positions": architecture.longest or architecture.stated,
        "explanation": {language: cost.explain(language) for language in ("en", "zh")},
    }


@lru_cache(maxsize=64)
def _sketched(values: tuple[tuple[str, Any], ...]) -> Architecture:
    given = dict(values)
    window = None if given["window"] == "none" else int(given["window"])
    shared = min(given["kv_heads"], given["heads"])  # a slider passes by what can't be
    return read_architecture(Sketch(**{**given, "window": window, "kv_heads": shared}).config())


def _curve(architecture: Architecture, use: Scenario) -> list[dict[str, Any]]:
    """Figures at every length that the model has positions for, or states."""
    rows: list[dict[str, Any]] = []
    for length in LENGTHS:
        asked = replace(use, length=length)
        if asked.within(architecture) != asked or length > (architecture.stated or length):
            break
        figures = asked.figures(architecture)
        shares = _shares(asked.cost(architecture), use.phase == "training")
        rows.append({"length": length, **figures, "shares": shares})
    return rows


def _shares(cost: Cost, training: bool) -> dict[str, float]:
    """The share of the FLOPs of each kind of work, 0 to 1."""
    found = dict.fromkeys(KINDS, 0)
    for kernel in cost.forward + (cost.backward if training else ()):
        path = kernel.name.lower()
        kind = next(kind for kind, words in KINDS.items() if any(word in path for word in words))
        found["pairs" if kernel.kind == "attention" else kind] += kernel.flops * kernel.count
    total = max(1, sum(found.values()))
    return {name: flops / total for name, flops in found.items()}


def _parts(cost: Cost, training: bool, path: str = "") -> list[Part]:
    """The parts of a model down to the attention's, without those that take nothing."""
    found = []
    for name, part in cost.parts.items():
        here = f"{path}/{name}" if path else name
        flops = part.training_flops if training else part.flops
        kept = part.activations if training else part.kv_cache
        if part.params or flops or kept:
            found.append(Part(here, part.params, flops, kept))
            found += _parts(part, training, here)
    return found


def _longest(architecture: Architecture, use: Scenario) -> int | None:
    """The longest context that fits into the device and that the model has positions for.

    None if the model alone does not fit.
    """
    assert use.device is not None
    try:
        found = use.longest(architecture, use.device.memory)
    except ValueError:
        return None
    return min(found, architecture.stated or found)


def cost(session: Session, query: Query) -> Answer:
    """The cost of the opened model, or of one that the form describes."""
    with refused():
        opened = None if session.reader is None else session.reader.model
        return Answer(answer(query.given, opened).encode())


ROUTES: tuple[Route, ...] = ((r"/api/cost", cost),)
