"""The header of a call: every option as all ranks must have it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headwise.core.observation import Asked
from headwise.core.options import Options
from headwise.core.place import as_four_axes
from headwise.core.problem import Problem, check_mask, pose
from headwise.distributed.descriptions import described, described_part
from headwise.distributed.header import Header
from headwise.distributed.layouts import Layout
from headwise.dropout import Dropout
from headwise.score import Dot


def checked_part(kind: str, tensors: tuple[Any, Any, Any], options: Options) -> Problem:
    """The checked problem of this rank's part, without its mask and a tensor bias."""
    if any(not isinstance(x, Tensor) or x.ndim != 4 for x in tensors):
        raise ValueError(
            f"hw.distributed.{kind} takes q, k and v with the axes (batch, heads, length, width)"
        )
    check_mask(options.mask)
    rows = options.bias if isinstance(options.bias, Tensor) else None
    own = options._replace(mask=None, bias=None if rows is not None else options.bias)
    problem = pose(f"distributed.{kind}", *tensors, own)
    if rows is not None:
        shape, wanted = (1,) * (4 - rows.ndim) + tuple(rows.shape), tensors[0].shape[:3]
        fits = all(n in (1, want) for n, want in zip(shape, wanted, strict=False))
        if rows.ndim > 4 or not fits or not rows.is_floating_point():
            raise ValueError(
                f"bias is {rows.dtype} {tuple(rows.shape)}; give floating-point numbers of this "
                f"rank's rows over all keys, broadcast to {(*wanted, 'keys of all ranks')}"
            )
    return problem


def call_header(
    kind: str,
    problem: Problem,
    tensors: tuple[Tensor, Tensor, Tensor],
    layout: Layout,
    move: str,
    options: Options,
    asked: Asked,
) -> Header:
    """The call of this rank as the others must know it: every option, but for values that learn."""
    parts = zip("qkv", tensors, strict=True)
    same = {name: described_part(x, 2, problem.v.dtype) for name, x in parts}
    same |= described_options(problem, options)
    given = {"layout": layout, "move": move, **asked._asdict()}
    same |= {name: described(x) for name, x in given.items()}
    seed = 0 if problem.seed is None else int(problem.seed.flatten()[0])
    return Header(kind, same, (tensors[0].shape[2], tensors[1].shape[2], seed))


def described_options(problem: Problem, options: Options) -> dict[str, str]:
    """Every option as a text that is the same on ranks that mean the same.

    A score of None is a Dot; a bias tensor has the rank's own rows; a seed that was drawn is not
    the one that is used.
    """
    meant = options.keywords()
    score, _, bias, _, _, dropout, _ = options
    if score is None or isinstance(score, Dot):
        meant["score"] = Dot(problem.scale)
    if isinstance(bias, Tensor):
        meant["bias"] = described_part(as_four_axes(bias), 2)
    if not problem.dropout:
        meant["dropout"] = 0
    elif not isinstance(dropout, Dropout):
        meant["dropout"] = Dropout(problem.dropout)
    return {
        name: described(x, read=name not in ("score", "bias", "sinks")) for name, x in meant.items()
    }
