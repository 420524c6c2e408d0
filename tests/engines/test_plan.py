"""The plan takes the best engine that serves a call exactly, and says why not the others."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import headwise as hw
from headwise.engines import sdpa
from headwise.engines.plan import NAMES, engines
from tests.problems import Recipe, recipes


def three(queries: int = 6, keys: int = 6, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, 4, queries, width), *torch.randn(2, 1, 4, keys, width).unbind(0)


def chosen(*tensors: Tensor, **options: object) -> str:
    return hw.explain(*tensors, **options).engine


def test_plain_attention_on_a_cpu_goes_to_pytorchs_kernels() -> None:
    assert chosen(*three()) == "sdpa"
    assert chosen(*three(), mask=hw.mask.causal()) == "sdpa"
    assert chosen(*three(), mask=hw.mask.lengths([4])) == "sdpa"
    assert chosen(*three(), bias=torch.zeros(6, 6)) == "sdpa"
    assert chosen(*three(), score=hw.Cosine(3.0)) == "sdpa"


def wide_values() -> tuple[Tensor, Tensor, Tensor]:
    q, k, _ = three()
    return q, k, torch.randn(1, 4, 6, 12)


REFUSED = {  # what PyTorch's kernels can't do exactly, and a word of their reason
    "softcap": (three, {"softcap": 30.0}, "softcap"),
    "sinks": (three, {"sinks": torch.zeros(4)}, "sinks"),
    "dropout": (three, {"dropout": 0.1}, "dropout"),
    "negative scale": (three, {"score": hw.Dot(-0.5)}, "not positive"),
    "no scale": (three, {"score": hw.Cosine(0.0)}, "not positive"),
    "additive": (three, {"score": hw.Additive(torch.ones(8))}, "dot scores"),
    "alibi": (three, {"bias": hw.ALiBi(4)}, "ALiBi"),
    "buckets": (three, {"bias": hw.RelativeBuckets(torch.zeros(8, 4))}, "RelativeBuckets"),
    "bias": (three, {"bias": torch.zeros(6, 6, requires_grad=True)}, "gradient"),
    "values": (wide_values, {}, "wide"),
    "statistics": (three, {"observed": True}, "statistics"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_pytorchs_kernels_refuse_what_they_cannot_do_exactly(case: str) -> None:
    make, options, word = REFUSED[case]
    plan = hw.explain(*make(), **options)
    assert plan.engine == "streaming"
    assert word in plan.reasons["sdpa"]


@pytest.mark.parametrize("case", [name for name in REFUSED if name != "statistics"])
def test_a_forced_engine_that_cannot_serve_says_so(case: str) -> None:
    make, options, word = REFUSED[case]
    for call in (hw.attention, hw.explain):
        with pytest.raises(ValueError, match=rf"(?s)engine='sdpa' can't serve.*{word}.*'auto'"):
            call(*make(), engine="sdpa", **options)


def test_pytorchs_kernels_cannot_observe() -> None:
    with pytest.raises(ValueError, match=r"engine='sdpa' can't serve.*statistics"):
        hw.observe(*three(), engine="sdpa")


def test_a_bias_may_go_to_pytorchs_kernels_without_gradients() -> None:
    bias = torch.zeros(6, 6, requires_grad=True)
    with torch.no_grad():
        assert chosen(*three(), bias=bias) == "sdpa"


def test_long_masks_are_not_materialised() -> None:
    q = torch.empty(1, 1, 8192, 8)
    assert chosen(q, q, q, mask=hw.mask.causal()) == "sdpa"
    assert chosen(q, q, q, mask=hw.mask.causal() & hw.mask.window(64)) == "streaming"
    assert chosen(q, q, q, mask=hw.mask.lengths(9)) == "sdpa"  # all rows are alike


@pytest.mark.parametrize("engine", ["reference", "streaming"])
def test_a_forced_engine_serves(engine: str) -> None:
    plan = hw.explain(*three(), engine=engine)
    assert plan.engine == engine
    assert str(plan).count("→") == 1
    assert f"→ {engine}" in str(plan)


def test_an_unknown_engine_is_an_error_that_lists_the_known_ones() -> None:
    for call in (hw.attention, hw.observe, hw.explain):
        with pytest.raises(ValueError, match=r"engine='flash' is unknown.*'auto'.*'reference'"):
            call(*three(), engine="flash")


def test_a_plan_says_that_an_engine_was_requested() -> None:
    said = str(hw.explain(*three(), engine="reference")).splitlines()
    assert "  sdpa       could, but reference was requested" in said


def test_a_plan_prints_every_engine_with_its_reason() -> None:
    lines = str(hw.explain(*three(), softcap=20.0)).splitlines()
    assert [line.split()[-3 if "→" in line else 0] for line in lines if "→" not in line] == [
        name for name in NAMES if name != "streaming"
    ]
    assert "→ streaming  chosen" in lines
    assert "  reference  could, but streaming is preferred" in lines
    assert any("softcap" in line for line in lines)


@given(recipes(longest=20))
def test_the_plan_never_promises_what_attention_then_refuses(recipe: Recipe) -> None:
    call = recipe.call()
    plan = call.explain()
    assert set(plan.reasons) == set(NAMES)
    assert plan.reasons[plan.engine] is None
    call.attention("auto")
    for name, reason in plan.reasons.items():
        if reason is None:
            call.attention(name)
        else:
            with pytest.raises(ValueError, match="can't serve"):
                call.attention(name)


def test_every_engine_is_listed_with_why_it_cannot_run_here() -> None:
    found = engines()
    assert list(found) == list(NAMES)
    assert found["reference"] is None
    assert found["streaming"] is None
    assert found["sdpa"] is None


def test_a_plan_can_be_copied_deeply() -> None:
    plan = hw.explain(*three())
    assert copy.deepcopy(plan) == plan


@pytest.mark.parametrize(
    ("learns", "masked", "queries", "cudnn"),
    [
        (False, True, 1, True),
        (True, False, 128, True),
        (True, True, 128, False),
        (True, False, 127, False),
    ],
)
def test_cudnn_is_used_only_where_its_gradients_are_right(
    learns: bool, masked: bool, queries: int, cudnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    order = torch._C._get_sdp_priority_order()
    taken = torch.nn.functional.scaled_dot_product_attention

    def listens(*given: Tensor, **options: object) -> Tensor:
        now = torch._C._get_sdp_priority_order()
        asked.append(torch._C._get_cudnn_sdp_enabled())
        assert now[0] == SDPBackend.CUDNN_ATTENTION.value
        return taken(*given, **options)

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", listens)
    q, k = torch.randn(1, 1, queries, 8, requires_grad=learns), torch.randn(1, 1, 128, 8)
    added = torch.ones(1, 1, queries, 128, dtype=torch.bool) if masked else None
    given = {"is_causal": False, "scale": 1.0, "enable_gqa": False}
    sdpa._on_hopper(q, k, k, added, **given)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):  # a user's own choice
        sdpa._on_hopper(q, k, k, added, **given)
    assert asked == [cudnn, False]
    assert torch._C._get_sdp_priority_order() == order
    assert torch._C._get_cudnn_sdp_enabled()
