"""Watching compiled models: eager's figures and bits, one watched graph and one unwatched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.watching.table import Table
from tests.thinned import thinned

Made = tuple[nn.Module, Tensor]
PLACES = ("layer", "name", "kind", "head")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


class Torch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, x, x)[0]
        return out


class Ours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = hw.nn.MultiHeadAttention(32, 4, mask=hw.mask.causal())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


def stack() -> Made:
    return Stack(), torch.randn(2, 17, 32)


def multi_head() -> Made:
    return Torch(), torch.randn(2, 9, 32)


def ours() -> Made:
    return Ours(), torch.randn(2, 9, 32)


def llama(implementation: str, tokens: int = 12) -> Callable[[], Made]:
    def make() -> Made:
        transformers = pytest.importorskip("transformers")
        import headwise.transformers  # noqa: F401  registers the implementation

        config = transformers.LlamaConfig(
            hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
            intermediate_size=64, vocab_size=99, use_cache=False,
            attn_implementation=implementation,
        )  # fmt: skip
        return transformers.LlamaModel(config), torch.randint(0, 99, (2, tokens))

    make.__name__ = f"{implementation}-{tokens}"
    return make


def run(model: Any, x: Tensor) -> Tensor:
    out = model(x)
    found: Tensor = out if isinstance(out, Tensor) else out[0]
    return found


def assert_same(found: Table, expected: Table) -> None:
    assert found.columns == expected.columns
    assert len(found) == len(expected) > 0
    for mine, other in zip(found, expected, strict=True):
        assert [mine[name] for name in PLACES] == [other[name] for name in PLACES]
        figures = [name for name in expected.columns if name not in PLACES]
        a, b = (torch.tensor([row[name] for name in figures]) for row in (mine, other))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    "make",
    # One has as many tokens as heads, so that axes in the wrong order have the same shape.
    [
        pytest.param(stack, marks=pytest.mark.slow),
        multi_head,
        ours,
        llama("sdpa", tokens=4),
        pytest.param(llama("headwise"), marks=pytest.mark.slow),
    ],
    ids=lambda f: f.__name__,
)
def test_figures_bits_and_graphs_of_a_whole_model(make: Callable[[], Made]) -> None:
    model, x = make()
    with hw.watch(model, maps=False) as seen:
        run(model, x)
    expected = seen.heads()
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    plain = run(fast, x)
    watch = hw.watch(fast, maps=False)
    with watch:
        out = run(fast, x)
    assert torch.equal(out, plain)
    assert_same(watch.heads(), expected)
    run(fast, x)  # unwatched once more
    with watch:
        run(fast, x).sum().backward()
    with hw.watch(model, maps=False) as another:
        run(fast, x)
    assert_same(another.heads(), expected)
    assert graphs() == 2
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("make", thinned([stack, llama("sdpa")]))
def test_a_sample_of_the_rows_has_eager_figures(make: Callable[[], Made]) -> None:
    model, x = make()
    with hw.watch(model, rows=5, maps=False) as seen:
        run(model, x)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    with hw.watch(fast, rows=5, maps=False) as watch:
        run(fast, x)
    assert_same(watch.heads(), seen.heads())


def test_equal_layers_that_are_compiled_one_by_one_share_a_graph() -> None:
    model, x = stack()
    x.requires_grad_()
    with hw.watch(model, maps=False) as seen:
        model(x)
    expected = seen.heads()
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    model(x)
    for _ in range(2):
        with hw.watch(model, maps=False) as seen:
            model(x)
        assert_same(seen.heads(), expected)
        model(x)
    assert graphs() == 2


def test_a_watch_that_came_first_goes_on_in_compiled_code() -> None:
    model, x = stack()
    with hw.watch(model, maps=False) as watch:
        model(x)
        watch.step()
        torch.compile(model, fullgraph=True, backend="aot_eager")(x)
        watch.step()
    first, second = (entry.table for entry in watch.series)
    assert_same(second, first)


def test_lengths_that_change_need_one_watched_graph() -> None:
    fast = torch.compile(Layer(), fullgraph=True, backend="aot_eager", dynamic=True)
    with hw.watch(fast, maps=False) as watch:
        for length in (17, 9, 30):
            fast(torch.randn(2, length, 32))
            watch.step()
    assert len(watch.series) == 3
    assert graphs() == 1


def losses(compiled: bool) -> tuple[list[float], list[tuple[int, Table]]]:
    torch.manual_seed(0)
    model, _ = stack()
    step = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    optimiser, found = torch.optim.SGD(model.parameters(), 0.1), []
    with hw.watch(step, maps=False, every=2) as watch:
        for _ in range(5):
            loss = step(torch.randn(2, 17, 32)).square().mean()
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            found.append(float(loss.detach()))
    return found, [(entry.step, entry.table) for entry in watch.series]


def test_a_training_loop_has_the_same_series_and_two_graphs() -> None:
    (expected, eager), (found, series) = losses(False), losses(True)
    assert found == pytest.approx(expected)
    assert [number for number, _ in series] == [number for number, _ in eager] == [0, 2, 4]
    for (_, mine), (_, other) in zip(series, eager, strict=True):
        assert_same(mine, other)
    assert graphs() == 2


@pytest.mark.parametrize("turns", [False, True])
def test_two_optimisers_end_the_steps_that_they_end_in_eager_mode(turns: bool) -> None:
    def steps(compiled: bool) -> list[tuple[int, int]]:
        torch._dynamo.reset()
        model, x = stack()
        step = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        both = [torch.optim.SGD(layer.parameters(), 0.1) for layer in model.layers]
        found = []
        with hw.watch(step, maps=False) as watch:
            for number in range(4):
                step(x).square().mean().backward()
                for optimiser in [both[number % 2]] if turns else both:
                    optimiser.step()
                    found.append((number, watch.steps))
            both[0].step()  # nothing ran
            found.append((4, watch.steps))
        return found

    assert steps(True) == steps(False)


def test_a_recomputed_forward_is_recorded_once() -> None:
    model, x = Stack(checkpointed=True), torch.randn(2, 17, 32)
    with hw.watch(model, maps=False) as seen:
        model(x).sum().backward()
    expected = seen.heads()
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    with hw.watch(fast, maps=False) as watch:
        fast(x).sum().backward()
    assert_same(watch.heads(), expected)
    assert [int(layer.counted()[0]) for layer in watch.layers] == [2 * 17] * 2


def test_a_compiled_layer_in_a_checkpoint_is_recorded_once() -> None:
    model, x = Stack(checkpointed=True), torch.randn(2, 17, 32, requires_grad=True)
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    with hw.watch(model, maps=False) as watch:
        model(x).sum().backward()
    assert [int(layer.counted()[0]) for layer in watch.layers] == [2 * 17] * 2


def test_a_fast_path_has_eager_figures() -> None:
    layer, x = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval(), torch.randn(2, 9, 32)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), hw.watch(layer, maps=False) as seen:
        layer(x)
    with torch.no_grad(), hw.watch(fast, maps=False) as watch:
        fast(x)
    assert_same(watch.heads(), seen.heads())


def test_every_watch_in_inference_mode_has_the_same_graph() -> None:
    model, x = stack()
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        for _ in range(2):
            with hw.watch(fast, maps=False):
                fast(x)
    assert graphs() == 1


class Cached(nn.Module):
    """One token that attends to a cache with room to spare."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(32, 32)

    def forward(self, cache: Tensor, filled: Tensor) -> Tensor:
        q = self.query(cache[:, :, :1].transpose(1, 2).flatten(2)).unflatten(-1, (4, 8))
        shown = (torch.arange(cache.shape[2]) < filled)[None, None, None]
        return F.scaled_dot_product_attention(q.transpose(1, 2), cache, cache, attn_mask=shown)


