"""The GPU engine: every kernel on Triton's interpreter here, and on the device under `-m gpu`.

The generated problems are those of the other engines; what is special to kernels comes after.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, seed, settings
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from tests.engines import test_agreement as agreement
from tests.problems import KINDS, Recipe, every_pair, recipes

pytest.importorskip("triton", reason="the engine's kernels are written in Triton")

from headwise.engines.triton import cards, shapes
from headwise.engines.triton.launch import stride_unit

# NumPy, which Triton's interpreter computes with, warns where 32-bit hashes wrap around and where
# an exponential of something far away becomes nothing, as both are meant to.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KERNELS = {  # what the kernels do
    "score": tuple(kind for kind in KINDS["score"] if kind != "additive"),
    "dtype": tuple(kind for kind in KINDS["dtype"] if kind != "float64"),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def observing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine returns statistics, so the comparison asks for them and for their gradients."""
    monkeypatch.setattr(agreement, "OBSERVING", (*agreement.OBSERVING, "triton"))


# The interpreter takes seconds for a problem, so `make test` leaves two of three to
# `make test-all`; a GPU takes them all.
pairs = [
    pytest.param(recipe, id=str(recipe.seed), marks=pytest.mark.slow if recipe.seed % 3 else ())
    for recipe in every_pair(**KERNELS)
]


@pytest.mark.parametrize("recipe", pairs)
def test_every_pair_of_options_agrees_with_the_reference(recipe: Recipe) -> None:
    agreement.assert_agrees(recipe, "triton", DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [pytest.param(*pair.values, id=pair.id) for pair in pairs])
def test_every_pair_of_options_agrees_on_the_device(recipe: Recipe) -> None:
    agreement.assert_agrees(recipe, "triton", DEVICE)


