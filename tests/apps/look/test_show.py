"""What a recording shows of layers that read other tokens, such as a vision tower."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.apps.look.show import session_of


class TwoSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.language = (hw.nn.MultiHeadAttention(8, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.language(self.tower(x)[:, :5])


def test_layers_of_other_sizes_are_named_and_not_mixed_in() -> None:
    with torch.no_grad(), hw.watch(model := TwoSizes()) as seen:
        model(torch.randn(1, 9, 8))
    (read,) = session_of(seen).state()["inputs"]
    (group,) = read["groups"]
    assert [layer["name"] for layer in group["layers"]] == ["language"]
    assert (group["rows"], group["columns"]) == (5, 5)
    assert "not shown, for they have another number of tokens: tower" in map(str, read["notes"])
