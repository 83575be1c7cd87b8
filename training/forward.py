"""A fast forward pass for training: no cache, no padding, the last layer only where a token is predicted.

It uses the weights of the transformers model it is given and computes the same. Beyond that, queries of the
full layers may meet keys of texts far away: each of a few keys taken from other rows of the batch counts
`m / n` times in the softmax (importance sampling of its denominator), as m such tokens would. So a window of
512 tokens teaches what a text of a million demands: a match whose score outweighs them all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel


class Trainee(nn.Module):
    """Wraps a Cohere 2 or Llama model; `forward` gives the losses and which predictions were right."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.inner = model
        settings: Any = model.config
        self.parallel = settings.model_type == "cohere2"
        self.heads, self.shared = settings.num_attention_heads, settings.num_key_value_heads
        self.dim = settings.head_dim
        theta = settings.rope_parameters["rope_theta"]
        turns = theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        self.turns: torch.Tensor
        self.register_buffer("turns", turns, persistent=False)

    def forward(
        self,
        tokens: torch.Tensor,
        places: torch.Tensor,
        picked: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor,
        others: torch.Tensor,
        guided: torch.Tensor,
        hints: torch.Tensor,
        opens: torch.Tensor,
        far_index: torch.Tensor,
        far_places: torch.Tensor,
        far_bias: torch.Tensor,
        softening: torch.Tensor,
        eos: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """tokens and their places int64[B, T]; picked int64[B, P]: where the next token is predicted; targets
        and weights [B, P]; others int64[B, P, A]: what is as right as the target, or -1; guided float32
        [B, P]: 1 where what is predicted is copied; hints int64[B, P, HINTS]: from which tokens or the
        next, or -1: from wherever it stands (see `sources`); opens int64[B, T]: of which list's part a token
        is the first (1, 2, ...), or 0; far_index int64[N] into B * T: the sampled keys,
        far_places int64[N], and far_bias float32[B, N]: the logarithm of what each stands for, or -inf;
        softening: factor on the full layers' scores; eos: what ends an answer.

        Returns the weighted mean of -log of the probability of what is right; the same of the attention that
        the last layer's heads together pay to what is to be copied, and that those of the layer before it
        pay to what a list has said where its next part begins; and bool[B, P]: right predictions.
        """
        x, paid, before = self.states(tokens, places, picked, far_index, far_places, far_bias, softening)
        length = tokens.shape[1]
        logits = self.logits(x).flatten(0, 1)
        accepted = torch.cat([targets[..., None], others], 2).flatten(0, 1)
        chosen = logits.gather(1, accepted.clamp(min=0)).masked_fill(accepted < 0, float("-inf"))
        losses = logits.logsumexp(1) - chosen.logsumexp(1)
        loss = (losses * weights.flatten()).sum() / weights.sum()
        begun = F.pad(opens, (0, 1)).gather(1, picked + 1)
        copied = sources(tokens, picked, others, hints, begun > 0, eos)
        guidance = missed(paid[..., :length], copied, weights * guided)
        order = torch.arange(length, device=tokens.device)
        said = (opens[:, None] == begun[:, :, None]) & (begun[:, :, None] > 0) & (order <= picked[:, :, None])
        remembrance = missed(before[..., :length], said, weights)
        right = (logits.argmax(1, keepdim=True) == accepted).any(1)
        return loss, guidance, remembrance, right.view_as(targets)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Of states [B, P, W]: float32 [B, P, V]."""
        model: Any = self.inner.model
        return F.linear(x, model.embed_tokens.weight).float()

    def states(
        self,
        tokens: torch.Tensor,
        places: torch.Tensor,
        picked: torch.Tensor,
        far_index: torch.Tensor,
        far_places: torch.Tensor,
        far_bias: torch.Tensor,
        softening: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What is known at the picked places, [B, P, W], and the attention paid there in the last layer,
        [B, H, P, T + N], and in the one before it, [B, H, P, T or more]."""
        model: Any = self.inner.model
        batch, length = tokens.shape
        x = F.embedding(tokens, model.embed_tokens.weight)
        near = self.rotations(places)
        far = self.rotations(far_places)
        last = len(model.layers) - 1
        order = torch.arange(length, device=tokens.device)
        for index, layer in enumerate(model.layers):
            attention = layer.self_attn
            normed = self.norm(layer.input_layernorm, x)
            key, value = (
                self.split(attention.k_proj(normed), self.shared),
                self.split(attention.v_proj(normed), self.shared),
            )
            at = order.expand(batch, length)
            turned = near
            if index == last:
                at = picked
                rows = picked[:, :, None].expand(-1, -1, x.shape[2])
                normed, x = normed.gather(1, rows), x.gather(1, rows)
                here = picked[:, None, :, None].expand(-1, 1, -1, self.dim // 2)
                turned = (near[0].gather(2, here), near[1].gather(2, here))
            query = self.split(attention.q_proj(normed), self.heads)
            window = getattr(attention, "sliding_window", None)
            if window is not None:
                out, paid = banded(self.rotate(query, *turned), self.rotate(key, *near), value, window)
            else:
                taken, held = self.sample(key, far_index), self.sample(value, far_index)
                if not self.parallel:
                    query, key, taken = (
                        self.rotate(query, *turned),
                        self.rotate(key, *near),
                        self.rotate(taken, *far),
                    )
                key = torch.cat([key, taken.expand(batch, -1, -1, -1)], 2)
                value = torch.cat([value, held.expand(batch, -1, -1, -1)], 2)
                seen = torch.where(order <= at[:, :, None], 0.0, float("-inf"))
                beyond = far_bias[:, None, :].expand(-1, at.shape[1], -1)
                bias = torch.cat([seen, beyond], 2)
                out, paid = attend(query * softening, key, value, bias)
            if index == last - 1:
                before = unbanded(paid, picked, length) if window is not None else of_picked(paid, picked)
            out = attention.o_proj(out.transpose(1, 2).flatten(2))
            if self.parallel:
                x = x + out + layer.mlp(normed)
            else:
                x = x + out
                x = x + layer.mlp(self.norm(layer.post_attention_layernorm, x))
        return self.norm(model.norm, x), paid, before

    def norm(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """Cohere's layer norm without bias, or Llama's root mean square."""
        epsilon = module.variance_epsilon
        size = (x.shape[-1],)
        if self.parallel:
            return F.layer_norm(x, size, module.weight, None, epsilon)
        return F.rms_norm(x, size, module.weight, epsilon)

    def split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """[B, T, heads * D] to [B, heads, T, D]."""
        return x.view(*x.shape[:2], heads, self.dim).transpose(1, 2)

    def sample(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """[B, H, T, D] to the N tokens of index, [1, H, N, D]."""
        return x.transpose(1, 2).flatten(0, 1)[index].transpose(0, 1)[None]

    def rotations(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [B, 1, T, D / 2] of places [B, T], or [1, 1, N, D / 2] of places [N]."""
        angles = places.float()[..., None] * self.turns
        angles = angles[:, None] if places.ndim == 2 else angles[None, None]
        return angles.cos(), angles.sin()

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary positions: neighbouring dimensions are a pair in Cohere, the two halves in Llama."""
        if self.parallel:
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def missed(paid: torch.Tensor, wanted: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean of -log of the attention, [B, H, P, T], that all heads together pay to what is wanted,
    bool[B, P, T], over the places where something is."""
    mass = (paid * wanted[:, None]).sum((1, 3)).clamp(1e-6, 1)
    worth = weights * wanted.any(2)
    return -(mass.log() * worth).sum() / worth.sum().clamp(min=1)


def sources(
    tokens: torch.Tensor,
    picked: torch.Tensor,
    others: torch.Tensor,
    hints: torch.Tensor,
    alone: torch.Tensor,
    eos: int,
) -> torch.Tensor:
    """Where what comes behind the picked places, int64[B, P], can be copied from: bool[B, P, T].

    That is an earlier token of tokens, int64[B, T], which is the same, followed by the same two (or by any,
    behind an answer's end, and where alone, bool[B, P], says so); or one of the others, int64[B, P, A], which
    would be as right. Where hints, int64[B, P, HINTS], name tokens, it is those or the next: what stands in
    front of them is known there.
    """
    length = tokens.shape[1]
    padded = F.pad(tokens, (0, 3), value=eos)
    before = torch.arange(length, device=tokens.device) <= picked[:, :, None]
    found = before
    ended = torch.zeros_like(alone)
    for ahead in range(3):
        wanted = padded.gather(1, picked + 1 + ahead)
        ended = ended | alone | (wanted == eos) if ahead else ended
        found = found & ((padded[:, None, ahead : ahead + length] == wanted[:, :, None]) | ended[:, :, None])
    for other in others.unbind(2):
        found = found | (before & (tokens[:, None] == other[:, :, None]))
    behind = torch.arange(length, device=tokens.device) - hints[..., None]
    told = (((behind == 0) | (behind == 1)) & (hints >= 0)[..., None]).any(2)
    return torch.where((hints < 0).all(2)[..., None], found, told & before)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [B, Hq, P, D], key and value [B, H, S, D], bias [B, P, S] to [B, Hq, P, D], and the weights,
    [B, Hq, P, S]."""
    batch, heads, count, dim = query.shape
    shared = key.shape[1]
    scores = query.reshape(batch, shared, -1, dim) @ key.transpose(-1, -2) * dim**-0.5
    scores = scores.view(batch, shared, heads // shared, count, -1) + bias[:, None, None]
    weights: torch.Tensor = scores.softmax(-1).view(batch, shared, -1, key.shape[2])
    return (weights @ value).view(batch, heads, count, dim), weights.view(batch, heads, count, -1)


def banded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sliding-window attention: each block of queries sees its own block of keys and the one before.

    query [B, Hq, T, D], key and value [B, H, T, D] to [B, Hq, T, D], and the weights, [B, Hq, T, 2 * window];
    T is a multiple of window, or smaller, and then that stands for it.
    """
    batch, heads, length, dim = query.shape
    shared = key.shape[1]
    size = min(window, length)
    blocks = length // size

    def with_previous(x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(batch, shared, 1, blocks, size, dim)
        return torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :, :-1], x], 4)

    row = torch.arange(size, device=query.device)[:, None] + size
    column = torch.arange(2 * size, device=query.device)
    band = (column <= row) & (column > row - window)
    seen = band & ((torch.arange(blocks, device=query.device)[:, None, None] > 0) | (column >= size))
    grouped = query.reshape(batch, shared, heads // shared, blocks, size, dim)
    scores = grouped @ with_previous(key).transpose(-1, -2) * dim**-0.5
    weights: torch.Tensor = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out = (weights @ with_previous(value)).reshape(batch, heads, length, dim)
    return out, weights.reshape(batch, heads, length, 2 * size)


def of_picked(paid: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """The picked queries', int64[B, P], of weights [B, H, T, S]: [B, H, P, S]."""
    return paid.gather(2, picked[:, None, :, None].expand(-1, paid.shape[1], -1, paid.shape[3]))


def unbanded(paid: torch.Tensor, picked: torch.Tensor, length: int) -> torch.Tensor:
    """The picked queries' weights of `banded` by token: [B, H, P, T]."""
    mine = of_picked(paid, picked)
    size = mine.shape[3] // 2
    # A block's first key is one block before its first query, and the first block's is not there.
    at = (picked // size * size)[:, None, :, None] + torch.arange(2 * size, device=picked.device)
    whole = mine.new_zeros(*mine.shape[:3], length + size)
    return whole.scatter(3, at.expand_as(mine), mine)[..., size:]
