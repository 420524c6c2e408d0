"""Numbers that steering adds to keys, alone and beside a bias of distances, in Triton's kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.bias import Bias, Sum
from tests.engines.test_triton import DEVICE, check, normal
from tests.thinned import thinned

pytest.importorskip("triton", reason="the engine's kernels are written in Triton")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # as in test_triton
H, N, M = 4, 40, 56


@pytest.fixture(params=["here", pytest.param("device", marks=pytest.mark.gpu)])
def place() -> None:
    """Run under the interpreter, and on a GPU if there is one."""


def logs() -> Tensor:
    """Factors of keys, some of which are hidden."""
    found = normal(1, H, 1, M).clone()
    found[:, 1, :, 3:9] = -torch.inf
    return found


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("distances", thinned(["none", "alibi", "buckets"]))
def test_kernels_add_them_as_the_reference_does(distances: str) -> None:
    added = logs()
    bias: Bias = added
    if distances == "alibi":
        bias = Sum(hw.ALiBi(normal(H).abs()), added)
    elif distances == "buckets":
        bias = Sum(hw.RelativeBuckets(normal(8, H), max_distance=20), added)
    three = normal(1, H, N, 16), normal(1, 2, M, 16), normal(1, 2, M, 16)
    check(*three, 1e-5, bias=bias, mask=hw.mask.causal())


@pytest.mark.usefixtures("place")
def test_all_parts_of_a_sum_have_gradients() -> None:
    three = normal(1, H, N, 16), normal(1, 2, M, 16), normal(1, 2, M, 16)
    table, added = normal(8, H), normal(1, H, 1, M)
    found = []
    for engine in ("triton", "streaming", "reference"):
        leaves = [x.detach().clone().requires_grad_() for x in (table, added)]
        bias = Sum(hw.RelativeBuckets(leaves[0], max_distance=20), leaves[1])
        out = hw.attention(*three, bias=bias, mask=hw.mask.causal(), engine=engine)
        found.append(torch.autograd.grad(out.sin().sum(), leaves))
    for grads in found[:2]:
        for mine, theirs in zip(grads, found[2], strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert three[0].device.type == DEVICE
