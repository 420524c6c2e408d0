"""ViT: an image as a sequence of patches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.checks import Count, Rate, Size, check_kind, check_tensor
from headwise.core.intervals import Mask
from headwise.models.config import Config
from headwise.nn.block import Block
from headwise.nn.call import check_dtype
from headwise.nn.feed_forward import GELU, FeedForward
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.norms import LayerNorm, Norm


@dataclass(frozen=True)
class ViTConfig(Config):
    """Square images, `image` pixels wide, in patches `patch` wide; the defaults are for CIFAR.

    ViT-B/16 is image=224, patch=16, classes=1000, d_model=768, layers=12, heads=12,
    feed_forward=GELU(3072).
    """

    image: Size = 32
    patch: Size = 4
    channels: Size = 3
    classes: Size = 10
    d_model: Size = 192
    layers: Count = 6
    heads: Size = 6
    kv_heads: Size | None = None
    feed_forward: FeedForward = GELU(768)
    norm: Norm = LayerNorm(1e-6)
    qk_norm: Norm | None = None
    bias: bool = True
    dropout: Rate = 0.0
    attention_dropout: Rate = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image % self.patch:
            raise ValueError(
                f"image={self.image} does not divide into patches of patch={self.patch} pixels"
            )

    @property
    def patches(self) -> int:
        """The number of patches of an image."""
        return (self.image // self.patch) ** 2

    def block(self) -> Block:
        """One layer of this model."""
        attention = MultiHeadAttention(
            self.d_model,
            self.heads,
            kv_heads=self.kv_heads,
            bias=self.bias,
            qk_norm=self.qk_norm,
            dropout=self.attention_dropout,
        )
        feed_forward = self.feed_forward.build(self.d_model, self.bias)
        return Block(self.d_model, attention, feed_forward, norm=self.norm, dropout=self.dropout)


class ViT(nn.Module):
    """images (B, channels, image, image) -> logits (B, classes).

    >>> import torch
    >>> from headwise.models import ViT, ViTConfig
    >>> model = ViT(ViTConfig(image=8, patch=4, d_model=32, layers=2, heads=4))
    >>> model(torch.randn(2, 3, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        check_kind("config", config, ViTConfig, "ViTConfig()")
        self.config = config
        # With a stride as wide as its kernel, a convolution is one matrix applied to each patch.
        self.patches = nn.Conv2d(config.channels, config.d_model, config.patch, config.patch)
        self.summary = nn.Parameter(torch.zeros(1, 1, config.d_model))  # the class token
        self.positions = nn.Parameter(torch.empty(1, config.patches + 1, config.d_model))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(config.block() for _ in range(config.layers))
        self.norm = config.norm.build(config.d_model)
        self.head = nn.Linear(config.d_model, config.classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as the paper does: truncated normal weights; biases and class token zero."""
        nn.init.trunc_normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images)[:, 0])
        return logits

    def features(self, images: Tensor, mask: Mask | None = None) -> Tensor:
        """(B, 1 + patches, d_model): the class token, then the patches row by row."""
        config = self.config
        check_tensor("images", images, "batch", config.channels, config.image, config.image)
        check_dtype(self.patches, images=images)
        x = self.patches(images).flatten(2).transpose(1, 2)  # (B, patches, d_model)
        x = torch.cat((self.summary.expand(x.shape[0], -1, -1), x), 1) + self.positions
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, mask=mask)
        normed: Tensor = self.norm(x)
        return normed
