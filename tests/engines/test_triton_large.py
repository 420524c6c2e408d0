"""Logits of any size on the GPU engines: values, statistics, maps and gradients stay exact.

The interpreter rounds every product; on a GPU the compiler may fuse it with a sum. Numbers here are
chosen so that neither matters: rows lifted by a bias, or scores that are whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import headwise as hw
from tests.core.test_large_logits import LEVELS, STEPS
from tests.engines.test_hopper import on_hopper
from tests.engines.test_triton import DEVICE, normal

pytest.importorskip("triton", reason="the engine's kernels are written in Triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # as in test_triton

SHARES = ("top_prob", "self_mass", "previous_mass", "sink_mass", "entropy", "distance")
ROUTES = {"forward": 18, "decoding": 6}  # queries
MANY = 20 if DEVICE == "cpu" else 1100  # keys from which few queries are decoding
SINKS = (1e38, 3e38, -3e38, 0.5)  # one per head


@pytest.fixture(params=["here", pytest.param("device", marks=pytest.mark.gpu)])
def place() -> None:
    """Run under the interpreter, and on a GPU if there is one."""


def three(queries: int, keys: int = MANY, heads: int = 2) -> list[Tensor]:
    return [normal(1, heads, queries, 16), normal(1, 1, keys, 16), normal(1, 1, keys, 16)]


def lifted(queries: int, keys: int = MANY) -> Tensor:
    """A bias that lifts the first rows to great heights, and hides a key of the others."""
    bias = torch.zeros(queries, keys, device=DEVICE)
    bias[:, -1] = -3e38
    for row, height in enumerate(LEVELS):
        bias[row] = height
    return bias


def agree(leaves: list[Tensor], **given: object) -> None:
    """Compare out, lse, shares, maps and gradients with the reference."""
    results = []
    learnt = [*leaves, *(x for x in given.values() if isinstance(x, Tensor))]
    for engine in ("triton", "reference"):
        own = [x.detach().requires_grad_() for x in learnt]
        named = dict(zip(given, own[3:], strict=False))
        out, seen = hw.observe(*own[:3], engine=engine, **(given | named))
        value = out.sin().sum() + seen.entropy.sum()
        value = value + seen.lse[seen.lse.abs() < 1e20].sum()
        grads = torch.autograd.grad(value, own, allow_unused=True)
        shares = [getattr(seen, share) for share in SHARES]
        results.append(([out, seen.lse, seen.max_logit, *shares], grads))
    for found, wanted in zip(*(values for values, _ in results), strict=True):
        same(found, wanted)
    for found, wanted in zip(*(grads for _, grads in results), strict=True):
        most = wanted.abs().max().clamp_min(1)  # a large q makes a large gradient of k
        same(found / most, wanted / most)
    maps(leaves, **given)


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.detach(), wanted.detach(), rtol=2e-4, atol=2e-5)


def maps(leaves: list[Tensor], **given: object) -> None:
    """Compare every route of a map with the weights of the reference."""
    q, k, _ = leaves
    eye = torch.eye(k.shape[2], device=DEVICE).expand(*k.shape[:2], -1, -1)
    p = hw.attention(q, k, eye, engine="reference", **given)
    amap = hw.attention_map(q, k, **given)
    best, key = amap.top(k.shape[2])
    same(amap[:, :], p)
    same(amap.pool(max(p.shape[2:]), "max"), p)
    same(torch.zeros_like(best).scatter_add(-1, key.clamp_min(0), best), p)
    same(amap.received(), p.sum(-2))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("route", ROUTES)
def test_lifted_rows_agree_with_the_reference(route: str) -> None:
    queries = ROUTES[route]
    agree(three(queries), bias=lifted(queries))


CASES: dict[str, Callable[[], dict[str, object]]] = {
    "cap": lambda: {"softcap": 3.0},
    "sinks": lambda: {"sinks": torch.tensor([0.5, -1e9], device=DEVICE)},
    "causal": lambda: {"mask": hw.mask.causal(0)},
    "no visible key": lambda: {"mask": hw.mask.causal(-1)},
}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("case", CASES)
def test_lifted_rows_agree_beside_other_options(case: str) -> None:
    agree(three(18), bias=lifted(18), **CASES[case]())


@pytest.mark.usefixtures("place")
def test_one_key_has_all_the_weight() -> None:
    agree(three(18, 1), bias=lifted(18, 1))


@pytest.mark.usefixtures("place")
def test_biases_that_float32_holds_are_used_to_the_last_digit() -> None:
    q, k, v = three(18, 7)
    bias = torch.tensor([1e7, -1e7] * 9)[:, None] + STEPS
    agree([torch.zeros_like(q), torch.zeros_like(k), v], bias=bias.to(DEVICE))


def whole(sizes: list[float], queries: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Scores that are whole multiples of a row's size; some keys share the largest."""
    keys = MANY if queries < 16 else 20
    q, k = torch.zeros(1, 2, queries, 16), torch.zeros(1, 1, keys, 16)
    q[:, 0, :, 0] = torch.tensor(sizes * queries)[:queries]
    q[:, 1] = -q[:, 0]
    k[..., 0] = torch.arange(keys) % 7 - 3
    return [q.to(DEVICE, dtype), k.to(DEVICE, dtype), normal(1, 1, keys, 16).to(dtype)]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("route", ROUTES)
