"""The statistics are what their definitions say, computed key by key on the full matrix."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from headwise.core.observation import sample_rows
from tests.oracle import answer, statistics
from tests.problems import Recipe, recipes, small_blocks
from tests.rounding import bounds, close

ENGINES = ("streaming", "reference")


def three(
    queries: int = 6, keys: int = 6, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, 2, n, 8, dtype=torch.float64) for n in (queries, keys, keys))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def weights_of(q: Tensor, k: Tensor, mask: hw.mask.Mask) -> Tensor:
    """The full matrix, (B, Hq, N, M): attention over values that are the unit vectors."""
    eye = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    return hw.attention(q, k, eye, mask=mask, engine="reference")


@pytest.mark.parametrize("engine", ENGINES)
@given(recipe=recipes(longest=20))
def test_every_statistic_is_its_definition(engine: str, recipe: Recipe) -> None:
    call = recipe.call()
    with small_blocks(), torch.no_grad():
        _, seen = call.observe(engine)
        found = answer(call)
        allowed, wanted = bounds(call, found), statistics(call, found)
    wanted.pop("sink_mass")  # where a sequence starts is tested below, case by case
    wrong = {n: close(getattr(seen, n), x, allowed[n]) for n, x in wanted.items()}
    assert not {n: text for n, text in wrong.items() if text}, f"{engine} on {recipe}"
    assert torch.equal(seen.sees, found.seen.any(-1))


@pytest.mark.parametrize("engine", ENGINES)
@given(
    recipe=recipes(mask=("none", "causal", "padding", "window"), longest=12),
    k=st.sampled_from((1, 2, 3, 4, 10**12)),
)
def test_sink_mass_is_the_weight_of_the_first_keys(engine: str, recipe: Recipe, k: int) -> None:
    call = recipe.call()
    with torch.no_grad():
        _, seen = call.observe(engine, stats=("sink_mass",), sink_keys=k)
        found = answer(call)
        allowed = bounds(call, found)["sink_mass"]
    wanted = found.p[..., :k].sum(-1)
    assert not close(seen.sink_mass, wanted, allowed + 0 * wanted), str(recipe)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_sink_of_a_document_is_its_own_first_key(engine: str) -> None:
    q, k, v = three()
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    mask = hw.mask.causal() & hw.mask.documents(ids)
    _, seen = hw.observe(q, k, v, mask=mask, engine=engine, sink_keys=2)
    weights = weights_of(q, k, mask)
    starts = torch.tensor([[0, 0, 2, 2, 2, 5], [0] * 6])
    wanted = torch.zeros(2, 2, 6, dtype=torch.float64)
    for b in range(2):
        for i in range(6):
            first = int(starts[b, i])
            wanted[b, :, i] = weights[b, :, i, first : first + 2].sum(-1)
    torch.testing.assert_close(seen.sink_mass, wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_sink_of_a_padded_sequence_is_its_first_real_key(engine: str) -> None:
    q, k, v = three()
    first = torch.tensor([2, 0]).reshape(2, 1, 1)
    mask = hw.mask.causal() & hw.mask.between(first, torch.tensor(6))
    _, seen = hw.observe(q, k, v, mask=mask, engine=engine)
    weights = weights_of(q, k, mask)
    torch.testing.assert_close(seen.sink_mass[0], weights[0, :, :, 2])
    torch.testing.assert_close(seen.sink_mass[1], weights[1, :, :, 0])


@pytest.mark.parametrize("engine", ENGINES)
def test_sinks_the_row_does_not_see_have_no_mass(engine: str) -> None:
    q, k, v = three()
    _, seen = hw.observe(q, k, v, mask=hw.mask.causal() & hw.mask.window(1), engine=engine)
    assert (seen.sink_mass[:, :, 2:] == 0).all()
    assert (seen.sink_mass[:, :, :2] > 0).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_self_and_previous_follow_where_the_queries_stand(engine: str) -> None:
    q, k, v = three(2, 6)
    weights = weights_of(q, k, hw.mask.causal())
    _, seen = hw.observe(q, k, v, mask=hw.mask.causal(), engine=engine)
    torch.testing.assert_close(
        seen.self_mass, torch.stack([weights[..., 0, 4], weights[..., 1, 5]], -1)
    )
    torch.testing.assert_close(
        seen.previous_mass, torch.stack([weights[..., 0, 3], weights[..., 1, 4]], -1)
    )
    _, placed = hw.observe(q, k, v, mask=hw.mask.causal([0, 3]), engine=engine)
    torch.testing.assert_close(placed.self_mass[0, :, 0], torch.ones(2, dtype=torch.float64))
    assert (placed.previous_mass[0, :, 0] == 0).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_see_nothing_have_the_statistics_of_nothing(engine: str) -> None:
    _, seen = hw.observe(*three(), mask=hw.mask.lengths([0, 6]), engine=engine)
    nothing = {"lse": -math.inf, "max_logit": -math.inf, "effective_keys": 1.0}
    for name in hw.STATISTICS:
        assert (getattr(seen, name)[0] == nothing.get(name, 0.0)).all(), name
        assert getattr(seen, name)[1].isfinite().all()
    assert not seen.sees[0].any()
    assert seen.sees[1].all()


@pytest.mark.parametrize("engine", ENGINES)
def test_with_sinks_a_row_sums_to_less_than_one_and_is_not_renormalised(engine: str) -> None:
    q, k, v = three()
    sinks = torch.tensor([0.0, 2.0], dtype=torch.float64)
    _, seen = hw.observe(q, k, v, sinks=sinks, engine=engine)
    s = q @ k.transpose(-1, -2) / math.sqrt(8)
    p = torch.exp(s - seen.lse[..., None])
    assert (p.sum(-1) < 1).all()
    torch.testing.assert_close(seen.entropy, -(p * p.log()).sum(-1))
    torch.testing.assert_close(seen.top_prob, p.amax(-1))
    torch.testing.assert_close(
        p.sum(-1) + torch.exp(sinks[:, None] - seen.lse), torch.ones(2, 2, 6).double()
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [60.0, 1.0, 1e-3])
def test_entropy_stays_exact_whatever_the_logits(engine: str, size: float) -> None:
    # At a deviation of 3600 lse minus the mean logit is below zero; at 1e-6 the weights are even.
    q, k, v = (x.float() for x in three(64, 256))
    _, seen = hw.observe(size * q, size * k, v, engine=engine)
    _, truth = hw.observe(size * q.double(), size * k.double(), v.double(), engine="reference")
    assert (seen.entropy >= 0).all()
    assert (seen.entropy <= math.log(256) * (1 + 1e-6)).all()
    logits = 1e4 if size == 60.0 else 10
    slack = 8 * logits * torch.finfo(torch.float32).eps
    torch.testing.assert_close(seen.entropy.double(), truth.entropy, atol=slack, rtol=slack)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_variance_of_logits_survives_a_large_common_part(engine: str) -> None:
    # Raw squares would leave nothing: the logits are near 3000 and vary by about one.
    q, k, v = (x.float() for x in three(40, 300))
    k = k + 1000 * torch.sign(q[:, :, :1])
    q = q[:, :, :1].expand_as(q).contiguous()
    with small_blocks(keys=64):
        _, seen = hw.observe(q, k, v, engine=engine, stats=("logit_var", "logit_mean"))
    _, truth = hw.observe(q.double(), k.double(), v.double(), engine="reference")
    assert truth.logit_mean.abs().min() > 1000
    torch.testing.assert_close(seen.logit_var.double(), truth.logit_var, rtol=5e-3, atol=0.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_only_lse_and_entropy_have_gradients(engine: str) -> None:
    leaves = [x.requires_grad_() for x in three()]
    _, seen = hw.observe(*leaves, engine=engine)
    with_gradient = {name for name in hw.STATISTICS if getattr(seen, name).requires_grad}
    assert with_gradient == {"lse", "entropy"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("stat", hw.STATISTICS)
def test_a_statistic_asked_for_alone_is_the_same(engine: str, stat: str) -> None:
    tensors = three()
    _, every = hw.observe(*tensors, mask=hw.mask.causal(), engine=engine)
    _, alone = hw.observe(*tensors, mask=hw.mask.causal(), engine=engine, stats=(stat,))
    assert list(alone.values) == [stat]
    torch.testing.assert_close(getattr(alone, stat), getattr(every, stat))


def test_a_statistic_not_asked_for_says_how_to_ask() -> None:
    _, seen = hw.observe(*three(), stats=("entropy",))
    with pytest.raises(AttributeError, match=r"max_logit was not observed.*has entropy.*stats="):
        _ = seen.max_logit


def test_one_statistic_may_be_named_by_a_string() -> None:
    _, seen = hw.observe(*three(), stats="entropy")
    assert list(seen.values) == ["entropy"]


def test_an_unknown_statistic_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'entropi'.*lse, max_logit, .*output_norm"):
        hw.observe(*three(), stats=("entropy", "entropi"))


def test_without_a_batch_the_statistics_have_none() -> None:
    q, k, v = three()
    _, seen = hw.observe(q[0], k[0], v[0])
    assert all(getattr(seen, name).shape == (2, 6) for name in hw.STATISTICS)
    _, batched = hw.observe(q[:1], k[:1], v[:1])
    for name, figure in seen.heads().items():
        torch.testing.assert_close(figure, batched.heads()[name])


# Sampled rows


@pytest.mark.parametrize("engine", ENGINES)
@given(recipe=recipes(dtype="float64", longest=30, lengths=("square", "more keys", "more queries")))
def test_sampled_rows_are_rows_of_the_whole(engine: str, recipe: Recipe) -> None:
    call = recipe.call()
    every, wanted = call.observe(engine, sink_keys=2)
    out, seen = call.observe(engine, sink_keys=2, rows=3)
    whole = call.sizes.queries <= 3
    rows = torch.arange(call.sizes.queries) if whole else seen.rows
    assert seen.sampled == (not whole)
    with torch.no_grad():
        allowed = bounds(call, answer(call))
    assert not close(out, every, allowed["out"])
    for name in hw.STATISTICS:
        some = getattr(wanted, name)[..., rows]
        text = close(getattr(seen, name), some, allowed[name][..., rows])
        assert not text, f"{name}: {text} on {recipe}"
    assert torch.equal(seen.sees, wanted.sees[..., rows])


def test_a_sample_has_a_row_of_every_stratum_and_is_the_same_every_time() -> None:
    rows = sample_rows(8, 100, torch.device("cpu"))
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert [int(r * 8 / 100) for r in rows.tolist()] == list(range(8))
    assert torch.equal(rows, sample_rows(8, 100, torch.device("cpu")))
    assert sample_rows(100, 100, torch.device("cpu")) is None
    assert sample_rows(None, 100, torch.device("cpu")) is None


@given(st.integers(1, 300), st.integers(1, 300))
def test_every_sample_holds_as_many_different_rows_as_asked(rows: int, queries: int) -> None:
    found = sample_rows(rows, queries, torch.device("cpu"))
    if rows >= queries:
        assert found is None
    else:
        assert len(set(found.tolist())) == rows
        assert 0 <= int(found.min()) <= int(found.max()) < queries


def test_rows_may_be_named_one_by_one() -> None:
    tensors = three()
    _, every = hw.observe(*tensors, mask=hw.mask.causal())
    _, seen = hw.observe(*tensors, mask=hw.mask.causal(), rows=torch.tensor([4, 1]))
    assert seen.rows.tolist() == [4, 1]
    torch.testing.assert_close(seen.entropy, every.entropy[..., [4, 1]])


def test_sampled_statistics_have_gradients_too() -> None:
    leaves = [x.requires_grad_() for x in three()]
    _, seen = hw.observe(*leaves, mask=hw.mask.causal(), rows=torch.tensor([4, 1]))
    seen.entropy.sum().backward()
    assert (leaves[0].grad[:, :, [4, 1]] != 0).any()
    assert (leaves[0].grad[:, :, [0, 2, 3, 5]] == 0).all()


@pytest.mark.parametrize("rows", [0, -3])
def test_no_rows_are_no_sample(rows: int) -> None:
    with pytest.raises(ValueError, match=f"rows={rows}"):
        hw.observe(*three(), rows=rows)


# Dropout


@pytest.mark.parametrize("engine", ENGINES)
def test_statistics_are_of_the_weights_before_dropout(engine: str) -> None:
    tensors, dropout = three(), hw.Dropout(0.5, seed=3)
    out, dropped = hw.observe(*tensors, dropout=dropout, engine=engine)
    _, plain = hw.observe(*tensors, engine=engine)
    for name in hw.STATISTICS:
        if name != "output_norm":
            torch.testing.assert_close(getattr(dropped, name), getattr(plain, name))
    torch.testing.assert_close(dropped.output_norm, out.norm(dim=-1))
    _, sampled = hw.observe(*tensors, dropout=dropout, engine=engine, rows=torch.tensor([3]))
    torch.testing.assert_close(sampled.output_norm, out.norm(dim=-1)[..., 3:4])


# A figure a head


def test_a_heads_figures_are_over_the_rows_that_see_a_key_and_are_no_padding() -> None:
    q, k, v = three()
    _, seen = hw.observe(q, k, v, mask=hw.mask.causal(-1))  # the first row sees nothing
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    counted = [(b, i) for b in range(2) for i in range(1, 6) if not padding[b, i]]
    figures = seen.heads(padding)
    for name in hw.STATISTICS:
        rows = torch.stack([getattr(seen, name)[b, :, i] for b, i in counted])
        torch.testing.assert_close(figures[f"{name}_mean"], rows.mean(0))
    rows = torch.stack([seen.max_logit[b, :, i] for b, i in counted])
    torch.testing.assert_close(figures["max_logit_max"], rows.amax(0))
    rows = torch.stack([seen.entropy[b, :, i] for b, i in counted])
    torch.testing.assert_close(figures["entropy_min"], rows.amin(0))
    assert all(figure.shape == (2,) for figure in figures.values())


def test_a_sampled_maximum_is_named_a_lower_bound() -> None:
    tensors = three()
    _, seen = hw.observe(*tensors, rows=2)
    _, every = hw.observe(*tensors)
    figures = seen.heads()
    assert "max_logit_max" not in figures
    assert (figures["max_logit_max_lower_bound"] <= every.heads()["max_logit_max"]).all()
    assert (figures["entropy_min_upper_bound"] >= every.heads()["entropy_min"]).all()


def test_padding_is_sampled_with_the_rows() -> None:
    tensors, padding = three(), torch.zeros(2, 6, dtype=torch.bool)
    padding[:, 1] = True
    _, seen = hw.observe(*tensors, rows=torch.tensor([1, 3]))
    torch.testing.assert_close(seen.heads(padding)["entropy_mean"], seen.entropy[..., 1].mean(0))


def test_a_head_whose_rows_all_see_nothing_has_no_figure() -> None:
    _, seen = hw.observe(*three(), mask=hw.mask.lengths(0))
    assert all(figure.isnan().all() for n, figure in seen.heads().items() if n.endswith("_mean"))


def test_an_observation_says_what_it_holds_and_can_be_copied_deeply() -> None:
    _, seen = hw.observe(*three(), stats=("entropy", "lse"), rows=2)
    assert repr(seen) == "Observation(lse, entropy; (B, Hq, N) = (2, 2, 2), 2 sampled rows)"
    twin = copy.deepcopy(seen)
    assert torch.equal(twin.entropy, seen.entropy)
    assert torch.equal(twin.rows, seen.rows)


def test_figures_of_a_head_that_sees_no_key_are_nan() -> None:
    q, k, v = three()
    seen = torch.ones(1, 2, 6, 6, dtype=torch.bool)
    seen[:, 1] = False
    found = hw.observe(q, k, v, mask=hw.mask.dense(seen))[1].heads()
    assert {"entropy_min", "max_logit_max"} <= set(found)
    for name, value in found.items():
        assert value[0].isfinite(), name
        assert value[1].isnan(), name


def test_every_head_of_every_batch_entry_may_begin_at_its_own_key() -> None:
    q, k, v = (torch.randn(2, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    mask = hw.mask.between(torch.tensor([[[0], [1]], [[3], [2]]]), torch.tensor(5))
    p = hw.attention_map(q, k, mask=mask).to_tensor()
    first = torch.tensor([[0, 1], [3, 2]])[..., None, None].expand(2, 2, 5, 1)
    wanted = p.gather(-1, first)[..., 0]
    for engine in ("reference", "streaming", "auto"):
        _, seen = hw.observe(q, k, v, mask=mask, stats=("sink_mass",), engine=engine)
        torch.testing.assert_close(seen.sink_mass, wanted)
