"""The one seam to transformers: a registered attention function and its mask (no patching)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from offload_decode.attention.states import merge_states, sink_state
from offload_decode.errors import ConfigError
from offload_decode.kernels.dense import attend_dense
from offload_decode.models.cache import PrefixLayer, TailLayer
from offload_decode.types import AttentionState

NAME = "offload_decode"


def prefix_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention over the tail, merged with the prefix of the cache layer that `key` came from.

    `query [B, H, T, D]`, `key` and `value [B, Hkv, S, D]` after RoPE, `attention_mask` bool `[B, 1, T, S]`;
    returns `[B, T, H, D]` as transformers expects. Keys that come from no layer of ours are plain dense
    attention.
    """
    assert scaling is not None, "every served architecture states its scaling"
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ConfigError("a prepared 4-D attention mask must be bool, True where a token may be seen")
    layer: TailLayer | None = getattr(key, "offload_layer", None)
    # The tail is attended to between these two, so that a device is at it while the host searches.
    finish: Callable[[], AttentionState] | None = None
    if isinstance(layer, PrefixLayer):
        finish = layer.prefix.begin(layer.index, query, scaling, softcap)
    state: AttentionState | None = None
    whole = attention_mask is None or bool(attention_mask.all())  # a query that sees all of the tail
    if isinstance(layer, PrefixLayer) and whole:
        state = layer.prefix.attend_tail(layer.index, query, layer.tail, scaling, softcap)
    if state is None:
        state = attend_dense(query, key, value, scaling, attention_mask, softcap)
    if layer is not None:
        layer.unattended = False
    if finish is not None:
        state = merge_states(state, finish())
    if s_aux is not None:
        state = merge_states(state, sink_state(s_aux, state))
    return state.out.to(query.dtype).transpose(1, 2).contiguous(), None


def tail_mask(
    *,
    kv_length: int,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    local_size: int | None = None,
    **arguments: Any,
) -> Tensor:
    """A bool mask `[B, 1, T, S]` over the keys that the attention call receives.

    A 2-D `attention_mask` must cover prefix and tail: a shorter one would silently be padded with zeros.
    With one, a sliding window (`local_size` tokens) is counted in the row's own tokens, because padding
    between prefix and question would otherwise use up a part of it.
    """
    if attention_mask is not None:
        _check_covers_prefix(attention_mask, kv_offset, kv_length)
        if local_size is not None:
            mask_function = causal_mask_function
    mask: Tensor = sdpa_mask(
        kv_length=kv_length,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        mask_function=mask_function,
        **{**arguments, "allow_is_causal_skip": False},
    )
    if attention_mask is not None and local_size is not None:
        position = attention_mask[:, kv_offset:].long().cumsum(-1)
        queries = position[:, -mask.shape[2] :]
        mask = mask & (queries[:, None, :, None] - position[:, None, None, :] < local_size)
    return mask


def _check_covers_prefix(attention_mask: Tensor, kv_offset: int, kv_length: int) -> None:
    if attention_mask.shape[-1] != kv_offset + kv_length:
        raise ConfigError(
            f"the attention mask covers {attention_mask.shape[-1]} tokens, but {kv_offset + kv_length} "
            "are in the cache with its stored prefix: pass ones for the prefix too, as Engine.inputs does"
        )
    # The engine's own masks say so; a million entries are not read at every step.
    covered = getattr(attention_mask, "offload_covered", 0) >= kv_offset
    if not covered and not bool(attention_mask[:, :kv_offset].all()):
        raise ConfigError(
            "the attention mask hides stored tokens: only tokens after the prefix can be masked"
        )


def activate(model: Any) -> None:
    """Let `model` attend through `prefix_attention`."""
    AttentionInterface.register(NAME, prefix_attention)
    AttentionMaskInterface.register(NAME, tail_mask)
    model.set_attn_implementation(NAME)
