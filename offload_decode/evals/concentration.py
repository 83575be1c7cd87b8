"""How concentrated attention to stored tokens is: keys that hold a share of its mass, and its entropy.

The probabilities of a query row are those of the stored tokens alone, and add to 1 (paper 002, appendix A.2,
has those of a whole row of attention).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.kv.host import BLOCK_TOKENS, HostKV

SHARES = (0.75, 0.9, 0.95, 0.99)
_NUMBERS = 1 << 22  # logits that are in memory at once, or those of one row


@dataclass(frozen=True)
class Concentration:
    """Of query rows `[Hkv, R]`: `entropy` in nats, float64; `keys [shares, Hkv, R]`, int64, the fewest tokens
    that hold each of `SHARES`.
    """

    entropy: Tensor
    keys: Tensor


def concentration(host: HostKV, layer: int, queries: Queries) -> Concentration:
    """Of all rows of one layer's queries, on the CPU.

    Exact for float32 logits: they are computed key by key from the store, a few rows at a time, and sorted.
    """
    heads, rows = queries.rows.shape[:2]
    entropy = torch.empty(heads, rows, dtype=torch.float64)
    keys = torch.empty(len(SHARES), heads, rows, dtype=torch.int64)
    step = max(1, _NUMBERS // host.length)
    for head in range(heads):
        for start in range(0, rows, step):
            part = slice(start, start + step)
            entropy[head, part], keys[:, head, part] = _of(_logits(host, layer, head, queries, part))
    return Concentration(entropy, keys)


def _logits(host: HostKV, layer: int, head: int, queries: Queries, rows: slice) -> Tensor:
    """`[r, N]` float32 on the device."""
    asked, stored = queries.rows[head, rows], host.keys(layer, head)
    logits = asked.new_empty(len(asked), host.length)
    for first in range(0, host.length, BLOCK_TOKENS):
        block = slice(first, min(first + BLOCK_TOKENS, host.length))
        logits[:, block] = queries.logits(asked @ stored.read(block, asked.device).T)
    return logits


def _of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy `[r]` and keys `[shares, r]` of `logits [r, N]`."""
    lse = torch.logsumexp(logits.double(), -1)
    ordered = logits.sort(-1, descending=True).values.double() - lse[:, None]
    weights = ordered.exp()
    entropy = -(weights * ordered).sum(-1).clamp(max=0.0)
    held = weights.cumsum(-1)
    shares = torch.tensor(SHARES, dtype=torch.float64, device=held.device)
    # A share that is held but for the rounding of a sum of N numbers is held.
    wanted = shares * (1 - 1e-9)
    keys = torch.searchsorted(held, wanted.expand(len(held), -1).contiguous()) + 1
    return entropy.cpu(), keys.clamp(max=logits.shape[-1]).T.cpu()
