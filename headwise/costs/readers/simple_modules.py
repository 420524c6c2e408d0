"""Norms and feed-forward modules, read into the layers they are."""

from __future__ import annotations

from torch import nn

from headwise.costs.layers import Activation, FeedForwardLayer, NormLayer
from headwise.nn.feed_forward import GatedFeedForward

ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.ReLU: "relu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
}


def read_norm(module: nn.Module) -> NormLayer:
    """The norm that a module is; ValueError if it is another."""
    if isinstance(module, nn.LayerNorm):
        bias = module.elementwise_affine and module.bias is not None
        return NormLayer(module.normalized_shape[-1], "layer", bias, module.elementwise_affine)
    if isinstance(module, nn.RMSNorm):
        return NormLayer(module.normalized_shape[-1], "rms", False, module.elementwise_affine)
    raise ValueError(f"{type(module).__name__} is not a norm that can be read")


def read_feed_forward(module: nn.Module) -> FeedForwardLayer:
    """The feed-forward layer that `hw.nn.GELU(…).build` and its like make."""
    if isinstance(module, GatedFeedForward):
        width, hidden = module.gate.in_features, module.gate.out_features
        return FeedForwardLayer(width, hidden, "silu", True, module.gate.bias is not None)
    if isinstance(module, nn.Sequential) and len(module) == 3:
        up, middle, down = module
        if isinstance(up, nn.Linear) and isinstance(down, nn.Linear):
            kind = ACTIVATIONS.get(type(middle))
            fits = up.out_features == down.in_features and up.in_features == down.out_features
            if kind is not None and fits and (up.bias is None) == (down.bias is None):
                bias = up.bias is not None
                return FeedForwardLayer(up.in_features, up.out_features, kind, bias=bias)
    raise ValueError(
        f"{type(module).__name__} is not a feed-forward layer that can be read; use "
        "hw.nn.ReLU(width).build(d_model), hw.nn.GELU(…) or hw.nn.SwiGLU(…)"
    )
