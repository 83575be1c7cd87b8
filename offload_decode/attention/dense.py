"""Dense attention with its log-sum-exp: by torch's fused kernels, many queries in parts of bounded memory,
long prefixes block by block.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload_decode.attention.queries import CausalMask, attend, empty_state, joined, merge_states
from offload_decode.common.rows.compiled import features
from offload_decode.types import AttentionState

# torch's fused operators that return the log-sum-exp. cuDNN: half precision, widths up to 128 (on Hopper
# 256), values of another width; queries that see all keys, or a square causal mask. Flash: half precision,
# widths up to 256; windows too. Memory-efficient: float32 too, any width, without windows. None has a soft
# cap.

_WIDTHS = 8  # the operators take multiples of it
_PLANNED_ROWS = 1024  # cuDNN plans for every shape anew, which pays for a chunk and not for a step
_BOTTOM_RIGHT = 2  # of `_efficient_attention_forward`: the last row sees the last key


def attend_fused(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: CausalMask | None = None
) -> AttentionState | None:
    """`queries.attend` for `query [B, H, T, D]`, `key [B, Hkv, S, D]` and `value [B, Hkv, S, Dv]` of
    one dtype on a GPU, where all rows see all keys or follow `causal`; `out` is of that dtype. None where no
    operator serves them: on a CPU, with dtypes that differ, or no keys.

    Products are of the given dtype and sums of float32, as in a model's own attention: in bfloat16 `out` is
    off by some 2^-8 of its largest number, and `lse` by some 2^-8.
    """
    on_gpu = query.is_cuda and torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    if not on_gpu or not (query.dtype == key.dtype == value.dtype) or not key.shape[2]:
        return None
    value_dim = value.shape[-1]
    query, key, value = (
        widened(part, -(-part.shape[-1] // _WIDTHS) * _WIDTHS) for part in (query, key, value)
    )
    for operator in _OPERATORS:
        if (found := operator(query, key, value, scaling, causal)) is not None:
            return AttentionState(found[0][..., :value_dim], found[1])
    return None


def widened(part: Tensor, width: int) -> Tensor:
    """With zeros up to `width` channels, which change no score; padding by nothing would copy."""
    return part if part.shape[-1] == width else pad(part, (0, width - part.shape[-1]))


Found = tuple[Tensor, Tensor] | None
"""What an operator found, `out` and `lse`; None where it does not serve these tensors."""


def _cudnn(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: CausalMask | None) -> Found:
    tokens, keys = query.shape[2], key.shape[2]
    # It counts a row's place from the first key.
    if tokens < _PLANNED_ROWS or (causal is not None and (causal.window is not None or tokens != keys)):
        return None
    newest = torch.cuda.get_device_capability(query.device) >= (9, 0)  # elsewhere flash is faster
    if not newest or not _allowed("cudnn", query, key, value, grouped=True):
        return None
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal is not None, False, scale=scaling
    )
    return out, lse.reshape(out.shape[:3])


def _flash(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: CausalMask | None) -> Found:
    width = max(query.shape[-1], value.shape[-1])  # it knows one alone
    one_query, one_key, one_value = (widened(part[:, :, :1], width) for part in (query, key, value))
    if not _allowed("flash", one_query, one_key, one_value, grouped=True):
        return None
    by_token = [widened(part, width).transpose(1, 2) for part in (query, key, value)]
    window = None if causal is None or causal.window is None else causal.window - 1
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(*by_token, None, None, query.shape[2], key.shape[2], 0.0, causal is not None, False),
        scale=scaling,
        window_size_left=window,
        window_size_right=None if window is None else 0,
    )
    return out.transpose(1, 2), lse


def _efficient(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: CausalMask | None) -> Found:
    grouped = _by_kv_head(query, key, value)
    if (causal is not None and causal.window is not None) or not _allowed(
        "efficient", *grouped, grouped=False
    ):
        return None
    out, lse, *_ = torch.ops.aten._efficient_attention_forward(
        *(part.transpose(1, 2) for part in grouped),
        *(None, None, None, None, None, 0.0, 0 if causal is None else _BOTTOM_RIGHT, True),
        scale=scaling,
    )
    batch, heads, tokens = query.shape[:3]
    # Its rows are filled up to a multiple of 32.
    lse = lse[:, :, :tokens].reshape(batch, heads, tokens)
    return out.transpose(1, 2).reshape(batch, heads, tokens, -1), lse


def _by_kv_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each KV head with its group as a sequence, `[B · Hkv, G, …]`, for operators without groups: no copy."""
    group = query.shape[1] // key.shape[1]
    key, value = (part.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for part in (key, value))
    return query.reshape(-1, group, *query.shape[2:]), key, value