def test_a_token_stands_beside_its_own_key_in_a_cache() -> None:
    model, cache = Cached(), torch.randn(2, 4, 11, 8)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (6, 9):
        with hw.watch(model, maps=False) as seen:
            model(cache, torch.tensor(length))
        with hw.watch(fast, maps=False) as watch:
            fast(cache, torch.tensor(length))
        assert_same(watch.heads(), seen.heads())
        assert min(watch.heads()["self_mass_mean"]) > 0
    assert graphs() == 1


class Backwards(Stack):
    """Its last layer runs first, and the first one never."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(Layer())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers[1](self.layers[2](x))
        return found


def test_layers_are_numbered_as_they_run() -> None:
    model, x = Backwards(), torch.randn(2, 17, 32)
    with hw.watch(model) as seen:
        model(x)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with hw.watch(fast) as watch:
            fast(x)
        assert [layer.name for layer in watch.layers] == ["layers.2", "layers.1"]
        assert_same(watch.heads(), seen.heads())
        assert watch.types()["type"] == seen.types()["type"]


@pytest.mark.slow
def test_inductor_records_the_same() -> None:
    model, x = stack()
    with hw.watch(model, maps=False) as seen:
        model(x)
    expected = seen.heads()
    fast = torch.compile(model, fullgraph=True)
    with hw.watch(fast, maps=False) as watch:
        fast(x).sum().backward()
    assert_same(watch.heads(), expected)


def test_layers_are_chosen_by_number_and_name() -> None:
    model, x = stack()
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    for chosen in (1, "layers.1"):
        with hw.watch(fast, maps=False, layers=chosen) as watch:
            fast(x)
        assert {row["name"] for row in watch.heads()} == {"layers.1"}
        assert [layer.name for layer in watch.layers] == ["layers.1"]


def test_a_watched_model_is_not_traced_by_torch_jit() -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]

    x = torch.randn(2, 6, 16)
    for model in (hw.nn.MultiHeadAttention(16, 4), Attends()):
        watch = hw.watch(model).attach()
        with (
            pytest.warns(DeprecationWarning, match="jit.trace"),
            pytest.raises(ValueError, match="can't record a watched model: detach"),
        ):
            torch.jit.trace(model, x)
        watch.detach()


def test_a_watched_model_is_not_exported() -> None:
    model, x = stack()
    with hw.watch(model), pytest.raises(ValueError, match="a watched model can't be exported"):
        torch.export.export(model, (x,))
    assert torch.export.export(model, (x,)) is not None
