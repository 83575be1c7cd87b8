"""Attention in one operator of torch that returns its log-sum-exp: in the dtype that it is given, with the
keys of a KV head read by its whole group where they lie. Which operators there are is torch's to say, of a
device, its build and these tensors; `kernels.dense` has the reference for the rest.

cuDNN: half precision, widths up to 128 (on Hopper 256), values of another width; rows that see all keys, or
as many rows as keys that each see those up to their own. Flash: half precision, widths up to 256; windows
too. Memory-efficient: float32 too, any width, without windows. None has a soft cap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload_decode.attention.places import Places
from offload_decode.types import AttentionState

_WIDTHS = 8  # the operators take multiples of it
_PLANNED_ROWS = 1024  # cuDNN plans for every shape anew, which pays for a chunk and not for a step
_BOTTOM_RIGHT = 2  # of `_efficient_attention_forward`: the last row sees the last key


def attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    places: Places | None = None,
) -> AttentionState | None:
    """`attention.states.attend` for `query [B, H, T, D]`, `key [B, Hkv, S, D]` and `value [B, Hkv, S, Dv]` of
    one dtype on a GPU, where all rows see all keys or follow `places`; `out` is of that dtype. None where no
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
    for serves, run in _OPERATORS:
        if serves(query, key, value, places):
            out, lse = run(query, key, value, scaling, places)
            return AttentionState(out[..., :value_dim], lse)
    return None


def widened(part: Tensor, width: int) -> Tensor:
    """With zeros up to `width` channels, which change neither a score nor the channels that are kept; padding
    by nothing would copy.
    """
    return part if part.shape[-1] == width else pad(part, (0, width - part.shape[-1]))


def _serves_cudnn(query: Tensor, key: Tensor, value: Tensor, places: Places | None) -> bool:
    if query.shape[2] < _PLANNED_ROWS:
        return False
    # It counts a row's place from the first key.
    square = query.shape[2] == key.shape[2]
    if places is not None and (places.window is not None or not square):
        return False
    newest = torch.cuda.get_device_capability(query.device) >= (9, 0)  # elsewhere flash is faster
    return newest and _allowed("cudnn", query, key, value, grouped=True)


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, places: Places | None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, places is not None, False, scale=scaling
    )
    return out, lse.reshape(out.shape[:3])


def _serves_flash(query: Tensor, key: Tensor, value: Tensor, places: Places | None) -> bool:
    width = max(query.shape[-1], value.shape[-1])
    some = [widened(part[:, :, :1], width) for part in (query, key, value)]  # as `_flash` will have them
    return _allowed("flash", some[0], some[1], some[2], grouped=True)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, places: Places | None
) -> tuple[Tensor, Tensor]:
    width = max(query.shape[-1], value.shape[-1])  # it knows one alone
    by_token = [widened(part, width).transpose(1, 2) for part in (query, key, value)]
    window = None if places is None or places.window is None else places.window - 1
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *by_token,
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        places is not None,
        False,
        scale=scaling,
        window_size_left=window,
        window_size_right=None if window is None else 0,
    )
    return out.transpose(1, 2), lse


def _serves_efficient(query: Tensor, key: Tensor, value: Tensor, places: Places | None) -> bool:
    if places is not None and places.window is not None:
        return False
    return _allowed("efficient", *_by_kv_head(query, key, value), grouped=False)


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, places: Places | None
) -> tuple[Tensor, Tensor]:
    by_token = [part.transpose(1, 2) for part in _by_kv_head(query, key, value)]
    out, lse, *_ = torch.ops.aten._efficient_attention_forward(
        *by_token,
        None,
        None,
        None,
        None,
        None,
        0.0,
        0 if places is None else _BOTTOM_RIGHT,
        True,
        scale=scaling,
    )
    batch, heads, tokens = query.shape[:3]
    # Its rows are filled up to a multiple of 32.
    lse = lse[:, :, :tokens].reshape(batch, heads, tokens)
    return out.transpose(1, 2).reshape(batch, heads, tokens, -1), lse


def _by_kv_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each KV head with its group as a sequence of its own, `[B · Hkv, G, …]`, so that an operator without
    groups reads the same keys for all of them and nothing is copied.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (part.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for part in (key, value))
    return query.reshape(-1, group, *query.shape[2:]), key, value


def _allowed(kind: str, query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> bool:
    """Whether torch would take the operator for these tensors on their device."""
    asked = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, grouped)
    allows: Callable[[Any], bool] = getattr(torch.backends.cuda, f"can_use_{kind}_attention")
    with torch.cuda.device(query.device):
        return allows(asked)


_OPERATORS = (
    (_serves_cudnn, _cudnn),
    (_serves_flash, _flash),
    (_serves_efficient, _efficient),
)
"""The fastest first."""
