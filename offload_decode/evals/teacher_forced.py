"""Negative log-likelihoods of tokens that are given, whatever a model would have said in their place.

Of `tokens [M + 1]` the first M are run and the last M predicted: what follows the last stored token is not
known of a store, so that the first is run and not predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload_decode.engine.conversation import Conversation
from offload_decode.engine.corpusless import without_corpus
from offload_decode.engine.engine import Engine
from offload_decode.evals.contender import DENSE, Contender
from offload_decode.evals.heard import Heard
from offload_decode.models.loading import LoadedModel
from offload_decode.store.reader import KVStore

Tokens = npt.NDArray[np.int32]
PART = 256  # tokens whose logits are in memory at once


@dataclass(frozen=True)
class Forced:
    """`nll [M]`, float64, in nats; `attended`: stored tokens a query row of a searched layer; `tail_share`:
    the mean share of the attention in the searched layers that goes to the M tokens themselves, where it was
    asked for.
    """

    nll: npt.NDArray[np.float64]
    attended: float
    tail_share: float | None = None


def behind_store(loaded: LoadedModel, store: KVStore, contender: Contender, tokens: Tokens) -> Forced:
    """Tokens behind a stored prefix, each attending as `contender` does; `tail_share` is that of dense
    attention. Raises as `Engine.open`.
    """
    engine = Engine.open(store, loaded, selector=contender.selector, options=contender.options)
    if contender.selector != DENSE:
        nll = _run(engine, tokens, lambda: None)
        return Forced(nll, _attended(engine))
    prefix = Heard(engine.prefix)
    conversation = Conversation(loaded, store, prefix)
    shares: list[Tensor] = []

    def ran() -> None:
        shares.extend(pass_.tail_share.flatten() for pass_ in prefix.take(conversation.cache))

    nll = _run(conversation, tokens, ran)
    return Forced(nll, _attended(conversation), float(torch.cat(shares).mean()))


def behind_window(loaded: LoadedModel, window: Tokens, tokens: Tokens) -> Forced:
    """Tokens behind `window [W]`, which the bare model reads as the beginning of a text."""
    conversation = without_corpus(loaded, len(window) + len(tokens))
    if len(window):
        conversation.extend(window.tolist())
    return Forced(_run(conversation, tokens, lambda: None), 0.0)


def _run(conversation: Conversation, tokens: Tokens, ran: Callable[[], None]) -> npt.NDArray[np.float64]:
    """`nll [M]`; `ran` is called after each pass.

    Where tokens of a pass choose together, or are remembered, each is run alone, as it is when it is
    generated: an earlier one must not choose by a later one.
    """
    chosen = conversation.prefix.chosen
    step = 1 if chosen.one_question or chosen.selector.remembers else PART
    parts = []
    with conversation.alone(), conversation.taken_back_on_failure():
        for start in range(0, len(tokens) - 1, step):
            run = tokens[start : min(start + step, len(tokens) - 1)].tolist()
            logits = conversation.run(run, every=True)
            expected = torch.from_numpy(tokens[start + 1 : start + 1 + len(run)]).long().to(logits.device)
            parts.append(torch.nn.functional.cross_entropy(logits.double(), expected, reduction="none"))
            ran()
    return torch.cat(parts).cpu().numpy()


def _attended(conversation: Conversation) -> float:
    stats = conversation.prefix.take_stats()
    return stats.selected / max(1, stats.rows)
