"""Multi-head latent attention: attention to the latents of tokens, without the keys and values of each head.

DeepSeek-V2 (arXiv 2405.04434, §2.1.2). A token's keys and values are linear in its row `[c | r]`, the latent
and the rotary part that all heads share: head h has the key `[K_h c | r]` and the value `V_h c`, where
`kv_b_proj` holds K and V. So q·k is the inner product of the absorbed query `[q K_h | q_r]` with the row, and
the head's output is V_h times the attention over the rows: one KV head for all query heads, whose values are
its keys. These are what transformers caches, but for its older releases, which cached the heads expanded.
"""

import warnings
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from offload_decode.common.errors import OffloadDecodeWarning, UnsupportedModel
from offload_decode.types import AttentionState, IndexShape

_MADE: WeakKeyDictionary[nn.Module, tuple[Tensor, Tensor]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Latent:
    """The widths of latent attention: `rank` of the latent, `plain` and `rotary` of a head's key, `value`."""

    rank: int
    plain: int
    rotary: int
    value: int

    @property
    def dim(self) -> int:
        """Numbers of a token's row."""
        return self.rank + self.rotary


def latent_of(module: Any) -> Latent | None:
    """How an attention module expands the latents that it caches; None for one that caches keys and values.

    Raises `UnsupportedModel` for latents that are expanded otherwise than this file says.
    """
    if not hasattr(module, "expand_kv"):
        return None
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    widths = [getattr(module, name, None) for name in names]
    projection = getattr(module, "kv_b_proj", None)
    if projection is None or getattr(projection, "bias", None) is not None or None in widths:
        raise UnsupportedModel(
            f"{type(module).__name__} expands latents in another way than by kv_b_proj without a bias"
        )
    return Latent(*widths)  # type: ignore[arg-type]


def tell_of_indexer(config: Any, tokens: int, stored: bool, way: str) -> None:
    """Warn where a model's own indexer would choose among so many tokens and is not asked. `stored`: its keys
    are kept; `way`: the method of a prefill or the selector, of which `dense` and `own` ask it.
    """
    most = getattr(config, "index_topk", None)
    if isinstance(most, int) and tokens > most and not (stored and way in ("dense", "own")):
        message = (
            f"This model learned to attend to the {most:,} tokens that an indexer of its own chooses. Here "
            f"'{way}' chooses instead: prefill with the method dense, and ask with -s own, where it is known."
        )
        warnings.warn(OffloadDecodeWarning(message), stacklevel=3)


class LatentHeads:
    """The heads of an attention module that has `latent`, for one call with queries `like` these."""

    def __init__(self, module: Any, latent: Latent, like: Tensor):
        self.latent = latent
        rows = _weight(module.kv_b_proj, latent.rank, like).detach().float()
        heads = rows.reshape(-1, latent.plain + latent.value, latent.rank)
        self._keys, self._values = heads[:, : latent.plain], heads[:, latent.plain :]

    def absorb(self, query: Tensor) -> Tensor:
        """Queries `[B, H, T, plain + rotary]` as they meet the tokens' rows: float32 `[B, H, T, dim]`."""
        plain, rotary = query[..., : self.latent.plain], query[..., self.latent.plain :]
        return torch.cat([plain.float() @ self._keys, rotary.float()], dim=-1)

    def expand(self, state: AttentionState) -> AttentionState:
        """Attention over the rows, `out [B, H, T, dim]`, as over the heads' values, `[B, H, T, value]`."""
        return AttentionState(state.out[..., : self.latent.rank] @ self._values.mT, state.lse)


def _weight(projection: Any, rank: int, like: Tensor) -> Tensor:
    """The weight `[H · (plain + value), rank]` of `kv_b_proj`."""
    if type(projection) is nn.Linear:
        weight: Tensor = projection.weight
        if weight.is_floating_point() and weight.device == like.device:
            return weight
    # In few bits, adapted, or fetched when it is called: what it makes of every unit vector, kept as long as
    # it makes the same of one vector.
    unit = torch.eye(rank, dtype=like.dtype, device=like.device)
    probe: Tensor = projection(torch.linspace(-1, 1, rank).to(unit)[None])
    known = _MADE.get(projection)
    if known is None or known[0].device != probe.device or not torch.equal(known[0], probe):
        known = _MADE[projection] = probe, projection(unit).T
    return known[1]


def index_of(module: Any, keys: Tensor | None) -> IndexShape | None:
    """The indexer of an attention module whose cache layer holds index `keys [B, S, dim]`; None where it has
    none, or one whose keys are not those of single tokens.
    """
    indexer = getattr(module, "indexer", None)
    topk, dim = getattr(indexer, "index_topk", None), getattr(indexer, "head_dim", None)
    if keys is None or not isinstance(topk, int) or dim != keys.shape[-1]:
        return None
    return IndexShape(int(dim), topk)
