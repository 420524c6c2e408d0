"""Model FLOPs utilisation of watched steps: FLOPs by `hw.cost`, time by the device's own clock.

Noting a pass reads shapes only, and a step is timed by two marks on the device's queue, which are
read when they have passed: nothing waits.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.costs.calculate import unwrapped
from headwise.costs.tracing.traced_model import TracedModel
from headwise.costs.uses.utilisation import Utilisation

DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
CACHES = ("past_key_values", "cache", "caches")
TARGETS = ("target", "decoder_input_ids", "decoder_inputs_embeds", "labels")
PASSED_OVER = ("mask", "position", "type", "lengths", "labels", *TARGETS[1:])
"""Parts of the names of arguments that are not the sequence a model reads."""
LOOK_AGAIN = 64
"""The steps after which a model's parameters are listed anew."""


@dataclass(frozen=True)
class StepUtilisation:
    """The model FLOPs of one step as a share of the device's peak; if not known, `why`."""

    step: int
    mfu: float | None
    seconds: float
    device: str = ""
    dtype: str = ""
    why: str = ""

    def __str__(self) -> str:
        if self.mfu is None:
            return f"no MFU: {self.why}"
        took = f"{1e3 * self.seconds:,.3g} ms"
        return f"MFU {100 * self.mfu:.3g} % of {self.device} in {self.dtype}, step of {took}"


class GivenShape(NamedTuple):
    """The shape of a tensor that a pass was given, by the name of its argument."""

    name: str
    size: tuple[int, ...]
    floating: bool


class ModelPass(NamedTuple):
    """One forward of the model."""

    given: tuple[GivenShape, ...]
    dtype: torch.dtype  # of its products
    learning: bool  # a backward follows
    cached: bool  # it continues from a KV cache


class Mark(NamedTuple):
    """A moment: an event in a GPU's queue, or the time."""

    event: torch.cuda.Event | None
    time: float

    @classmethod
    def now(cls, where: torch.device) -> Mark:
        """This moment, when the work that is queued on the device will have ended."""
        if where.type != "cuda":
            return cls(None, time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(where))
        return cls(event, time.perf_counter())

    @property
    def passed(self) -> bool:
        """True if the device has come as far."""
        return self.event is None or self.event.query()

    def until(self, later: Mark) -> float:
        """Seconds up to a later mark, once it has passed."""
        if self.event is None or later.event is None:
            return later.time - self.time
        later.event.synchronize()
        return float(self.event.elapsed_time(later.event)) / 1e3


class MeteredStep(NamedTuple):
    """A step that ended: its passes and its time."""

    passes: Counter[ModelPass]
    begun: Mark
    ended: Mark


class StepMeter:
    """Meters the steps of a model that are looked at."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._names = _arguments(unwrapped(model))
        self._passes: Counter[ModelPass] = Counter()
        self._begun: Mark | None = None
        self._learned = False
        self._parameters: list[Tensor] = list(model.parameters())
        self._steps = 0
        self._known: dict[tuple[str, int], Utilisation | str] = {}  # or why it is not known

    def begin(self) -> None:
        """A step begins that is looked at."""
        self._passes, self._learned = Counter(), False
        if self._steps % LOOK_AGAIN == 0:  # all of them are asked for in every step
            self._parameters = list(self.model.parameters())
        self._steps += 1
        self._begun = Mark.now(self._weight.device)

    def learn(self) -> None:
        """An optimiser of the model made a step: passes with gradients had a backward."""
        self._learned = True

    def add(self, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """A pass of the whole model begins with these arguments."""
        named = dict(zip(self._names, given, strict=False)) | dict(options)
        shapes = tuple(
            GivenShape(name, tuple(x.shape), x.is_floating_point())
            for name, x in named.items()
            if isinstance(x, Tensor) and not x.is_nested  # whose sizes are not one shape
        )
        kind, dtype = self._weight.device.type, self._weight.dtype
        if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        cached = any(named.get(name) is not None for name in CACHES)
        self._passes[ModelPass(shapes, dtype, torch.is_grad_enabled(), cached)] += 1

    def end(self) -> MeteredStep | None:
        """The step ends; None if nothing learned in it, or its beginning was not seen."""
        begun, self._begun = self._begun, None
        if begun is None or not self._learned or not any(each.learning for each in self._passes):
            return None
        return MeteredStep(self._passes, begun, Mark.now(self._weight.device))

    def read(self, number: int, step: MeteredStep) -> StepUtilisation:
        """The utilisation of a step that ended."""
        seconds = 0.0
        try:
            seconds = step.begun.until(step.ended)
            if any(each.cached for each in step.passes):
                raise ValueError("a pass continued from a KV cache")
            dtype = self._dtype(step.passes)
            used = self._used(dtype)
            sizes = {each: sizes_of(used.architecture, each.given) for each in step.passes}
            for each, count in step.passes.items():
                used.add(sizes[each], each.learning, count)
            return StepUtilisation(number, used.read(seconds), seconds, used.device, dtype)
        except Exception as error:  # whatever it is, the step itself was recorded
            return StepUtilisation(number, None, seconds, why=str(error))

    def _used(self, dtype: str) -> Utilisation:
        """The utilisation of what learns now; ValueError, found out once, if it is not known."""
        key = dtype, sum([each.requires_grad for each in self._parameters])
        if key not in self._known:
            try:
                self._known[key] = Utilisation.of(self.model, self._weight.device, dtype)
            except ValueError as error:  # not kept: each time it is raised its traceback grows
                self._known[key] = str(error)
        known = self._known[key]
        if isinstance(known, str):
            raise ValueError(known)
        return known

    def _dtype(self, passes: Iterable[ModelPass]) -> str:
        kinds = {DTYPES.get(each.dtype, str(each.dtype)) for each in passes}
        if len(kinds) > 1:
            raise ValueError(f"its passes computed in {' and '.join(sorted(kinds))}")
        (kind,) = kinds
        rounded = torch.get_float32_matmul_precision() != "highest"
        return "tf32" if kind == "fp32" and rounded and self._weight.is_cuda else kind

    @property
    def _weight(self) -> Tensor:
        return self._parameters[0] if self._parameters else torch.empty(0)


def _arguments(model: nn.Module) -> list[str]:
    """The names of a forward's arguments; none if it has no Python signature."""
    try:
        return list(inspect.signature(type(model).forward).parameters)[1:]
    except (TypeError, ValueError):
        return []


def sizes_of(architecture: TracedModel, given: Iterable[GivenShape]) -> dict[str, int]:
    """The sizes of a pass as `hw.cost` takes them; ValueError if they can't be told.

    >>> from headwise.costs.calculate import read_architecture
    >>> from headwise.models import GPTConfig
    >>> sizes_of(read_architecture(GPTConfig(50)), [GivenShape("tokens", (8, 128), False)])
    {'batch': 8, 'queries': 128}
    """
    named = {x.name: x for x in given}
    read = [x for x in named.values() if not any(part in x.name for part in PASSED_OVER)]
    first = read[0] if read else None
    if first is not None and architecture.own_length:  # images, all of the same size
        return {"batch": first.size[0]}
    if architecture.pair:
        target = next((named[name] for name in TARGETS if name in named), None)
        if first is None or target is None or len(target.size) < 2:
            raise ValueError("the sequences of its passes are not known")
        sizes = {"batch": target.size[0], "queries": target.size[1]}
        return {**sizes, "context": first.size[1]} if len(first.size) < 3 else sizes
    if first is None or len(first.size) != (3 if first.floating else 2):
        raise ValueError("the sequence of its passes is not known")
    return {"batch": first.size[0], "queries": first.size[1]}
