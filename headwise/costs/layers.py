"""Descriptions of the layers that a model is made of, with every size that its cost depends on.

A reader turns a module or a configuration into these; counting is written once, for these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Literal, TypeVar

from headwise.core.intervals import Mask
from headwise.costs.workload import share
from headwise.messages import say

Activation = Literal["relu", "gelu", "silu", "tanh", "sigmoid", "none"]


@dataclass(frozen=True)
class NormLayer:
    """LayerNorm or RMSNorm over vectors of this width."""

    width: int
    kind: Literal["layer", "rms"] = "layer"
    bias: bool = True
    scale: bool = True


@dataclass(frozen=True)
class LinearLayer:
    """A matrix from `inputs` to `outputs`; `tied` if its weights are counted elsewhere."""

    label: str
    inputs: int
    outputs: int
    bias: bool = False
    tied: bool = False
    activation: Activation = "none"
    first_only: bool = False  # applied to one token of the sequence, such as a class token
    aside: bool = False  # its output does not continue the stream
    split: Literal["none", "columns"] = "none"  # over the ranks of tensor parallelism


@dataclass(frozen=True)
class EmbeddingLayer:
    """A table of vectors that tokens, positions or segments are looked up in."""

    label: str
    rows: int
    width: int
    per_batch: bool = True  # False: the same rows for every batch entry
    tied: bool = False
    split: bool = False  # over the ranks of tensor parallelism


@dataclass(frozen=True)
class LooseWeight:
    """A parameter that no matrix product uses, such as a class token."""

    label: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ConvolutionLayer:
    """A convolution from `inputs` to `outputs` channels over `kernel` places per output.

    It makes `tokens` outputs of an image or sound, or one per token if that is None.
    """

    label: str
    inputs: int
    outputs: int
    kernel: int
    tokens: int | None = None
    entries: int | None = None  # numbers of its input per batch entry
    bias: bool = True
    padding: int = 0  # zeros in front, for which the input is copied
    activation: Activation = "none"
    gated: bool = False  # half of the outputs gate the other half
    learns_input: bool = True


@dataclass(frozen=True)
class DropoutStep:
    """Dropout of the stream that flows through a model."""

    rate: float


@dataclass(frozen=True)
class AttentionLayer:
    """Attention with its projections.

    The mask is `causal`, a `window` of keys, `mask`, or those together.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool = False
    window: int | None = None
    mask: Mask | None = None
    query_bias: bool = True
    key_bias: bool = True
    value_bias: bool = True
    out_bias: bool = True
    projections: Literal["separate", "shared", "none", "values"] = "separate"
    whole_heads: bool = False  # unprojected heads that each see the whole input
    context: tuple[int, int] | None = None  # widths of the sequence that a cross-attention sees
    qk_norm: NormLayer | None = None
    rotary: int = 0  # entries of a head that are rotated
    positions: int = 0  # rows of a table of positions that is added to the input
    score: Literal["dot", "additive", "general", "cosine", "fixed"] = "dot"
    score_params: int = 0
    softcap: bool = False
    sinks: bool = False
    added_keys: int = 0  # learned keys and values beside those of the tokens
    bias_kind: Literal["none", "alibi", "buckets", "table"] = "none"
    bias_params: int = 0
    bias_length: int = 0  # distances of a bucketed bias; positions of a table
    dropout: float = 0.0
    unprojected_values: bool = False
    caches: bool = True  # decoding keeps its keys and values
    plain_out: bool = False  # no output projection
    headwise: bool = False  # computed by headwise's engines


@dataclass(frozen=True)
class FeedForwardLayer:
    """Two matrices with an activation between them, or three if it is gated."""

    width: int
    hidden: int
    activation: Activation = "gelu"
    gated: bool = False
    bias: bool = True
    dropout: float = 0.0  # of the hidden layer


@dataclass(frozen=True)
class MatrixLayer:
    """A layer known by its matrices, its other weights, and the state of its recurrence, if any.

    Its matrix products are counted.
    """

    label: str
    width: int
    matrices: tuple[LinearLayer, ...]
    state: int = 0  # numbers per batch entry, in the model's dtype


