"""Triton programs: attention to chosen rows, merging an attention split over programs, and Quest's pages.

`device_tokens` and `pages_device` say what they are for and how they are launched. All arithmetic is float32:
keys, values and bounds are widened as they are read. Offsets into tensors are int64, so that neither tokens
nor pages are limited by 2^31 elements.
"""

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
    """One span of one query's places. Rows are read on the device, or in pinned memory of the host."""
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


@triton.jit
def _operand(q, above, below, rest, PARTS: tl.constexpr):
    """Queries times one factor where they are above zero, times another below; of two parts in float16, and
    in columns of the `rest` 2,048 times what that leaves out.
    """
    numbers = tl.where(q > 0.0, q * above, q * below)
    if PARTS == 2:
        coarse = numbers.to(tl.float16)
        fine = ((numbers - coarse.to(tl.float32)) * 2048.0).to(tl.float16)
        numbers = tl.where(rest[:, None], fine, coarse)
    return tl.trans(numbers)


@triton.jit
def score_program(
    query,
    lower,
    upper,
    scale,
    scores,
    n_lists,
    n_pages,
    lower_head,
    lower_page,
    lower_dim,
    upper_head,
    upper_page,
    upper_dim,
    near,
    far,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE_PAGES: tl.constexpr,  # 0: no scales
):
    """Scores of one block of pages for one list. Lists run fastest, so that the next ones find the block in
    the cache.

    With two parts a query is the sum of two float16 numbers, which carry 22 of float32's 24 bits, and meets
    bounds that float16 holds exactly: the tensor cores keep up with the memory where float32 would not.
    """
    blocks = tl.cdiv(n_pages, BLOCK)
    item = tl.program_id(0) % n_lists
    first = (tl.program_id(0) // n_lists % blocks) * BLOCK
    head = (tl.program_id(0) // n_lists // blocks).to(tl.int64)
    row = head * n_lists + item

    page = first.to(tl.int64) + tl.arange(0, BLOCK)
    channel = tl.arange(0, DIM_PADDED)
    inside = channel < DIM
    here = (page < n_pages)[:, None] & inside[None, :]
    low = tl.load(
        lower + head * lower_head + page[:, None] * lower_page + channel[None, :] * lower_dim, here, other=0
    )
    high = tl.load(
        upper + head * upper_head + page[:, None] * upper_page + channel[None, :] * upper_dim, here, other=0
    )

    if PARTS == 2:
        low, high = low.to(tl.float16), high.to(tl.float16)
    else:
        low, high = low.to(tl.float32), high.to(tl.float32)
    if SCALE_PAGES:
        scale += (head * tl.cdiv(n_pages, SCALE_PAGES) + first // SCALE_PAGES) * DIM
        unit = tl.load(scale + channel, inside, other=0.0)[None, :]

    COLUMNS: tl.constexpr = 16
    SHARE: tl.constexpr = COLUMNS // PARTS  # queries in the columns of a product
    column = tl.arange(0, COLUMNS)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in tl.range(0, GROUP, SHARE, num_stages=1):
        member = start + column % SHARE
        ours = (member < GROUP)[:, None] & inside[None, :]
        q = tl.load(query + (row * GROUP + member[:, None]) * DIM + channel[None, :], ours, other=0.0)
        if SCALE_PAGES:
            q *= unit
        factor, rest = tl.full((COLUMNS,), 1.0, tl.float32), column >= SHARE
        if PARTS == 2:
            reach = tl.max(tl.abs(q), axis=1)
            reach = tl.where(reach == 0.0, 1.0, reach)
            q = q / reach[:, None]
            factor = tl.where(rest, reach / 2048.0, reach)
        # Where the query grows with the key, the upper bound counts, narrowed by some of the lower one.
        total = tl.dot(high, _operand(q, near, far, rest, PARTS), input_precision="tf32x3")
        total = tl.dot(low, _operand(q, far, near, rest, PARTS), total, input_precision="tf32x3")
        each = tl.sum(tl.reshape(total * factor[None, :], (BLOCK, PARTS, SHARE)), axis=1)
        each = tl.where((start + tl.arange(0, SHARE) < GROUP)[None, :], each, float("-inf"))
        best = tl.maximum(best, tl.max(each, axis=1))
    tl.store(scores + row * n_pages + page, best, page < n_pages)


@triton.jit
def select_program(source, ids, kept, kept_ids, width, k, chunks, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """The k best of one chunk of a row, in the order in which they stand there. `source` holds scores in the
    first round and their keys, in the order of uint32, in the later ones.

    The k-th best key is found bit by bit: the largest that k entries reach.
    """
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    place = chunk * BLOCK + tl.arange(0, BLOCK)
    here = place < width
    if FIRST:
        score = tl.load(source + row * width + place, here, other=0.0)
        score = tl.where(score == 0.0, 0.0, score)  # -0 equals 0
        bits = score.to(tl.uint32, bitcast=True)
        key = tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)
        key = tl.where(here, key, 0)
        page = tl.where(here, place.to(tl.int64), -1)
    else:
        key = tl.load(source + row * width + place, here, other=0).to(tl.uint32, bitcast=True)
        page = tl.load(ids + row * width + place, here, other=-1)

    reached = tl.sum(tl.zeros((BLOCK,), tl.uint32), 0)
    step = reached + 0x80000000
    for _ in range(32):
        enough = tl.sum((key >= reached + step).to(tl.int32), 0) >= k
        reached = tl.where(enough, reached + step, reached)
        step = step >> 1

    # Places beyond the row have the key 0: a chunk of fewer than k entries is padded with them.
    above, level = key > reached, key == reached
    wanted = k - tl.sum(above.to(tl.int32), 0)
    chosen = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= wanted))
    target = (row * chunks + chunk) * k + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(kept + target, key.to(tl.int32, bitcast=True), chosen)
    tl.store(kept_ids + target, page, chosen)


@triton.jit
def order_program(keys, ids, best, k, blocks, BLOCK: tl.constexpr):
    """Puts each of a block of a row's k entries at its rank: the number of entries that come before it."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    mine = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + row * k + mine, mine < k, other=0).to(tl.uint32, bitcast=True)
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, k, BLOCK):
        other = start + tl.arange(0, BLOCK)
        rival = tl.load(keys + row * k + other, other < k, other=0).to(tl.uint32, bitcast=True)
        earlier = (rival[None, :] == key[:, None]) & (other[None, :] < mine[:, None])
        before = ((rival[None, :] > key[:, None]) | earlier) & (other < k)[None, :]
        rank += tl.sum(before.to(tl.int32), axis=1)
    page = tl.load(ids + row * k + mine, mine < k, other=-1)
    tl.store(best + row * k + rank, page, mine < k)


@triton.jit
def attend_program(
    query,
    keys,
    values,
    pages,
    limit,
    out,
    lse,
    n_lists,
    n_splits,
    span,
    n_places,
    n_tokens,
    scaling,
    softcap,
    key_head,
    key_token,
    key_dim,
    value_head,
    value_token,
    value_dim,
    CAPPED: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    CHANNELS: tl.constexpr,  # of a key that are loaded at once: all, unless they would not fit
    BLOCK: tl.constexpr,
):
    """One span of one list's places; `MEMBERS` queries of the group share each key and value loaded."""
    LOG2E: tl.constexpr = 1.4426950408889634
    tiles: tl.constexpr = (GROUP + MEMBERS - 1) // MEMBERS
    member = tl.program_id(0) % tiles * MEMBERS + tl.arange(0, MEMBERS)
    split = tl.program_id(0) // tiles % n_splits
    row = (tl.program_id(0) // tiles // n_splits).to(tl.int64)
    head = row // n_lists
    channel, value_channel = tl.arange(0, CHANNELS), tl.arange(0, VALUE_DIM_PADDED)
    value_inside = (value_channel < VALUE_DIM)[None, :]
    ours = (member < GROUP)[:, None]
    query += (row * GROUP + member[:, None]) * DIM + channel[None, :]
    if CHANNELS >= DIM:
        q = tl.load(query, ours & (channel < DIM)[None, :], other=0.0)
    keys += head * key_head
    values += head * value_head
    pages += row * (n_places // PAGE)

    top = tl.full((MEMBERS,), float("-inf"), tl.float32)
    total = tl.zeros((MEMBERS,), tl.float32)
    gathered = tl.zeros((MEMBERS, VALUE_DIM_PADDED), tl.float32)
    end = tl.minimum(split * span + span, tl.minimum(tl.load(limit + head), n_places).to(tl.int32))
    for start in range(split * span, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        page = tl.load(pages + place // PAGE, place < end, other=-1)
        token = page * PAGE + place % PAGE
        seen = (page >= 0) & (token < n_tokens)
        here = seen[:, None]
        # Three TF32 products keep float32's digits on the tensor cores.
        logits = tl.zeros((MEMBERS, BLOCK), tl.float32)
        for first in range(0, DIM, CHANNELS):
            inside = (first + channel < DIM)[None, :]
            key = keys + token[:, None] * key_token + (first + channel)[None, :] * key_dim
            k = tl.load(key, here & inside, other=0.0)
            if CHANNELS < DIM:
                q = tl.load(query + first, ours & inside, other=0.0)
            logits = tl.dot(q, tl.trans(k.to(tl.float32)), logits, input_precision="tf32x3")
        logits *= scaling
        value = values + token[:, None] * value_token + value_channel[None, :] * value_dim
        v = tl.load(value, here & value_inside, other=0.0)
        if CAPPED:
            shrunk = tl.exp2(tl.abs(logits / softcap) * (-2 * LOG2E))
            capped = softcap * (1.0 - shrunk) / (1.0 + shrunk)  # softcap · tanh(|logits| / softcap)
            logits = tl.where(logits < 0.0, -capped, capped)
        logits = tl.where(seen[None, :], logits * LOG2E, float("-inf"))
        highest = tl.maximum(top, tl.max(logits, axis=1))
        shift = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen yet: not -inf minus -inf
        weight = tl.exp2(logits - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weight, axis=1)
        gathered = gathered * fade[:, None] + tl.dot(weight, v.to(tl.float32), input_precision="tf32x3")
        top = highest

    target = (row * n_splits + split) * GROUP + member
    total = tl.where(total == 0.0, 1.0, total)  # nothing seen: the empty state
    tl.store(lse + target, (top + tl.log2(total)) / LOG2E, member < GROUP)
    own = out + target[:, None] * VALUE_DIM + value_channel[None, :]
    tl.store(own, gathered / total[:, None], ours & value_inside)
