"""What PyTorch does for a model, part by part: products, traffic, and what autograd saves.

The model is on the meta device, so nothing is computed. Operations are seen below autograd, FLOPs
are those of PyTorch's own table, and a storage that autograd saves counts once, in the part that
made it, whoever saves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from headwise.core.intervals import Mask
from headwise.core.place import Place
from headwise.costs.formula import Formula, Line, formula
from headwise.costs.kernel import AttentionShape, Kernel, Kind, MatmulShape
from headwise.costs.pairs import count_pair_flops, pairs_of_a_head, pairs_of_a_rank
from headwise.costs.tally import CountedPart, recomputed_kernel
from headwise.costs.tape import Tape
from headwise.costs.tracing.naming import SizeNames, checked
from headwise.costs.visible import Pairs

SPECIAL = {
    "exp", "exp2", "expm1", "log", "log1p", "tanh", "sigmoid", "silu", "gelu", "erf", "softplus",
    "mish", "log_sigmoid_forward", "_softmax", "_log_softmax", "elu", "sin", "cos",
}  # fmt: skip
NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm")
FREE = {"empty", "empty_strided", "new_empty", "empty_like", "detach", "alias", "lift_fresh",
        "_local_scalar_dense", "new_empty_strided", "_unsafe_view"}  # fmt: skip
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


@dataclass(eq=False)
class LayerCall:
    """A layer of a list while it runs, and the tensors that it asked autograd to save."""

    part: CountedPart
    parent: LayerCall | None
    path: str = ""
    asked: set[int] = field(default_factory=set)
    strays: bool = False  # it runs modules that are not its own, which are counted elsewhere


@dataclass(eq=False)
class Home:
    """The part that made a storage, and the layer in whose call it did."""

    part: CountedPart
    call: LayerCall | None


class OwnAttention(NamedTuple):
    """An attention module of headwise or PyTorch that runs."""

    across: bool  # its keys are of another sequence
    caches: bool  # decoding keeps its keys and values


@dataclass(frozen=True)
class MaskedProduct:
    """A product with the matrix of all pairs, and the pairs that its mask shows."""

    mask: Mask | None
    place: Place
    visible: int
    dense: int
    width: int  # of a query, or of a value


class Recorder(TorchDispatchMode):
    """Counts the operations of a model into the parts that are open."""

    def __init__(self, tape: Tape, names: SizeNames, own: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape, self.names, self.work = tape, names, tape.work
        self.homes: dict[int, Home] = {}
        self.calls: list[LayerCall] = []
        self.masks: dict[int, Mask | None] = {}  # by the storage that stands for the mask
        self.kept: list[Any] = []  # ids of storages are unique while they live
        self.saved: set[int] = {storage_id(each) for each in own}
        self.outputs: dict[int, tuple[CountedPart, Counter[Line]]] = {}
        self.quiet = self.held = 0
        self.seen_masks: list[tuple[Mask | None, int, int]] = []
        self.dropout_masks: set[int] = set()
        self.statistics: set[int] = set()
        self.touched: set[int] = set()  # storages that an operation has read
        self.used: dict[int, Fraction] = {}  # of experts: the share of a weight that a token uses
        self.hides_unknown = False  # a mask that could not be read: its pairs all count
        self.attending: OwnAttention | None = None

    # operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        for each in args:
            if isinstance(each, Tensor):
                self.touched.add(storage_id(each))
        if not _views(func):
            home = Home(self.tape.current, self.calls[-1] if self.calls else None)
            for each in tree_leaves(out):
                if isinstance(each, Tensor):
                    self.homes[storage_id(each)] = home
        if name.startswith("bernoulli"):
            self.dropout_masks |= {storage_id(x) for x in tree_leaves(out) if isinstance(x, Tensor)}
        if name == "native_layer_norm":
            self.statistics |= {storage_id(x) for x in out[1:]}
        if not self.quiet:
            self._note(func, name, args, kwargs or {}, out)
        return out

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        packet = func._overloadpacket
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
            self._product(name, flops, args, out)
            return
        if name in FREE or _views(func):
            return
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if not any(x.is_meta for x in made):
            return  # what counts pairs of a mask, and no part of the model
        written = sum(numbers(x) * x.element_size() for x in made)
        kind: Kind = "elementwise"
        bytes_read = sum(min(numbers(x), x.numel()) * x.element_size() for x in read)
        if name == "embedding" or name.startswith("index"):
            kind, bytes_read = "embedding", written
        elif name == "_softmax":
            kind = "softmax"
        elif name in NORMS:
            kind = "norm"
        special = sum(x.numel() for x in made) if name in SPECIAL else 0
        self.tape.run(Kernel(name, kind, 0, bytes_read, written, special))
        if any(x.requires_grad for x in read) and torch.is_grad_enabled():
            self.tape.run(Kernel(name, kind, 0, bytes_read + written, bytes_read), True)

    def _product(self, name: str, flops: int, args: Any, out: Any) -> None:
        """A matrix product or a convolution, and the products of its backward."""
        if name not in PRODUCTS:
            self._convolution(name, flops, args, out)
            return
        a, b = args[-2:] if name in ("mm", "bmm") else args[1:3]
        batch = a.shape[0] if a.ndim == 3 else 1
        self.product(name, a.shape[-2], b.shape[-1], a.shape[-1], batch, (a, b))

    def product(
        self,
        label: str,
        m: int,
        n: int,
        k: int,
        batch: int,
        factors: tuple[Tensor, Tensor],
        weights: int | None = None,
    ) -> None:
        """`batch` products of (m, k) and (k, n), whose second factors are `weights` matrices."""
        tape, work, names = self.tape, self.work, self.names
        count = 2 * batch * m * n * k
        # A matrix that all tokens share is no product of pairs, whatever its sizes are.
        share = self._visible(batch, m, n, k) if factors[0].ndim == 3 else None
        visible = count if share is None else count * share.visible // share.dense
        element = work.element
        sizes = [batch * m * k, (batch if weights is None else weights) * k * n, batch * m * n]
        a, b, y = (size * element for size in sizes)
        plain = Kernel(label, "matmul", visible, a + b, y, shape=MatmulShape(m, n, k, batch),
                       flops_dense=count, flops_executed=count)  # fmt: skip
        tape.run(plain)
        grad = torch.is_grad_enabled()
        if grad and factors[0].requires_grad:
            shape = MatmulShape(m, k, n, batch)
            tape.run(replace(plain, name=f"{label} (input)", bytes_read=y + b, bytes_written=a,
                             shape=shape), True)  # fmt: skip
        if grad and factors[1].requires_grad:
            shape = MatmulShape(k, n, m, batch)
            tape.run(replace(plain, name=f"{label} (weight)", bytes_read=a + y, bytes_written=b,
                             shape=shape), True)  # fmt: skip
        if share is not None:
            self._flops_of_pairs(label, share, visible)
            return
        rows = names.rows(m) if batch == 1 else names.width(batch) * names.rows(m)
        tape.flops(label, checked(2 * rows * names.width(k) * names.width(n), visible))

    def _convolution(self, name: str, flops: int, args: Any, out: Any) -> None:
        moved = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        read = sum(x.numel() * x.element_size() for x in moved)
        made = sum(x.numel() * x.element_size() for x in tree_leaves(out) if isinstance(x, Tensor))
        self.tape.run(Kernel(name, "convolution", flops, read, made))
        learned = sum(x.requires_grad for x in moved[:2]) if torch.is_grad_enabled() else 0
        for _ in range(learned):
            self.tape.run(Kernel(f"{name} (backward)", "convolution", flops, read, made), True)
        self.tape.flops(name, formula(flops))

    # masks

    def remember(self, stand_in: Tensor, mask: Mask | None) -> Tensor:
        """Let a tensor stand for a mask, also through its views."""
        self.masks[storage_id(stand_in)] = mask
        self.kept.append(stand_in.untyped_storage())
        return stand_in

    def mask_of(self, given: Tensor) -> Mask | None:
        """The mask that a tensor stands for; of one that can't be read, every pair counts."""
        known = storage_id(given)
        if known not in self.masks:
            self.hides_unknown = True
            return None
        return self.masks[known]

    @contextmanager
    def under(self, masks: Sequence[tuple[Mask | None, int, int]]) -> Iterator[None]:
        """Count only visible pairs of the products inside that have a mask's queries and keys."""
        self.seen_masks += masks
        yield
        del self.seen_masks[len(self.seen_masks) - len(masks) :]

    def narrowed(self, mask: Mask | None) -> Mask | None:
        """The mask of a call, which that of the work narrows where a sequence sees itself."""
        narrower = self.work.mask
        if self.attending is None or self.attending.across or narrower is None:
            return mask
        return narrower if mask is None else mask & narrower

    def _visible(self, batch: int, m: int, n: int, k: int) -> MaskedProduct | None:
        """The pairs of a product of queries with keys, or of weights with values."""
        tokens = self.names.tokens
        for mask, queries, keys in reversed(self.seen_masks):
            if m == queries and keys in (n, k) and batch >= tokens.batch:
                heads = max(1, batch // tokens.batch)
                place = self.place(heads, queries, keys)
                pairs = pairs_of_a_rank(mask, place, tokens, self.work)
                width = k if n == keys else n
                return MaskedProduct(mask, place, pairs.visible, pairs.dense, width)
        return None

    def _flops_of_pairs(self, label: str, product: MaskedProduct, flops: int) -> None:
        """Record the formula of a product with every visible pair."""
        place, tokens = product.place, self.names.tokens
        calls = place.batch * place.heads
        if product.visible % calls:
            self.tape.flops(label, formula(flops))
            return
        whole = place.heads * product.width
        h = self.names.widths.get("h")
        wide = self.names.width(whole) if whole == h else (
            self.names.width(place.heads) * self.names.width(product.width))  # fmt: skip
        visible, every = product.visible // calls, product.dense // calls
        pairs, note = pairs_of_a_head(product.mask, visible, every, tokens, self.work)
        self.tape.flops(label, checked(2 * tokens.b * pairs * wide, flops), note)

    def place(self, heads: int, queries: int, keys: int) -> Place:
        """Where a call's queries and keys stand, of all ranks of context parallelism."""
        tokens = self.names.tokens
        across = self.attending is not None and self.attending.across
        if self.work.ranks.cp > 1 and (queries == keys or across):
            keys = keys * self.work.ranks.cp
            return Place(tokens.batch, heads, queries, keys)
        return Place(tokens.batch, heads, queries, keys, offset=keys - queries)

    def flops_of_pairs(self, shape: AttentionShape, pairs: Pairs) -> None:
        """Record the formula of a fused call's FLOPs."""
        tokens = self.names.tokens
        if self.work.ranks.cp == 1:
            tokens = replace(tokens, queries=shape.queries, keys=shape.keys)
        count_pair_flops(self.tape, shape, self.names.widths.get("h", 1), pairs, tokens)

    # tensors that autograd saves

    def pack(self, x: Tensor) -> Tensor:
        """Count a saved tensor, unless its storage was counted before."""
        known = storage_id(x)
        for call in self.calls:
            call.asked.add(known)
        if known in self.saved or self.recomputes:
            return x
        self.saved.add(known)
        self.kept.append(x.untyped_storage())
        self._credit(self.homes.get(known), self._line(x, known))
        return x

    @property
    def recomputes(self) -> bool:
        """True inside of what the backward runs again, which saves nothing but its inputs."""
        return self.held > 0 or (self.work.recompute == "layers" and bool(self.calls))

    def keep(self, label: str, count: Formula) -> None:
        """Save bytes that no tensor stands for."""
        if not self.recomputes and self.work.recompute != "attention":
            self.tape.keep(label, count)

    def _line(self, x: Tensor, known: int) -> Line:
        count = x.untyped_storage().nbytes() // x.element_size()
        each = x.element_size()
        if known in self.dropout_masks and self.work.device == "cuda":
            each = 1
        if known in self.statistics:  # a GPU keeps them in float32, a CPU in the input's dtype
            each = self.work.wide if self.work.device == "cuda" else self.work.element
        parts = max(1, count // max(1, x.numel()))  # of joined projections a tensor is one part
        written = checked(parts * self.names.tensor(tuple(x.shape)), count)
        return Line("activations", "saved", written * each)

    def _credit(self, home: Home | None, line: Line) -> None:
        if home is None:
            self.tape.root.saved.append(line)
            return
        call = home.call
        if call is None or call in self.calls:
            home.part.saved.append(line)
            return
        while call.parent is not None and call.parent not in self.calls:
            call = call.parent
        _, found = self.outputs.setdefault(id(call.part), (call.part, Counter()))
        found[line] += 1

    def settle(self, parents: Callable[[CountedPart], CountedPart]) -> None:
        """Give the outputs of layers that others saved to the layers, once all calls are known."""
        for part, found in self.outputs.values():
            for line, times in found.items():
                if times == part.copies:
                    part.saved.append(line)
                else:
                    where = parents(part)
                    where.saved.append(Line(line.figure, line.label, line.formula, times))

    @contextmanager
    def recomputed(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Save only these inputs of what follows, and compute it once more in the backward."""
        for each in inputs:
            self.pack(each)
        part, ran = self.tape.current, len(self.tape.current.forward)
        self.held += 1
        yield
        self.held -= 1
        part.backward += [recomputed_kernel(kernel) for kernel in part.forward[ran:]]

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Count no operation inside."""
        self.quiet += 1
        yield
        self.quiet -= 1


def storage_id(x: Tensor) -> int:
    """The identity of a tensor's storage while it lives."""
    return int(x.untyped_storage()._cdata)


def numbers(x: Tensor) -> int:
    """Numbers that a tensor has stored: an expanded one has fewer than it shows."""
    stored = x.untyped_storage().nbytes() // max(1, x.element_size())
    return min(x.numel(), stored)


def _views(func: Any) -> bool:
    returns = func._schema.returns
    if not returns or returns[0].alias_info is None:
        return False
    return not returns[0].alias_info.is_write
