"""Translators in training: batches of few shapes, updates that resume, and the same as a graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwise.apps.lab.laboratory import CPU, Lab
from headwise.apps.lab.learner import WARM, Learner
from headwise.apps.lab.padded_batches import FullBatches, padded
from headwise.apps.lab.translation_runs import TranslationData, build, corpus, numbers
from headwise.apps.train.meter import DivergedError
from headwise.apps.train.recipe import Recipe


def learner(
    data: TranslationData, steps: int, variant: str = "base", capture: bool = False
) -> Learner:
    torch.manual_seed(0)
    model = build(Lab("tiny"), variant, data.tokeniser)
    order = FullBatches(data.train, tokens=256, seed=0)
    return Learner(model, Recipe(steps, warmup=2), order, data.tokeniser.pad, capture)


def test_pairs_have_the_shortest_length_that_holds_them() -> None:
    data = corpus("tiny", CPU)
    parts = padded(numbers()[:200], data.tokeniser, (4, 6, 64), CPU)
    assert [part.source.shape[1] for part in parts] == [
        length for length in (4, 6, 64) if length in {part.source.shape[1] for part in parts}
    ]
    assert sum(map(len, parts)) == 200
    pad = data.tokeniser.pad
    for part in parts:
        assert part.target.shape[1] == part.source.shape[1] + 1
        assert torch.equal((part.source != pad).sum(-1), part.lengths)
        assert part.predictions == int((part.target[:, 1:] != pad).sum())


def test_an_epoch_has_every_pair_at_most_once_and_full_batches_alone() -> None:
    data = corpus("tiny", CPU)
    order = FullBatches(data.train, tokens=256, seed=0)
    (part,) = data.train
    count = len(part) // order.sizes[0]
    seen = torch.cat([order.batch(number)[1] for number in range(count)])
    assert len(seen.unique()) == len(seen) == count * order.sizes[0]
    again = FullBatches(data.train, tokens=256, seed=0)
    assert torch.equal(again.batch(count + 1)[1], order.batch(count + 1)[1])  # the next epoch


def test_a_restored_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    data = corpus("tiny", CPU)
    whole, first, second = (learner(data, steps=6) for _ in range(3))
    for _ in range(6):
        whole.update()
    for _ in range(3):
        first.update()
    first.save(tmp_path / "state.safetensors", {"curve": [[1, 2.0]]})
    assert second.restore(tmp_path / "state.safetensors")["curve"] == [[1, 2.0]]
    for _ in range(3):
        second.update()
    assert torch.equal(second.losses, whole.losses)
    assert second.mean_loss(data.test) == whole.mean_loss(data.test)
    assert whole.largest_norms(2) == second.largest_norms(2)


def test_a_loss_that_is_not_finite_is_told() -> None:
    data = corpus("tiny", CPU)
    broken = learner(data, steps=2)
    with torch.no_grad():
        broken.model.get_parameter("embedding.weight").fill_(torch.nan)
    broken.update()
    with pytest.raises(DivergedError):
        broken.check()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "variant",
    ["base", "shared", "additive", "convolution", "fixed", "keys-half", "lstm", "lstm-attention"],
)
def test_a_graph_trains_as_the_kernels_one_by_one(variant: str) -> None:
    data = corpus("tiny", torch.device("cuda"))
    steps = WARM + 6
    plain, captured = (learner(data, steps, variant, capture=x) for x in (False, True))
    for _ in range(steps):  # side by side, each on its own stream
        plain.update()
        captured.update()
    torch.cuda.synchronize()
    assert captured.graphs
    assert not plain.graphs
    torch.testing.assert_close(captured.losses, plain.losses, atol=2e-2, rtol=2e-2)
    assert int(captured.at) == steps
