"""Whether a layer's logits grow and shrink with the weights that make its queries and keys."""

from __future__ import annotations

from torch import nn

from headwise.watching.layer import Layer

HARMLESS = ("out", "o_", "v_", "value", "post", "final", "pre_", "input", "attn_sub", "inner_attn")
"""How the names of norms begin that stand before queries and keys are made, or at the output."""

OF_OUTPUT = "LayerNorm"
"""What transformers calls the norm of BERT's kin, after the output and the path around."""


def why_not(module: nn.Module, layer: Layer) -> str | None:
    """Why a scaling of the weights would not scale the logits alike; None: it would.

    A norm of queries and keys undoes it, and what is added to a logit or caps it stays as it is. A
    norm whose place its name does not tell is taken for one of queries and keys.
    """
    for name, child in module.named_children():
        if _is_norm(name, child) and name != OF_OUTPUT and not name.lower().startswith(HARMLESS):
            return f"it normalises queries and keys ({name}), which undoes a scaling"
    for said in (module, getattr(module, "config", None)):
        if getattr(said, "clip_qkv", None):
            return "its queries and keys are cut off (clip_qkv)"
    if layer.last is None:
        return "the recording knows the figures of its passes, and not how its logits were made"
    return layer.last.bent


def _is_norm(name: str, child: nn.Module) -> bool:
    named = "norm" in name.lower() or "norm" in type(child).__name__.lower()
    return named and not isinstance(child, nn.Identity)
