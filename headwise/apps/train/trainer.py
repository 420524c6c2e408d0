"""The training loop: updates, and every so often a measurement and a checkpoint."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from headwise.apps.train import sharded_checkpoints
from headwise.apps.train.data.batches import mixed
from headwise.apps.train.head_watch import HeadWatch, watched
from headwise.apps.train.meter import Meter
from headwise.apps.train.ranks import ALONE, TrainingRanks
from headwise.apps.train.recipe import Recipe
from headwise.costs import Utilisation
from headwise.models.trained import Run, checkpoint_parts, checkpoints

Batch = TypeVar("Batch")
Answer = TypeVar("Answer")


class Task(Protocol[Batch]):
    """Something to learn. Batch number n must be the same every time it is requested."""

    unit: str
    """The name of its predictions: tokens, images."""

    def build(self) -> nn.Module:
        """A new model, initialised from the current random state."""
        ...

    def batch(self, number: int, device: torch.device) -> Batch:
        """Training batch number n."""
        ...

    def count(self, batch: Batch) -> int:
        """The number of predictions in a batch."""
        ...

    def sizes(self, batch: Batch) -> dict[str, int]:
        """The sizes of a batch, as `hw.cost` takes them."""
        ...

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        """The sum of the losses of these predictions, or of this rank's part of them."""
        ...

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """Figures to follow during training, on the validation data."""
        ...

    def judge(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """The final figures, on the test data."""
        ...


def _never() -> bool:
    return False


def _silent(measured: dict[str, Any]) -> None:
    return None


@dataclass(frozen=True)
class Trainer(Generic[Batch]):
    """One run of a task by a recipe, in a folder; `settings` are those a resumed run must share.

    Of several `ranks`, each has a trainer, and all take the same steps.
    """

    task: Task[Batch]
    recipe: Recipe
    run: Run
    settings: dict[str, Any]
    device: torch.device
    report: Callable[[dict[str, Any]], None] = _silent
    should_stop: Callable[[], bool] = _never
    watch_every: int | None = None
    ranks: TrainingRanks = ALONE

    def train(self) -> nn.Module | None:
        """Train from the run's last checkpoint, or from the start, to the end of the recipe.

        None if `should_stop` ended the run early; its checkpoint can be resumed from.
        """
        model, optimizer, start = self.begin()
        utilisation = known_utilisation(model, self.device, self.ranks.count)
        self.report(
            {
                "step": start,
                "steps": self.recipe.steps,
                "parameters": sum(each.numel() for each in model.parameters()),
                "unit": self.task.unit,
                "device": str(self.device),
                "ranks": self.ranks.count,
                **({} if utilisation is None else {"peak": utilisation.peak}),
                "settings": self.settings,
            }
        )
        meter = Meter(self.device, utilisation, self.ranks)
        with watched(model, self.run, self.watch_every, start, self.ranks) as heads:
            return self.steps(model, optimizer, start, heads, meter)

    def steps(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        start: int,
        heads: HeadWatch,
        meter: Meter,
    ) -> nn.Module | None:
        """Take the steps from `start` to the end of the recipe."""
        plain, call = self.callable(model)
        saved = start
        for step in range(start, self.recipe.steps):
            with heads.step() as watched_now:
                used = plain if watched_now else call
                taken = self.step(used, optimizer, step, meter.utilisation)
            meter.add(*taken)
            done = step + 1
            last = done == self.recipe.steps
            stopping = bool(self.ranks.largest(int(self.should_stop())))
            saving = done % self.recipe.checkpoint_every == 0 or last or stopping
            if done % self.recipe.log_every == 0 or saving:  # a resumed run averages as many steps
                self.record(done, {**meter.read(saved), "rate": self.recipe.rate(step)})
            if done % self.recipe.evaluate_every == 0 or last:
                with meter.away():
                    self.record(done, self.evaluated(model))
            if saving:
                with meter.away():
                    heads.flush()  # first: a resumed run repeats no step before its checkpoint
                    self.save(model, optimizer, done)
                saved = done
            if stopping and not last:
                return None
        self.finish(model)
        return model

    def begin(self) -> tuple[nn.Module, torch.optim.Optimizer, int]:
        """The model, its optimiser, and the step to start from."""
        model, optimizer = self.made()
        step, shared = 0, checkpoint_parts.newest(self.run.shared_state)
        if self.run.state.exists():
            tensors, about = checkpoints.load(self.run.state)
            step = about["step"]
            if shared is None or int(shared.name) < step:
                refuse_another_run(self.settings, about["asked"], self.run.state)
                checkpoints.restore(model, optimizer, tensors, self.run.state)
                shared = None
        optimizer = sharded_checkpoints.spread(model, optimizer, self.recipe.optimizer, self.ranks)
        if shared is not None:
            about = checkpoint_parts.about(shared)
            step = about["step"]
            refuse_another_run(self.settings, about["asked"], shared)
            sharded_checkpoints.restore(shared, model, optimizer)
        if step != self.ranks.largest(step):
            raise ValueError(
                f"this rank sees a checkpoint of step {step} and another one a later step: "
                f"{self.run.folder} must be a folder that all ranks share"
            )
        self.run.forget_after(step)  # a run killed before its first checkpoint starts again
        return model, optimizer, step

    def made(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A new model and its optimiser, the same on every rank."""
        torch.manual_seed(self.recipe.seed)
        model = self.task.build()
        if not self.ranks.sharded:  # else a device gets its part only, which is all it may hold
            model = model.to(self.device)
        return model, self.recipe.optimizer(model)

    def callable(self, model: nn.Module) -> tuple[nn.Module, nn.Module]:
        """The module that a step calls, plain and compiled if the recipe says so.

        Attention across ranks can't be compiled.
        """
        plain = self.ranks.trainable(model)
        if not self.recipe.compile or self.ranks.sequence is not None:
            return plain, plain
        compiled = torch.compile(plain)
        assert isinstance(compiled, nn.Module)
        return plain, compiled

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        step: int,
        utilisation: Utilisation | None = None,
    ) -> tuple[Tensor, Tensor, int]:
        """One update: the mean loss, the gradient norm before clipping, the predictions made.

        The mean over ranks of this loss is that of the whole batch, as are the gradients.
        """
        if self.ranks.mesh is not None:  # a step depends on its number, not on those before
            torch.manual_seed(mixed(self.recipe.seed, step, self.ranks.own))
        model.train()
        first = step * self.recipe.accumulate
        numbers = range(first, first + self.recipe.accumulate)
        batches = [self.task.batch(number, self.device) for number in numbers]
        count = sum(self.task.count(batch) for batch in batches)
        share = count / self.ranks.count
        if utilisation is not None:
            for batch in batches:
                utilisation.add(self.task.sizes(batch))
        total = torch.zeros((), device=self.device)
        for batch in batches:
            with autocast(self.device):
                # Divided by the count of all batches: accumulating equals one large batch.
                loss = self.task.loss(model, batch, self.recipe.label_smoothing) / share
            loss.backward()
            total += loss.detach()
        norm = self.recipe.update(optimizer, step, model.parameters())
        return total, self.ranks.whole(norm), count

    def evaluated(self, model: nn.Module) -> dict[str, Any]:
        """Evaluate the model without any effect on training."""
        return undisturbed(lambda: self.task.evaluate(model, self.device), model, self.device)

    def record(self, step: int, values: dict[str, Any]) -> None:
        """Record a measurement and report it."""
        self.run.record({"step": step, **values})
        self.report({"step": step, "steps": self.recipe.steps, **values})

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Write a checkpoint; one of the other kind, if there is any, is older and not needed."""
        about = {"step": step, "asked": self.settings}
        if self.ranks.mesh is None:
            checkpoints.save(self.run.state, checkpoints.capture(model, optimizer), about)
            sharded_checkpoints.remove(self.run.shared_state)
        else:
            sharded_checkpoints.save(self.run.shared_state, model, optimizer, about, self.ranks)
            if self.ranks.first:
                self.run.state.unlink(missing_ok=True)

    def finish(self, model: nn.Module) -> None:
        """Write the weights alone and score the model; a run that was finished is only reported."""
        steps = self.recipe.steps
        finished = [line for line in self.run.measured() if "test" in line]
        ended = self.ranks.first and bool(finished) and self.run.model.exists()
        if self.ranks.largest(int(ended)):
            if finished:
                self.report({"steps": steps, **finished[-1]})
            return
        about = {"step": steps, "asked": self.settings}
        alone = self.ranks.mesh is None
        tensors = checkpoints.weights(model) if alone else sharded_checkpoints.whole_weights(model)
        if self.ranks.first:
            checkpoints.save(self.run.model, tensors, about)
        judged = undisturbed(lambda: self.task.judge(model, self.device), model, self.device)
        self.record(steps, {"test": judged})


def undisturbed(ask: Callable[[], Answer], model: nn.Module, device: torch.device) -> Answer:
    """Use a model in eval mode, and leave its mode and the random state as they were."""
    training = model.training
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad(), autocast(device):
        model.eval()
        try:
            return ask()
        finally:
            model.train(training)


def known_utilisation(model: nn.Module, device: torch.device, count: int) -> Utilisation | None:
    """The utilisation of a training; None if the device's peak or the model's cost is not known."""
    half = device.type == "cuda" and torch.cuda.is_bf16_supported()
    try:
        return Utilisation.of(model, device, "bf16" if half else "fp32", count)
    except ValueError:
        return None


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bf16 on a GPU that has it, float32 elsewhere."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.autocast("cuda", torch.bfloat16)
    return nullcontext()


def refuse_another_run(settings: dict[str, Any], before: dict[str, Any], origin: Path) -> None:
    """Raise ValueError unless a checkpoint was made with exactly these settings."""
    if settings == before:
        return
    flat, other = flatten(settings), flatten(before)
    names = [name for name in sorted(flat | other) if flat.get(name) != other.get(name)]
    some = "; ".join(f"{name} was {other.get(name)} and is {flat.get(name)}" for name in names[:3])
    raise ValueError(f"{origin} is a checkpoint of another run: {some}")


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name.

    >>> flatten({"recipe": {"steps": 3}})
    {'recipe.steps': 3}
    """
    flat: dict[str, Any] = {}
    for name, each in value.items():
        if isinstance(each, dict):
            flat |= flatten(each, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = each
    return flat


def steps_within(trainer: Trainer[Batch], minutes: float, warm: int = 20, timed: int = 30) -> int:
    """Estimate how many steps fit into this time from a trial whose results are discarded.

    A tenth of the time is reserved for evaluation and checkpoints.
    """
    started = time.perf_counter()
    model, optimizer = trainer.made()
    optimizer = sharded_checkpoints.spread(
        model, optimizer, trainer.recipe.optimizer, trainer.ranks
    )
    _, call = trainer.callable(model)
    trial = replace(trainer, recipe=replace(trainer.recipe, steps=warm + timed))
    for step in range(warm + timed):
        if step == warm:
            begun = _now(trainer.device)
        trial.step(call, optimizer, step)
    seconds = (_now(trainer.device) - begun) / timed
    left = minutes * 60 - (time.perf_counter() - started)
    return trainer.ranks.largest(max(1, int(0.9 * left / seconds)))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
