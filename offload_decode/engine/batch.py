"""Several questions on one store in one forward pass, padded on the left."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from offload_decode.engine.citations import Watch, cite
from offload_decode.engine.conversation import Conversation
from offload_decode.models.passes import run_in_passes
from offload_decode.models.processors import Processors
from offload_decode.types import Answer, CitedDocument, StepStats


def answer_batch(
    engine: Conversation, questions: Sequence[str], max_new_tokens: int, cites: bool = False
) -> list[Answer]:
    """Greedy answers, equal to `Engine.answer` for each question; every answer carries the batch's shared
    stats. A question whose answer has ended is no longer run.
    """
    forked, ends = engine.fork(), engine.end_tokens
    watches = [Watch(engine.prefix.host) for _ in questions] if cites else []
    forked.prefix.watches = tuple(watches)
    forked.cache.batch_repeat_interleave(len(questions))
    device, stored = engine.loaded.device, engine.length
    asked = [engine.pending + engine.question_tokens(question) for question in questions]
    most = [forked.most_new(max_new_tokens, len(one) - len(engine.pending)) for one in asked]
    longest = max(map(len, asked))
    limit = engine.admitted(longest, len(asked))
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in asked], device=device)
    own = torch.tensor([[False] * (longest - len(one)) + [True] * len(one) for one in asked], device=device)
    # One buffer for the whole run: a fresh mask over a million stored tokens at every step would cost more
    # than it.
    mask = torch.ones(len(asked), stored + longest + max_new_tokens, dtype=torch.bool, device=device)
    mask[:, stored : stored + longest] = own
    position = (stored + own.cumsum(-1) - 1).clamp(min=0)

    model, tokenizer = engine.loaded.model, engine.loaded.tokenizer
    processors = [Processors(model, tokenizer, engine.tokens + one, ends, max_new_tokens) for one in asked]
    tokens: list[list[int]] = [[] for _ in asked]
    running = list(range(len(asked)))
    stats = StepStats()
    for step in range(max_new_tokens):
        began = time.perf_counter()
        seen = mask[:, : stored + longest + step]
        seen.offload_covered = stored  # type: ignore[attr-defined]  # models.seam need not look
        logits = run_in_passes(engine.loaded, ids, forked.cache, limit, seen, position)
        stats.tokens += ids.numel()
        stats.total_s += time.perf_counter() - began
        sampled = torch.stack(
            [processors[row](own) for row, own in zip(running, logits, strict=True)]
        ).argmax(-1)
        chosen, kept = sampled.tolist(), []
        for place, (row, token) in enumerate(zip(running, chosen, strict=True)):
            if token not in ends:
                tokens[row].append(token)
                if not processors[row].append(token) and len(tokens[row]) < most[row]:
                    kept.append(place)
        running = [running[place] for place in kept]
        if not running:
            break
        ids, position = sampled[:, None], position[:, -1:] + 1
        if len(kept) < len(chosen):
            rows = torch.tensor(kept, device=device)
            forked.cache.batch_select_indices(rows)
            forked.prefix.watches = tuple(watches[row] for row in running) if cites else ()
            # All is True but the padding: only the questions' columns move up.
            mask[: len(kept), stored : stored + longest] = mask[rows, stored : stored + longest]
            mask, ids, position = mask[: len(kept)], ids[rows], position[rows]
    stats.add(forked.prefix.take_stats())
    cited: list[tuple[CitedDocument, ...] | None] = [None] * len(asked)
    if cites:
        cited = [cite(watch, engine.store, engine.tokenizer) for watch in watches]
    return [
        Answer(engine.decode(own).strip(), tuple(own), stats, "length" if len(own) == end else "stop", seen)
        for own, end, seen in zip(tokens, most, cited, strict=True)
    ]
