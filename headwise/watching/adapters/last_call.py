"""The last call of a module in compiled code."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from headwise.core.observation import Observation
from headwise.nn.call import Call
from headwise.watching.recorder.seen_call import SeenCall, bent, owned


class LastCall:
    """The last call of a module: traced code sets the attributes, and its graph returns them.

    Later runs of a CUDA graph write over what it returned, so a GPU's tensors are copied when they
    are taken: at the end of a step, and by whoever asks.
    """

    def __init__(self) -> None:
        self.sizes: tuple[int, int, int] | None = None  # batch, queries, keys; None if none ran
        self.bent: str | None = None
        self.call: Call | None = None
        self.padding: Tensor | None = None
        self.rows: Tensor | None = None
        self.highest: Tensor | None = None
        self.values: dict[str, Tensor] = {}

    def set(self, call: Call) -> None:
        """Note how a call is made; the compiler traces this."""
        self.sizes = (call.q.shape[0], call.q.shape[2], call.k.shape[2])
        self.bent = bent(call)

    def keep(self, call: Call, seen: Observation, padding: Tensor | None) -> None:
        """Keep the rows of a call and what its map needs; the compiler traces this."""
        q, k = call.q.detach(), call.k.detach()
        if k.shape[2] != q.shape[2]:
            k = k.clone()  # it may be a cache, which will be written into
        none = call.v.new_empty(*call.v.shape[:3], 0)  # a view would hold all the values
        self.call = Call(q, k, none, call.given)  # torch 2.11 can't rebuild what _replace() makes
        self.padding, self.rows = padding, seen.rows
        self.highest, self.values = seen.highest, dict(seen.values)

    def take(self, stats: tuple[str, ...]) -> SeenCall | None:
        """The call with these statistics; None if none ran since the last time this was asked."""
        sizes, self.sizes = self.sizes, None
        if sizes is None:
            return None
        batch, queries, keys = sizes
        found = SeenCall(batch, queries, 0, None, None, None, None, self.bent, keys)
        call, self.call = self.call, None
        return found if call is None else self._kept(found, call, stats)

    def _kept(self, found: SeenCall, call: Call, stats: tuple[str, ...]) -> SeenCall:
        """The same with its rows, and what its map needs; they are forgotten here."""
        assert self.highest is not None
        values = {name: _own(value) for name, value in self.values.items()}
        lse = values.get("lse") if self.rows is None else None
        shown = {name: value for name, value in values.items() if name in stats}
        seen = Observation(shown, _own(self.highest), self.rows)
        padding = None if self.padding is None else _own(self.padding)
        kept = owned(call._replace(q=_own(call.q), k=_own(call.k)))
        self.padding, self.rows, self.highest, self.values = None, None, None, {}
        return replace(found, observation=seen, padding=padding, lse=lse).keeping(kept)


def _own(x: Tensor) -> Tensor:
    return x.clone() if x.device.type == "cuda" else x
