"""A run that diverges on purpose: the alarm comes before the loss turns, the remedy saves it."""

import pytest

from bench.watch_divergence import RECIPE, Course, train


@pytest.fixture(scope="module")
def diverged() -> Course:
    """The learning rate too high, and nothing that normalises queries and keys."""
    return train()


def last(course: Course) -> float:
    return sum(course.losses[-10:]) / 10


def test_the_alarm_comes_long_before_the_loss_turns(diverged: Course) -> None:
    alarm, turned = diverged.first("logit growth"), diverged.turned()
    assert alarm is not None
    assert turned is not None
    assert alarm + 10 < turned
    assert min(diverged.losses) < 2.0  # it had learnt something
    assert last(diverged) > 2.0  # and does not get over it, though the rate falls to its end
    assert diverged.max_logits[-1] > 1000


def test_clipping_after_each_step_saves_the_same_run(diverged: Course) -> None:
    saved = train(limit=100.0)
    assert len(saved.losses) == RECIPE.steps
    assert saved.clipped > 0
    assert saved.turned() is None
    assert last(saved) < 1.0 < last(diverged)
    assert saved.max_logits[-1] < 150
