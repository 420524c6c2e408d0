"""Joint attention of diffusion transformers: text and image tokens attend as one sequence.

A module is given both, as hidden_states and encoder_hidden_states, and its queries and keys are as
many as both together. Which comes first is told by the values: one part of them is the projection
of the text. Blocks that join the two before their attention do it in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headwise.nn.call import Call
from headwise.watching.adapters.other_sequence import parameters
from headwise.watching.recorder.marked_keys import Marked

PARTS = ("image", "text")


class RunningModule(Protocol):
    """A module that runs, and what it was called with."""

    module: nn.Module
    given: tuple[Any, ...]
    options: Mapping[str, Any]


def joint_parts(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The spans of a model with joint attention, which no numbers of tokens stand for."""
    joint = any(getattr(module, "add_v_proj", None) is not None for module in model.modules())
    return dict.fromkeys(PARTS, ()) if joint else {}


@dataclass
class JointAttention:
    """Where the text is among the tokens of a model, once a layer has told it.

    One layer of each class is asked, because reading the answer waits for the device.
    """

    told: dict[type, bool | None] = field(default_factory=dict)

    @property
    def text_first(self) -> bool | None:
        """True if the text comes before the image; None if no layer has told it."""
        return next((x for x in self.told.values() if x is not None), None)

    def parts(self, frames: Sequence[RunningModule], call: Call) -> dict[str, Marked] | None:
        """The image's and the text's tokens, none if it is not known which are which.

        None if the call of the innermost of these modules is not joint attention.
        """
        for depth, frame in enumerate(reversed(frames[-2:])):
            names = parameters(type(frame.module).forward)
            named = dict(zip(names, frame.given, strict=False)) | dict(frame.options)
            image, text = named.get("hidden_states"), named.get("encoder_hidden_states")
            if not (isinstance(image, Tensor) and isinstance(text, Tensor)):
                continue
            tokens = image.shape[1] + text.shape[1]
            if image.ndim != 3 or not call.q.shape[2] == call.k.shape[2] == tokens:
                continue
            kind = type(frame.module)
            if depth == 0 and self.text_first is None and kind not in self.told:
                self.told[kind] = _text_first(frame.module, text, call.v)
            first = self.text_first
            if first is None:
                return {}
            return _parts(len(call.q), tokens, text.shape[1], first, call.q.device)
        return None


def _text_first(module: nn.Module, text: Tensor, v: Tensor) -> bool | None:
    """True if the values (B, H, N, D) begin with the projected text, False if they end with it.

    None if neither is so.
    """
    project = getattr(module, "add_v_proj", None) or getattr(module, "to_v", None)
    if not isinstance(project, nn.Module):
        return None
    with torch.no_grad():
        made, packed = project(text), v.detach().transpose(1, 2).flatten(2)
    if made.shape[::2] != packed.shape[::2]:
        return None
    if torch.equal(made, packed[:, : made.shape[1]]):
        return True
    return False if torch.equal(made, packed[:, -made.shape[1] :]) else None


@functools.lru_cache(maxsize=16)
def _parts(
    batch: int, tokens: int, text: int, text_first: bool, device: torch.device
) -> dict[str, Marked]:
    order = torch.arange(tokens, device=device).expand(batch, -1)
    of_text = order < text if text_first else order >= tokens - text
    first, last = (0, text) if text_first else (tokens - text, tokens)
    rest = order[:, last:] if text_first else order[:, :first]
    return {"image": Marked(~of_text, rest), "text": Marked(of_text, order[:, first:last])}
