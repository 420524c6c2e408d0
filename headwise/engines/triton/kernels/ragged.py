"""Attention of packed requests over a paged pool of keys, with statistics and received weights.

A program computes the heads of one key head for some queries of one request. It goes over the keys
twice: the first time for the output and lse, the second for what needs the weights themselves.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.tile import LOG2E, NOTHING, product, tanh

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def row_of(entries, first, before, j, here, PAGE: tl.constexpr):
    """Return the rows of the keys j of a request; `ragged_batch.Pages` says where they lie."""
    if entries is None:
        found = (before + j).to(tl.int64)
    else:
        entry = tl.load(entries + first + j // PAGE, mask=here, other=0).to(tl.int64)
        found = entry * PAGE + j % PAGE
    return found


@triton.jit
def tile_of(x, row, head, row_step, head_step, here, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load (rows, PADDED) of one head each; zeros where a row is not `here`."""
    column = tl.arange(0, PADDED)
    start = row.to(tl.int64) * row_step + head * head_step
    inside = here[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0)


@triton.jit
def scores(q, k, scale, softcap, seen, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Return the logits of a tile, -inf where a key is hidden."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAP:
        s = product(tanh(product(s, scale / softcap)), softcap)
    else:
        s = product(s, scale)
    return tl.where(seen, s, NOTHING)


@triton.jit
def seen_keys(j, position, there, WINDOW: tl.constexpr):
    """Return which keys j (KEYS,) the rows at these positions see."""
    seen = there[:, None] & (j[None, :] <= position[:, None])
    if WINDOW > 0:
        seen = seen & (j[None, :] > position[:, None] - WINDOW)
    return seen


@triton.jit
def observe_pages(
    q, keys, values, sinks, query_ends, key_ends, entries, width, marks, mark_width, received,
    out, figures, scale, softcap, group, heads, tokens, sink_keys,
    q_row, q_head, k_row, k_head, v_row, v_head,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, VALUES: tl.constexpr, PADDED_VALUES: tl.constexpr, PAGE: tl.constexpr,
    MARK_PAGE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, LOOK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write out (T, Hq, VALUES) and figures (13, Hq, T), and add to received (slots, Hq)."""
    tile, kh, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, before = tl.load(query_ends + r), tl.load(key_ends + r)
    count = tl.load(query_ends + r + 1) - begin
    held = tl.load(key_ends + r + 1) - before
    first_token = tile * TOKENS
    if first_token >= count:
        return
    first = tl.where(width > 0, r * width, before)
    first_mark = tl.where(mark_width > 0, r * mark_width, before)
    row = tl.arange(0, GROUP * TOKENS)
    member, token = row // TOKENS, first_token + row % TOKENS
    there = (member < group) & (token < count)
    head = kh * group + tl.minimum(member, group - 1)
    position = held - count + token
    own = tile_of(q, begin + token, head, q_row, q_head, there, WIDTH, PADDED)

    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(held - count + first_token - WINDOW + 1, 0)
    highest = tl.minimum(held - count + first_token + TOKENS, held)
    most = tl.full([GROUP * TOKENS], NOTHING, tl.float32)
    total = tl.zeros([GROUP * TOKENS], tl.float32)
    summed, number = total, total
    acc = tl.zeros([GROUP * TOKENS, PADDED_VALUES], tl.float32)
    for j0 in range(lowest, highest, KEYS):
        j = j0 + tl.arange(0, KEYS)
        here = j < highest
        at = row_of(entries, first, before, j, here, PAGE)
        k = tile_of(keys, at, kh, k_row, k_head, here, WIDTH, PADDED)
        v = tile_of(values, at, kh, v_row, v_head, here, VALUES, PADDED_VALUES)
        seen = seen_keys(j, position, there & (position < held), WINDOW) & here[None, :]
        s = scores(own, k, scale, softcap, seen, CAP, PRECISION)
        new = tl.maximum(most, tl.max(s, 1))
        base = tl.where(new == NOTHING, 0.0, new)
        p = tl.exp2((s - base[:, None]) * LOG2E)
        shrunk = tl.exp2((most - base) * LOG2E)
        total = total * shrunk + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrunk[:, None], input_precision=PRECISION)
        most = new
        if LOOK:
            number += tl.sum(seen.to(tl.float32), 1)
            summed += tl.sum(tl.where(seen, s, 0.0), 1)

    base = tl.where(most == NOTHING, 0.0, most)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        beside = tl.maximum(base, sink)
        shrunk = tl.exp2((base - beside) * LOG2E)
        total = total * shrunk + tl.exp2((sink - beside) * LOG2E)
        acc, base = acc * shrunk[:, None], beside
    total = tl.where(total > 0.0, total, 1.0)
    acc = acc / total[:, None]
    column = tl.arange(0, PADDED_VALUES)
    place = ((begin + token).to(tl.int64) * heads + head) * VALUES
    inside = there[:, None] & (column < VALUES)[None, :]
    tl.store(out + place[:, None] + column[None, :], acc.to(out.dtype.element_ty), mask=inside)

    if LOOK:
        log_total = tl.log2(total) * LN2
        number = tl.maximum(number, 1.0)
        mean = summed / number
        weight, square, entropy = number * 0.0, number * 0.0, number * 0.0
        spread, distance, sinking = number * 0.0, number * 0.0, number * 0.0
        itself, previous = number * 0.0, number * 0.0
        for j0 in range(lowest, highest, KEYS):
            j = j0 + tl.arange(0, KEYS)
            here = j < highest
            at = row_of(entries, first, before, j, here, PAGE)
            k = tile_of(keys, at, kh, k_row, k_head, here, WIDTH, PADDED)
            seen = seen_keys(j, position, there & (position < held), WINDOW) & here[None, :]
            s = scores(own, k, scale, softcap, seen, CAP, PRECISION)
            log_p = tl.where(seen, (s - base[:, None]) - log_total[:, None], 0.0)
            p = tl.where(seen, tl.exp2(log_p * LOG2E), 0.0)
            away = position[:, None] - j[None, :]
            off = tl.where(seen, s - mean[:, None], 0.0)
            weight += tl.sum(p, 1)
            square += tl.sum(p * p, 1)
            entropy -= tl.sum(p * log_p, 1)
            spread += tl.sum(off * off, 1)
            distance += tl.sum(p * away.to(tl.float32), 1)
            sinking += tl.sum(tl.where((j < sink_keys)[None, :], p, 0.0), 1)
            itself += tl.sum(tl.where(away == 0, p, 0.0), 1)
            previous += tl.sum(tl.where(away == 1, p, 0.0), 1)
            if received is not None:
                added = tl.sum(tl.reshape(p, [GROUP, TOKENS, KEYS]), 1)
                mark = row_of(marks, first_mark, before, j, here, MARK_PAGE)
                each = tl.arange(0, GROUP)
                to = received + mark[None, :] * heads + (kh * group + each)[:, None]
                tl.atomic_add(to, added, mask=(each < group)[:, None] & here[None, :])
        norm = tl.sqrt(tl.sum(tl.where(inside, acc * acc, 0.0), 1))
        one = figures + head.to(tl.int64) * tokens + begin + token
        step = (begin * 0 + heads).to(tl.int64) * tokens
        tl.store(one, base + log_total, mask=there)
        tl.store(one + step, most, mask=there)
        tl.store(one + 2 * step, tl.exp2((most - base - log_total) * LOG2E), mask=there)
        tl.store(one + 3 * step, entropy, mask=there)
        tl.store(one + 4 * step, tl.exp2(entropy * LOG2E), mask=there)
        tl.store(one + 5 * step, weight * weight / tl.where(square > 0.0, square, 1.0), mask=there)
        tl.store(one + 6 * step, mean, mask=there)
        tl.store(one + 7 * step, spread / number, mask=there)
        tl.store(one + 8 * step, sinking, mask=there)
        tl.store(one + 9 * step, itself, mask=there)
        tl.store(one + 10 * step, previous, mask=there)
        tl.store(one + 11 * step, distance, mask=there)
        tl.store(one + 12 * step, norm, mask=there)
