"""What each row of a call would lose under policies of sparse attention, as one operator.

For every row: how many of its largest weights make up 95 % of them; and for each policy the weight
that it keeps, Σ p over the kept keys, and the error of its output, ‖o_S − o‖ / ‖o‖. The operator
holds the choice, which depends on numbers, so that compiled code records the same figures.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.core.policies import Policy, Window, check_policy, of_heads, of_rows
from headwise.core.problem import Problem, Terms, without_autocast
from headwise.core.row_sums import LOG_TOTAL, RowResults
from headwise.engines.operators import CALL, define
from headwise.engines.sparse_call import all_rows, kept_rows
from headwise.engines.streaming.forward_loop import Forward
from headwise.engines.streaming.loop import Selection
from headwise.engines.streaming.selection import Joint, select
from headwise.maps.backends import coverage_for
from headwise.maps.region import Region

SHARE = 0.95
NEEDED = "needed_95"
KEPT, ERROR = "kept_", "error_"
"""Before the name of a policy: the weight that it keeps, and the error of its output."""

_TERMS = len(Terms._fields)
_numbers = itertools.count()


class SparsePolicies:
    """Policies by their names, with a number by which compiled code finds them."""

    def __init__(self, policies: Iterable[Policy]) -> None:
        self.named: dict[str, Policy] = {}
        for policy in policies:
            name, again = policy.name, 1
            while name in self.named:
                again += 1
                name = f"{policy.name}_{again}"
            self.named[name] = policy
        self.number = next(_numbers)
        _KNOWN[self.number] = self

    def __bool__(self) -> bool:
        return bool(self.named)

    def for_kind(self, kind: str) -> tuple[str, ...]:
        """The names of the policies that mean something in a layer of this kind."""
        if kind == "window":
            return ()
        return tuple(
            x for x, p in self.named.items() if kind == "self" or not isinstance(p, Window)
        )

    def figures(self, names: Sequence[str]) -> tuple[str, ...]:
        """The names of the figures of these policies."""
        found = [f"{part}{name}" for name in names for part in (KEPT, ERROR)]
        return (NEEDED, *found) if names else ()


_KNOWN: weakref.WeakValueDictionary[int, SparsePolicies] = weakref.WeakValueDictionary()
NONE = SparsePolicies(())


def losses(
    problem: Problem,
    policies: SparsePolicies,
    kind: str,
    within: Sequence[Policy] = (),
    share: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """The figures of a problem's rows by their names, (B, Hq, N) each; no gradients flow.

    `within` are policies under which the call itself runs: then it is not known how many keys it
    needs. `share` is the number of the first head and that of all heads of the layer, if they are
    known. ValueError if a policy was made for another call.
    """
    names = policies.for_kind(kind)
    if not names:
        return {}
    q, k, v = (x.detach() for x in (problem.q, problem.k, problem.v))
    chosen = [policies.named[name] for name in names]
    if share is not None:
        own = range(share[0], share[0] + q.shape[1])
        chosen = [of_heads(policy, own, share[1]) for policy in chosen]
    for policy in chosen:
        check_policy(policy, problem.place, k.shape[1])
    found = _computed(q, k, v, *problem.terms(), problem.rows, chosen, within)
    figures = dict(zip(policies.figures(names), found.unbind(0), strict=True))
    if within:
        del figures[NEEDED]
    return figures


def traced_losses(
    problem: Problem, number: int, kind: str, figures: Sequence[str]
) -> dict[str, Tensor]:
    """The same in compiled code, which knows the policies by their number."""
    q, k, v = (x.detach() for x in (problem.q, problem.k, problem.v))
    found = _OPERATOR(q, k, v, *problem.terms(), problem.rows, number, kind)
    return dict(zip(figures, found.unbind(0), strict=True))


def _computed(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
    """The figures one behind the other, (1 + 2 policies, B, Hq, N)."""
    terms, rows, policies, within = Terms(*given[:_TERMS]), *given[_TERMS:]
    terms = terms.without_band(q.shape[2], k.shape[2])._replace(seed=None, dropout=0.0)
    with torch.no_grad(), without_autocast(q.device):
        around: Selection | None = None
        for policy in within:
            chosen = select(of_rows(policy, rows), q, k, terms)
            around = chosen if around is None else Joint(around, chosen)
        if around is None:
            whole = all_rows(q, k, v, terms)
        else:
            whole = Forward(q, k, v, terms, LOG_TOTAL, around).run()
        region = Region(q, k, v[..., :0], terms)
        wide = whole.lse.dtype
        found = [coverage_for(region).needed(region, whole.totals(), SHARE).to(wide)]
        bare = terms._replace(sinks=None)
        for policy in (of_rows(policy, rows) for policy in policies):
            if around is None:
                part, *_ = kept_rows(q, k, v, bare, policy)
            else:
                chosen = Joint(around, select(policy, q, k, terms))
                part = Forward(q, k, v, bare, LOG_TOTAL, chosen).run()
            found += [whole.weight_of(part), _error(whole, part, terms.sinks)]
        return torch.stack(found)


def _error(whole: RowResults, part: RowResults, sinks: Tensor | None) -> Tensor:
    """‖o_S − o‖ / ‖o‖, where the sink takes its share of the kept keys; 0 where o is 0."""
    wide = whole.lse.dtype
    out = part.out.to(wide)
    if sinks is not None:
        out = out * torch.sigmoid(part.lse - sinks.to(wide)[:, None])[..., None]
    own = whole.out.to(wide)
    size = torch.linalg.vector_norm(own, dim=-1)
    away: Tensor = torch.linalg.vector_norm(out - own, dim=-1)
    error: Tensor = away / size.masked_fill(size == 0, torch.inf)
    return error


def _run(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
    *rest, number, kind = given
    known = _KNOWN[number]
    policies = [known.named[name] for name in known.for_kind(kind)]
    found: Tensor = _computed(q, k, v, *rest, policies, ())
    return found


def _shapes(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
    *_, number, kind = given
    count = 1 + 2 * len(_KNOWN[number].for_kind(kind))
    return q.new_empty(count, *q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


_OPERATOR = define(
    "sparse_losses",
    f"({CALL}, Tensor? rows, int policies, str kind) -> Tensor",
    _run,
    _shapes,
    *([torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []),
)
