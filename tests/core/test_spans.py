"""The weight on a span of keys is the sum of its columns of the map, in every kind of call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.core.spans import shown, within
from tests.oracle import answer
from tests.problems import Recipe, every_pair, small_blocks
from tests.rounding import bounds, close

ENGINES = ("streaming", "reference")
SLOW = pytest.mark.slow
pairs = [  # `make test` takes half of the recipes, each on one of the engines
    pytest.param(engine, recipe, id=f"{engine}-{recipe.seed}", marks=() if first else SLOW)
    for recipe in every_pair()
    for engine, first in zip(ENGINES, (recipe.seed % 4 == 0, recipe.seed % 4 == 2), strict=True)
]


def some_spans(batch: int, keys: int) -> dict[str, tuple[int | Tensor, int | Tensor]]:
    """Spans of every form: all keys, none, a part, and one of its own for each batch entry."""
    first = torch.arange(batch) % (keys + 1)
    return {
        "all": (0, keys),
        "none": (keys, keys),
        "part": (keys // 3, keys - keys // 4),
        "own": (first, torch.full_like(first, keys)),
        "until": (0, first),
        "from": (first, keys),
    }


def assert_sums(recipe: Recipe, engine: str, device: str = "cpu") -> None:
    """Compare the weights on spans with sums over the true matrix."""
    call = recipe.call()
    keys = call.k.shape[2]
    spans = some_spans(len(call.q), keys)
    with small_blocks(), torch.no_grad():
        _, seen = call.copy(device=device).observe(engine, stats=("entropy",), spans=spans)
        found = answer(call)
        allowed = bounds(call, found)["sink_mass"]
    assert list(seen.values) == ["entropy", *(f"span_{name}" for name in spans)]
    for name, (first, last) in spans.items():
        within = torch.arange(keys)
        low, high = (torch.as_tensor(x).reshape(-1, 1, 1, 1) for x in (first, last))
        wanted = (found.p * ((within >= low) & (within < high))).sum(-1)
        assert not close(seen.spans[name].cpu(), wanted, allowed + 0 * wanted), f"{name} {recipe}"


@pytest.mark.parametrize(("engine", "recipe"), pairs)
def test_a_span_weighs_as_much_as_its_columns(engine: str, recipe: Recipe) -> None:
    assert_sums(recipe, engine)


def test_calls_with_a_span_of_numbers_are_prepared_once() -> None:
    assert shown((2, 9), torch.device("cpu")).description() == ("stretch", 2, 9)
    assert shown((torch.tensor([2]), 9), torch.device("cpu")).description() is None


def three(batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, batch, 4, 12, 8).unbind(0)
    return q, k[:, :2], v[:, :2]


def test_spans_are_those_of_the_map() -> None:
    q, k, v = three()
    mask = hw.mask.causal() & hw.mask.window(5)
    _, seen = hw.observe(q, k, v, mask=mask, sinks=torch.randn(4), spans={"a": (2, 9)})
    amap = hw.attention_map(q, k, mask=mask, lse=seen.lse)
    torch.testing.assert_close(seen.spans["a"], amap[..., 2:9].sum(-1))
    torch.testing.assert_close(amap.mass(2, 9), amap[..., 2:9].sum(-1))
    assert not amap.mass(4, 4).any()
    torch.testing.assert_close(seen.heads()["span_a_mean"], seen.spans["a"].mean((0, 2)).double())


def test_sampled_rows_have_the_weights_of_those_rows() -> None:
    q, k, v = three()
    spans = {"a": (torch.tensor([0, 3]), torch.tensor([4, 12]))}
    _, whole = hw.observe(q, k, v, spans=spans)
    _, some = hw.observe(q, k, v, spans=spans, rows=5, stats=())
    assert list(some.values) == ["span_a"]
    torch.testing.assert_close(some.spans["a"], whole.spans["a"][..., some.rows])


def test_without_a_batch_a_span_has_none_either() -> None:
    q, k, v = (x[0] for x in three())
    _, seen = hw.observe(q, k, v, spans={"all": (0, 12)})
    torch.testing.assert_close(seen.spans["all"], torch.ones(4, 12))


def test_gradients_and_output_are_those_without_spans() -> None:
    q, k, v = (x.requires_grad_() for x in three())
    out, seen = hw.observe(q, k, v, spans={"a": (0, 5)})
    plain, _ = hw.observe(q, k, v)
    assert torch.equal(out, plain)
    assert not seen.spans["a"].requires_grad
    seen.entropy.sum().backward()
    assert q.grad.isfinite().all()


@SLOW  # a watch of compiled layers, in every run, weighs spans in the same way
def test_compiled_code_weighs_spans() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        spans = {"a": (1, 5), "own": (first, first + 3)}
        _, seen = hw.observe(q, k, v, mask=hw.mask.causal(), spans=spans)
        return torch.stack(list(seen.spans.values()))

    given = (*three(), torch.tensor([2, 7]))
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), run(*given))


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ({"a": (0, 13)}, "'a' is 0 to 13; it needs 0 <= first <= last <= 12"),
        ({"a": (-1, 3)}, "'a' is -1 to 3"),
        ({"a": (5, 3)}, "'a' is 5 to 3"),
        ({"a": (torch.tensor([0, 9]), 8)}, r"'a' is \[0, 9\] to 8"),
        ({"a": (torch.tensor([0, 1, 2]), 8)}, "'a' has 3 bounds, and the batch has 2 entries"),
        ({"a": (0, 2.5)}, "'a' has the bound 2.5"),
        ({"a": (0, torch.tensor(2.5))}, "'a' has the bound a torch.float32 tensor"),
        ({"a": 7}, "'a' is 7; give the first key"),
        ({"a b": (0, 1)}, "a span is called 'a b'"),
        ([("a", (0, 1))], "must map names to ranges"),
    ],
)
def test_what_is_no_range_of_keys_is_refused(spans: object, says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        hw.observe(*three(), spans=spans)
    assert "in hw.observe(q float32 (2, 4, 12, 8)" in str(raised.value)


def test_a_span_moves_with_the_keys_that_a_cache_forgot() -> None:
    spans = {"early": (0, 3), "late": (5, 9), "own": (torch.tensor([1, 6]), torch.tensor([4, 20]))}
    found = within(spans, keys=6, forgotten=2)
    assert (found["early"], found["late"]) == ((0, 1), (3, 6))
    assert [x.tolist() for x in found["own"]] == [[0, 4], [2, 6]]
