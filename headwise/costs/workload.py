"""The work whose cost is asked for: sizes, dtype, cache, and the ranks that share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from headwise.core.intervals import Mask
from headwise.costs.formula import Formula, size
from headwise.costs.visible import Tile
from headwise.messages import say

BITS = {"fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
ALIASES = {
    "float64": "fp64", "float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16",
    "half": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
}  # fmt: skip
COMPUTED = ("fp64", "fp32", "bf16", "fp16")

DeviceKind = Literal["cuda", "cpu"]
Recompute = Literal["layers", "attention"] | None
Layout = Literal["contiguous", "head_tail"]


@dataclass(frozen=True)
class CacheLayout:
    """How a cache stores keys and values.

    `bits` per number; `scale_bits` for every `group` numbers (a whole head's key or value if None),
    and `table_bits` per page if tokens are stored in pages of `page`.
    """

    bits: int = 16
    scale_bits: int = 0
    group: int | None = None
    page: int | None = None
    table_bits: int = 32

    @classmethod
    def of(cls, given: object, dtype: str) -> CacheLayout:
        """A layout as it is, by the name of a dtype, or by default in the model's dtype.

        "int8" is the layout of `hw.nn.Int8Cache`: eight bits, and a float32 scale for each key and
        each value of a head.
        """
        if isinstance(given, cls):
            return given
        name = dtype_name("cache", dtype if given is None else given)
        return cls(8, 32) if name == "int8" else cls(BITS[name])

    def __post_init__(self) -> None:
        for name in ("bits", "group", "page"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"CacheLayout({name}={value!r}) must be a positive integer")
        if type(self.scale_bits) is not int or self.scale_bits < 0:
            raise ValueError(f"CacheLayout(scale_bits={self.scale_bits!r}) must be 0 or more")

    def vector(self, width: int) -> Fraction:
        """Bytes of one key or value of this width, scales included."""
        groups = 1 if self.group is None else -(-width // self.group)
        return Fraction(self.bits * width + self.scale_bits * groups, 8)

    def room(self, length: int) -> int:
        """Tokens that are stored for a sequence of this length: whole pages."""
        return length if self.page is None else -(-length // self.page) * self.page

    def table(self, length: int) -> int:
        """Bytes of a sequence's page table."""
        return 0 if self.page is None else -(-length // self.page) * self.table_bits // 8


@dataclass(frozen=True)
class Ranks:
    """The sizes of a mesh: data, tensor and context parallelism, and sharded parameters."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    fsdp: int = 1

    @classmethod
    def of(cls, mesh: object) -> Ranks:
        """The sizes from a dictionary such as {"tp": 4, "cp": 2}, or of a DeviceMesh's names."""
        names = getattr(mesh, "mesh_dim_names", None)
        if names is not None:
            mesh = dict(zip(names, mesh.shape, strict=True))  # type: ignore[attr-defined]
        if mesh is None:
            return cls()
        if not isinstance(mesh, Mapping):
            raise ValueError(f'mesh={mesh!r} must be a dictionary such as {{"dp": 2, "tp": 4}}')
        known = cls.__dataclass_fields__
        for name, ranks in mesh.items():
            if name not in known:
                raise ValueError(
                    say(
                        "mesh has no axis {name!r}; it takes dp (data), tp (tensor), cp (context) "
                        "and fsdp (sharded parameters)",
                        name=name,
                    )
                )
            if type(ranks) is not int or ranks < 1:
                raise ValueError(
                    say("mesh[{name!r}]={size!r} must be a positive number of ranks", name=name,
                        size=ranks)
                )  # fmt: skip
        return cls(**mesh)

    @property
    def count(self) -> int:
        """All ranks."""
        return self.dp * self.tp * self.cp * self.fsdp

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)


@dataclass(frozen=True)
class Workload:
    """A call of a model: `batch` sequences of `queries` tokens that see `keys` tokens.

    With more keys than queries the others are in a cache, and an encoder has run before. `context`
    is the length of the sequence that cross-attention sees.
    """

    batch: int = 1
    queries: int | None = None
    keys: int | None = None
    context: int | None = None
    mask: Mask | None = None
    dtype: str = "bf16"
    device: DeviceKind = "cuda"
    fused: bool = True
    recompute: Recompute = None
    tile: Tile = (128, 128)
    cache: CacheLayout = CacheLayout()
    ranks: Ranks = Ranks()
    layout: Layout = "contiguous"

    @property
    def element(self) -> int:
        """Bytes of one number."""
        return BITS[self.dtype] // 8

    @property
    def wide(self) -> int:
        """Bytes of a number in which sums are kept: float32 or wider."""
        return max(4, self.element)


@dataclass(frozen=True)
class Tokens:
    """The tokens of one rank: b sequences of s queries, which see t keys."""

    batch: int
    queries: int  # of this rank
    keys: int
    all_queries: int  # of all ranks of context parallelism
    cached: bool = False  # some keys, or all of a context's, were made in earlier calls

    @property
    def b(self) -> Formula:
        """The batch, as a letter."""
        return size("b", self.batch)

    @property
    def s(self) -> Formula:
        """The queries, as a letter."""
        return size("s", self.queries)

    @property
    def t(self) -> Formula:
        """The keys: a letter of their own if they are not the queries."""
        return self.s if self.keys == self.queries else size("t", self.keys)

    @property
    def rows(self) -> Formula:
        """All queries of the batch."""
        return self.b * self.s


def dtype_name(what: str, given: Any) -> str:
    """The short name of a dtype, given as a name or as torch has it; ValueError if unknown.

    >>> dtype_name("dtype", "torch.bfloat16")
    'bf16'
    """
    name = str(given).removeprefix("torch.")
    name = ALIASES.get(name, name)
    if name not in BITS:
        raise ValueError(
            say("{what}={given!r} is not a dtype; use one of {there}", what=what, given=given,
                there=", ".join(BITS))
        )  # fmt: skip
    return name


MOST_SEQUENCES = 1 << 40
MOST_TOKENS = 1 << 24
"""The longest sequence: the pairs of a mask are counted row by row."""


def check_workload(work: Workload) -> None:
    """Raise ValueError for sizes that no call has."""
    for name in ("batch", "queries", "keys", "context"):
        value = getattr(work, name)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r} must be a positive integer")
        if value is not None and name != "batch" and value > MOST_TOKENS:
            raise ValueError(
                say("{name}={value} is too long; at most {most:,} tokens are counted", name=name,
                    value=value, most=MOST_TOKENS)
            )  # fmt: skip
    if work.batch > MOST_SEQUENCES:
        raise ValueError(
            say("batch={value} is too large; at most {most:,} sequences are counted",
                value=str(work.batch)[:40], most=MOST_SEQUENCES)
        )  # fmt: skip
    if work.dtype not in COMPUTED:
        raise ValueError(
            say(
                "dtype={dtype!r} is not one that activations are computed in; use one of {there} "
                "(a cache may be smaller: cache={dtype!r})",
                dtype=work.dtype,
                there=", ".join(COMPUTED),
            )
        )
    choices = {
        "device": ("cuda", "cpu"),
        "recompute": (None, "layers", "attention"),
        "layout": ("contiguous", "head_tail"),
    }
    for name, allowed in choices.items():
        if getattr(work, name) not in allowed:
            raise ValueError(f"{name}={getattr(work, name)!r}; use one of {allowed}")
    if len(tuple(work.tile)) != 2 or any(type(side) is not int or side < 1 for side in work.tile):
        raise ValueError(f"tile={work.tile!r} must be two positive integers: queries and keys")
    if work.keys is not None and work.queries is not None and work.keys < work.queries:
        raise ValueError(
            f"keys={work.keys} are fewer than queries={work.queries}: keys count every token, also "
            "those of a cache; for cross-attention use context="
        )
    if work.mask is not None and not isinstance(work.mask, Mask):
        raise ValueError(f"mask={work.mask!r} is not a mask; try hw.mask.causal()")


def share(what: str, size: int, ranks: int, axis: str) -> int:
    """One rank's part of a size; ValueError if it does not divide."""
    if size % ranks:
        raise ValueError(
            say(
                "{what} of {size} does not divide over {ranks} ranks ({axis}={ranks}); choose "
                "{axis} among the divisors of {size}",
                what=what,
                size=size,
                ranks=ranks,
                axis=axis,
            )
        )
    return size // ranks