@pytest.mark.slow
@settings(max_examples=20)
@given(recipe=recipes(**KERNELS))
def test_any_problem_agrees_with_the_reference(recipe: Recipe) -> None:
    agreement.assert_agrees(recipe, "triton", DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("share", range(5))  # each compiles kernels of its own, beside the others
def test_any_problem_agrees_with_the_reference_on_the_device(share: int) -> None:
    @seed(share)
    @settings(max_examples=4)
    @given(recipe=recipes(**KERNELS))
    def agrees(recipe: Recipe) -> None:
        agreement.assert_agrees(recipe, "triton", DEVICE)

    agrees()


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


MASKS = {
    "none": None,
    "causal": hw.mask.causal(),
    "window": hw.mask.causal() & hw.mask.window(40),
    "documents": hw.mask.causal() & hw.mask.documents(torch.arange(130) // 50),
    "sinks and window": hw.mask.causal() & (hw.mask.window(20) | hw.mask.prefix(4)),
    "padding": hw.mask.lengths([130, 0]),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_rows_and_keys_of_several_blocks_agree(mask: hw.mask.Mask | None) -> None:
    q, k, v = normal(2, 2, 70, 16), normal(2, 1, 130, 16), normal(2, 1, 130, 24)
    check(q, k, v, 1e-5, mask=mask)


def check(q: Tensor, k: Tensor, v: Tensor, tolerance: float, **options: object) -> None:
    """Output, statistics and gradients against the reference in float64."""
    found = everything("triton", q, k, v, **options)
    compare(found, everything("reference", *(x.double() for x in (q, k, v)), **options), tolerance)


def compare(found: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float) -> None:
    """Each by its norm, but for infinities, which must be the same."""
    for name, x in found.items():
        y = truth[name]
        assert torch.equal(x.isinf(), y.isinf()), name
        x, y = x.masked_fill(x.isinf(), 0).double(), y.masked_fill(y.isinf(), 0).double()
        assert float((x - y).norm()) <= tolerance * float(y.norm()) + 1e-12, name


def everything(
    engine: str, q: Tensor, k: Tensor, v: Tensor, **options: object
) -> dict[str, Tensor]:
    """Output, statistics, and gradients through the output, lse and entropy."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, seen = hw.observe(*leaves, engine=engine, **options)
    lse = seen.lse.masked_fill(seen.lse == -torch.inf, 0)
    loss = out.sin().sum() + lse.sin().sum() + seen.entropy.sin().sum()
    grads = torch.autograd.grad(loss, leaves)
    values = {"out": out, **seen.values} | dict(zip("qkv", grads, strict=True))
    return {name: x.detach() for name, x in values.items()}


@pytest.mark.parametrize("kind", ["lengths", "between", "dense"])
def test_a_key_that_no_row_sees_may_hold_anything(kind: str) -> None:
    q, k, v = normal(1, 2, 40, 16), normal(1, 2, 100, 16), normal(1, 2, 100, 16)
    unseen = torch.zeros(100, dtype=torch.bool, device=DEVICE)
    unseen[70:] = True
    if kind == "between":  # a hole inside one block, between the rows' intervals
        unseen[34:37] = True
        even = torch.arange(40, device=DEVICE) % 2 == 0
        first, last = torch.where(even, 0, 37), torch.where(even, 34, 70)
        mask = hw.mask.between(first, last)
    elif kind == "lengths":
        mask = hw.mask.lengths(70)
    else:
        mask = hw.mask.dense(~unseen)
    finite = [x.clone().requires_grad_() for x in (q, k, v)]
    poisoned = [x.clone() for x in (q, k, v)]
    for x in poisoned[1:]:
        x[:, :, unseen] = torch.nan
    poisoned = [x.requires_grad_() for x in poisoned]
    grads = []
    for leaves in (finite, poisoned):
        out = hw.attention(*leaves, mask=mask, engine="triton")
        grads.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    for clean, dirty in zip(*grads, strict=True):
        assert torch.equal(clean, dirty)


def test_the_same_call_gives_the_same_bits() -> None:
    q, k, v = normal(1, 4, 70, 16), normal(1, 2, 70, 16), normal(1, 2, 70, 16)
    first, second = (everything("triton", q, k, v, mask=hw.mask.causal()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("score", ["dot", "additive"])
def test_gradients_of_the_entropy_may_lie_in_any_order(score: str) -> None:
    # 128 rows fill whole blocks, which are then copied as they lie
    q, k, v = (normal(1, 2, 128, 8) for _ in range(3))
    share, weight = normal(1, 128, 2), normal(8)
    grads = []
    for engine, wide in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [x.to(wide).requires_grad_() for x in (q, k)]
        options = {"score": hw.Additive(weight.to(wide))} if score == "additive" else {}
        _, seen = hw.observe(*leaves, v.to(wide), engine=engine, **options)
        loss = (seen.entropy.transpose(1, 2) * share).sum()
        grads.append(torch.autograd.grad(loss, leaves))
    for x, y in zip(*grads, strict=True):
        assert (x - y).norm() <= 1e-4 * y.norm()


@pytest.mark.parametrize("score", ["dot", "additive"])
def test_a_row_that_sees_nothing_and_has_no_sink_takes_no_gradient(score: str) -> None:
    leaves = [normal(1, 2, 5, 8).requires_grad_() for _ in range(3)]
    sinks = torch.tensor([-torch.inf, 0.5], device=DEVICE, requires_grad=True)
    options = {"score": hw.Additive(normal(8))} if score == "additive" else {}
    out, seen = hw.observe(
        *leaves, sinks=sinks, mask=hw.mask.causal(-2), engine="triton", **options
    )
    (out.sum() + seen.entropy.sum()).backward()
    assert all(x.grad.isfinite().all() for x in (*leaves, sinks))
    assert (leaves[0].grad[:, :, :2] == 0).all()


@pytest.mark.parametrize("place", ["here", pytest.param("device", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("queries", [1, 40])  # decoding's kernels, and the forward's
def test_a_sink_that_rules_is_lse_to_the_bit(queries: int, place: str) -> None:
    q, k, v = normal(1, 4, queries, 16), normal(1, 4, 70, 16), normal(1, 4, 70, 16)
    sinks = torch.tensor([93.7, 228.447, 178.13, 1e4], device=DEVICE)
    _, seen = hw.observe(q, k, v, sinks=sinks, stats=("lse", "entropy"), engine="triton")
    amap = hw.attention_map(q, k, sinks=sinks)
    assert (seen.lse == sinks[:, None]).all()
    assert (amap.lse == sinks[:, None]).all()


@pytest.mark.parametrize("engine", ["streaming", "triton"])
@pytest.mark.parametrize("queries", [2, 40])  # decoding's kernels, and the forward's
@pytest.mark.parametrize("sink", [1e30, 1e38])
def test_a_sink_however_far_above_leaves_no_entropy(sink: float, queries: int, engine: str) -> None:
    leaves = [normal(1, 1, n, 16).requires_grad_() for n in (queries, 40, 40)]
    sinks = torch.tensor([sink], device=DEVICE, requires_grad=True)
    _, seen = hw.observe(*leaves, sinks=sinks, engine=engine)
    seen.entropy.sum().backward()
    assert (seen.entropy == 0).all()
    assert all((x.grad == 0).all() for x in (*leaves, sinks))


@pytest.mark.parametrize("engine", ["reference", "streaming", "triton"])
@pytest.mark.parametrize("queries", [2, 40])
def test_an_endless_sink_takes_all_the_weight(queries: int, engine: str) -> None:
    q, k = normal(1, 1, queries, 16), normal(1, 1, 40, 16)
    sinks = torch.tensor([torch.inf], device=DEVICE)
    out, seen = hw.observe(q, k, k, sinks=sinks, engine=engine)
    assert (seen.lse == torch.inf).all()
    for x in (out, seen.entropy, seen.top_prob, seen.sink_mass, seen.distance):
        assert (x == 0).all()


@pytest.mark.parametrize("engine", ["streaming", "triton"])
def test_one_query_may_be_sampled_more_than_once(engine: str) -> None:
    q, k, v = normal(2, 1, 1, 16), normal(2, 1, 5, 16), normal(2, 1, 5, 16)
    options = {"mask": hw.mask.lengths([3, 5]), "rows": torch.tensor([0, 0, 0], device=DEVICE)}
    _, found = hw.observe(q, k, v, engine=engine, **options)
    _, wanted = hw.observe(q.double(), k.double(), v.double(), engine="reference", **options)
    for name, x in found.values.items():
        torch.testing.assert_close(x.double(), getattr(wanted, name), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("queries", [2, 40])
def test_a_variance_that_is_too_large_is_infinite(queries: int) -> None:
    q = torch.full((1, 1, queries, 1), 1e10, device=DEVICE)
    k = torch.tensor([1e10, -1e10] * 4, device=DEVICE).view(1, 1, 8, 1)
    _, seen = hw.observe(q, k, k, engine="triton")
    assert (seen.logit_var == torch.inf).all()


@pytest.mark.parametrize("engine", ["streaming", "triton"])
def test_no_heads_of_an_additive_score_give_nothing(engine: str) -> None:
    q, k = normal(2, 0, 3, 8), normal(2, 1, 4, 8)
    out, seen = hw.observe(q, k, k, score=hw.Additive(normal(8)), engine=engine)
    assert out.shape == (2, 0, 3, 8)
    assert seen.entropy.shape == seen.self_mass.shape == (2, 0, 3)


def test_more_batch_entries_than_a_grid_holds_are_refused() -> None:
    q = torch.zeros(65536, 1, 1, 1, device=DEVICE)
    with pytest.raises(ValueError, match="a GPU's grid has room for 65535"):
        hw.attention(q, q, q, engine="triton")
    assert hw.attention(q, q, q, softcap=1.0).shape == q.shape


CALLS = {  # each by kernels of its own
    "rows": (40, 40, None),
    "masked rows": (40, 40, hw.mask.causal()),
    "few rows, many keys": (2, 40, None),
    "additive": (4, 40, None),
}


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("call", CALLS)
def test_a_query_that_is_no_number_is_told_from_one_that_sees_nothing(
    call: str, poison: float
) -> None:
    queries, keys, mask = CALLS[call]
    q, k, v = normal(1, 1, queries, 16), normal(1, 1, keys, 16), normal(1, 1, keys, 16)
    score = hw.Additive(normal(16)) if call == "additive" else None
    q[0, 0, 1, 3] = poison
    names = ("lse", "max_logit", "entropy", "top_prob", "self_mass", "distance", "logit_mean")
    out, seen = hw.observe(q, k, v, score=score, mask=mask, stats=names, engine="triton")
    wide = [x.double() for x in (q, k, v)]
    score = None if score is None else hw.Additive(score.weight.double())
    right, saw = hw.observe(*wide, score=score, mask=mask, stats=names, engine="reference")
    assert torch.equal(out.isnan(), right.isnan())
    for name in names:
        assert torch.equal(seen.values[name].isfinite(), saw.values[name].isfinite()), name
    assert torch.equal(seen.lse.isnan(), saw.lse.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_lowest_number_of_a_dtype_hides_a_key_beside_others_and_nothing_alone(
    dtype: torch.dtype,
) -> None:
    # the masks of transformers, whose rows of padding are full of it
    q, k, v = (normal(1, 2, 6, 16) for _ in range(3))
    bias = torch.zeros(6, 6, device=DEVICE, dtype=dtype)
    bias[:, 4:], bias[0] = torch.finfo(dtype).min, torch.finfo(dtype).min
    names = ("lse", "top_prob", "self_mass", "distance")
    results = []
    for engine, wide in (
        ("triton", torch.float32),
        ("streaming", torch.float32),
        ("reference", torch.float64),
    ):
        leaves = [x.to(wide).requires_grad_() for x in (q, k, v)]
        out, seen = hw.observe(*leaves, bias=bias, engine=engine)
        grads = torch.autograd.grad(out[:, :, 1:].sum() + seen.entropy[:, :, 1:].sum(), leaves)
        rows = [seen.values[name][:, :, 1:] for name in names]
        results.append([out, seen.entropy, *rows, *grads])
    for found in results[:2]:
        for x, y in zip(found, results[2], strict=True):
            torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-4)


def test_strides_that_a_kernel_would_multiply_beyond_32_bits_come_whole() -> None:
    assert stride_unit([64, 4096], 16) == 16
    assert stride_unit([64, 4100], 16) == 1
    assert stride_unit([64, 1 << 31], 16) == 1


def test_operators_pass_pytorchs_own_check() -> None:
    q, k, v = (normal(1, 2, 5, 16).requires_grad_() for _ in range(3))
    position = torch.arange(5, dtype=torch.int32, device=DEVICE)[None]
    none = [None] * 5
    arguments = (q, k, v, None, None, None, position, *none, 0.25, 0.0, 0.0, 0, None, 7)
    torch.library.opcheck(torch.ops.headwise.triton.default, arguments)


def test_compiled_calls_agree_for_every_length() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attention(q, k, v, mask=hw.mask.causal(), engine="triton")

    for n in (7, 9):
        q, k, v = (normal(1, 2, n, 16).requires_grad_() for _ in range(3))
        assert torch.allclose(
            compiled(q, k, v), hw.attention(q, k, v, mask=hw.mask.causal()), atol=1e-5
        )


@pytest.mark.parametrize(
    "mask",
    [
        None,
        hw.mask.causal(),
        hw.mask.causal() & hw.mask.window(3),
        hw.mask.causal() & hw.mask.documents(torch.arange(12) // 5),
        hw.mask.lengths([7, 0]),
    ],
    ids=str,
)
def test_operations_are_counted_as_the_streaming_engine_counts_them(
    mask: hw.mask.Mask | None,
) -> None:
    q = normal(2, 1, 12, 16)
    counts = []
    for engine in ("triton", "streaming"):
        with FlopCounterMode(display=False) as counter:
            hw.attention(q, q, q, mask=mask, engine=engine)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_second_derivative_is_refused_in_words() -> None:
    q = normal(1, 1, 4, 16).requires_grad_()
    out = hw.attention(q, q, q, engine="triton")
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="triton engine has no second derivative"):
        torch.autograd.grad(grad.sum(), q)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"width": 257}, "257"),
        ({"width": 129, "score": hw.Additive(torch.ones(129))}, "heads of 1 to 128"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_with_a_reason(
    change: dict[str, object], reason: str
) -> None:
    q = torch.zeros(1, 1, 4, change.pop("width", 16), dtype=change.pop("dtype", torch.float32))
    q = q.to(DEVICE)
    options = {name: hw.Additive(torch.ones(q.shape[-1], device=DEVICE)) for name in change}
    with pytest.raises(ValueError, match=reason):
        hw.attention(q, q, q, engine="triton", **options)
    assert hw.attention(q, q, q, **options).shape == q.shape


# Every combination compiles kernels of its own, which takes seconds: every mask at the widths that
# have shapes of their own, the hardest and none at the others.
LARGE = [
    pytest.param(dtype, width, mask, id=f"{str(dtype)[6:]}-{width}-{mask}")
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for width in (16, 20, 64, 80, 128, 256)
    for mask in (
        MASKS if dtype == torch.bfloat16 and width in (64, 128) else ("none", "sinks and window")
    )
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "width", "mask"), LARGE)
def test_large_problems_agree(dtype: torch.dtype, width: int, mask: str) -> None:
    n, m = 1000, 1337
    made = {
        **MASKS,
        "window": hw.mask.causal() & hw.mask.window(300),
        "documents": hw.mask.causal() & hw.mask.documents(torch.arange(m) // 400),
        "sinks and window": hw.mask.causal() & (hw.mask.window(200) | hw.mask.prefix(4)),
        "padding": hw.mask.lengths([m, 0]),
    }[mask]
    q, k, v = (normal(2, h, length, width, dtype=dtype) for h, length in ((4, n), (2, m), (2, m)))
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}[dtype]
    check(q, k, v, tolerance, mask=made)


@pytest.mark.gpu
def test_calls_can_be_captured_in_a_graph() -> None:
    q, k, v = (normal(1, 4, 500, 64, dtype=torch.bfloat16) for _ in range(3))

    def call() -> Tensor:
        return hw.attention(q, k, v, mask=hw.mask.causal(), engine="triton")

    expected = call()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_a_new_length_compiles_no_other_forward() -> None:
    from headwise.engines.triton.forward import forward

    def call(n: int) -> None:
        q = normal(1, 2, n, 64, dtype=torch.bfloat16)
        hw.attention(q, q, q, mask=hw.mask.causal(), engine="triton")

    call(1)  # whose mask hides nothing, and is left out
    call(512)
    known = sum(len(cache[0]) for cache in forward.device_caches.values())
    for n in (16, 100, 513, 777):
        call(n)
    assert sum(len(cache[0]) for cache in forward.device_caches.values()) == known


def test_an_older_gpu_is_refused_with_its_name_and_another_engine_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = cards.Card("Tesla T4", 7, 5, 65536)
    monkeypatch.setattr(cards, "_INTERPRETED", old)
    monkeypatch.setattr(cards, "CARDS", {0: old})
    q = normal(1, 1, 4, 16)
    with pytest.raises(
        ValueError, match="needs an Ampere GPU or a later one, and this is Tesla T4"
    ):
        hw.attention(q, q, q, engine="triton")
    plan = hw.explain(q, q, q, softcap=5.0)
    assert plan.engine == "streaming"
    assert "Tesla T4" in str(plan.reasons["triton"])


def test_tuned_shapes_are_kept_for_each_gpu_and_preferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shapes, "_CHOSEN", {})
    one, other = cards.Card("one", 8, 0, 166912), cards.Card("other", 8, 6, 101376)
    best = shapes.Shape(64, 16, 2, 5)
    file = shapes.remember(one, {("forward", 64, 2): best})
    assert file.is_relative_to(tmp_path)
    shapes.remember(other, {("keys", 64, 2): best})
    assert shapes.shape("forward", 64, 2, one) == best
    assert shapes.shape("forward", 64, 2, other) == shapes.default("forward", 64, 2, other) != best
    assert shapes.shape("keys", 64, 2, other) == best


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"one": {"forward 64 2": {"rows": 64}}}', "\x00"]
)
def test_a_file_of_shapes_that_nobody_can_read_is_as_good_as_none(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shapes, "_CHOSEN", {})
    one, best = cards.Card("one", 8, 0, 166912), shapes.Shape(64, 16, 2, 5)
    shapes.remember(one, {("keys", 64, 2): best})
    shapes.tuned_file().write_text(text)
    assert shapes.shape("keys", 64, 2, one) == shapes.default("keys", 64, 2, one)
    shapes.remember(one, {("keys", 64, 2): best})
    shapes.remember(one, {("keys", 128, 2): best})
    assert shapes.shape("keys", 64, 2, one) == shapes.shape("keys", 128, 2, one) == best


@pytest.mark.gpu
def test_tuning_tries_the_usual_shape_and_keeps_what_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwise.engines.triton import tuning

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shapes, "_CHOSEN", {})
    device = torch.device("cuda", 0)
    found = list(tuning.tune(device, widths=(64,), tokens=2048))
    assert [x.kernel for x in found] == list(shapes.KERNELS)
    assert all(0 < x.best <= x.usual < 1000 for x in found)  # milliseconds, both measured
    tuning.keep(device, found)
    chosen = [shapes.shape(x.kernel, 64, 2, cards.card(device)) for x in found]
    assert chosen == [x.chosen for x in found]


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [166912, 101376], ids=["A100", "RTX"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpus_without_a_copy_engine_compute_addresses(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, shared: int
) -> None:
    # As they would: their shapes and their loads, on whatever GPU is here.
    monkeypatch.setattr(cards, "CARDS", {0: cards.Card("older", 8, 0, shared)})
    q, k, v = (normal(1, heads, 300, width, dtype=dtype) for heads in (2, 1, 1))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    check(q, k, v, tolerance, mask=hw.mask.causal() & hw.mask.window(100))


@pytest.mark.gpu
def test_calls_on_several_streams_do_not_disturb_each_other() -> None:
    tensors = [[normal(1, 4, 700, 64, dtype=torch.bfloat16) for _ in range(3)] for _ in range(4)]
    mask = hw.mask.causal() & hw.mask.documents(torch.arange(700, device=DEVICE) // 300)
    expected = [hw.observe(*x, mask=mask, engine="triton") for x in tensors]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in tensors]
    found = []
    for _ in range(5):
        found = []
        for stream, x in zip(streams, tensors, strict=True):
            with torch.cuda.stream(stream):
                found.append(hw.observe(*x, mask=mask, engine="triton"))
    torch.cuda.synchronize()
    for (out, seen), (same, saw) in zip(found, expected, strict=True):
        assert torch.equal(out, same)
        assert all(torch.equal(seen.values[name], saw.values[name]) for name in saw.values)


@pytest.mark.gpu
def test_a_training_step_compiles_into_generated_code() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, seen = hw.observe(q, k, v, mask=hw.mask.causal(), softcap=20.0, engine="triton")
        return out.float().square().sum() + seen.entropy.sum()

    compiled = torch.compile(loss, fullgraph=True)
    for n in (256, 300):
        leaves = [normal(1, 2, n, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        found = torch.autograd.grad(compiled(*leaves), leaves)
        wanted = torch.autograd.grad(loss(*leaves), leaves)
        for a, b in zip(found, wanted, strict=True):
            assert torch.allclose(a.float(), b.float(), rtol=2e-2, atol=1e-2)


def test_kernels_that_the_interpreter_runs_compile_too() -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engines.compiled_triton"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    names = {
        *("forward", "single", "fill_rows", "grad_queries", "grad_keys", "grad_bias"),
        *("grad_distance", "split_step", "merge_step", "cells", "log_sums", "largest"),
        *("prepare", "additive_forward", "additive_grad_queries", "additive_grad_keys"),
    }
    assert names <= set(json.loads(told.stdout))
