"""An answer put through the model once more, with attention to every stored token: docs/methods.md §10."""

from __future__ import annotations

import torch
from torch import Tensor

from offload_decode.common.errors import ConfigError
from offload_decode.engine.conversation import LOGITS, Conversation
from offload_decode.engine.grounded import Record
from offload_decode.engine.step import StoredPrefix
from offload_decode.types import Checked


def checked(talk: Conversation, record: Record) -> Checked:
    """How far an answer of a conversation, as it was recorded, agrees with dense attention: all that stands
    behind the stored tokens is read again, the question in one go and the answer in another, in as few passes
    as memory allows.

    Raises as `SecondPass`, and as `Conversation.extend`.
    """
    again = SecondPass(talk, record)
    while again.left:
        tokens, every = again.next(again.left)
        if every:
            with again.conversation.step():
                rows = again.conversation.run(tokens, every=True)
        else:
            rows = again.conversation.extend(tokens)
        again.take(rows)
    return again.found


class SecondPass:
    """The tokens of a recorded answer on their way through a conversation that attends densely: its caller
    runs what is `next`, in passes of its own, and lets it `take` the logits.

    Raises `ConfigError` where the stored tokens are split over workers.
    """

    def __init__(self, talk: Conversation, record: Record):
        if not talk.prefix.watchable:
            raise ConfigError("an answer of a store in parts is not checked: leave --check or --workers out")
        shape = talk.loaded.shape
        # A model that was trained to choose what it attends to is exact as it chooses.
        prefix = StoredPrefix.over(talk.prefix.host, shape, "dense" if shape.index is None else "own", {})
        self.conversation = Conversation(talk.loaded, talk.store, prefix)
        self.conversation.admit = talk.admit
        self._record = record
        self._tokens = [*record.before, *record.tokens[:-1]] if record.tokens else []
        self._ran = self._compared = self._same = 0
        self._difference, self._step = 0.0, LOGITS

    @property
    def left(self) -> int:
        """Tokens that are left to run."""
        return len(self._tokens) - self._ran

    @property
    def found(self) -> Checked:
        """Of the tokens that were compared so far."""
        return Checked(self._compared, self._same, self._difference / max(1, self._compared))

    def next(self, most: int) -> tuple[list[int], bool]:
        """The tokens to run next, so many at `most`; whether the logits after each are wanted, `[T, V]`, or
        those after the last one, `[V]`.
        """
        before = len(self._record.before)
        if every := self._ran >= before:
            most = min(most, self._step)
        after = min(self._ran + most, len(self._tokens) if every else before)
        tokens, self._ran = self._tokens[self._ran : after], after
        return tokens, every

    def take(self, logits: Tensor) -> None:
        """The logits after what was `next`: each row is compared with the token that the answer has there."""
        if self._ran < len(self._record.before):
            return
        rows = logits if logits.ndim == 2 else logits[None]
        self._step = max(1, LOGITS // rows.shape[1])
        start, end = self._compared, self._compared + len(rows)
        likeliest = torch.tensor(self._record.likeliest[start:end], device=rows.device)
        taken = torch.tensor(self._record.tokens[start:end], device=rows.device)[:, None]
        logs = (rows.gather(-1, taken)[:, 0] - rows.logsumexp(-1)).float().cpu()
        self._same += int((rows.argmax(-1) == likeliest).sum())
        self._difference += float((logs - torch.tensor(self._record.logs[start:end])).abs().sum())
        self._compared = end
