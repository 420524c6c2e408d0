"""Several equal models in training as one; on a GPU each update is one CUDA graph.

The models differ in seed or in rate. A step launches the kernels of one model, each of which works
for all, and a graph launches them at once: neither Python nor a kernel's start keeps a GPU waiting.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headwise.apps.train.recipe import Recipe
from headwise.apps.train.stacking import Stack

WARM = 2
"""Updates of each shape before it is captured: they create what is created once."""
AHEAD = 16
"""Steps that may wait on a stream: enough to keep it busy, and few to wait for at the end."""
EPSILON = 1e-8
"""What Adam adds to the size of a gradient before it divides by it."""


class TokenLoss(torch.autograd.Function):
    """Cross-entropy of logits (n, V), each token's times its share: (n,).

    Its gradient takes the place of the probabilities: it is the largest tensor of a step. The value
    leaves out what `smoothing` adds, the gradient has it.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, shares: Tensor, smoothing: float
    ) -> Tensor:
        p = logits.softmax(-1)
        said = targets[:, None]
        nats = -p.gather(1, said)[:, 0].to(shares.dtype).clamp_min(1e-30).log()
        p.sub_(smoothing / p.shape[1])
        p.scatter_add_(1, said, p.new_full(said.shape, smoothing - 1))
        ctx.save_for_backward(p, shares)
        return nats * shares

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        p, shares = ctx.saved_tensors
        return p.mul_((gradient * shares).to(p.dtype)[:, None]), None, None, None


token_loss: Callable[[Tensor, Tensor, Tensor, float], Tensor] = TokenLoss.apply


class Batches(Protocol):
    """What a stack learns: batches of a few shapes, for all of its models at once."""

    sizes: list[int]
    """The sequences of a batch of each shape, for each model."""

    def batch(self, number: int) -> tuple[int, Tensor]:
        """The shape of a batch, and the numbers (R, B) of its sequences."""
        ...

    def losses(self, stack: Stack, shape: int, rows: Tensor, smoothing: float) -> Tensor:
        """The loss of each model (R,) on its sequences."""
        ...


class StackedAdamW:
    """AdamW by a recipe for a matrix (R, P) whose rows are models; each row is clipped by itself.

    Matrices decay, which `decays` (P,) tells. Nothing in it waits for the device.
    """

    def __init__(self, recipe: Recipe, weights: Tensor, decays: Tensor) -> None:
        self.recipe, self.weights = recipe, weights
        self.decays = recipe.weight_decay * decays
        self.means, self.squares = torch.zeros_like(weights), torch.zeros_like(weights)
        self.steps = torch.zeros(1, device=weights.device, dtype=weights.dtype)

    @torch.no_grad()
    def step(self, gradient: Tensor, rates: Tensor) -> Tensor:
        """Update the rows at their rates (R, 1) or (R, P); the norms (R,) before clipping."""
        first, second = self.recipe.betas
        norms: Tensor = torch.linalg.vector_norm(gradient, dim=1)
        gradient = gradient * (self.recipe.clip / (norms + 1e-6)).clamp(max=1.0)[:, None]
        self.steps += 1
        self.means.lerp_(gradient, 1 - first)
        self.squares.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        size = (self.squares / (1 - second**self.steps)).sqrt_().add_(EPSILON)
        move = (self.means / (1 - first**self.steps)).div_(size)
        if self.recipe.weight_decay:
            move.addcmul_(self.weights, self.decays)
        self.weights.addcmul_(move, rates, value=-1.0)
        return norms


class StackedTraining:
    """Models in training, one for each rate, and their losses; `dtype` is computed with."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        recipe: Recipe,
        rates: Sequence[float],
        order: Batches,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        cuda = device.type == "cuda"
        self.device, self.recipe, self.order, self.capture = device, recipe, order, cuda
        self.stream = torch.cuda.Stream(device) if cuda else None
        self.stack = Stack(models, device, dtype or next(models[0].parameters()).dtype)
        self.runs = len(models)
        flat = self.stack.flat.detach()
        wide = flat.dtype
        self.peaks = torch.tensor(rates, device=device, dtype=wide)[:, None] / recipe.learning_rate
        self.rates = self.peaks.clone()
        matrices = self.stack.columns(lambda name, shape: len(shape) > 2)
        self.optimizer = StackedAdamW(recipe, flat, matrices)
        self.step = 0
        self.losses, self.norms = (
            torch.zeros(recipe.steps, self.runs, device=self.device, dtype=wide) for _ in range(2)
        )
        self.at = torch.zeros(1, device=self.device, dtype=torch.int64)  # the step, on the device
        self.rows = [
            torch.zeros(self.runs, size, device=self.device, dtype=torch.int64)
            for size in order.sizes
        ]
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.visits: Counter[int] = Counter()
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def update(self) -> None:
        """Take one step of every model."""
        with self.beside():  # the rows as well: memory is reused in the order of a stream
            shape, rows = self.order.batch(self.step)
            torch.mul(self.peaks, self.recipe.rate(self.step), out=self.rates)
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
        self.stack.module.train()
        with faster(self.device):
            smoothing = self.recipe.label_smoothing
            losses = self.order.losses(self.stack, shape, self.rows[shape], smoothing)
            (gradient,) = torch.autograd.grad(losses.sum(), self.stack.flat)
        norms = self.optimizer.step(gradient, self.rates)
        self.losses.index_copy_(0, self.at, losses.detach()[None])
        self.norms.index_copy_(0, self.at, norms[None])
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
            torch.cuda.synchronize(self.device)
            self._compute(shape)
            return
        self.graphs[shape] = graph
        graph.replay()

    def seconds(self, steps: int) -> float:
        """The time of a step, a mean of so many."""
        begun = self._now()
        for _ in range(steps):
            self.update()
        return (self._now() - begun) / steps

    def _now(self) -> float:
        if self.stream is not None:
            self.stream.synchronize()
        return time.perf_counter()

    def finite(self) -> list[bool]:
        """Which models have lost nothing to infinity so far."""
        with self.beside():
            return [math.isfinite(x) for x in self.losses[: self.step].sum(0).tolist()]

    def largest_norms(self, parts: int) -> list[list[float]]:
        """For each model the largest gradient norms before clipping, in so many parts."""
        with self.beside():
            chunks = self.norms[: self.step].cpu().chunk(parts)
            return torch.stack([x.amax(0) for x in chunks], 1).tolist()

    def beside(self) -> AbstractContextManager[object]:
        """Work on this training's own stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @contextmanager
    def measuring(self) -> Iterator[nn.Module]:
        """The models as they are now, in eval mode, without gradients, on their stream."""
        with self.beside(), torch.no_grad(), faster(self.device):
            yield self.stack.settle().eval()


@contextmanager
def faster(device: torch.device) -> Iterator[None]:
    """Let a GPU multiply float32 in tf32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
