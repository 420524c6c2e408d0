"""Stacked trainings: many models as one compute and learn what each would by itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headwise.apps.lab.laboratory import CPU, Lab
from headwise.apps.lab.translation_rivals import GatedRecurrence, RecurrentTranslator, SlidingWindow
from headwise.apps.lab.translation_runs import VARIANTS, build, corpus, numbers, said
from headwise.apps.train.padded_batches import FullBatches, padded
from headwise.apps.train.recipe import Recipe
from headwise.apps.train.stacked_training import WARM, StackedTraining
from headwise.apps.train.stacking import Stack, stacked
from headwise.mask import lengths
from headwise.models import Greedy

RATES = (1e-3, 3e-3)


def pair(variant: str) -> list[nn.Module]:
    """Two new models of a variant, with different seeds."""
    return [build(Lab("tiny"), variant, corpus("tiny", CPU).tokeniser, seed) for seed in (0, 1)]


def training(
    models: list[nn.Module], steps: int = 4, device: torch.device = CPU
) -> StackedTraining:
    data = corpus("tiny", device)
    recipe = Recipe(steps, warmup=2, label_smoothing=0.1, clip=0.5)
    order = FullBatches(data.train, 128, (0, 1), data.tokeniser.pad)
    half = torch.bfloat16 if device.type == "cuda" else None
    return StackedTraining(models, recipe, RATES, order, device, half)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_stack_computes_what_each_of_its_models_computes(variant: str) -> None:
    data, models = corpus("tiny", CPU), [model.double().eval() for model in pair(variant)]
    source, sizes, target = data.train[0].rows(torch.arange(4))
    stack = Stack(models, CPU, torch.float64)
    stack.module.eval()
    found = stack(source, target[:, :-1], source_lengths=sizes)
    each = [
        model(source[rows], target[rows, :-1], source_lengths=sizes[rows])
        for model, rows in zip(models, (slice(2), slice(2, 4)), strict=True)
    ]
    kept = target[:, :-1] != data.tokeniser.pad
    torch.testing.assert_close(found[kept], torch.cat(each)[kept])
    for number, model in enumerate(models):
        assert {n: x.shape for n, x in stack.state(number).items()} == {
            n: x.shape for n, x in model.named_parameters()
        }


@pytest.mark.parametrize("variant", ["base", "additive", "fixed", "recurrence", "lstm-attention"])
def test_a_stack_learns_what_each_of_its_models_learns(variant: str) -> None:
    """Rates, clipping, weight decay, smoothing and the order of batches are each model's own."""
    data = corpus("tiny", CPU)
    stack = training([model.double() for model in pair(variant)])
    for _ in range(4):
        stack.update()
    for number, model in enumerate(pair(variant)):
        recipe = replace(stack.recipe, learning_rate=RATES[number])
        optimizer = recipe.optimizer(model.double())
        order = FullBatches(data.train, tokens=128, seeds=(number,))
        for step in range(4):
            shape, rows = order.batch(step)
            source, sizes, target = data.train[shape].rows(rows[0])
            loss = F.cross_entropy(
                model(source, target[:, :-1], source_lengths=sizes).flatten(0, 1),
                target[:, 1:].flatten(),
                ignore_index=data.tokeniser.pad,
                label_smoothing=0.1,
            )
            loss.backward()  # type: ignore[no-untyped-call]
            norm = recipe.update(optimizer, step, model.parameters())
        assert float(norm) == pytest.approx(float(stack.norms[-1, number]))
        torch.testing.assert_close(stack.stack.state(number), dict(model.named_parameters()))


def test_a_stack_translates_what_each_of_its_models_translates() -> None:
    data, models = corpus("tiny", CPU), pair("base")
    texts = said(training(models), data)
    for model, mine in zip(models, texts, strict=True):
        source = torch.tensor([data.sources[0]])
        out = model.generate(source, 2 * source.shape[1] + 10, strategy=Greedy())  # type: ignore[operator]
        assert mine[0].startswith(data.tokeniser.decode(out[0].tolist()))


def test_a_model_that_diverges_leaves_the_others_alone() -> None:
    models, alone = pair("base"), training(pair("base"))
    with torch.no_grad():
        models[0].get_parameter("embedding.weight").fill_(torch.nan)
    stack = training(models)
    for _ in range(2):
        stack.update()
        alone.update()
    assert stack.finite() == [False, True]
    assert torch.equal(stack.losses[:2, 1], alone.losses[:2, 1])
    assert stack.largest_norms(2)[1] == alone.largest_norms(2)[1]


