"""The text of an answer as it is shown: up to a stop string, and in whole characters."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from offload_decode.engine.text import Pieces


class AnswerText:
    """Tokens in, text out, up to the first of the strings of `stop` that is complete; it is then `stopped` by
    that string. No piece ends within a character, and no stop string is ever shown.

    The text ends where that string begins; of several that end with the same character, where the longest
    begins; so many tokens are `kept` that begin before it. Unless `raw`, the joined text is without white
    space at its ends, as `Answer.text` is. The same tokens give the same joined text, however they are cut
    into pieces. Special tokens are left out, but for those that are `shown` as a text.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        raw: bool = False,
        shown: Mapping[int, str] | None = None,
    ):
        self.stopped: str | None = None
        self.kept = 0
        self._pieces = Pieces(tokenizer)
        self._stop = tuple(stop)
        self._raw = raw
        self._shown = shown or {}
        self._begun = False
        self._starts: list[int] = []  # characters before each token
        self._length = 0  # characters so far, whether they are shown or not
        # Written and not shown: what may be the beginning of a stop string, and white space before it.
        self._open = self._blank = ""

    def push(self, token: int) -> str:
        """The text that can be shown with one more token; it may be empty."""
        self._starts.append(self._length)
        shown = self._shown.get(token)
        return self._until_stop(self._pieces.push(token) if shown is None else self._pieces.rest() + shown)

    def rest(self) -> str:
        """The rest, when no more tokens come."""
        shown = self._until_stop(self._pieces.rest())
        last, self._open = self._open, ""
        return shown + self._trimmed(last)

    def _until_stop(self, piece: str) -> str:
        if self.stopped is not None:
            return ""
        text, self._length = self._open + piece, self._length + len(piece)
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.stopped = min(found)
            self.kept = bisect_left(self._starts, self._length - len(text) + start)
            self._open = ""
            return self._trimmed(text[:start])
        starts = (i for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in self._stop))
        start = next(starts, len(text))
        self._open = text[start:]
        return self._trimmed(text[:start])

    def _trimmed(self, text: str) -> str:
        if self._raw:
            return text
        text = self._blank + text if self._begun else text.lstrip()
        shown = text.rstrip()
        self._begun, self._blank = self._begun or bool(shown), text[len(shown) :]
        return shown