def test_plain_scores_of_any_size_agree(route: str) -> None:
    agree(whole([2.0**10, 1e6, 1e8, 2.0**60], ROUTES[route]))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("scale", [0.37, -300.0])
def test_scales_of_any_size_agree(scale: float) -> None:
    agree(whole([1e5, 2.0**20], 18), score=hw.Dot(scale))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("route", ROUTES)
def test_very_large_sinks_have_the_gradients_of_the_reference(route: str) -> None:
    agree(three(ROUTES[route], heads=4), sinks=torch.tensor(SINKS, device=DEVICE))


@pytest.mark.usefixtures("place")
def test_a_sink_and_a_bias_at_both_ends_of_float32_give_no_nan() -> None:
    leaves = [x.requires_grad_() for x in three(18, heads=4)]
    sinks = torch.tensor(SINKS, device=DEVICE, requires_grad=True)
    out, seen = hw.observe(*leaves, bias=lifted(18), sinks=sinks, engine="triton")
    grads = torch.autograd.grad(out.sum() + seen.entropy.sum(), [*leaves, sinks])
    assert all(x.isfinite().all() for x in (out, seen.entropy, seen.top_prob, *grads))


@pytest.mark.usefixtures("place")
def test_additive_scores_of_any_size_agree() -> None:
    q, k, v = (x[:, :1].contiguous() for x in three(18, 20))
    weight = torch.zeros(16, device=DEVICE)
    weight[:2] = 2.0**22
    q[..., :2], k[..., :2] = 30.0, 30.0  # tanh is 1
    k[:, :, 3, :2] = -90.0  # one key but for which all logits of a row are alike
    _, seen = hw.observe(q, k, v, score=hw.Additive(weight), engine="triton")
    leaf = q.clone().requires_grad_()
    out = hw.attention(leaf, k, v, score=hw.Additive(weight), engine="triton")
    out.sum().backward()
    torch.testing.assert_close(seen.top_prob, torch.full_like(seen.top_prob, 1 / 19))
    torch.testing.assert_close(seen.lse, torch.full_like(seen.lse, 2.0**23))
    assert leaf.grad.isfinite().all()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("route", "score"), [("forward", "dot"), ("decoding", "dot"), ("decoding", "additive")]
)
def test_statistics_without_values_are_those_with_values(route: str, score: str) -> None:
    q, k, v = three(ROUTES[route])
    given = {} if score == "dot" else {"score": hw.Additive(normal(16))}
    leaves = [q.requires_grad_(), k.requires_grad_()]
    results = []
    for values in (v, v[..., :0]):
        out, seen = hw.observe(q, k, values, mask=hw.mask.causal(), engine="triton", **given)
        assert out.shape == (*q.shape[:3], values.shape[-1])
        grads = torch.autograd.grad((seen.entropy + 2 * seen.lse).sum(), leaves)
        results.append([x for name, x in seen.values.items() if name != "output_norm"] + [*grads])
    assert (seen.output_norm == 0).all()
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_plain_scores_of_any_size_agree_on_hopper(dtype: torch.dtype) -> None:
    sizes = [2.0**5, 2.0**15] if dtype == torch.float16 else [2.0**5, 2.0**20, 2.0**24]
    q, k, v = whole(sizes, 200, dtype)
    out, seen = hw.observe(q, k, v, mask=hw.mask.causal(0), engine="hopper")
    wide = [x.double() for x in (q, k, v)]
    wanted, truth = hw.observe(*wide, mask=hw.mask.causal(0), engine="reference")
    torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=1e-2)
    for name in ("lse", "max_logit", *SHARES):
        found = getattr(seen, name).double()
        torch.testing.assert_close(found, getattr(truth, name), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.gpu
@on_hopper
def test_statistics_without_values_go_to_hopper() -> None:
    q, k = (torch.randn(1, 2, 300, 64, device="cuda").bfloat16() for _ in range(2))
    assert hw.explain(q, k, k[..., :0], observed=True).engine == "hopper"
    _, seen = hw.observe(q, k, k[..., :0])
    _, wanted = hw.observe(q.double(), k.double(), k[..., :0].double(), engine="reference")
    for name in ("lse", *SHARES):
        found = getattr(seen, name).double()
        torch.testing.assert_close(found, getattr(wanted, name), rtol=1e-3, atol=1e-3, msg=name)
