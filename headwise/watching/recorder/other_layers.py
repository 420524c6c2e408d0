"""Layers that mix tokens without a softmax: what they are, and figures of their states."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headwise.watching.table import Table, Value

DELTA, KIMI, MAMBA2, MAMBA = "gated delta rule", "Kimi delta attention", "Mamba-2", "Mamba"
RG_LRU = "RG-LRU"
FUNCTIONS = {
    "torch_chunk_gated_delta_rule": DELTA,
    "torch_recurrent_gated_delta_rule": DELTA,
    "chunk_kimi_delta_attention": KIMI,
    "recurrent_kimi_delta_attention": KIMI,
    "mamba2_chunk_scan": MAMBA2,
    "mamba_selective_scan": MAMBA,
    "_rnn_scan": RG_LRU,
}
"""Functions of transformers' files and classes that run a recurrence, and what they compute."""

NAMES = (
    (r"GatedDeltaNet$", DELTA),
    (r"DeltaNet$", "delta rule"),
    (r"GatedLinearAttention$", "gated linear attention"),
    (r"LightningAttention$", "lightning attention"),
    (r"Retention$", "retention"),
    (r"Rwkv\w*(Attention|SelfAttention|LinearAttention)$|RWKV\w*Attention$", "RWKV"),
    (r"RgLru$|RGLRU$", RG_LRU),
    (r"mLSTM\w*Layer$|xLSTMLayer$", "mLSTM"),
    (r"ShortConv$", "short convolution"),
    (r"BasicFourierTransform$", "Fourier transform"),
    (r"^Mamba2$|Mamba2Mixer$", MAMBA2),
    (r"^Mamba$|MambaMixer$", MAMBA),
    (r"^nn\.(LSTM|GRU|RNN)$", r"\1"),
)
"""What a layer is by the name of its class, where its functions do not tell."""

LARGEST = 1 << 26
"""The most weights of an implied map."""


@dataclass(frozen=True)
class Recurrence:
    """A call of a recurrence S_i = exp(g_i) S_{i−1} + k_i u_iᵀ, o_i = S_iᵀ q_i, in each head.

    u_i = write_i v_i, or by the delta rule write_i (v_i − (exp(g_i) S_{i−1})ᵀ k_i). queries and
    keys (B, N, H, K) as they enter it, decay (B, N, H, 1 or K) is g, write (B, N, H).
    """

    queries: Tensor
    keys: Tensor
    decay: Tensor
    write: Tensor
    delta: bool
    state: Tensor | None  # (B, H, ·, ·) after the last token, where it is known
    begun: bool  # the state held earlier tokens

    def implied_map(self, batch: int, head: int) -> Tensor:
        """The weights (N, N) with which outputs are sums of values, in float64.

        With S_ij = q_i · exp(g_{j+1} + … + g_i) k_j for j ≤ i, they are S · diag(write). By the
        delta rule S · (1 + L)⁻¹ · diag(write), where L_ij = write_i k_i · exp(…) k_j for j < i.
        """
        q, k, g = (x[batch, :, head].double() for x in (self.queries, self.keys, self.decay))
        write = self.write[batch, :, head].double()
        found = _decayed(q, k, g)
        if self.delta:
            before = write[:, None] * _decayed(k, k, g).tril(-1)
            inverse = before + torch.eye(len(k), dtype=torch.float64, device=k.device)
            found = torch.linalg.solve_triangular(
                inverse, found, upper=False, left=False, unitriangular=True
            )
        return found * write