def _allowed(kind: str, query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> bool:
    asked = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, grouped)
    allows: Callable[[Any], bool] = getattr(torch.backends.cuda, f"can_use_{kind}_attention")
    with torch.cuda.device(query.device):
        return allows(asked)


_OPERATORS = (_cudnn, _flash, _efficient)  # the fastest first


# Many queries on a CPU whose instructions multiply bfloat16. With AMX torch's fused kernel takes a quarter of
# the time of what follows. With AVX-512 BF16 alone it is no faster in bfloat16 than in float32; there it is
# FlashAttention's Algorithm 1 (arXiv 2205.14135) by matrix products, which are several times faster but round
# their results. So they compute each score less a reference near its row's largest, which stands in one more
# channel of the query, where keys have a one: what is rounded is small where it counts.

LEAST_ROWS = 64
"""Tokens of a query from which on blocks of keys pay."""
_KEYS = 512  # of a block, whose scores stay in a core's cache
_MORE = 8  # channels beside the head's own, of which the first is the reference's
_ABOVE = 4.0  # nats by which a score may surpass its row's reference before that is raised


@cache
def has_amx() -> bool:
    """Whether this processor multiplies tiles of bfloat16."""
    return "amx-bf16" in features()


@cache
def has_bf16_products() -> bool:
    """Whether this processor multiplies matrices of bfloat16; elsewhere it is emulated, and slow."""
    return has_amx() or "avx512bf16" in features()


def serves_bf16(query: Tensor, keys: torch.dtype, values: torch.dtype) -> bool:
    """Whether `query [B, H, T, D]` meets keys and values of those dtypes in such products."""
    halves = query.dtype == keys == values == torch.bfloat16 and query.device.type == "cpu"
    return halves and query.shape[2] >= LEAST_ROWS and has_bf16_products()


