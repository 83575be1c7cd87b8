"""Dense attention with its log-sum-exp: through torch's fused kernels, a question's rows in parts so that
what is held does not grow with their number, and long prefixes block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from offload_decode.attention.places import Places
from offload_decode.attention.states import attend, empty_state, merge_states
from offload_decode.kernels.fused import attend_fused, widened
from offload_decode.kernels.half_products import attend_half, serves_half
from offload_decode.types import AttentionState

SCORES = 1 << 22
"""Scores, or entries of a mask, that a CPU holds at once, each in a handful of float32 tensors."""
DEVICE_SCORES = 1 << 24
"""The same on a device, which takes more of them to be busy."""
PLACED_ROWS = 512
"""Rows of a text for which a mask is made at once, where no operator knows what they see by their place."""


def attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
    places: Places | None = None,
) -> AttentionState:
    """`attend`, through a fused kernel where torch has one that returns the log-sum-exp: uncapped, on a CPU
    (there by products of bfloat16 where many rows see all keys, see `kernels.half_products`); on a GPU
    without a mask (`kernels.fused`). Memory beyond the inputs and the result grows with T and with
    S, and not with their product. `places` say what rows see in place of a mask.
    """
    batch, heads, tokens, _ = query.shape
    keys, on_cpu = max(1, key.shape[2]), query.device.type == "cpu"
    if mask is None and softcap is None:
        state = attend_fused(query, key, value, scaling, places)
        if state is not None:
            return state
        if places is None and key.shape[2] and serves_half(query, key.dtype, value.dtype):
            return attend_half(query, key, value, scaling)
    if places is not None:
        return _placed(query, key, value, scaling, places, softcap)
    if not on_cpu or softcap is not None or key.shape[2] == 0:
        step = (SCORES if on_cpu else DEVICE_SCORES) // (batch * heads * keys)
        key, value = key.float(), value.float()  # once, and not for each part
        return _in_parts(
            lambda rows, seen: attend(rows, key, value, scaling, seen, softcap), query, mask, step
        )
    step = tokens if mask is None else SCORES // (batch * keys)
    key, value = key.float(), value.float()
    return _in_parts(lambda rows, seen: _fused(rows.float(), key, value, scaling, seen), query, mask, step)


def attend_blocks(
    query: Tensor,
    blocks: Iterable[tuple[Tensor, Tensor]],
    value_dim: int,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """Attend to a sequence of blocks of keys `[1, Hkv, S, D]` and values `[1, Hkv, S, value_dim]`, one in
    memory at a time, merged by log-sum-exp.
    """
    state = empty_state(query, value_dim)
    for key, value in blocks:
        state = merge_states(state, attend_dense(query, key, value, scaling, softcap=softcap))
    return state


def _placed(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, places: Places, softcap: float | None
) -> AttentionState:
    """Some rows at a time, with the keys that they see and a mask of these."""
    tokens, keys = query.shape[2], key.shape[2]
    parts = []
    for start in range(0, tokens, PLACED_ROWS):
        rows = slice(start, min(start + PLACED_ROWS, tokens))
        seen, mask = places.seen(rows, tokens, keys), places.mask(rows, tokens, keys, query.device)
        own = query[:, :, rows], key[:, :, seen], value[:, :, seen]
        parts.append(attend_dense(*own, scaling, mask, softcap))
    return _joined(parts)


def _in_parts(
    attend_rows: Callable[[Tensor, Tensor | None], AttentionState],
    query: Tensor,
    mask: Tensor | None,
    step: int,
) -> AttentionState:
    """The state of `query [B, H, T, D]`, `step` of its T rows at a time."""
    tokens, step = query.shape[2], max(1, step)
    if step >= tokens:
        return attend_rows(query, mask)
    parts = []
    for start in range(0, tokens, step):
        rows = slice(start, start + step)
        seen = None if mask is None else mask.expand(-1, -1, tokens, -1)[:, :, rows]
        parts.append(attend_rows(query[:, :, rows], seen))
    return _joined(parts)


def _joined(parts: Sequence[AttentionState]) -> AttentionState:
    """The state of all rows."""
    out, lse = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    return AttentionState(out, lse)


def _fused(query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None) -> AttentionState:
    bias = None if mask is None else torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    # The kernel takes one width alone.
    width, value_dim = max(key.shape[-1], value.shape[-1]), value.shape[-1]
    query, key, value = (widened(part, width) for part in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=bias, scale=scaling
    )
    out = out[..., :value_dim]
    if mask is not None:
        # The kernel reports a log-sum-exp of 0 for a row that sees nothing.
        lse = lse.masked_fill(~mask.any(-1).expand(lse.shape), -torch.inf)
    return AttentionState(out, lse)