def _decayed(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """q_i · exp(g_{j+1} + … + g_i) k_j of (N, K), for j ≤ i, else 0."""
    total, n = g.cumsum(0), len(q)
    if g.shape[1] == 1:
        return ((q @ k.T) * (total - total.T).tril().exp()).tril()
    found = q.new_zeros(n, n)
    for i in range(n):  # a table of all pairs and channels would be large
        found[i, : i + 1] = (k[: i + 1] * (total[i] - total[: i + 1]).exp()) @ q[i]
    return found


@dataclass
class Seen:
    """Sums over the calls of a layer, per head, and its last call."""

    sums: Tensor  # (4, H): tokens, Σ exp(g), Σ g, Σ of the states' norms; g meaned over channels
    states: int
    last: Recurrence | None


@dataclass
class OtherLayers:
    """The layers of a model that mix tokens without a softmax, and what was seen of them."""

    kept: bool  # calls, for implied maps
    kinds: dict[str, str] = field(default_factory=dict)
    seen: dict[str, Seen] = field(default_factory=dict)
    fixed: dict[str, Tensor] = field(default_factory=dict)  # log decays (H, channels) of weights
    ended: bool = False  # a step ended: what comes next starts anew

    def record(self, name: str, call: Recurrence) -> None:
        """Add the figures of a call; nothing is read back."""
        if self.ended:
            self.seen.clear()
            self.ended = False
        decay = call.decay.double().mean(-1)  # (B, N, H)
        tokens = torch.full_like(decay, 1.0)
        norms = torch.zeros_like(decay[0, 0])
        if call.state is not None:
            norms = call.state.double().flatten(2).norm(dim=-1).sum(0)
        exact = call.decay.double().exp().mean(-1)
        sums = torch.stack([*(x.sum((0, 1)) for x in (tokens, exact, decay)), norms])
        before = self.seen.get(name)
        states = 0 if call.state is None else len(call.state)
        if before is not None:
            sums, states = sums + before.sums, states + before.states
        mapped = self.kept and call.queries.shape[-1] > 0
        self.seen[name] = Seen(sums, states, call if mapped else None)

    def table(self) -> Table:
        """One row per head, or per layer whose heads were not seen; figures are NaN there."""
        rows: list[dict[str, Value]] = []
        nan = float("nan")
        for name, kind in self.kinds.items():
            row: dict[str, Value] = {"name": name, "kind": kind}
            seen = self.seen.get(name)
            if seen is None:
                for head, logs in enumerate(self.fixed.get(name, torch.full((1, 1), nan)).double()):
                    log = float(logs.mean())
                    known: dict[str, Value] = {"head": head, "decay_mean": float(logs.exp().mean())}
                    known["memory"] = -1 / log if log else float("inf")
                    rows.append(row | known | {"state_norm": nan})
                continue
            for head, (n, decay, log, norm) in enumerate(seen.sums.T.tolist()):
                figures: dict[str, Value] = {
                    "head": head,
                    "decay_mean": decay / n,
                    "memory": -n / log if log else float("inf"),
                    "state_norm": norm / seen.states if seen.states else nan,
                }
                rows.append(row | figures)
        return Table(rows, ["name", "kind", "head", "decay_mean", "memory", "state_norm"])

    def implied_map(self, name: str, head: int, batch: int) -> Tensor:
        """The implied map (N, N) of the last call of a layer; ValueError if there is none."""
        if name not in self.kinds:
            there = ", ".join(self.kinds) or "none"
            raise ValueError(f"{name!r} is not one of seen.others; there are {there}")
        call = self.seen[name].last if name in self.seen else None
        if call is None:
            why = "its calls were not seen"
            if name in self.seen:
                why = "maps=False keeps no calls" if not self.kept else "it has none"
            raise ValueError(f"there is no implied map of {name}: {why}")
        if call.begun:
            raise ValueError(
                f"the state of {name} held earlier tokens, whose keys are gone; watch a pass over "
                "the whole text to have its map"
            )
        rows, n, heads = call.write.shape
        if not (0 <= head < heads and 0 <= batch < rows):
            raise ValueError(f"{name} has {heads} heads and {rows} texts: no {head=}, {batch=}")
        if n * n > LARGEST:
            raise ValueError(f"the implied map of {n:,} tokens is too large: {LARGEST:,} weights")
        return call.implied_map(batch, head)


def other_kinds(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules of a model that mix tokens without a softmax, and what they are."""
    for module in model.modules():
        kind = _kind(type(module))
        if kind is not None:
            yield module, kind


def _kind(of: type[nn.Module]) -> str | None:
    names = {
        name
        for each in of.__mro__[:-1]
        if each.__module__ == of.__module__
        for method in vars(each).values()
        if callable(method)
        for name in getattr(getattr(inspect.unwrap(method), "__code__", None), "co_names", ())
    }
    for name, kind in FUNCTIONS.items():
        if name in names:
            return kind
    known = f"nn.{of.__name__}" if of.__module__.startswith("torch.nn") else of.__name__
    for pattern, kind in NAMES:
        found = re.search(pattern, known)
        if found:
            return found.expand(kind)
    return None
