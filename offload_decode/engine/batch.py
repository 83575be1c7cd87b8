"""Several questions on one store in one forward pass, padded on the left."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from offload_decode.engine.engine import Answer, Engine
from offload_decode.engine.sampler import Sampler
from offload_decode.types import StepStats


def answer_batch(engine: Engine, questions: Sequence[str], max_new_tokens: int) -> list[Answer]:
    """Greedy answers, equal to `Engine.answer` for each question; every answer carries the batch's shared
    stats.
    """
    forked = engine.fork()
    forked.cache.batch_repeat_interleave(len(questions))
    device, stored = engine.loaded.device, engine.length
    asked = [engine.pending + engine.question_tokens(question) for question in questions]
    longest = max(map(len, asked))
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in asked], device=device)
    own = torch.tensor([[False] * (longest - len(one)) + [True] * len(one) for one in asked], device=device)
    # One buffer for the whole run: a fresh mask over a million stored tokens at every step would cost more
    # than it.
    mask = torch.ones(len(asked), stored + longest + max_new_tokens, dtype=torch.bool, device=device)
    mask[:, stored : stored + longest] = own
    position = (stored + own.cumsum(-1) - 1).clamp(min=0)

    sampler, tokens = Sampler(), [[] for _ in asked]  # type: tuple[Sampler, list[list[int]]]
    open_rows = set(range(len(asked)))
    stats = StepStats()
    for step in range(max_new_tokens):
        began = time.perf_counter()
        logits = engine.loaded.forward(ids, forked.cache, mask[:, : stored + longest + step], position)
        stats.tokens += ids.numel()
        stats.total_s += time.perf_counter() - began
        sampled = sampler(logits)
        for row in sorted(open_rows):
            token = int(sampled[row])
            if token in engine.end_tokens:
                open_rows.discard(row)
            else:
                tokens[row].append(token)
        if not open_rows:
            break
        ids, position = sampled[:, None], position[:, -1:] + 1
    stats.add(forked.prefix.take_stats())
    return [
        Answer(engine.decode(one).strip(), tuple(one), stats, "length" if row in open_rows else "stop")
        for row, one in enumerate(tokens)
    ]
