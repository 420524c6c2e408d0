"""A model under sparse attention, simulated: each row sees only the keys that a policy keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from headwise.core.arguments import is_integer
from headwise.core.policies import Policy
from headwise.watching.experiments.steering import changing
from headwise.watching.recorder.experiments import Sparse

Layers = int | str | Iterable[int | str]


@contextmanager
def sparsify(
    model: nn.Module,
    policy: Policy | Mapping[int | str, Policy],
    layers: Layers | None = None,
) -> Iterator[None]:
    """Let a model compute as if only the keys that a policy keeps were there, while a block runs.

    `policy` is one of `hw.sparse`, or one for each layer, {layer: policy}: the layers are numbers
    or names of `hw.watch` (* matches any part of a name), and those that it does not name stay as
    they are. Budgets may differ by head: `hw.sparse.TopK((8, 64, ...))`. `layers` limits a policy
    to some layers.

    The weights are renormalised over the kept keys, and learned sinks stay in the denominator. It
    is exact, in memory linear in the length, in training and while a model generates with a cache,
    and gradients flow if backward runs inside the block. It is a simulation and not faster: it
    tells what a sparse model would lose. Under `hw.steer` a policy chooses by the steered logits;
    of nested blocks, each policy chooses for itself and a row keeps what all of them keep. A watch
    records the sparse attention. ValueError where attention can't be changed; no layer stays as it
    was without being asked to.

    >>> import torch, headwise as hw
    >>> gpt = hw.load("gpt")
    >>> ids = gpt.encode("to be or not to be, that is the question")
    >>> with torch.no_grad(), hw.sparsify(gpt.model, hw.sparse.TopK(4)):
    ...     logits = gpt.model(ids)
    >>> logits.shape
    torch.Size([1, 12, 4096])
    """
    with changing("sparsify", model, "changed", sparse=_checked(policy, layers)):
        yield


def _checked(policy: object, layers: object) -> tuple[Sparse, ...]:
    """The policies of layers; ValueError for anything else."""
    if isinstance(policy, Mapping):
        if layers is not None:
            raise ValueError(
                f"hw.sparsify(layers={layers!r}): a dict of policies names its layers already"
            )
        found = [Sparse(_layer(layer), _policy(x)) for layer, x in policy.items()]
        # A number says more than a name, and a name more than a pattern.
        found.sort(key=lambda x: isinstance(x.layer, str) + ("*" in str(x.layer)))
    elif layers is None:
        found = [Sparse(None, _policy(policy))]
    else:
        many = layers if isinstance(layers, Iterable) and not isinstance(layers, str) else (layers,)
        found = [Sparse(_layer(layer), _policy(policy)) for layer in many]
    if not found:
        raise ValueError(
            f"hw.sparsify({policy!r}, layers={layers!r}) is about no layer: give a policy, a dict "
            "{layer: policy}, or numbers and names of layers"
        )
    return tuple(found)


def _layer(layer: object) -> int | str:
    if not isinstance(layer, str) and not is_integer(layer):
        raise ValueError(f"the layer {layer!r} of hw.sparsify must be a number or a name")
    return layer if isinstance(layer, str) else int(layer)


def _policy(policy: object) -> Policy:
    if not isinstance(policy, Policy):
        raise ValueError(
            "hw.sparsify takes a policy: hw.sparse.TopK(k), Window(left, sinks), "
            f"Blocks(size, count), Indices(tensor) or Evicted(scores, budget), not {policy!r}"
        )
    return policy
