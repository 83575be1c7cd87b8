"""A decoder layer in blocks for a few rows, in two compiled calls: what comes before attention, and after.

A layer of one token is some seventy small operations of torch, which together take longer than its products.
Sums, norms, rotation and activations are float32 here, where transformers rounds each to the model's dtype.
Longer passes, and layers of another form, run as transformers has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor, nn

from offload_decode.common.rows.arrays import Float32
from offload_decode.common.rows.compiled import exponential
from offload_decode.common.rows.ggml_products import FORM, Matrices, padded, products
from offload_decode.common.rows.team import cells
from offload_decode.hf.attention import attend_token
from offload_decode.hf.cache import CorpusCache
from offload_decode.hf.compat import cache_in

FEW_ROWS = {"avx512": 64, "vnni": 32}.get(FORM, 16)
"""Rows of a pass that are multiplied in the blocks; more are multiplied by unpacked tiles, which takes as
long for 512 rows (AVX-512). Far fewer than that, as their inputs are rounded.
"""
PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
_REASSOCIATE = {"reassoc", "contract", "nsz"}
_NONE = np.empty(0, np.float32)


@njit(nogil=True, cache=True, fastmath=_REASSOCIATE)
def _norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """RMSNorm (arXiv 1910.07467) of rows."""
    for r in range(len(x)):
        total = np.float32(0)
        for d in range(x.shape[1]):
            total += x[r, d] * x[r, d]
        by = np.float32(1) / np.sqrt(total / np.float32(x.shape[1]) + eps)
        for d in range(x.shape[1]):
            out[r, d] = x[r, d] * by * weight[d]


# To look for a division by zero would keep compilers from doing sixteen at a time.
@njit(nogil=True, cache=True, fastmath=_REASSOCIATE, error_model="numpy")
def _activate(gate: Any, up: Any, kind: int, out: Any) -> None:
    """`silu(gate) * up`, or of GELU's approximation by tanh (arXiv 1606.08415)."""
    one, two, half = np.float32(1), np.float32(2), np.float32(0.5)
    if kind == 0:
        for d in range(len(out)):
            small = exponential(-np.abs(gate[d]))
            share = (one if gate[d] >= 0 else small) / (one + small)
            out[d] = gate[d] * share * up[d]
    else:
        for d in range(len(out)):
            inner = np.float32(0.7978845608) * (gate[d] + np.float32(0.044715) * gate[d] * gate[d] * gate[d])
            small = exponential(-two * np.abs(inner))
            tanh = (one - small) / (one + small)
            out[d] = half * gate[d] * (one + (tanh if inner >= 0 else -tanh)) * up[d]


@njit(nogil=True, cache=True)
def _rotate(rows: Any, cos: Any, sin: Any) -> None:
    """RoPE (arXiv 2104.09864) of `rows [R, H, D]`, whose halves are rotated together."""
    half = rows.shape[2] // 2
    for r in range(len(rows)):
        for h in range(rows.shape[1]):
            for d in range(half):
                a, b = rows[r, h, d], rows[r, h, d + half]
                rows[r, h, d] = a * cos[r, d] - b * sin[r, d]
                rows[r, h, d + half] = b * cos[r, d + half] + a * sin[r, d + half]


@njit(nogil=True, cache=True)
def _before(
    team: Any,
    x: Any,
    norm: Any,
    eps: Any,
    table: Any,
    biases: Any,
    head_norms: Any,
    cos: Any,
    sin: Any,
    out: Any,
) -> None:
    """`x [M, K]` to queries, keys and values: `[M, heads, D]` each."""
    normed = np.empty_like(x)
    _norm(x, norm, eps, normed)
    flat, start, first = products(team, normed, table), 0, 0
    for part in range(3):
        own = out[part]
        width = own.shape[1] * own.shape[2]
        for r in range(len(x)):
            row = flat[start + r * width : start + (r + 1) * width]
            if len(biases):
                row += biases[first : first + width]
            own[r] = row.reshape(own.shape[1:])
            if part < 2 and head_norms.shape[1]:
                _norm(own[r], head_norms[part], eps, own[r])
        if part < 2:
            _rotate(own, cos, sin)
        start += padded(len(x), table) * width
        first += width


@njit(nogil=True, cache=True)
def _add_products(team: Any, x: Any, rows: Any, table: Any, norm: Any, eps: Any, out: Any) -> None:
    """`x [M, K]` and the products of `rows`, which a norm follows where there is one, to `out [M, K]`."""
    count, width = x.shape
    added = products(team, rows, table)[: count * width].reshape(count, width)
    if len(norm):
        _norm(added, norm, eps, added)
    for r in range(count):
        for d in range(width):
            out[r, d] = x[r, d] + added[r, d]


@njit(nogil=True, cache=True)
def _after(
    team: Any, x: Any, attended: Any, tables: Any, norms: Any, after_norms: Any, eps: Any, kind: int, out: Any
) -> None:
    """`x [M, K]`, before the layer, and `attended [M, heads * D]` to the layer's output `out [M, K]`."""
    count = len(x)
    summed, normed = np.empty_like(x), np.empty_like(x)
    _add_products(team, x, attended, tables[0], after_norms[0], eps, summed)
    _norm(summed, norms[1], eps, normed)
    both = products(team, normed, tables[1])
    inner = tables[1][0, 2]
    up = both[padded(count, tables[1]) * inner :]
    active = np.empty((count, inner), np.float32)
    for r in range(count):
        own = slice(r * inner, (r + 1) * inner)
        _activate(both[own], up[own], kind, active[r])
    _add_products(team, summed, active, tables[2], after_norms[1], eps, out)


