"""Quest's pages as Triton kernels for CUDA, tested equal to `pages_reference`.

Quest, arXiv 2406.10774, §3.3-3.5; the split of the attention over programs is Flash-Decoding's
(https://pytorch.org/blog/flash-decoding). All arithmetic is float32; no tensor is limited to 2^31 elements.

Imported when a CUDA device is there to run it: importing it without triton raises ConfigError.
"""

import torch
from torch import Tensor

from offload_decode.attention.device_tokens import merge_splits
from offload_decode.attention.pages_reference import SCALE_PAGES, PageBounds
from offload_decode.attention.queries import empty_state
from offload_decode.common.errors import ConfigError
from offload_decode.types import AttentionState

try:
    import triton

    from offload_decode.attention.device_programs import (
        attend_program,
        order_program,
        score_program,
        select_program,
    )
except ModuleNotFoundError as error:
    raise ConfigError(
        "Quest's pages on a CUDA device need triton, which CUDA builds of torch bring along: "
        "`pip install triton`, or use the device cpu."
    ) from error

TILE = 4096  # elements of each bound that a program scores at once, twice that where they are narrow
CHUNK = 8192  # scores that one program selects from in registers
MEMBERS = 16  # queries that share the keys an attention loads: the least rows of a tensor-core product
WIDE_CHANNELS = 128  # of keys with more than 256: so a program fits into the shared memory of small cards
PROGRAMS = 256  # that an attention is split into where it has fewer lists: a few for each multiprocessor


def page_scores(query: Tensor, bounds: PageBounds, corner: float = 1.0) -> Tensor:
    """Upper bounds of q·k per page, the largest of the group: see `pages_reference.page_scores`."""
    heads, lists, group, dim = query.shape
    lower, upper, scale = bounds
    pages = lower.shape[1]
    scores = torch.empty(heads, lists, pages, device=query.device)
    padded = max(16, triton.next_power_of_2(dim))
    parts = 2 if lower.dtype in (torch.float16, torch.int8) else 1
    block = min(SCALE_PAGES, max(16, TILE * parts // padded))  # divides it: one row of scales a block
    if scores.numel():
        with torch.cuda.device(query.get_device()):
            score_program[(heads * lists * triton.cdiv(pages, block),)](
                query.float().contiguous(),
                lower,
                upper,
                lower if scale is None else scale.contiguous(),
                scores,
                lists,
                pages,
                *lower.stride(),
                *upper.stride(),
                (1 + corner) / 2,
                (1 - corner) / 2,
                PARTS=parts,
                GROUP=group,
                DIM=dim,
                DIM_PADDED=padded,
                BLOCK=block,
                SCALE_PAGES=0 if scale is None else SCALE_PAGES,
            )
    return scores


def top_pages(scores: Tensor, k: int) -> Tensor:
    """Exactly the `k` best pages, best first, of equal ones the earlier first: see
    `pages_reference.top_pages`.

    Chunks of a row hand their best to the next round until one chunk holds them all.
    """
    heads, lists, pages = scores.shape
    k, rows = min(k, pages), heads * lists
    if 2 * k > CHUNK < pages:  # a round would not halve what is left
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    best = torch.empty(heads, lists, k, dtype=torch.int64, device=scores.device)
    if best.numel() == 0:
        return best
    with torch.cuda.device(scores.get_device()):
        source, ids, width, chunks = scores.float().contiguous(), best, pages, 0
        while chunks != 1:
            chunks = triton.cdiv(width, CHUNK)
            block = triton.next_power_of_2(min(width, CHUNK))
            kept = torch.empty(rows, chunks * k, dtype=torch.int32, device=scores.device)
            kept_ids = torch.empty(rows, chunks * k, dtype=torch.int64, device=scores.device)
            select_program[(rows * chunks,)](
                source,
                ids,
                kept,
                kept_ids,
                width,
                k,
                chunks,
                FIRST=source.dtype == torch.float32,
                BLOCK=block,
                num_warps=max(1, min(16, block // 512)),
            )
            source, ids, width = kept, kept_ids, chunks * k
        block = min(64, triton.next_power_of_2(k))
        blocks = triton.cdiv(k, block)
        order_program[(rows * blocks,)](source, ids, best, k, blocks, BLOCK=block)
    return best


def attend_pages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    page_size: int,
    limit: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """Attend to the tokens of lists of pages: see `pages_reference.attend_pages`. One device."""
    heads, lists, group, dim = query.shape
    value_dim = values.shape[2]
    rows, places = heads * lists, pages.shape[2] * page_size
    if rows * group * places == 0:
        return empty_state(query, value_dim)
    padded, value_padded = (max(16, triton.next_power_of_2(width)) for width in (dim, value_dim))
    widest = max(padded, value_padded)
    block = 32 if widest <= 128 else 16
    tiles = triton.cdiv(group, MEMBERS)
    # Programs of one list each take a span of its places, a multiple of the block.
    span = triton.cdiv(triton.cdiv(places, triton.cdiv(PROGRAMS, rows * tiles)), block) * block
    splits = triton.cdiv(places, span)
    out = torch.empty(heads, lists, splits, group, value_dim, device=query.device)
    lse = torch.empty(heads, lists, splits, group, device=query.device)
    with torch.cuda.device(query.get_device()):
        attend_program[(rows * splits * tiles,)](
            query.float().contiguous(),
            keys,
            values,
            pages.contiguous(),
            limit.to(query.device).contiguous(),
            out,
            lse,
            lists,
            splits,
            span,
            places,
            keys.shape[1],
            scaling,
            1.0 if softcap is None else softcap,
            *keys.stride(),
            *values.stride(),
            CAPPED=softcap is not None,
            PAGE=page_size,
            GROUP=group,
            MEMBERS=MEMBERS,
            DIM=dim,
            VALUE_DIM=value_dim,
            VALUE_DIM_PADDED=value_padded,
            CHANNELS=padded if padded <= 256 else WIDE_CHANNELS,
            BLOCK=block,
            num_stages=2 if widest <= 256 else 1,
            num_warps=4 if widest <= 256 else 8,
        )
    return merge_splits(out, lse)