def test_what_can_t_be_stacked_is_refused() -> None:
    with pytest.raises(ValueError, match="GRU has parameters of its own"):
        stacked([nn.GRU(3, 4), nn.GRU(3, 4)])


def test_pairs_have_the_shortest_length_that_holds_them() -> None:
    data = corpus("tiny", CPU)
    parts = padded(numbers()[:200], data.tokeniser, (4, 6, 64), CPU)
    assert sum(map(len, parts)) == 200
    pad = data.tokeniser.pad
    for part in parts:
        assert part.target.shape[1] == part.source.shape[1] + 1
        assert torch.equal((part.source != pad).sum(-1), part.lengths)
        assert part.predictions == int((part.target[:, 1:] != pad).sum())


def test_an_epoch_has_every_pair_at_most_once_and_seeds_share_its_shapes_alone() -> None:
    data = corpus("tiny", CPU)
    order = FullBatches(data.train, tokens=256, seeds=(0, 1))
    (part,) = data.train
    count = len(part) // order.sizes[0]
    batches = [order.batch(number)[1] for number in range(count)]
    for seen in torch.cat(batches, 1):
        assert len(seen.unique()) == len(seen) == count * order.sizes[0]
    assert not torch.equal(*batches[0])
    alone = FullBatches(data.train, tokens=256, seeds=(1,))
    assert torch.equal(alone.batch(count + 1)[1][0], order.batch(count + 1)[1][1])  # another epoch


def test_a_window_does_not_see_padding() -> None:
    torch.manual_seed(0)
    window, x = SlidingWindow(8, causal=False), torch.randn(1, 6, 8)
    padded_too = window(x, mask=lengths(torch.tensor([4])))
    torch.testing.assert_close(padded_too[:, :4], window(x[:, :4]))


@pytest.mark.parametrize("causal", [True, False])
def test_a_gated_recurrence_is_a_recurrence(causal: bool) -> None:
    """What is computed at once is what a state gives that is updated token by token."""
    torch.manual_seed(0)
    layer, x = GatedRecurrence(16, 4, causal).double(), torch.randn(1, 5, 16).double()
    layer.start()
    q, k, v = (each(x).view(5, 4, -1) for each in (layer.query, layer.key, layer.value))
    keep = layer.forget(x).sigmoid()[0]  # (5, 4)
    rows = torch.zeros(5, 4, 4, dtype=torch.float64)
    for head in range(4):
        state, back = torch.zeros(2, 4, dtype=torch.float64), not causal and head >= 2
        for place in range(5)[:: -1 if back else 1]:
            state = keep[place, head] * state + k[place, head, :, None] * v[place, head]
            rows[place, head] = q[place, head] @ state * 2**-0.5
    out = layer.out(layer.norm(rows.flatten(1)) * F.silu(layer.gate(x)))
    torch.testing.assert_close(layer(x), out)


def test_an_lstm_reads_as_pytorch_s_does() -> None:
    data = corpus("tiny", CPU)
    model = build(Lab("tiny"), "lstm-attention", data.tokeniser).double().eval()
    assert isinstance(model, RecurrentTranslator)
    layer, theirs = model.back[0], nn.LSTM(32, 16, batch_first=True).double()
    names = {"weight_ih_l0": "input.weight", "weight_hh_l0": "state.weight"}
    names |= {"bias_ih_l0": "input.bias", "bias_hh_l0": "state.bias"}
    theirs.load_state_dict({mine: layer.get_parameter(name) for mine, name in names.items()})
    x, known = torch.randn(1, 4, 32).double(), torch.tensor([[[True], [True], [True], [False]]])
    states, hidden, _ = layer(x, known, True)
    expected, (last, _) = theirs(x[:, :3].flip(1))
    torch.testing.assert_close(states[:, :3], expected.flip(1))
    torch.testing.assert_close(hidden, last[0])


def test_the_triton_kernels_compute_what_stacked_layers_do_step_by_step() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.apps.lab.short_kernels_agree"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agrees") == 7


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["base", "additive", "fixed", "recurrence", "lstm-attention"])
def test_a_graph_trains_as_the_kernels_one_by_one(variant: str) -> None:
    cuda, steps = torch.device("cuda"), WARM + 6
    plain, captured = (training(pair(variant), steps, cuda) for _ in range(2))
    plain.capture = False
    for _ in range(steps):  # side by side, each on its own stream
        plain.update()
        captured.update()
    torch.cuda.synchronize()
    assert captured.graphs
    assert not plain.graphs
    torch.testing.assert_close(captured.losses, plain.losses, atol=2e-2, rtol=2e-2)
    assert int(captured.at) == steps
