"""Triton programs: attention of one query to chosen rows, and merging an attention split over programs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_rows_program(
    query,
    keys,
    values,
    places,
    scores,
    out,
    lse,
    n_splits,
    span,
    k,
    scaling,
    softcap,
    key_row,
    value_row,
    SCORED: tl.constexpr,  # the inner products are known: keys are not read
    CAPPED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The state of one span of one query's places. Rows are read where they lie: on the device, or in pinned
    memory of the host.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    split = tl.program_id(0) % n_splits
    item = (tl.program_id(0) // n_splits).to(tl.int64)
    channel, value_channel = tl.arange(0, DIM_PADDED), tl.arange(0, VALUE_DIM_PADDED)
    inside, value_inside = (channel < DIM)[None, :], (value_channel < VALUE_DIM)[None, :]
    q = tl.load(query + item * DIM + channel, channel < DIM, other=0.0)
    places += item * k
    scores += item * k

    top = tl.sum(tl.zeros((BLOCK,), tl.float32), 0) + float("-inf")
    total = tl.sum(tl.zeros((BLOCK,), tl.float32), 0)
    gathered = tl.zeros((VALUE_DIM_PADDED,), tl.float32)
    end = tl.minimum(split * span + span, k)
    for start in range(split * span, end, BLOCK):
        number = start + tl.arange(0, BLOCK)
        place = tl.load(places + number, number < end, other=-1)
        seen = place >= 0
        if SCORED:
            logits = tl.load(scores + number, seen, other=float("-inf"))
            seen = seen & (logits != float("-inf"))
            logits = tl.where(seen, logits, 0.0)
        else:
            key = keys + place[:, None] * key_row + channel[None, :]
            own = tl.load(key, seen[:, None] & inside, other=0.0).to(tl.float32)
            logits = tl.sum(own * q[None, :], axis=1)
        value = values + place[:, None] * value_row + value_channel[None, :]
        v = tl.load(value, seen[:, None] & value_inside, other=0.0).to(tl.float32)
        logits *= scaling
        if CAPPED:
            shrunk = tl.exp2(tl.abs(logits / softcap) * (-2 * LOG2E))
            capped = softcap * (1.0 - shrunk) / (1.0 + shrunk)  # softcap · tanh(|logits| / softcap)
            logits = tl.where(logits < 0.0, -capped, capped)
        logits = tl.where(seen, logits * LOG2E, float("-inf"))
        highest = tl.maximum(top, tl.max(logits, axis=0))
        shift = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen yet: not -inf minus -inf
        weight = tl.exp2(logits - shift)
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weight, axis=0)
        gathered = gathered * fade + tl.sum(weight[:, None] * v, axis=0)
        top = highest

    target = item * n_splits + split
    total = tl.where(total == 0.0, 1.0, total)  # nothing seen: the empty state
    tl.store(lse + target, (top + tl.log2(total)) / LOG2E)
    tl.store(out + target * VALUE_DIM + value_channel, gathered / total, value_channel < VALUE_DIM)


@triton.jit
def merge_program(
    part,
    part_lse,
    out,
    lse,
    n_splits,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):
    """Merges the states of one query's splits (docs/methods.md §1)."""
    item = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS_PADDED)
    channel = tl.arange(0, DIM_PADDED)
    source = (item // GROUP * n_splits + split) * GROUP + item % GROUP
    each = tl.load(part_lse + source, split < n_splits, other=float("-inf"))
    highest = tl.max(each, axis=0)
    weight = tl.exp(each - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weight, axis=0)
    total = tl.where(total == 0.0, 1.0, total)
    here = (split < n_splits)[:, None] & (channel < DIM)[None, :]
    parts = tl.load(part + source[:, None] * DIM + channel[None, :], here, other=0.0)
    merged = tl.sum(parts * weight[:, None], axis=0) / total
    tl.store(out + item * DIM + channel, merged, channel < DIM)
    tl.store(lse + item, highest + tl.log(total), None)
