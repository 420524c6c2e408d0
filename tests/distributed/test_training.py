"""Training with many processes gives what one gives, and goes on with any number of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import headwise as hw
from headwise.apps.train import LanguageSetup, Recipe, TrainingRanks, train
from headwise.apps.train.tasks.language import Language
from headwise.models import GPTConfig
from headwise.models.trained import Run
from headwise.nn import SwiGLU
from tests.distributed.processes import Processes

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
pytest.importorskip("pyarrow")
pytestmark = pytest.mark.xdist_group("ranks")  # one worker, one set of processes

STEPS = 6
WORDS = ("attention", "is", "a", "weighted", "mean", "of", "values", "and", "weights", "are", "few")


def setup(text: str, **model: Any) -> LanguageSetup:
    config = GPTConfig(
        vocabulary=300, context=22, d_model=32, layers=2, heads=4, kv_heads=2,
        feed_forward=SwiGLU(48), **model,
    )  # fmt: skip
    recipe = Recipe(
        steps=STEPS, learning_rate=0.02, warmup=2, accumulate=2, log_every=1, evaluate_every=4,
        checkpoint_every=2, seed=3,
    )  # fmt: skip
    return LanguageSetup(text, 300, config, recipe, batch=5)


def some_slow(names: Iterable[str], slow: tuple[str, ...]) -> list[Any]:
    return [pytest.param(x, marks=[pytest.mark.slow] if x in slow else []) for x in names]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    numbers = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(WORDS), (2500,), generator=numbers).tolist()
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(" ".join(WORDS[number] for number in chosen), encoding="utf-8")
    return str(path)


def trained(out: str, given: LanguageSetup | None, **options: Any) -> bool:
    """Train in float64; True if the run came to its end."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return train(given, out, device="cpu", **options) is not None
    finally:
        torch.set_default_dtype(before)


def on_ranks(
    mesh: DeviceMesh, out: str, given: LanguageSetup | None, context: int, sharded: bool,
    stop: int | None = None, watch: int | None = None,
) -> bool:  # fmt: skip
    seen = itertools.count(1)
    ranks = TrainingRanks.over(mesh, context=context, sharded=sharded)
    # Only one rank is told to stop: the others must hear of it.
    asked = stop is not None and ranks.own == ranks.count - 1
    return trained(
        out, given, ranks=ranks, watch_every=watch,
        should_stop=lambda: asked and next(seen) == stop,
    )  # fmt: skip


def lines(folder: Path | str) -> list[dict[str, Any]]:
    found = Run(Path(folder)).measured()
    return [{k: v for k, v in line.items() if k not in ("per_second", "mfu")} for line in found]


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert len(found) == len(wanted)
    for line, other in zip(found, wanted, strict=True):
        assert line.keys() == other.keys()
        for name, value in other.items():
            test = value if isinstance(value, dict) else {name: value}
            own = line[name] if isinstance(value, dict) else {name: line[name]}
            assert own == pytest.approx(test, rel=1e-9), (name, line)