Body = AttentionLayer | FeedForwardLayer | MatrixLayer | ConvolutionLayer


@dataclass(frozen=True)
class SubLayer:
    """A body with its residual connection and the norms around it.

    x + dropout(body(before(x))), and `post` norms the sum.
    """

    name: str
    body: Body
    before: NormLayer | None = None
    post: NormLayer | None = None
    dropout: float = 0.0
    residual: bool = True


@dataclass(frozen=True)
class StackedLayer:
    """One layer of a model: sublayers one after another."""

    sublayers: tuple[SubLayer, ...]


Step = EmbeddingLayer | NormLayer | LinearLayer | ConvolutionLayer | LooseWeight | DropoutStep


@dataclass(frozen=True)
class LayerStack:
    """Steps before the layers, the layers, and steps after them."""

    name: str
    before: tuple[Step, ...] = ()
    layers: tuple[StackedLayer, ...] = ()
    after: tuple[Step, ...] = ()
    tokens: int | None = None  # its own length, such as the patches of an image
    longest: int | None = None  # more tokens have no position
    width: int = 0
    reads_tokens: bool = True  # False: its input is numbers, such as the output of other layers


@dataclass(frozen=True)
class LayeredModel:
    """A model: one stack, or an encoder whose output the next stack attends to."""

    name: str
    stacks: tuple[LayerStack, ...]

    @property
    def longest(self) -> int | None:
        """The most tokens that it has positions for; None if any number has."""
        return min((each.longest for each in self.stacks if each.longest is not None), default=None)

    @property
    def stated(self) -> int | None:
        """No further positions are stated."""
        return None

    @property
    def own_length(self) -> bool:
        """True if every call has the same length, such as an image's."""
        return self.stacks[-1].tokens is not None

    @property
    def pair(self) -> bool:
        """True for an encoder with a decoder."""
        return len(self.stacks) > 1


T = TypeVar("T")


def sharded(layer: T, ranks: int) -> T:
    """The part of a layer that one of `ranks` ranks holds; ValueError if it does not divide.

    Heads and hidden widths are divided. If there are fewer key heads than ranks, each rank holds
    one, so ranks must be a multiple of them. A vocabulary is divided as torch does: the first rank
    has the larger part.
    """
    if ranks == 1:
        return layer
    part: T = _part(layer, ranks)  # type: ignore[assignment]
    return part


@singledispatch
def _part(layer: object, ranks: int) -> object:
    return layer


@_part.register
def _(layer: AttentionLayer, ranks: int) -> AttentionLayer:
    heads = share(say("attention with heads"), layer.heads, ranks, "tp")
    kv_heads = layer.kv_heads
    if kv_heads % ranks == 0:
        kv_heads //= ranks
    elif ranks % kv_heads == 0:
        kv_heads = 1
    else:
        raise ValueError(
            say(
                "{heads} key heads neither divide over {ranks} ranks (tp={ranks}) nor divide "
                "{ranks}, so that each rank would hold one; choose another tp",
                heads=kv_heads,
                ranks=ranks,
            )
        )
    return replace(
        layer,
        heads=heads,
        kv_heads=kv_heads,
        score_params=share(say("score parameters"), layer.score_params, ranks, "tp"),
        bias_params=share(say("bias parameters"), layer.bias_params, ranks, "tp"),
    )


@_part.register
def _(layer: FeedForwardLayer, ranks: int) -> FeedForwardLayer:
    return replace(layer, hidden=share(say("a hidden width"), layer.hidden, ranks, "tp"))


@_part.register
def _(layer: EmbeddingLayer, ranks: int) -> EmbeddingLayer:
    return replace(layer, rows=-(-layer.rows // ranks)) if layer.split else layer


@_part.register
def _(layer: LinearLayer, ranks: int) -> LinearLayer:
    if layer.split == "none":
        return layer
    return replace(layer, outputs=-(-layer.outputs // ranks))
