"""Masks of nn.MultiheadAttention, read as intervals where they are intervals."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.nn.torch_masks import read_torch_masks

B, H, N, D = 2, 4, 6, 16
LATER = torch.ones(N, N, dtype=torch.bool).triu(1)
PADDED = torch.arange(N) >= torch.tensor([[N], [N - 2]])
GIVEN: dict[str, tuple[dict[str, Any], bool]] = {  # the arguments, and whether they are intervals
    "causal": ({"attn_mask": LATER}, True),
    "padding": ({"key_padding_mask": PADDED}, True),
    "both": ({"attn_mask": LATER, "key_padding_mask": PADDED}, True),
    "per head": ({"attn_mask": LATER.repeat(B * H, 1, 1)}, True),
    "holes": ({"attn_mask": torch.eye(N, dtype=torch.bool)}, False),
    "added": ({"attn_mask": torch.randn(N, N)}, True),
    "added, and hidden": ({"attn_mask": torch.randn(N, N).masked_fill(LATER, -torch.inf)}, True),
}


@pytest.mark.parametrize("name", GIVEN)
def test_masks_give_the_weights_of_multihead_attention(name: str) -> None:
    (options, intervals), x = GIVEN[name], torch.randn(B, N, D)
    theirs = nn.MultiheadAttention(D, H, batch_first=True).eval()
    padding = options.get("key_padding_mask")
    p = theirs(x, x, x, **options, need_weights=True, average_attn_weights=False)[1]
    q, k, _ = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in _projected(theirs, x))
    mask, bias = read_torch_masks(options.get("attn_mask"), padding, H)
    assert mask is None or bool(mask.pieces) == intervals
    ours = hw.attention_map(q, k, mask=mask, bias=bias).to_tensor()
    torch.testing.assert_close(ours, p)


def _projected(theirs: nn.MultiheadAttention, x: Tensor) -> tuple[Tensor, ...]:
    return (x @ theirs.in_proj_weight.T + theirs.in_proj_bias).chunk(3, -1)


def test_the_hint_counts_only_where_pytorch_takes_it() -> None:
    assert repr(read_torch_masks(LATER, None, H, is_causal=True)[0]) == "causal(offset=0)"
    hidden = torch.zeros(N, N, dtype=torch.bool)
    mask, _ = read_torch_masks(hidden, None, H, is_causal=True, need_weights=True)
    assert repr(mask) != "causal(offset=0)"


def test_a_mask_that_is_learned_keeps_its_gradient_and_low_numbers_stay_numbers() -> None:
    learned = torch.zeros(N, N, requires_grad=True)
    assert read_torch_masks(learned, None, H) == (None, learned)
    low = torch.full((N, N), -1e9)
    assert read_torch_masks(low, None, H)[1] is low
    assert read_torch_masks(low, None, H, hidden=-1e4)[1] is None
