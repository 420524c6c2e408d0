"""A watch keeps the bits of a model's own kernels, and headwise's outputs to rounding."""

import torch
from torch import nn

import headwise as hw


def watched_and_not(model: nn.Module, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    before = model(*given)
    with hw.watch(model) as seen:
        watched = model(*given)
    assert seen.heads()
    return before, watched


def test_outputs_of_a_models_own_kernels_keep_their_bits() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    before, watched = watched_and_not(layer, torch.randn(2, 33, 32))
    assert torch.equal(before, watched)


def test_outputs_of_headwises_own_attention_agree_to_rounding() -> None:
    model = hw.models.GPT(hw.models.GPTConfig(64, context=64, d_model=32, layers=2, heads=4)).eval()
    before, watched = watched_and_not(model, torch.randint(64, (2, 50)))
    torch.testing.assert_close(before, watched)
