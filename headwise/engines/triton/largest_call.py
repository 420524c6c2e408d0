"""Attention over the largest keys of each row: their bounds, then the engine's own kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.policies import Amount, per_head
from headwise.core.problem import Terms
from headwise.core.row_sums import LOG_TOTAL, RowResults
from headwise.engines.gradients import BackwardInputs, Gradients
from headwise.engines.triton.host.backward_call import differentiate_dot
from headwise.engines.triton.host.forward_call import run_forward
from headwise.engines.triton.host.launches import Launches
from headwise.engines.triton.host.map_call import largest_bounds
from headwise.engines.triton.host.operands import widened
from headwise.engines.triton.kernels.maps.map_held import Bounds


def attend(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, amount: Amount
) -> tuple[RowResults, Tensor, Tensor]:
    """The results of every row over its largest keys; the bounds least and above; and last."""
    dtype = q.dtype
    q, k, v = widened(q, k, v)
    count = per_head(amount, q.device).int().reshape(1, -1, 1).expand(q.shape[:3])
    bounds = largest_bounds(q, k, terms, count)
    rows = run_forward(Launches(), q, k, v, terms, LOG_TOTAL, bounds)
    edges = torch.stack((bounds.least, bounds.above))
    return rows._replace(out=rows.out.to(dtype)), edges, bounds.last


def differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    given: BackwardInputs,
    edges: Tensor,
    last: Tensor,
) -> Gradients:
    """The gradients of every input from that of out."""
    least, above = (x.contiguous() for x in edges.unbind(0))
    bounds = Bounds(last, least, above, last.contiguous())
    q, k, v, out, grad_out = widened(q, k, v, given.out, given.grad_out)
    given = given._replace(out=out, grad_out=grad_out)
    return differentiate_dot(q, k, v, terms, given, bounds)
