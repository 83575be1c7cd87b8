"""The attention function and the mask that are registered with transformers (no patching).

Queries attend to the generated KV here and to the stored prefix through the cache layer that gave the keys;
the two states are merged exactly.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import causal_mask_function, sdpa_mask

from offload_decode.attention.dense import attend_dense
from offload_decode.attention.host_dense import attend_tensors
from offload_decode.attention.queries import CausalMask, merge_states, sink_state
from offload_decode.common.errors import ConfigError, UnsupportedModel
from offload_decode.common.rows.arrays import Float32
from offload_decode.hf.cache_layers import (
    RUNNING,
    AttentionCall,
    GeneratedLayer,
    GraphLayer,
    LatentLayer,
    PrefixLayer,
)
from offload_decode.hf.mla import LatentHeads, latent_of
from offload_decode.hf.packed_batch import PackedLayer
from offload_decode.types import AttentionState

NAME = "offload_decode"
NOT_BOOL = "a prepared 4-D attention mask must be bool, True where a token may be seen"
_WITHOUT_EFFECT = frozenset(["cache_position", "position_ids"])


def prefix_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention to the generated KV, merged with that to the prefix of the cache layer that `key` came from.

    `query [B, H, T, D]`, `key` and `value [B, Hkv, S, D]` after RoPE, `attention_mask` bool `[B, 1, T, S]`;
    returns `[B, T, H, D]` as transformers expects. Keys that come from no layer of ours get dense attention.
    """
    assert scaling is not None, "every served architecture states its scaling"
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ConfigError(NOT_BOOL)
    run = RUNNING.current
    layer: GeneratedLayer | PackedLayer | GraphLayer | None = run.layer_of(key)
    latent = None if layer is not None else latent_of(module)
    if latent is not None:  # the keys were made of what came from the cache
        layer = run.layer_before(module.layer_idx)  # type: ignore[arg-type]
    if isinstance(layer, GraphLayer):
        _refuse_unknown(module, others)
        call = AttentionCall(module, layer.index, query, key, value, scaling, softcap, s_aux)
        return layer.attend(call), None
    if layer is not None:
        if latent is not None:
            others.pop("indices", None)  # tokens that a model's own indexer chose
        _refuse_unknown(module, others)
        if run.positions is not None:
            query = _temperature_at(module, query, run.positions, layer.get_seq_length() - query.shape[2])
    stored_query, expand = query, _as_it_is
    if latent is not None and isinstance(layer, LatentLayer | PackedLayer):
        heads = LatentHeads(module, latent, query)
        stored_query, expand = pad(heads.absorb(query), (0, layer.index_dim)), heads.expand
    if isinstance(layer, PackedLayer):
        states = [expand(part) for part in layer.attend(stored_query, scaling, softcap)]
        return _finished(reduce(merge_states, states), s_aux, query, ours=True)
    # Where the mask has the one entry of `generated_mask`, the position alone says what a token sees. Some
    # models cut the keys, and the mask with them. Keys from no layer are those of the tokens.
    causal: CausalMask | None = None
    more_than_one = max(query.shape[2], key.shape[2]) > 1
    if attention_mask is not None and more_than_one and attention_mask.shape[2:] == (1, 1):
        causal, attention_mask = layer.causal if layer is not None else CausalMask(), None
    if not isinstance(layer, PrefixLayer):
        state = _attend(query, key, value, scaling, attention_mask, softcap, causal)
    else:
        # The generated KV is attended to between these two, so that a device works while the host searches;
        # behind them where what is chosen of the stored tokens says what is seen of it.
        index = None
        if isinstance(layer, LatentLayer) and layer.index_dim and run.asked is not None:
            index = run.asked.queries(attention_mask, causal)
        finish = layer.prefix.begin(layer.index, stored_query, scaling, softcap, index)
        if index is not None:
            finish = partial(_as_it_is, finish())
            if (seen := index.seen()) is not None:
                attention_mask, causal = seen, None
        part: AttentionState | None = None
        free = causal is None or query.shape[2] == 1
        if free and layer.generated.length > layer.prefix.whole_generated and run.sees_all(attention_mask):
            part = layer.prefix.attend_generated(layer.index, stored_query, layer.generated, scaling, softcap)
        if part is None:
            generated = _attend(query, key, value, scaling, attention_mask, softcap, causal)
        else:
            generated = expand(part)
        state = merge_states(generated, expand(finish()))
    if layer is not None:
        layer.unattended = False
    return _finished(state, s_aux, query, ours=layer is not None)


