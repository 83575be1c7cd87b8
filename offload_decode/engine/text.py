"""Generated tokens as text, in pieces of whole characters as they come."""

from collections.abc import Sequence
from typing import Any

# So many tokens whose text is not whole yet are no character any more.
_LONG = 64


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Text of generated tokens, as they spell it: no spaces are removed before full stops."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Pieces:
    """Tokens in, text out: no piece ends within a character, and together they are the text of all tokens."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        # The first `_ready` were shown last; they may join with what follows.
        self._tokens: list[int] = []
        self._ready = 0

    def push(self, token: int) -> str:
        """The text that one more token completes; it may be empty."""
        self._tokens.append(token)
        many = len(self._tokens)
        if many > _LONG and many % (many // 8):  # all are decoded again, so not after every one
            return ""
        before, written = decode(self._tokenizer, self._tokens[: self._ready]), self._written
        # A character of several bytes may lack its last ones: they decode to U+FFFD until they come.
        if written.endswith("\ufffd"):
            return ""
        # Of special tokens nothing is shown, and behind nothing a decoder leaves out a space.
        if written != before:
            del self._tokens[: self._ready]
        self._ready = len(self._tokens)
        return written[len(before) :]

    def rest(self) -> str:
        """The text that is left when no more tokens come."""
        before = decode(self._tokenizer, self._tokens[: self._ready])
        rest, self._tokens, self._ready = self._written[len(before) :], [], 0
        return rest

    @property
    def _written(self) -> str:
        return decode(self._tokenizer, self._tokens)