@pytest.fixture(scope="module")
def alone(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    assert trained(str(out), setup(text), watch_every=2)
    return out


KINDS = {
    "data": (2, 1, False),  # five texts over two ranks
    "sharded": (2, 1, True),
    "context": (2, 2, False),
    "data and context": (4, 2, False),
    "context, sharded": (3, 3, True),  # 22 positions over three ranks
}


@pytest.mark.parametrize("kind", some_slow(KINDS, ("data and context", "context, sharded")))
def test_losses_figures_and_weights_are_those_of_one_process(
    processes: Processes, text: str, alone: Path, tmp_path: Path, kind: str
) -> None:
    count, context, sharded = KINDS[kind]
    out = tmp_path / "run"
    assert all(processes.run(on_ranks, count, str(out), setup(text), context, sharded, None, 2))
    same(lines(out), lines(alone))
    ours, theirs = (hw.load(folder).model.state_dict() for folder in (out, alone))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(*(hw.watching.open_run(x).heads() for x in (out, alone)), strict=True):
        assert ours["head"] == theirs["head"]
        if context == 1:  # rows are sampled from each rank's own
            assert ours["entropy_mean"] == pytest.approx(theirs["entropy_mean"], rel=1e-6)


CHANGES = {
    "more ranks": ((2, 1, False), (4, 2, True)),
    "fewer ranks": ((3, 1, True), (2, 2, False)),
    "from one process": (None, (2, 1, True)),
    "in one process": ((2, 1, True), None),
}


@pytest.mark.parametrize("change", some_slow(CHANGES, ("more ranks", "in one process")))
def test_a_stopped_run_goes_on_with_other_ranks(
    processes: Processes, text: str, alone: Path, tmp_path: Path, change: str
) -> None:
    before, after = CHANGES[change]
    out, given = str(tmp_path / "run"), setup(text)
    if before is None:
        seen = itertools.count(1)
        assert not trained(out, given, should_stop=lambda: next(seen) == 3)
    else:
        count, *more = before
        assert not any(processes.run(on_ranks, count, out, given, *more, 3))
    assert [line["step"] for line in lines(out) if "loss" in line] == [1, 2, 3]
    hw.load(out)  # not finished, and yet a model
    if after is None:
        assert trained(out, None)
    else:
        count, *more = after
        assert all(processes.run(on_ranks, count, out, None, *more))
    same(lines(out), lines(alone))


class KilledError(BaseException):
    """Ends a run in the middle of a step."""


def killed(mesh: DeviceMesh, out: str, given: LanguageSetup, at: int) -> bool:
    batch = Language.batch

    def ends(task: Language, number: int, device: torch.device) -> Any:
        if number == at:
            raise KilledError
        return batch(task, number, device)

    Language.batch = ends  # type: ignore[method-assign]
    try:
        return on_ranks(mesh, out, given, 1, True, None, 1)
    except KilledError:
        return False
    finally:
        Language.batch = batch  # type: ignore[method-assign]


def test_a_killed_run_resumes_as_if_it_had_never_been(
    processes: Processes, text: str, alone: Path, tmp_path: Path
) -> None:
    """Also with dropout: a step's random numbers depend on the step and the rank."""
    given = setup(text, dropout=0.1, attention_dropout=0.1)
    whole, out = str(tmp_path / "whole"), str(tmp_path / "run")
    assert all(processes.run(on_ranks, 2, whole, given, 1, True, None, 1))
    assert not any(processes.run(killed, 2, out, given, 7))  # in the fourth step
    (Path(out) / "last/4").mkdir()  # a checkpoint that was not completed
    assert [line["step"] for line in lines(out) if "loss" in line] == [1, 2, 3]
    assert all(processes.run(on_ranks, 2, out, None, 1, True, None, 1))
    assert lines(out) == lines(whole)
    first, again = (hw.watching.open_run(x).history("entropy_mean") for x in (whole, out))
    assert first == again
    assert lines(out) != lines(alone)


def refused(mesh: DeviceMesh, out: str, given: LanguageSetup | None, context: int) -> str:
    try:
        on_ranks(mesh, out, given, context, False)
    except ValueError as error:
        return str(error)
    return ""


def test_what_ranks_can_not_share_is_refused(
    processes: Processes, text: str, tmp_path: Path
) -> None:
    few = replace(setup(text), batch=1)
    for said in processes.run(refused, 2, str(tmp_path / "a"), few, 1):
        assert "a batch of 1 texts can't be dealt to 2 processes" in said
        assert "let at least 2 share it (--context-ranks)" in said
    for said in processes.run(refused, 3, str(tmp_path / "b"), few, 2):
        assert "3 processes can't share sequences by groups of 2" in said
    assert not (tmp_path / "a/config.json").exists()
