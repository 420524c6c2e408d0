"""The heads of a run, looked at while it trains: what `headwise train --watch` asks for."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

from headwise.training.run_folder import Run
from headwise.watching import watch

ROWS = 64
"""Rows of each pass that are looked at: enough for a mean, and hardly slower than none."""


@contextmanager
def watched(
    model: nn.Module, run: Run, every: int | None, start: int
) -> Iterator[Callable[[], AbstractContextManager[bool]]]:
    """What to put around each step, from `start` on; it gives whether someone looks at this one.

    The model is watched in the steps that are looked at and at no other time, so evaluation leaves
    no trace in the figures, and the steps between cost what they always did. Compiled code can't be
    looked into: these steps must call the model itself.
    """
    if every is None:
        yield lambda: nullcontext(False)
        return
    watching = watch(model, rows=ROWS, every=every, alarms=True)
    watching.steps = start

    @contextmanager
    def looking() -> Iterator[bool]:
        due = watching.steps % every == 0
        if due:
            watching.attach()
        try:
            yield due
        finally:
            watching.detach()
        watching.step()

    with watching.record(run.folder / "watch", resume=True):
        yield looking
