"""A translator in training: on a GPU each of its updates is one CUDA graph, on a stream of its own.

A small model keeps a GPU waiting for Python, which launches hundreds of short kernels a step. A
graph launches them at once, and the streams of several models run side by side.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.apps.lab.padded_batches import FullBatches, Padded
from headwise.apps.train.meter import DivergedError
from headwise.apps.train.recipe import Recipe
from headwise.models.trained import checkpoints

WARM = 2
"""Updates of each shape before it is captured: they create what is created once."""

AHEAD = 16
"""Steps that may wait on a stream: enough to keep it busy, and few to wait for at the end."""


class Learner:
    """A model (source, target, source_lengths) -> logits, its optimiser, and its losses so far."""

    def __init__(
        self, model: nn.Module, recipe: Recipe, order: FullBatches, pad: int, capture: bool = True
    ) -> None:
        device = order.parts[0].source.device
        self.model, self.recipe, self.order, self.pad = model.to(device), recipe, order, pad
        self.device, self.capture = device, capture and device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.optimizer = recipe.optimizer(model)
        self.step = 0
        self.losses = torch.zeros(recipe.steps, device=device)
        self.norms = torch.zeros(recipe.steps, device=device)
        self.at = torch.zeros(1, device=device, dtype=torch.int64)  # the step, on the device
        self.rate = torch.tensor(recipe.learning_rate, device=device)
        self.rows = [torch.zeros(size, device=device, dtype=torch.int64) for size in order.sizes]
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.visits: Counter[int] = Counter()
        self._share_rate()
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def update(self) -> None:
        """Take one step."""
        with self.beside():  # the rows as well: memory is reused in the order of a stream
            shape, rows = self.order.batch(self.step)
            self.rate.fill_(self.recipe.rate(self.step))
            self.rows[shape].copy_(rows)
            if shape in self.graphs:
                self.graphs[shape].replay()
            elif self.capture and self.visits[shape] >= WARM:
                self._capture(shape)
            else:
                self._compute(shape)
                self.visits[shape] += 1
        self.step += 1
        if self.stream is not None and (shape not in self.graphs or self.step % AHEAD == 0):
            self.stream.synchronize()

    def _compute(self, shape: int) -> None:
        """Compute the update of the rows that are set; nothing in it waits for the device."""
        self.model.train()
        with faster(self.device):
            loss = self._loss(
                *self.order.parts[shape].rows(self.rows[shape]),
                smoothing=self.recipe.label_smoothing,
                reduction="mean",
            )
            torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.index_copy_(0, self.at, loss.detach()[None])
        self.norms.index_copy_(0, self.at, norm[None])
        self.at += 1

    def _capture(self, shape: int) -> None:
        """Record the update of a shape and run it; without a graph if it can't be recorded."""
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self.stream):
                self._compute(shape)
        except Exception as error:
            first = str(error).partition("\n")[0]
            warnings.warn(f"no CUDA graph: {first}; each kernel is launched alone", stacklevel=2)
            self.capture = False
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize(self.device)
            self._compute(shape)
            return
        self.graphs[shape] = graph
        graph.replay()

    def _loss(
        self, source: Tensor, lengths: Tensor, target: Tensor, smoothing: float, reduction: str
    ) -> Tensor:
        logits = self.model(source, target[:, :-1], source_lengths=lengths)
        return F.cross_entropy(
            logits.flatten(0, 1),  # (B · L, vocabulary)
            target[:, 1:].flatten(),
            ignore_index=self.pad,
            label_smoothing=smoothing,
            reduction=reduction,
        )

    def mean_loss(self, parts: Sequence[Padded]) -> float:
        """Nats per token."""
        with self.measuring():
            total = torch.zeros((), device=self.device)
            for part in parts:
                size = max(1, self.order.tokens // part.source.shape[1])
                for rows in torch.arange(len(part), device=self.device).split(size):
                    total += self._loss(*part.rows(rows), smoothing=0.0, reduction="sum")
            return float(total) / sum(part.predictions for part in parts)

    def check(self) -> None:
        """Raise DivergedError if a loss so far is not finite."""
        with self.beside():
            if not math.isfinite(float(self.losses[: self.step].sum())):
                raise DivergedError("the loss is no longer finite")

    def largest_norms(self, parts: int) -> list[float]:
        """The largest gradient norm before clipping, in each of so many parts of the training."""
        with self.beside():
            return [float(part.max()) for part in self.norms[: self.step].cpu().chunk(parts)]

    def save(self, file: Path, about: dict[str, Any]) -> None:
        """Write everything the next step depends on."""
        with self.beside():
            tensors = checkpoints.capture(self.model, self.optimizer)
            tensors |= {"losses": self.losses, "norms": self.norms}
            checkpoints.save(file, tensors, {"step": self.step, **about})

    def restore(self, file: Path) -> dict[str, Any]:
        """Go on from what `save` wrote, which is returned in words."""
        tensors, about = checkpoints.load(file)
        with self.beside():
            checkpoints.restore(self.model, self.optimizer, tensors, file)
            self._share_rate()
            self.losses.copy_(tensors["losses"])
            self.norms.copy_(tensors["norms"])
            self.step = int(about["step"])
            self.at.fill_(self.step)
        return about

    def _share_rate(self) -> None:
        """Let the optimiser read its rate from the device, where a graph can find it changed."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
            group["capturable"] = self.device.type == "cuda"

    def beside(self) -> AbstractContextManager[object]:
        """Work on this model's own stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Use the model in eval mode, without gradients, on its stream."""
        self.model.eval()
        with self.beside(), torch.no_grad(), faster(self.device):
            yield


@contextmanager
def faster(device: torch.device) -> Iterator[None]:
    """Let a GPU multiply float32 in tf32: without the many casts to bf16 that autocast launches."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bf16 on a GPU, for models whose steps are launched by Python; float32 elsewhere."""
    if device.type != "cuda":
        return nullcontext()
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
