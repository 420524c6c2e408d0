"""Kernels take parts of 16-bit keys as they are, and give float32 results that can be added."""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from headwise.core.options import Options
from headwise.core.partial import Partial, merge
from headwise.core.problem import pose
from headwise.core.row_sums import EVERYTHING, WIDE
from headwise.engines.operators import PARTS

pytest.importorskip("triton", reason="the engine's kernels are Triton's")

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # rows without keys

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CUTS = ((0, 13), (13, 40))
SCORES = {"dot": None, "additive": hw.Additive(torch.linspace(-1, 1, 16, device=DEVICE).half())}


@pytest.mark.parametrize("queries", [40, 5], ids=["forward", "decoding"])
@pytest.mark.parametrize("score", SCORES)
def test_parts_are_as_wide_as_float32_and_as_exact_as_the_whole(score: str, queries: int) -> None:
    from headwise.engines.triton import engine  # noqa: F401 (registers its forward and backward)
    from headwise.engines.triton.host import attention_call  # noqa: F401

    torch.manual_seed(0)
    shapes = ((1, 2, queries, 16), (1, 1, 40, 16), (1, 1, 40, 16))
    q, k, v = (torch.randn(shape, device=DEVICE).half() for shape in shapes)
    given = {"score": SCORES[score], "mask": hw.mask.causal()}
    forward, backward = PARTS["triton"]

    def part(i: int, j: int) -> tuple[object, ...]:
        problem = pose(
            "partial", q, k[:, :, i:j], v[:, :, i:j], Options(**given), first_query=40 - queries,
            first_key=i, offset=0,
        )  # fmt: skip
        return (problem.q, problem.k, problem.v, *problem.terms())

    merged: Partial | None = None
    for cut in CUTS:
        sums = forward(*part(*cut), EVERYTHING | WIDE)
        assert sums.out.dtype == torch.float32
        one = Partial.from_results(sums, None, sums.out.dtype)
        merged = one if merged is None else merge(merged, one)
    assert merged is not None
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    exact = given | {
        "score": None if score == "dot" else hw.Additive(SCORES[score].weight.double())
    }
    truth = hw.attention(*wide, engine="reference", **exact)
    out = merged.finish()
    assert (out.double() - truth).norm() < 1e-3 * truth.norm()

    grad = torch.randn_like(q)
    rows = (out, merged.lse(), merged.maximum, merged.log_total(), merged.entropy())
    wanted = torch.autograd.grad(truth, wide, grad.double())
    found = [torch.zeros_like(x) for x in wanted]
    for i, j in CUTS:
        grad_q, grad_k, grad_v, *_ = backward(*part(i, j), *rows, grad, None, None, False)
        assert grad_q.dtype == grad_k.dtype == grad_v.dtype == torch.float32
        found[0] += grad_q
        found[1][:, :, i:j], found[2][:, :, i:j] = grad_k, grad_v
    for mine, exactly in zip(found, wanted, strict=True):
        assert (mine - exactly).norm() < 2e-3 * exactly.norm()
