"""The Hopper engine: compiled without such a GPU, and run on one under `-m gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.core.options import Options
from headwise.core.problem import pose
from headwise.engines.triton.hopper import HOPPER
from tests.engines import test_triton as kernels
from tests.engines.agreement import assert_agrees
from tests.problems import Call, Recipe, every_pair

pytest.importorskip("triton", reason="the engine's kernel is written in Gluon, a part of Triton")

from headwise.engines.triton.host import attention_call
from headwise.engines.triton.kernels.hopper_softmax import numbers_of_cap

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HERE, reason="its kernel runs on Hopper GPUs only")


@pytest.mark.parametrize(
    ("step", "count"), [(18, 4), pytest.param(1, 70, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_variants_compile_within_a_multiprocessors_memory(step: int, count: int) -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engines.compiled", str(step)]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    variants = json.loads(told.stdout)
    assert len(variants) == count
    for variant in variants:
        assert variant["shared"] <= 227 * 1024, variant
        # Spilled between blocks, not inside their loop, and where the producer cleans values.
        assert variant["stack"] <= (768 if variant["mask"] in ("documents", "sinks") else 512), (
            variant
        )


def test_without_a_hopper_gpu_it_refuses_and_another_engine_serves() -> None:
    q = torch.randn(1, 1, 4, 16)
    with pytest.raises(ValueError, match="needs an NVIDIA Hopper GPU"):
        hw.attention(q, q, q, engine="hopper")
    told = hw.explain(q, q, q)
    assert told.engine == "sdpa"
    assert "Hopper" in str(told.reasons["hopper"])


def test_an_amd_gpu_of_the_same_number_is_not_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "NVIDIA" in str(HOPPER.absent(torch.device("cuda")))


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


REFUSED = {
    "float32": ({"dtype": torch.float32}, {}, "float16"),
    "wide": ({"width": 264}, {}, "wide"),
    "odd": ({"width": 20}, {}, "multiples of 8"),
    "tiny cap": ({}, {"softcap": 1e-7}, "caps between"),
    "huge cap": ({}, {"softcap": 1e7}, "caps between"),
    "cap beyond scores": ({}, {"softcap": 1e4}, "times a cap"),
    "tiny scale": ({}, {"score": hw.Dot(1e-7)}, "scales between"),
    "alibi": ({}, {"bias": hw.ALiBi(2)}, "plain or capped"),
    "dropout": ({}, {"dropout": 0.1}, "dropout"),
    "dense": ({}, {"mask": hw.mask.dense(torch.ones(200, 300, dtype=torch.bool).tril())}, "dense"),
    "few queries": ({"queries": 1, "keys": 4096}, {}, "few queries"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_refuses_what_it_cannot_do_with_a_reason(case: str) -> None:
    made, options, word = REFUSED[case]
    given = {"dtype": torch.bfloat16, "width": 64, "queries": 200, "keys": 300} | made
    q = torch.randn(1, 2, given["queries"], given["width"]).to(given["dtype"])
    k = torch.randn(1, 2, given["keys"], given["width"]).to(given["dtype"])
    v = k[..., : given.get("values")]
    assert word in str(HOPPER.refuses(pose("attention", q, k, v, Options(**options)), False))
    assert (
        HOPPER.refuses(pose("attention", *torch.randn(3, 1, 2, 200, 64).bfloat16()), True) is None
    )


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("scale", [0.125, -0.3])  # the scale of a capped score may be negative
def test_caps_are_served(scale: float, observed: bool) -> None:
    q, k, v = torch.randn(3, 1, 2, 200, 64).bfloat16()
    problem = pose("attention", q, k, v, Options(hw.Dot(scale), softcap=30.0))
    assert HOPPER.refuses(problem, observed) is None


@pytest.mark.parametrize("ratio", [1e-3, -0.03, 2.0, 1e3])
def test_the_numbers_of_a_cap_give_tanh_by_both_formulas(ratio: float) -> None:
    limit, factor, *series = numbers_of_cap(ratio)
    x = torch.linspace(-1, 1, 1001, dtype=torch.float64) * limit**0.5
    polynomial = sum(c * x ** (2 * n + 1) for n, c in enumerate(series))
    assert (polynomial - torch.tanh(ratio * x)).abs().max() < 2.5e-7
    x *= 100
    assert (1 - 2 / (1 + torch.exp2(factor * x)) - torch.tanh(ratio * x)).abs().max() < 1e-12


@pytest.mark.gpu
@on_hopper
def test_observed_and_banded_calls_go_to_it() -> None:
    q = normal(1, 2, 300, 64)
    assert hw.explain(q, q, q, observed=True).engine == "hopper"
    assert hw.explain(q, q, q, mask=hw.mask.causal() & hw.mask.window(99)).engine == "hopper"
    assert hw.explain(q, q, q, softcap=30.0).engine == "hopper"
    assert hw.explain(q, q, q, softcap=1e7).engine == "triton"


@pytest.mark.gpu
@on_hopper
def test_plain_calls_without_gradients_go_to_it_where_it_is_fastest() -> None:
    long, short = normal(1, 1, 4096, 128), normal(1, 1, 1024, 128)
    assert hw.explain(long, long, long).engine == "hopper"
    assert hw.explain(short, short, short).engine == "sdpa"
    learnt = long.clone().requires_grad_()
    assert hw.explain(learnt, long, long).engine == "sdpa"
    with torch.no_grad():
        assert hw.explain(learnt, long, long).engine == "hopper"


SERVED = {
    "score": ("dot", "scaled", "general", "cosine"),
    "mask": (
        *("none", "causal", "offsets", "window", "prefix-lm", "padding", "documents", "between"),
        "sinks and window",
    ),
    "bias": ("none",),
    "dropout": ("none",),
    "dtype": ("bfloat16", "float16"),
}


@dataclass(frozen=True)
class Even(Recipe):
    """A recipe whose values have a width that is a multiple of 8."""

    def call(self) -> Call:
        made = super().call()
        width = -(-made.v.shape[-1] // 8) * 8
        v = made.v.repeat(1, 1, 1, 8)[..., :width]
        return replace(made, v=v, sizes=replace(made.sizes, value_width=width))


pairs = [
    pytest.param(Even(**asdict(recipe)), id=str(recipe.seed)) for recipe in every_pair(**SERVED)
]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("observed", [False, True])  # short calls' moments are triton's
@pytest.mark.parametrize("recipe", pairs)
def test_generated_problems_agree_with_the_reference(recipe: Recipe, observed: bool) -> None:
    if (reason := refusal(recipe, "cuda")) is not None:
        pytest.skip(reason)
    assert_agrees(recipe, "hopper", "cuda", stats=None if observed else ())


def refusal(recipe: Recipe, device: str = "cpu") -> str | None:
    call = recipe.call().copy(device=device)
    return HOPPER.refuses(
        pose("attention", call.q, call.k, call.v, Options(**call.options())), True
    )


def test_all_generated_problems_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    # on a GPU, where tiles are wider, only more keys than these are split
    monkeypatch.setattr(attention_call, "few", lambda q, k: False)
    assert {refusal(pair.values[0]) for pair in pairs} == {None}


OWN = ("lse", "max_logit", "entropy", "distance")  # from its own kernel at any length
MASKS = {
    "none": None,
    "causal": hw.mask.causal(),
    "window": hw.mask.causal() & hw.mask.window(300),
    "both sides": hw.mask.window(200, 150),
    "first rows see nothing": hw.mask.causal(offset=-200),
}


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("width", [16, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_problems_agree(dtype: torch.dtype, width: int, mask: str) -> None:
    n, m = (1337, 1137) if mask == "first rows see nothing" else (1137, 1337)
    n, m = (1237, 1237) if mask == "both sides" else (n, m)
    q, k, v = (normal(2, h, x, width, dtype=dtype) for h, x in ((40, n), (20, m), (20, m)))
    found = kernels.everything("hopper", q, k, v, mask=MASKS[mask], stats=OWN)
    wide = (x.float() for x in (q, k, v))  # float64 would take the device minutes
    truth = kernels.everything("streaming", *wide, mask=MASKS[mask], stats=OWN)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 4e-3
    kernels.compare(found, truth, tolerance)
    plain = hw.attention(q, k, v, mask=MASKS[mask], engine="hopper")
    kernels.compare({"out": plain}, truth, tolerance)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("size", [0.1, 3.0, 60.0])  # logits far below, about and far beyond the cap
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_capped_problems_agree(dtype: torch.dtype, width: int, mask: str, size: float) -> None:
    q, k, v = (normal(1, h, x, width, dtype=dtype) for h, x in ((40, 437), (20, 537), (20, 537)))
    tensors, options = (q * size, k, v), {"mask": MASKS[mask], "softcap": 2.0}
    found = kernels.everything("hopper", *tensors, **options, stats=OWN)
    wide = (x.double() for x in tensors)
    truth = kernels.everything("reference", *wide, **options, stats=OWN)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 4e-3
    kernels.compare(found, truth, tolerance)
    plain = hw.attention(*tensors, **options, engine="hopper")
    kernels.compare({"out": plain}, truth, tolerance)


@pytest.mark.gpu
@on_hopper
def test_calls_with_different_caps_are_told_apart() -> None:
    q, k, v = (normal(1, 40, 300, 64) for _ in range(3))
    wide = [x.double() for x in (q, k, v)]
    turned = {"softcap": 2.0, "score": hw.Dot(-0.3)}  # not allowed without a cap
    for options in ({"softcap": 2.0}, {}, {"softcap": 0.5}, turned):
        found = hw.attention(q, k, v, **options, engine="hopper")
        truth = hw.attention(*wide, **options, engine="reference")
        kernels.compare({"out": found}, {"out": truth}, 2e-2)


@pytest.mark.gpu
@on_hopper
def test_infinities_reach_the_cap_and_nan_stays_where_it_is() -> None:
    q, k, v = (normal(1, 40, 300, 64) for _ in range(3))
    q[0, 0, 7, 3], k[0, 1, 250, 5], k[0, 2, 200, 5] = torch.nan, torch.nan, torch.inf
    options = {"mask": hw.mask.causal(), "softcap": 2.0, "stats": OWN}
    out, found = hw.observe(q, k, v, **options, engine="hopper")
    wide, truth = hw.observe(*(x.double() for x in (q, k, v)), **options, engine="reference")
    pairs = {"out": (out, wide)} | {name: (found.values[name], truth.values[name]) for name in OWN}
    for name, (x, y) in pairs.items():
        assert torch.equal(x.isnan(), y.isnan()), name
        kernels.compare({name: x.nan_to_num(0)}, {name: y.nan_to_num(0)}, 2e-2)
    assert out[0, 2].isfinite().all()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mask", [None, hw.mask.causal(), hw.mask.causal(offset=300)])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(  # far: the keys' own mean, which logits share
    ("far", "softcap"), [(0.0, None), (30.0, None), (0.0, 20.0)]
)
def test_moments_of_long_inputs_agree(
    mask: hw.mask.Mask | None, width: int, far: float, softcap: float | None
) -> None:
    q, k = normal(1, 40, 4200, width), (normal(1, 20, 4500, width) + far).bfloat16()
    names = ("logit_mean", "logit_var", "entropy", "distance")
    options = {"mask": mask, "softcap": softcap, "stats": names}
    out, found = hw.observe(q, k, k, **options, engine="hopper")
    truth = hw.observe(*(x.float() for x in (q, k, k)), **options, engine="streaming")
    kernels.compare({"out": out}, {"out": truth[0]}, 2e-2)
    for name in names:
        x, y = found.values[name], truth[1].values[name]
        assert float((x - y).norm()) <= (1e-3 if far else 1e-4) * float(y.norm()), name


@pytest.mark.gpu
@on_hopper
def test_a_dominant_sink_is_lse_to_the_bit() -> None:
    q, k, v = (normal(1, 4, 300, 64) for _ in range(3))
    sinks = torch.tensor([93.7, 228.447, 178.13, 1e4], device="cuda")
    _, seen = hw.observe(q, k, v, sinks=sinks, stats=("lse", "entropy"), engine="hopper")
    assert (seen.lse == sinks[:, None]).all()


@pytest.mark.gpu
@on_hopper
def test_the_same_call_gives_the_same_bits() -> None:
    q, k, v = (normal(2, 40, 900, 128) for _ in range(3))
    options = {"mask": hw.mask.causal(), "engine": "hopper", "stats": OWN}
    once, again = (hw.observe(q, k, v, **options) for _ in range(2))
    assert torch.equal(once[0], again[0])
    assert all(torch.equal(x, again[1].values[name]) for name, x in once[1].values.items())


@pytest.mark.gpu
@on_hopper
def test_calls_can_be_captured_compiled_and_run_on_several_streams() -> None:
    q, k, v = (normal(1, 40, 700, 64) for _ in range(3))

    def call() -> Tensor:
        return hw.attention(q, k, v, mask=hw.mask.causal(), engine="hopper")

    expected = call()
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            found = call()
        stream.synchronize()
        assert torch.equal(found, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    assert torch.equal(torch.compile(call, fullgraph=True)(), expected)
