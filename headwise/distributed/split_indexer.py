"""The indexer's loss of a split sequence: every rank receives all keys and computes its rows.

Memory stays linear in the length. The gradients of the indexer's keys go back to their owners.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.bias import Bias
from headwise.core.intervals import Mask
from headwise.core.options import Options
from headwise.core.place import as_four_axes
from headwise.core.problem import Problem, Terms, pose
from headwise.distributed.call_header import described_options
from headwise.distributed.descriptions import described
from headwise.distributed.header import Header, agree
from headwise.distributed.layouts import Layout
from headwise.distributed.ranges import positions
from headwise.distributed.shards import check_layout, unshard
from headwise.distributed.transport import RankGroup
from headwise.indexer import IndexCall, check_indexer, row_losses
from headwise.score import Dot, Score, rewrite


def index_loss(
    q: Tensor,
    k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    *,
    mesh: DeviceMesh,
    layout: Layout | None = None,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    """`hw.index_loss` of a sequence that is split between the ranks of a mesh.

    Every tensor is this rank's part, a bias tensor this rank's rows over all keys; `selected`
    (B|1, N, K) names keys of the whole sequence. Every rank gets the loss of the whole sequence and
    the gradients of its own part.
    """
    ranks, options = RankGroup.of(mesh), Options(score, mask, bias, softcap, sinks)
    given = IndexCall(q, k, index_q, index_k, index_weights)
    header, failure = Header("index loss"), None
    try:
        layout = check_layout(layout)
        check_indexer(given, q.shape[0], q.shape[2], k.shape[2], selected)
        problem = pose(
            "distributed.index_loss", q, k, k[..., :0], options._replace(mask=None, bias=None)
        )
        same = {"layout": described(layout), "mask": described(mask)}
        same |= {
            name: text
            for name, text in described_options(problem, options).items()
            if name in ("softcap", "sinks")
        }
        header = Header("index loss", same, (q.shape[2], k.shape[2]))
    except Exception as error:  # the others wait: they hear of it first
        failure = error
    every = agree(ranks, header, failure)
    assert layout is not None
    rows = positions(layout.of_lengths([own[0] for own in every])[ranks.own], q.device)
    whole_k = unshard(k.detach(), mesh, dim=2, layout=layout)
    whole_index = unshard(index_k, mesh, dim=1, layout=layout)
    problem, terms = _of_rows(q.detach(), whole_k, rows, sum(own[0] for own in every), options)
    local = given._replace(index_k=whole_index)
    divergence, mass = row_losses(problem, terms, local, selected)
    count = (mass > 0).sum()
    sums = torch.stack((divergence.detach().double().sum(), count.double()))
    dist.all_reduce(sums, group=ranks.group)
    total = sums[1].clamp_min(1)
    own = divergence.sum() / total.to(divergence.dtype)
    return own + (sums[0] / total).to(own.dtype) - own.detach()


def _of_rows(
    q: Tensor, k: Tensor, rows: Tensor, queries: int, options: Options
) -> tuple[Problem, Terms]:
    """The rows of a rank as a sample of the rows of the whole sequence."""
    score, bias = options.score, options.bias
    plain = options._replace(score=None, bias=None if isinstance(bias, Tensor) else bias)
    placeholder = k.new_zeros(1).expand(q.shape[0], q.shape[1], queries, k.shape[-1])
    problem = pose("distributed.index_loss", placeholder, k, k[..., :0], plain)
    scored = rewrite(Dot() if score is None else score, q, k)
    problem = replace(
        problem, q=scored.q, k=scored.k, scale=scored.scale, additive=scored.additive, rows=rows
    )
    terms = problem.terms()
    if isinstance(bias, Tensor):  # it has this rank's rows
        terms = terms._replace(bias=as_four_axes(bias).to(q.device))
    return problem, terms
