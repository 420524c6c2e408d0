"""The question that `headwise cost` was asked: models, sizes, and what is swept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headwise.costs import (
    DEVICES,
    THIS,
    Architecture,
    Scenario,
    Sketch,
    find_device,
    read_architecture,
)
from headwise.messages import Sentence, say
from headwise.models.trained import (
    ASSETS,
    CONFIGS,
    Run,
    built_in,
    find_model,
    holds_trained_model,
)

AXES = ("length", "batch", "heads")
MOST_POINTS = 64


@dataclass(frozen=True)
class Model:
    """A model to cost: read once, however many figures are asked for."""

    name: str
    architecture: Architecture
    sketch: Sketch | None = None

    @classmethod
    def drawn(cls, sketch: Sketch) -> Model:
        """The model of a sketch."""
        return cls(sketch.name, read_architecture(sketch.config()), sketch)

    def with_heads(self, heads: int) -> Model:
        """The same sketch with another number of heads, each of them narrower or wider."""
        if self.sketch is None:
            raise ValueError(
                say(
                    "heads can be swept for a decoder described by flags, and {name} is a model; "
                    "use --layers, --width and the others",
                    name=self.name,
                )
            )
        shared = self.sketch.kv_heads
        kept = shared if shared is None else min(shared, heads)
        return Model.drawn(replace(self.sketch, heads=heads, kv_heads=kept))


@dataclass(frozen=True)
class Sweep:
    """An axis and its values."""

    axis: str
    values: tuple[int, ...]

    def rows(self, model: Model, use: Scenario) -> list[dict[str, Any]]:
        """The figures of a model at each value."""
        found = []
        for value in self.values:
            each, asked = model, use
            if self.axis == "heads":
                each = model.with_heads(value)
            else:
                asked = replace(use, **{self.axis: value})  # type: ignore[arg-type]
            left_out = [str(what) for what in asked.cost(each.architecture).left_out]
            figures = asked.figures(each.architecture)
            found.append({self.axis: value, **figures, "left_out": left_out})
        return found


def chosen(names: list[str], given: Mapping[str, int]) -> list[Model]:
    """The models that were named, or the decoder that flags describe; ValueError if neither."""
    if names and given:
        first = next(iter(given)).replace("_", "-")
        raise ValueError(
            say(
                "{name} is described already; leave out --{first}, or the model",
                name=names[0],
                first=first,
            )
        )
    if not names and not given:
        raise ValueError(
            say(
                "name a model or a config.json, or describe a decoder: --layers 32 --width 4096 "
                "--heads 32; headwise cost --help has examples"
            )
        )
    if given:
        return [Model.drawn(sketched(given))]
    return [read_model(name) for name in names]


def sketched(given: Mapping[str, int]) -> Sketch:
    """The decoder of the flags; ValueError names those that are missing."""
    missing = [name for name in ("layers", "width", "heads") if name not in given]
    if missing:
        names = [f"--{name}" for name in missing]
        flags = Sentence(" and ".join(names), "、".join(names))
        raise ValueError(say("a decoder described by flags also needs {flags}", flags=flags))
    numbers: dict[str, Any] = dict(given)
    return Sketch(**numbers)


def read_model(name: str) -> Model:
    """A built-in model, a run of `headwise train`, or whatever `hw.cost` reads by name."""
    folder = ASSETS / name if name in built_in() else Path(name)
    if not folder.is_file():
        find_model(name)  # a wrong name is refused at once, before the hub is asked
    if name in built_in() or holds_trained_model(folder):
        run = Run(folder)
        settings = run.settings()
        try:
            config = CONFIGS[settings["task"]].from_dict(settings["model"])
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{run.config} does not describe a model: {error!r}") from error
        return Model(name, read_architecture(config))
    return Model(name, read_architecture(name))


def parsed_size(what: str, written: str, kilo: int = 1000) -> int:
    """A size such as 4096, 32k or 80GB; a k of tokens is 1024, of bytes 1000.

    >>> parsed_size("--length", "32k", 1024), parsed_size("--fit", "80GB")
    (32768, 80000000000)
    >>> parsed_size("--fit", "1.5 GiB")
    1610612736
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", written, re.IGNORECASE)
    if match is None or len(match[1]) > 15:
        raise ValueError(
            say("{what} {written!r} is not a size; try 4096, 32k or 80GB", what=what,
                written=written[:40])
        )  # fmt: skip
    base = 1024 if match[3] else kilo
    found = int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))
    if found < 1:
        raise ValueError(
            say("{what} {written!r} must be at least 1", what=what, written=written[:40])
        )
    return found


def parsed_room(written: str) -> int:
    """The bytes of --fit: a size, or the memory of a device.

    >>> parsed_room("h100")
    80000000000
    """
    name = written.strip().lower()
    if name in DEVICES or name in THIS:
        return int(find_device(name).memory)
    return parsed_size("--fit", written)


def parsed_mesh(written: str | None) -> dict[str, int]:
    """The sizes of a mesh.

    >>> parsed_mesh("tp=4, cp=2")
    {'tp': 4, 'cp': 2}
    """
    if written is None:
        return {}
    found = {}
    for part in written.split(","):
        name, _, size = part.partition("=")
        if not size.strip().isdigit():
            raise ValueError(
                say("--mesh {written!r} is not a mesh; try tp=4,cp=2", written=written[:60])
            )
        found[name.strip()] = int(size)
    return found


def parsed_sweep(written: str) -> Sweep:
    """An axis with values, listed or doubling.

    >>> parsed_sweep("length=1k..8k")
    Sweep(axis='length', values=(1024, 2048, 4096, 8192))
    >>> parsed_sweep("batch=1,8,32").values
    (1, 8, 32)
    """
    axis, _, values = written.partition("=")
    axis = axis.strip()
    if axis not in AXES or not values:
        raise ValueError(
            say(
                "--sweep {written!r} is not an axis with values; try length=1k..128k, "
                "batch=1,8,64 or heads=1..64",
                written=written[:60],
            )
        )
    kilo = 1024 if axis == "length" else 1000
    if ".." in values:
        low, high = (parsed_size("--sweep", end, kilo) for end in values.split("..", 1))
        found = [low]
        while 2 * found[-1] <= high and len(found) <= MOST_POINTS:
            found.append(2 * found[-1])
        if found[-1] < high:
            found.append(high)
    else:
        found = [parsed_size("--sweep", each, kilo) for each in values.split(",")]
    if len(found) > MOST_POINTS or len(found) < 2 or found != sorted(set(found)):
        raise ValueError(
            say("--sweep {written!r} needs 2 to {most} rising values", written=written[:60],
                most=MOST_POINTS)
        )  # fmt: skip
    return Sweep(axis, tuple(found))
