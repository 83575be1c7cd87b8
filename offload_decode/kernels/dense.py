"""Dense attention with its log-sum-exp through torch's fused CPU kernel, and block by block over long
prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from offload_decode.attention.states import attend, empty_state, merge_states
from offload_decode.types import AttentionState


def attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> AttentionState:
    """`attend`, through the fused kernel where torch has one that returns the log-sum-exp: uncapped, on a
    CPU.
    """
    if query.device.type != "cpu" or softcap is not None or key.shape[2] == 0:
        return attend(query, key, value, scaling, mask, softcap)
    bias = None if mask is None else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.float(), key.float(), value.float(), 0.0, False, attn_mask=bias, scale=scaling
    )
    if mask is not None:
        # The kernel reports a log-sum-exp of 0 for a row that sees nothing.
        lse = lse.masked_fill(~mask.any(-1).expand(lse.shape), -torch.inf)
    return AttentionState(out, lse)


def attend_blocks(
    query: Tensor,
    blocks: Iterable[tuple[Tensor, Tensor]],
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """Attend to a sequence of `(key, value)` blocks `[1, Hkv, S, D]`, one in memory at a time, merged by
    log-sum-exp.
    """
    state = empty_state(query)
    for key, value in blocks:
        key, value = key.to(query.device), value.to(query.device)
        state = merge_states(state, attend_dense(query, key, value, scaling, softcap=softcap))
    return state
