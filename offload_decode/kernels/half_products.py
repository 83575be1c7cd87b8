"""Attention of many rows on a CPU by products of bfloat16, where the processor has them (AVX-512 BF16, AMX).

torch's fused kernel for CPUs takes bfloat16 and is no faster for it; products of matrices are several times
faster than in float32, but round what they give. So they give a score less a reference of its row, near the
row's largest: a channel more of the query holds the reference, and keys have a one there. The sums in a
product are of float32, and what is rounded is small where it counts. Otherwise this is FlashAttention's
Algorithm 1 (arXiv 2205.14135).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from offload_decode.indexes.rows.processor import features
from offload_decode.types import AttentionState

LEAST_ROWS = 64
"""Tokens of a query from which on blocks of keys pay."""
_KEYS = 512  # of a block, whose scores stay in a core's cache
_MORE = 8  # channels beside the head's own, of which the first is the reference's
_ABOVE = 4.0  # nats by which a score may surpass its row's reference before that is raised


@cache
def has_half_products() -> bool:
    """Whether this processor multiplies matrices of bfloat16; elsewhere it is emulated, and slow."""
    return not features().isdisjoint({"avx512bf16", "amx-bf16"})


def serves_half(query: Tensor, keys: torch.dtype, values: torch.dtype) -> bool:
    """Whether `query [B, H, T, D]` meets keys and values of those dtypes in such products."""
    halves = query.dtype == keys == values == torch.bfloat16 and query.device.type == "cpu"
    return halves and query.shape[2] >= LEAST_ROWS and has_half_products()


def attend_half(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> AttentionState:
    """`attention.states.attend` for `query [B, H, T, D]`, `key [B, Hkv, S, D]` and `value [B, Hkv, S, Dv]` of
    bfloat16, where all rows see all of at least one key: float32, off by what rounding weights and parts of
    sums to bfloat16 costs (some 2^-8 of the largest number).
    """
    batch, heads, tokens, dim = query.shape
    shared = key.shape[1]
    rows = torch.zeros(batch, shared, heads // shared * tokens, dim + _MORE, dtype=torch.bfloat16)
    rows[..., :dim] = query.reshape(batch, shared, -1, dim)
    out = torch.empty(*rows.shape[:3], value.shape[-1])
    lse = torch.empty(rows.shape[:3])
    for i in range(batch):
        for head in range(shared):
            out[i, head], lse[i, head] = _attend(rows[i, head], key[i, head], value[i, head], scaling)
    return AttentionState(out.view(batch, heads, tokens, -1), lse.view(batch, heads, tokens))


def _attend(rows: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Rows `[R, D + _MORE]`, whose reference is written here, with the keys `[S, D]` of one KV head."""
    dim = key.shape[1]
    reference = rows[:, dim : dim + 1]
    out, total = torch.zeros(len(rows), value.shape[1]), torch.zeros(len(rows), 1)
    ones = torch.ones(min(_KEYS, len(key)), dim + _MORE, dtype=rows.dtype)
    for start in range(0, len(key), _KEYS):
        block, held = key[start : start + _KEYS], value[start : start + _KEYS]
        if start == 0:
            reference[:] = -(rows[:, :dim] @ block.T).amax(1, keepdim=True)
        ones[: len(block), :dim] = block
        beyond = rows @ ones[: len(block)].T
        above = beyond.amax(1, keepdim=True).float()
        if scaling * float(above.max()) > _ABOVE:
            before = reference.float()
            reference[:] = before - above.clamp(min=0)
            fall = ((reference.float() - before) * scaling).exp_()
            out.mul_(fall)
            total.mul_(fall)
            beyond = rows @ ones[: len(block)].T
        weights = beyond.mul_(scaling).exp_()
        total.add_(weights.sum(1, keepdim=True, dtype=torch.float32))
        out.add_(weights @ held)
    return out.div_(total), (total.log_() - reference.float() * scaling)[:, 0]
