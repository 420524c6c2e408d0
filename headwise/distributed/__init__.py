"""Attention on many GPUs: exact for every mask and option, and still visible.

Everything runs on torch.distributed: a DeviceMesh, NCCL or gloo. `attention` and `observe` take
this rank's part of a sequence; `shard` and `unshard` cut tensors that way and put them together.
"""

from headwise import handover
from headwise.distributed.layouts import (
    Layout,
    balanced,
    contiguous,
    head_tail,
    imbalance,
    pairs,
)
from headwise.distributed.movement import Movement, explain
from headwise.distributed.rank_attention import attention, observe
from headwise.distributed.sharded_tensors import DTensorCalls, held_range
from headwise.distributed.shards import shard, unshard
from headwise.distributed.split_indexer import index_loss
from headwise.distributed.split_maps import attention_map
from headwise.distributed.split_models import context_parallel
from headwise.distributed.transport import RankError, RankGroup, Traffic, traffic

__all__ = [
    "Layout",
    "Movement",
    "RankError",
    "RankGroup",
    "Traffic",
    "attention",
    "attention_map",
    "balanced",
    "context_parallel",
    "contiguous",
    "explain",
    "head_tail",
    "held_range",
    "imbalance",
    "index_loss",
    "observe",
    "pairs",
    "shard",
    "traffic",
    "unshard",
]

handover.serve_sharded(DTensorCalls())  # hw.attention and hw.observe of DTensors
