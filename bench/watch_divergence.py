"""A run that diverges on purpose, and the same run rescued: the picture of docs/watch.md.

    python -m bench.watch_divergence --picture docs/pictures/watch-divergence.png

A GPT of two layers learns to repeat the token three places back. Its learning rate rises to 0.8,
two hundred times a good one, and nothing normalises its queries and keys. It learns at first; then
its logits grow, its attention collapses, and it forgets everything: when the rate falls again, the
softmax is so saturated that it passes no gradient. The second run differs only by `hw.qk_clip`
after each step. `--seeds 4` reports several seeds.
"""

import argparse
import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.apps.train import Recipe
from headwise.models import GPT, GPTConfig
from headwise.nn import SwiGLU
from headwise.watching import Alarm
from headwise.watching.rules import EntropyCollapse, LogitGrowth

VOCABULARY, LENGTH, BACK = 32, 32, 3
CONFIG = GPTConfig(
    vocabulary=VOCABULARY,
    context=LENGTH,
    d_model=32,
    layers=2,
    heads=4,
    feed_forward=SwiGLU(64),
)
RECIPE = Recipe(steps=240, learning_rate=0.8, warmup=150, weight_decay=0.0, betas=(0.9, 0.95))
SEED = 3


@dataclass
class Course:
    """The measurements of each step of a run."""

    losses: list[float] = field(default_factory=list)
    max_logits: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    clipped: int = 0

    def first(self, rule: str) -> int | None:
        """The first step at which a rule raised an alarm."""
        return next((alarm.step for alarm in self.alarms if alarm.rule == rule), None)

    def turned(self, window: int = 10, rise: float = 0.5) -> int | None:
        """The step from which the mean loss of a window stays `rise` nats above its lowest."""
        means = [
            sum(self.losses[step - window + 1 : step + 1]) / window
            for step in range(window - 1, len(self.losses))
        ]
        lowest, turned = float("inf"), None
        for step, mean in enumerate(means, window - 1):
            lowest = min(lowest, mean)
            if mean <= lowest + rise:
                turned = None
            elif turned is None:
                turned = step
        return turned


def loss_of(model: nn.Module, random: torch.Generator) -> Tensor:
    """The loss of predicting the token three places back, for 16 sequences."""
    tokens = torch.randint(VOCABULARY, (16, LENGTH), generator=random)
    logits = model(tokens)[:, BACK:]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, :-BACK].flatten())


def train(
    limit: float | None = None,
    recipe: Recipe = RECIPE,
    seed: int = SEED,
    folder: Path | None = None,
) -> Course:
    """Train by a recipe, recorded in a folder; `limit` clips heads whose logits exceed it."""
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    optimizer = recipe.optimizer(model)
    random = torch.Generator().manual_seed(seed + 1)
    course = Course()
    watch = hw.watch(model, maps=False, alarms=[LogitGrowth(), EntropyCollapse()])
    with watch, nullcontext() if folder is None else watch.record(folder):
        for step in range(recipe.steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            loss = loss_of(model, random)
            watch.log(loss=loss)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            watch.step()
            if limit is not None:
                course.clipped += len(hw.qk_clip(model, watch, limit))
            table = watch.series[-1].table
            course.losses.append(float(loss.detach()))
            course.max_logits.append(max(table["max_logit_max"]))
            course.entropies.append(sum(table["entropy_mean"]) / len(table))
    course.alarms = watch.alarms
    return course


def draw(courses: dict[str, Course], path: Path) -> None:
    """Draw loss, largest logit and entropy of both runs, one above the other."""
    import matplotlib.pyplot as plt

    colours = {"as it is": "#c0392b", "with hw.qk_clip": "#21918c"}
    panels = (("losses", "loss (nats)"), ("max_logits", "largest logit"),
              ("entropies", "mean entropy (nats)"))  # fmt: skip
    figure, axes = plt.subplots(3, 1, figsize=(7.2, 6.4), sharex=True, constrained_layout=True)
    for axis, (name, title) in zip(axes, panels, strict=True):
        for label, course in courses.items():
            axis.plot(getattr(course, name), color=colours[label], label=label, linewidth=1.3)
        axis.set_ylabel(title)
        axis.spines[["top", "right"]].set_visible(False)
    diverging = courses["as it is"]
    chance = torch.log(torch.tensor(float(VOCABULARY)))
    axes[0].axhline(float(chance), color="grey", linewidth=0.8, linestyle=":")
    outside = axes[0].get_yaxis_transform()
    axes[0].text(1.005, float(chance), "chance", transform=outside, va="center", color="grey")
    axes[1].set_yscale("log")
    axes[1].axhline(100, color="grey", linewidth=0.8, linestyle=":")
    alarm, turned = diverging.first("logit growth"), diverging.turned()
    for axis in axes:
        axis.axvline(alarm, color="black", linewidth=0.9, linestyle="--")
        axis.axvline(turned, color="#c0392b", linewidth=0.9, linestyle="--")
    top = axes[0].get_ylim()[1]
    axes[0].text(alarm, top, f" the alarm, step {alarm}", va="bottom", fontsize=8)
    axes[0].text(turned, top, f" the loss turns, step {turned}", va="bottom", fontsize=8,
                 color="#c0392b")  # fmt: skip
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, ncols=2,
                  loc="outside lower center")  # fmt: skip
    axes[2].set_xlabel(f"step (the learning rate rises to {RECIPE.learning_rate} at step "
                       f"{RECIPE.warmup} and falls to {RECIPE.final:.0%} of that)")  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--seeds", type=int, help="the number of seeds to try")
    arguments = parser.parse_args()
    logging.getLogger("headwise").setLevel(logging.ERROR)
    for seed in range(arguments.seeds) if arguments.seeds else (SEED,):
        begun = time.perf_counter()
        courses = {"as it is": train(seed=seed), "with hw.qk_clip": train(limit=100.0, seed=seed)}
        print(f"seed {seed}, {time.perf_counter() - begun:.0f} seconds")
        for label, course in courses.items():
            print(
                f"  {label}: alarm at step {course.first('logit growth')}, loss turns at "
                f"{course.turned()}, lowest {min(course.losses):.3f}, last "
                f"{sum(course.losses[-10:]) / 10:.3f}, largest logit at the end "
                f"{course.max_logits[-1]:.0f}, {course.clipped} clips"
            )
    if arguments.picture is not None:
        draw(courses, arguments.picture)


if __name__ == "__main__":
    main()
