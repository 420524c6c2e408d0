"""The weight on spans of keys: Triton's kernels under its interpreter, all of them on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.core.test_spans import assert_sums
from tests.problems import KINDS, Recipe, every_pair

pytest.importorskip("triton", reason="the engine's kernels are written in Triton")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
KERNELS = {
    "score": tuple(kind for kind in KINDS["score"] if kind != "additive"),
    "dtype": tuple(kind for kind in KINDS["dtype"] if kind != "float64"),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
every = every_pair(**KERNELS)
pairs = [
    pytest.param(recipe, id=str(recipe.seed), marks=pytest.mark.slow if recipe.seed % 32 else ())
    for recipe in every
]


@pytest.mark.parametrize("recipe", pairs)
def test_the_kernels_weigh_a_span_as_its_columns(recipe: Recipe) -> None:
    assert_sums(recipe, "triton", DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["auto", "triton", "hopper"])
@pytest.mark.parametrize("recipe", every, ids=lambda recipe: str(recipe.seed))
def test_the_device_weighs_a_span_as_its_columns(engine: str, recipe: Recipe) -> None:
    plan = recipe.call().copy(device="cuda").explain(observed=True)
    if engine != "auto" and plan.reasons[engine]:
        pytest.skip(f"{engine}: {plan.reasons[engine]}")
    assert_sums(recipe, engine, "cuda")
