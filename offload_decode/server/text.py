"""The text of an answer as it comes: no piece ends within a character, and no stop string is ever shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload_decode.engine.pieces import Pieces


class Text:
    """Tokens in, text out, up to the first of the strings of `stop` that is complete; `stopped` tells of it.

    The text ends where that string begins; of several that end with the same character, where the longest
    begins. Unless `raw`, the joined text is without white space at its ends, as `Answer.text` is. The same
    tokens give the same joined text, however they are cut into pieces. Special tokens are left out, but for
    those that are `shown` as a text.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        raw: bool = False,
        shown: Mapping[int, str] | None = None,
    ):
        self.stopped = False
        self._pieces = Pieces(tokenizer)
        self._stop = tuple(stop)
        self._raw = raw
        self._shown = shown or {}
        self._begun = False
        # Written and not shown: what may be the beginning of a stop string, and white space before it.
        self._open = ""
        self._blank = ""

    def push(self, token: int) -> str:
        """What one more token lets be shown; it may be nothing."""
        if token in self._shown:
            return self._until_stop(self._pieces.rest() + self._shown[token])
        return self._until_stop(self._pieces.push(token))

    def rest(self) -> str:
        """What is left when no more tokens come."""
        shown = self._until_stop(self._pieces.rest())
        last, self._open = self._open, ""
        return shown + self._trimmed(last)

    def _until_stop(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self._open + piece
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._open = True, ""
            return self._trimmed(text[: min(found)[1]])
        starts = (start for start in range(len(text)) if self._may_stop(text[start:]))
        start = next(starts, len(text))
        self._open = text[start:]
        return self._trimmed(text[:start])

    def _may_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stop)

    def _trimmed(self, text: str) -> str:
        if self._raw:
            return text
        text = self._blank + text if self._begun else text.lstrip()
        shown = text.rstrip()
        self._begun, self._blank = self._begun or bool(shown), text[len(shown) :]
        return shown
