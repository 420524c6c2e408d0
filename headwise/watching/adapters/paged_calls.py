"""Reading a step of transformers' continuous batching: packed requests over a paged cache."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from headwise.watching.adapters.interface import InterfaceCall
from headwise.watching.recorder.paged_record import PagedCall, own_rows, rows_of
from headwise.watching.recorder.ragged_batch import Pages, RaggedBatch


class _Updated:
    """Stands in for a cache that has taken the new keys already."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.held = k, v

    def update(self, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return self.held


def is_paged(given: InterfaceCall) -> bool:
    """True if the call is a step of continuous batching."""
    return given.option("cache") is not None


def to_paged_call(given: InterfaceCall, beside: bool = False) -> tuple[PagedCall, InterfaceCall]:
    """The step of a call, whose new keys join the cache, and what to hand to another function.

    That function gets all keys and values; its own update of the cache changes nothing more.
    ValueError if the step can't be computed here.
    """
    cache, layer = given.options["cache"], int(getattr(given.module, "layer_idx", -1))
    allocator = getattr(cache, "layer_to_allocator", {}).get(layer)
    if allocator is None:
        raise ValueError(
            "its paged cache is not that of continuous batching in transformers 5.22; use that "
            "version, or watch model.generate"
        )
    if given.option("position_bias") is not None or given.option("dropout"):
        raise ValueError("position biases and dropout are not a part of paged attention here")
    options, q = dict(given.options), given.q[0].transpose(0, 1)
    read = options["read_index"][allocator.index]
    table, window = options.get("block_table"), getattr(allocator, "sliding_window", None)
    whole = window is None and table is None
    if whole and not beside:  # the kernel reads from the cache: nothing needs to be gathered
        options["read_index"] = [x[:0] for x in options["read_index"]]
    k, v = cache.update(given.k, given.v, layer_idx=layer, kwargs=options)
    if table is not None:
        rows, pages = own_rows(allocator, given.options)
        keys, values = rows_of(cache, layer)
        for pool, new in ((keys, given.k), (values, given.v)):
            pool.index_copy_(0, rows, new[0].transpose(0, 1)[: len(rows)])
    elif whole:
        at = read if read.numel() else options["write_index"][allocator.index]
        pages, (keys, values) = Pages(at), rows_of(cache, layer)
    else:
        pages, (keys, values) = Pages(None), (x[0].transpose(0, 1) for x in (k, v))
    scaling, sinks = given.option("scaling"), given.option("s_aux")
    if sinks is None:  # paged|eager takes them from the module
        sinks = getattr(given.module, "sinks", None)
    batch = RaggedBatch(
        q,
        keys,
        values,
        options["cu_seq_lens_q"],
        options["cu_seq_lens_k"],
        pages,
        int(options["max_length_q"]),
        q.shape[2] ** -0.5 if scaling is None else float(scaling),
        window,
        given.option("softcap"),
        None if sinks is None else sinks.detach().reshape(-1),
    )
    other = replace(given, k=k, v=v, options={**options, "cache": _Updated(k, v)})
    return PagedCall(batch, cache, layer, given.k[0].transpose(0, 1), given.options), other