def attend_bf16(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> AttentionState:
    """`queries.attend` for `query [B, H, T, D]`, `key [B, Hkv, S, D]` and `value [B, Hkv, S, Dv]` of
    bfloat16, where all rows see all of at least one key: float32, off by what rounding weights and parts of
    sums to bfloat16 costs (some 2^-8 of the largest number).
    """
    batch, heads, tokens, dim = query.shape
    shared = key.shape[1]
    if has_amx():
        state = _on_cpu(query.reshape(batch, shared, -1, dim), key, value, scaling)
        return AttentionState(
            state.out.reshape(batch, heads, tokens, -1), state.lse.reshape(batch, heads, tokens)
        )
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
    causal: CausalMask | None = None,
) -> AttentionState:
    """`attend`, through a fused kernel where torch has one that returns the log-sum-exp: uncapped, on a CPU
    (there by products of bfloat16 where many queries see all keys); on a GPU without a mask. Memory beyond
    the inputs and the result grows with T and with S, and not with their product. `causal` says what rows see
    in place of a mask.
    """
    batch, heads, tokens, _ = query.shape
    if causal is not None and tokens == 1:  # it sees all of these
        seen = causal.seen(slice(0, 1), 1, key.shape[2])
        key, value, causal = key[:, :, seen], value[:, :, seen], None
    keys, on_cpu = max(1, key.shape[2]), query.device.type == "cpu"
    if mask is None and softcap is None:
        if not on_cpu:
            state = attend_fused(query, key, value, scaling, causal)
            if state is not None:
                return state
        if causal is None and key.shape[2] and serves_bf16(query, key.dtype, value.dtype):
            return attend_bf16(query, key, value, scaling)
    if causal is not None:
        square = causal.window is None and softcap is None and tokens == key.shape[2]
        if square and serves_bf16(query, key.dtype, value.dtype) and has_amx():
            key, value = (part.repeat_interleave(heads // part.shape[1], 1) for part in (key, value))
            return _on_cpu(query, key, value, scaling, causal=True)
        return _masked(query, key, value, scaling, causal, softcap)
    if not on_cpu or softcap is not None or key.shape[2] == 0:
        step = (SCORES if on_cpu else DEVICE_SCORES) // (batch * heads * keys)
        key, value = key.float(), value.float()  # once, and not for each part
        return _in_parts(
            lambda rows, seen: attend(rows, key, value, scaling, seen, softcap), query, mask, step
        )
    step = tokens if mask is None else SCORES // (batch * keys)
    key, value = key.float(), value.float()
    if tokens == 1:
        return _fused(query.float(), key, value, scaling, mask)
    return _in_parts(lambda rows, seen: _fused(rows.float(), key, value, scaling, seen), query, mask, step)


def attend_blocks(
    query: Tensor,
    blocks: Iterable[tuple[Tensor, Tensor]],
    value_dim: int,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """Attend to blocks of keys `[1, Hkv, S, D]` and values `[1, Hkv, S, value_dim]`, one at a time."""
    state = empty_state(query, value_dim)
    for key, value in blocks:
        state = merge_states(state, attend_dense(query, key, value, scaling, softcap=softcap))
    return state


def _masked(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: CausalMask, softcap: float | None
) -> AttentionState:
    tokens, keys = query.shape[2], key.shape[2]
    parts = []
    for start in range(0, tokens, PLACED_ROWS):
        rows = slice(start, min(start + PLACED_ROWS, tokens))
        seen, mask = causal.seen(rows, tokens, keys), causal.mask(rows, tokens, keys, query.device)
        own = query[:, :, rows], key[:, :, seen], value[:, :, seen]
        parts.append(attend_dense(*own, scaling, mask, softcap))
    return joined(parts, 2)


def _in_parts(
    attend_rows: Callable[[Tensor, Tensor | None], AttentionState],
    query: Tensor,
    mask: Tensor | None,
    step: int,
) -> AttentionState:
    tokens, step = query.shape[2], max(1, step)
    if step >= tokens:
        return attend_rows(query, mask)
    parts = []
    for start in range(0, tokens, step):
        rows = slice(start, start + step)
        seen = None if mask is None else mask.expand(-1, -1, tokens, -1)[:, :, rows]
        parts.append(attend_rows(query[:, :, rows], seen))
    return joined(parts, 2)


def _fused(query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None) -> AttentionState:
    bias = None if mask is None else torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    out, lse = _on_cpu(query, key, value, scaling, bias=bias)
    if mask is not None:
        # The kernel reports a log-sum-exp of 0 for a row that sees nothing.
        lse = lse.masked_fill(~mask.any(-1).expand(lse.shape), -torch.inf)
    return AttentionState(out, lse)


def _on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    bias: Tensor | None = None,
    causal: bool = False,
) -> AttentionState:
    """By torch's fused kernel, in float32; `causal`: as many rows as keys, each sees those up to its own."""
    value_dim = value.shape[-1]
    if key.shape[-1] != value_dim:  # the kernel takes one width alone
        width = max(key.shape[-1], value_dim)
        query, key, value = (widened(part, width) for part in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=scaling
    )
    return AttentionState(out[..., :value_dim].float(), lse)