@lru_cache(4)
def _rotation(cos: Tensor, sin: Tensor, shape: torch.Size) -> tuple[Float32, Float32]:
    """`[M, D]` each. Layers of a pass are given the same tensors, or two kinds of layers two pairs."""
    wide = (own.expand(*shape, -1).reshape(shape.numel(), -1).float() for own in (cos, sin))
    cosine, sine = (own.contiguous().numpy() for own in wide)
    return cosine, sine


def _by_head(rows: Float32, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """`rows [M, H, D]` as transformers has them: `[B, H, T, D]`."""
    return torch.from_numpy(rows).to(dtype).view(*shape, -1, rows.shape[-1]).transpose(1, 2)


@dataclass(frozen=True)
class FewRows:
    """A decoder layer's `forward`, compiled for passes of up to `FEW_ROWS` rows."""

    layer: nn.Module
    matrices: tuple[Matrices, ...]
    norms: Float32
    after_norms: Float32
    head_norms: Float32
    biases: Float32
    eps: np.float32
    kind: int

    @classmethod
    def of(cls, layer: Any, ones: bool) -> FewRows | None:
        """Of a layer whose projections are `BlockLinear`; None for one of another form. `ones`: norms
        multiply by their weight and one, and follow what is added as well (Gemma).
        """
        attention, mlp = layer.self_attn, layer.mlp
        first = [getattr(attention, f"{name}_proj") for name in ("q", "k", "v")]
        rest = [attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        kind = _ACTIVATIONS.get(
            getattr(attention.config, "hidden_activation", None) or attention.config.hidden_act
        )
        if kind is None or any(own.bias is not None for own in rest):
            return None
        names = ("input_layernorm", "pre_feedforward_layernorm" if ones else "post_attention_layernorm")
        after = ("post_attention_layernorm", "post_feedforward_layernorm") if ones else ()
        heads = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]

        def weights(norms: Any) -> Float32:
            found = [norm.weight.detach().float().numpy() + float(ones) for norm in norms]
            return np.stack(found) if found else np.empty((2, 0), np.float32)

        biased = [own.bias.detach().float().numpy() for own in first if own.bias is not None]
        if len(biased) not in (0, 3):
            return None
        norm = layer.input_layernorm
        return cls(
            layer,
            tuple(
                Matrices((own.blocks, own.kind) for own in part)
                for part in (first, rest[:1], rest[1:3], rest[3:])
            ),
            weights(getattr(layer, name) for name in names),
            weights(getattr(layer, name) for name in after),
            weights(heads),
            np.concatenate(biased) if biased else _NONE,
            np.float32(getattr(norm, "eps", None) or norm.variance_epsilon),
            kind,
        )

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        """transformers' own, or of a few rows without gradients the compiled one."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        attention: Any = self.layer.self_attn
        attend = ALL_ATTENTION_FUNCTIONS.get(attention.config._attn_implementation)
        turned = named.get("position_embeddings")
        count = hidden_states.shape[0] * hidden_states.shape[1]
        plain = not given and attend is not None and not torch.is_grad_enabled()
        if not plain or turned is None or not 0 < count <= FEW_ROWS:
            return type(self.layer).forward(self.layer, hidden_states, *given, **named)
        shape, dtype = hidden_states.shape[:2], hidden_states.dtype
        x = hidden_states.reshape(count, -1).float().contiguous().numpy()
        cos, sin = _rotation(*turned, shape)
        dim, team = attention.head_dim, cells()
        out = tuple(np.empty((count, rows // dim, dim), np.float32) for rows in self.matrices[0].rows)
        _before(
            team,
            x,
            self.norms[0],
            self.eps,
            self.matrices[0].table,
            self.biases,
            self.head_norms,
            cos,
            sin,
            out,
        )
        cache, mask = cache_in(named), named.get("attention_mask")
        more = {name: one for name, one in named.items() if name not in _OF_LAYERS}
        softcap = getattr(attention, "attn_logit_softcapping", None)
        rows = None
        if count == 1 and isinstance(cache, CorpusCache) and cache.begun is not None:
            layer, token = cache.layers[attention.layer_idx], [own[0] for own in out]
            rows = attend_token(attention, layer, token, mask, attention.scaling, softcap, more)
        if rows is None:
            key, value = (_by_head(own, shape, dtype) for own in out[1:])
            if cache is not None:
                key, value = cache.update(key, value, attention.layer_idx)
            if softcap is not None:
                more["softcap"] = softcap
            attended, _ = attend(
                attention,
                _by_head(out[0], shape, dtype),
                key,
                value,
                mask,
                dropout=0.0,
                scaling=attention.scaling,
                sliding_window=getattr(attention, "sliding_window", None),
                **more,
            )
            rows = attended.float().contiguous().numpy()
        tables = tuple(own.table for own in self.matrices[1:])
        after = np.empty_like(x)
        _after(
            team, x, rows.reshape(count, -1), tables, self.norms, self.after_norms, self.eps, self.kind, after
        )
        return torch.from_numpy(after).to(dtype).view_as(hidden_states)


_OF_LAYERS = ("attention_mask", "cache", "past_key_values", "position_embeddings", "use_cache")
