"""An answer put through the model once more, with attention to every stored token: docs/methods.md §10."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from offload_decode.common.errors import ConfigError
from offload_decode.engine.conversation import LOGITS, Conversation
from offload_decode.engine.grounded import Record
from offload_decode.engine.step import StoredPrefix
from offload_decode.types import Checked


def checked(talk: Conversation, record: Record) -> Checked:
    """How far an answer of a conversation, as it was recorded, agrees with dense attention: all that stands
    behind the stored tokens is read again, the question in one go and the answer in another.

    Raises `ConfigError` where the stored tokens are split over workers, and as `Conversation.extend`.
    """
    if not talk.prefix.watchable:
        raise ConfigError("an answer of a store in parts is not checked: leave --check or --workers out")
    if not record.tokens:
        return Checked(0, 0, 0.0)
    same, difference = 0, 0.0
    for start, rows in _dense(talk, record):
        end = start + len(rows)
        same += int((rows.argmax(-1) == torch.tensor(record.likeliest[start:end], device=rows.device)).sum())
        log = _logs(rows, record.tokens[start:end])
        difference += float((log - torch.tensor(record.logs[start:end])).abs().sum())
    return Checked(len(record.tokens), same, difference / len(record.tokens))


def _dense(talk: Conversation, record: Record) -> Iterator[tuple[int, Tensor]]:
    """Of dense attention the logits `[n, V]` from which the tokens of the answer from a place on come."""
    shape = talk.loaded.shape
    # A model that was trained to choose what it attends to is exact as it chooses.
    prefix = StoredPrefix.over(talk.prefix.host, shape, "dense" if shape.index is None else "own", {})
    dense = Conversation(talk.loaded, talk.store, prefix)
    dense.admit = talk.admit
    first = dense.extend(record.before)
    yield 0, first[None]
    step = max(1, LOGITS // len(first))
    for start in range(0, len(record.tokens) - 1, step):
        part = record.tokens[start : min(start + step, len(record.tokens) - 1)]
        with dense.step():
            rows = dense.run(part, every=True)
        yield start + 1, rows


def _logs(rows: Tensor, tokens: list[int]) -> Tensor:
    """The log-probability of each token under its row of logits `[n, V]`: `[n]`, on the host."""
    taken = rows.gather(-1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0]
    return (taken - rows.logsumexp(-1)).float().cpu()
