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

from training.guidance import SINKS, beginning, belonging, copied, counting, reading, remembering, visible


class Trainee(nn.Module):
    """Wraps a Cohere 2 or Llama model; `forward` gives the losses and which predictions were right."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.inner = model
        settings: Any = model.config
        self.parallel = settings.model_type == "cohere2"
        self.heads, self.shared = settings.num_attention_heads, settings.num_key_value_heads
        self.dim = settings.head_dim
        self.sinks = SINKS if self.parallel else SINKS[:1]  # Llama's other heads there look back
        layers: Any = model.model.layers
        self.windows = [getattr(layer.self_attn, "sliding_window", None) for layer in layers]
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
        ends: torch.Tensor,
        origins: torch.Tensor,
        so_far: torch.Tensor,
        counted: torch.Tensor,
        bound: torch.Tensor,
        crowd: torch.Tensor,
        branches: torch.Tensor,
        far_index: torch.Tensor,
        far_places: torch.Tensor,
        far_bias: torch.Tensor,
        softening: torch.Tensor,
        eos: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """tokens and their places int64[B, T]; picked int64[B, P]: where the next token is predicted; targets
        and weights [B, P]; others int64[B, P, A]: what is as right as the target, or -1; guided float32
        [B, P]: 1 where what is predicted is copied; hints int64[B, P, HINTS]: from which tokens or the
        next, or -1: from wherever it stands (see `sources`); opens int64[B, T]: of which list's part a token
        is the first (1, 2, ...), or 0; ends int64[B, T]: which word of a list to count ends there, or 0;
        origins int64[B, T]: the token that is copied from there: a counted word's first one at its end,
        else itself; so_far int64[B, T]: which beginning of such a word has been read by then, or 0; counted
        int64[B, C]: some of these places; bound int64[B, R, 3]: a value's token, and
        the first and the last one of the name it belongs to, or -1; crowd float32[B, T]:
        the logarithm of how many tokens each stands for in the last layer; branches int64[B, T]: 0 for what
        all see, and a number for what only its own sees; far_index int64[N] into B * T: the
        sampled keys, far_places int64[N], and far_bias float32[B, N]: the logarithm of what each stands for,
        or -inf; softening: factor on the full layers' scores; eos: what ends an answer.

        Returns the weighted mean of -log of the probability of what is right; what is missed of what it is
        led to, float32[6] in the order of `guidance.LED`; and bool[B, P]: right predictions.
        """
        behind = (far_index, far_places, far_bias, softening)
        x, paid, held = self.states(tokens, places, picked, crowd, branches, *behind)
        logits = self.logits(x).flatten(0, 1)
        accepted = torch.cat([targets[..., None], others], 2).flatten(0, 1)
        chosen = logits.gather(1, accepted.clamp(min=0)).masked_fill(accepted < 0, float("-inf"))
        losses = logits.logsumexp(1) - chosen.logsumexp(1)
        loss = (losses * weights.flatten()).sum() / weights.sum()
        length = tokens.shape[1]
        named = bound[:, :, 0].clamp(min=0)
        count = self.by_token(paid, -3, counted, length)
        led = [
            copied(
                paid[-1][..., :length],
                tokens,
                picked,
                others,
                hints,
                opens,
                origins,
                branches,
                weights * guided,
                eos,
            ),
            remembering(self.by_token(paid, -2, picked, length), picked, opens, weights),
            belonging(self.by_token(paid, -2, named, length), bound),
            torch.stack(
                [counting(count[:, -i], counted, so_far, sink) for i, sink in enumerate(self.sinks, 1)]
            ).sum(),
            beginning(self.by_token(paid, -2, counted, length), tokens, origins, counted, ends),
            reading(self.logits(self.written(held, counted)), origins, counted, ends),
        ]
        right = (logits.argmax(1, keepdim=True) == accepted).any(1)
        return loss, torch.stack(led), right.view_as(targets)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Of states [B, P, W]: float32 [B, P, V]."""
        model: Any = self.inner.model
        return F.linear(x, model.embed_tokens.weight).float()

    def states(
        self,
        tokens: torch.Tensor,
        places: torch.Tensor,
        picked: torch.Tensor,
        crowd: torch.Tensor,
        branches: torch.Tensor,
        far_index: torch.Tensor,
        far_places: torch.Tensor,
        far_bias: torch.Tensor,
        softening: torch.Tensor,
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """What is known at the picked places, [B, P, W]; the attention paid in each layer: of all
        queries, [B, H, T, T + N], or [B, H, T, 2 * window] as `banded` has it, and in the last layer of the
        picked ones, [B, H, P, T + N]; and that layer's values, [B, KV heads, T + N, D]."""
        model: Any = self.inner.model
        batch, length = tokens.shape
        x = F.embedding(tokens, model.embed_tokens.weight)
        near = self.rotations(places)
        far = self.rotations(far_places)
        last = len(model.layers) - 1
        order = torch.arange(length, device=tokens.device)
        paid: list[torch.Tensor] = []
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
            window = self.windows[index]
            if window:
                query, key = self.rotate(query, *turned), self.rotate(key, *near)
                out, weights = banded(query, key, value, window, branches)
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
                near_bias = crowd[:, None, :] if index == last else torch.zeros_like(crowd)[:, None, :]
                met = visible(branches[:, None], branches.gather(1, at)[:, :, None])
                seen = torch.where((order <= at[:, :, None]) & met, near_bias, float("-inf"))
                beyond = far_bias[:, None, :].expand(-1, at.shape[1], -1)
                bias = torch.cat([seen, beyond], 2)
                out, weights = attend(query * softening, key, value, bias)
            paid.append(weights)
            out = attention.o_proj(out.transpose(1, 2).flatten(2))
            if self.parallel:
                x = x + out + layer.mlp(normed)
            else:
                x = x + out
                x = x + layer.mlp(self.norm(layer.post_attention_layernorm, x))
        return self.norm(model.norm, x), paid, value

    def written(self, value: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """What the last layer's heads of the first KV head write together where they pay all to one of the
        places, int64[B, C], of values [B, KV heads, T, D]: [B, C, W], normed as the model's states."""
        model: Any = self.inner.model
        mine = value[:, 0].gather(1, places[:, :, None].expand(-1, -1, self.dim))
        project = model.layers[-1].self_attn.o_proj.weight.unflatten(1, (self.heads, self.dim))
        together = project[:, : self.heads // self.shared].sum(1)
        return self.norm(model.norm, F.linear(mine, together))

    def by_token(self, paid: list[torch.Tensor], layer: int, rows: torch.Tensor, length: int) -> torch.Tensor:
        """What some queries, int64[B, R], pay to each token in a layer before the last: [B, H, R, T]."""
        mine = of_queries(paid[layer], rows)
        return unbanded(mine, rows, length) if self.windows[layer] else mine[..., :length]

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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, branches: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sliding-window attention: each block of queries sees its own block of keys and the one before.

    query [B, Hq, T, D], key and value [B, H, T, D], branches int64[B, T] (0 is seen by all, others by their
    own) to [B, Hq, T, D], and the weights, [B, Hq, T, 2 * window]; T is a multiple of window, or smaller, and
    then that stands for it.
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
    mine = branches.reshape(batch, blocks, size)
    met = torch.cat([F.pad(mine, (0, 0, 1, 0))[:, :-1], mine], 2)[:, :, None]
    seen = seen & visible(met, mine[..., None])
    grouped = query.reshape(batch, shared, heads // shared, blocks, size, dim)
    scores = grouped @ with_previous(key).transpose(-1, -2) * dim**-0.5
    weights: torch.Tensor = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    out = (weights @ with_previous(value)).reshape(batch, heads, length, dim)
    return out, weights.reshape(batch, heads, length, 2 * size)


def of_queries(paid: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some queries', int64[B, R], of weights [B, H, T, S]: [B, H, R, S]."""
    return paid.gather(2, rows[:, None, :, None].expand(-1, paid.shape[1], -1, paid.shape[3]))


def unbanded(mine: torch.Tensor, rows: torch.Tensor, length: int) -> torch.Tensor:
    """The weights of `banded` of the queries rows, int64[B, R], by token: [B, H, R, 2 * window] to
    [B, H, R, T]."""
    size = mine.shape[3] // 2
    # A block's first key is one block before its first query, and the first block's is not there.
    at = (rows // size * size)[:, None, :, None] + torch.arange(2 * size, device=rows.device)
    whole = mine.new_zeros(*mine.shape[:3], length + size)
    return whole.scatter(3, at.expand_as(mine), mine)[..., size:]