def attend_token(
    module: Any,
    layer: Any,
    token: Sequence[Float32],
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    others: Mapping[str, Any],
) -> Float32 | None:
    """What a cache's `layer` and `prefix_attention` do with one more token on a host, in compiled calls.

    `token`: its query `[H, D]`, key and value `[Hkv, D]`, float32. Returns `[H, Dv]`; or None, and nothing is
    done, where more is asked for.
    """
    if type(layer) is not PrefixLayer or not layer.prefix.by_token or not RUNNING.current.sees_all(mask):
        return None
    if not 0 < layer.generated.length < layer.prefix.whole_generated:
        return None
    _refuse_unknown(module, others)
    query, *both = token
    layer.append(*(torch.from_numpy(own)[None, :, None] for own in both))
    prefix: Any = layer.prefix
    out: Float32 = prefix.attend_token(layer.index, query, layer.generated, scaling, softcap)
    return out


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    mask: Tensor | None,
    softcap: float | None,
    causal: CausalMask | None,
) -> AttentionState:
    """`attend_dense`; of one token on a host by compiled loops, which need none of torch's threads: to wake
    them takes longer than a step's attention.
    """
    if query.shape[2] == 1 and mask is None:
        seen = slice(None) if causal is None else causal.seen(slice(0, 1), 1, key.shape[2])
        state = attend_tensors(query, key[:, :, seen], value[:, :, seen], scaling, softcap)
        if state is not None:
            return state
    return attend_dense(query, key, value, scaling, mask, softcap, causal)


def _as_it_is(state: AttentionState) -> AttentionState:
    return state


def _temperature_at(module: Any, query: Tensor, positions: Tensor, first: int) -> Tensor:
    """Llama 4's temperature by position: `query [B, H, T, D]`, scaled by the model for `first`,
    `first + 1` …, is scaled for `positions [B, T]`.

    Its layers without rotary positions scale a query by the logarithm of its position (arXiv 2501.19399),
    counted from the length of the cache, padding included: too far on for a padded sequence.
    """
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query

    def scale(at: Tensor) -> Any:
        return torch.log1p(torch.floor((at.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    counted = torch.arange(first, first + query.shape[2], device=positions.device)
    factor: Tensor = scale(positions) / scale(counted)
    return query * factor[:, None, :, None].to(query)


def _finished(state: AttentionState, sinks: Tensor | None, query: Tensor, ours: bool) -> tuple[Tensor, None]:
    """A state `[B, H, T, D]` merged with the sinks, as transformers takes it."""
    if sinks is not None:
        state = merge_states(state, sink_state(sinks, state))
    out = state.out
    if (ours or sinks is not None) and torch.is_grad_enabled():
        out = _WithoutGradients.apply(out, query)  # type: ignore[no-untyped-call]
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


def _refuse_unknown(module: torch.nn.Module, others: Mapping[str, Any]) -> None:
    """An unknown tensor may change the scores, those of stored tokens too."""
    for name, value in others.items():
        if isinstance(value, Tensor) and name not in _WITHOUT_EFFECT:
            raise UnsupportedModel(
                f"{type(module).__name__} passes '{name}' to its attention, which attention to stored "
                "tokens does not know"
            )


class _WithoutGradients(torch.autograd.Function):
    """Refuses gradients: those of a part alone would be wrong, and the fused kernel gives none of the LSE."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, query: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ConfigError(
            "there are no gradients behind a stored prefix or through attention sinks: train on the "
            "whole text with another attention (model.set_attn_implementation('eager'))"
        )


def generated_mask(
    *,
    kv_length: int,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    local_size: int | None = None,
    **arguments: Any,
) -> Tensor:
    """A bool mask `[B, 1, T, S]` over the keys that the attention call receives.

    Behind a prefix a 2-D `attention_mask` covers stored and generated tokens (`hf.hooks` checks it), and a
    sliding window or a chunk (`local_size` tokens) is counted in the sequence's own tokens: padding between
    prefix and question would use up a part of it. Where nothing is padded and no model adds to the mask, it
    has one entry for a sequence, and `prefix_attention` goes by the positions.
    """
    chunk = getattr(arguments.get("config"), "attention_chunk_size", None)
    chunked = local_size is not None and local_size == chunk
    run = RUNNING.current
    by_place = run.unpadded and arguments.get("allow_is_causal_skip", False) and not chunked
    if by_place and attention_mask is None:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=arguments.get("device"))
    own = attention_mask if attention_mask is run.mask else None
    if own is not None and local_size is not None:
        mask_function = causal_mask_function
    arguments |= {"attention_mask": attention_mask, "mask_function": mask_function}
    arguments["allow_is_causal_skip"] = False
    mask: Tensor = sdpa_mask(kv_length=kv_length, kv_offset=kv_offset, **arguments)
    if own is not None and local_size is not None:
        position = kv_offset + own[:, kv_offset:].long().cumsum(-1) - 1
        keys, queries = position[:, None, None, :], position[:, None, -mask.shape[2] :, None]
        near = queries // local_size == keys // local_size if chunked else queries - keys < local_size
        mask = mask & near
    return mask
