"""The text that facts are hidden in, and cutting it to a number of tokens."""

import hashlib
from dataclasses import dataclass
from typing import Any

from offload_decode.common.errors import CorpusError
from offload_decode.models.prompt import encode

_BETWEEN = "\n\n"
_CHARS_PER_TOKEN = 6  # more than most tokenizers reach, so that one attempt usually cuts enough text


@dataclass(frozen=True)
class Haystack:
    """A text and the name under which results speak of it."""

    name: str
    text: str

    @property
    def sha256(self) -> str:
        """Of the text in UTF-8."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def cut(self, tokenizer: Any, tokens: int, start: float = 0.0) -> str:
        """The text from the share `start` of it on, round its end, for `tokens` of the tokenizer's tokens.

        A text that is too short is repeated: the result is then longer than `text`.
        """
        begin = round(start * len(self.text))
        turned = f"{self.text[begin:]}{_BETWEEN}{self.text[:begin]}{_BETWEEN if begin else ''}"
        chars = _CHARS_PER_TOKEN * tokens
        while True:
            piece = (turned * (chars // len(turned) + 1))[:chars]
            ids = encode(tokenizer, piece, letters=True)
            if len(ids) >= tokens:
                # A cut inside a character of several bytes decodes to U+FFFD.
                text = tokenizer.decode(ids[:tokens], clean_up_tokenization_spaces=False)
                return str(text).rstrip("\ufffd")
            chars *= 2


@dataclass(frozen=True)
class Material:
    """What one text of an eval task is made of: a haystack from a place in it on, for so many `tokens`."""

    haystack: Haystack
    tokenizer: Any
    tokens: int
    start: float

    def filler(self, tokens: int) -> str:
        """The haystack from `start` on, for so many tokens."""
        return self.haystack.cut(self.tokenizer, tokens, self.start)

    def count(self, text: str) -> int:
        """How many of the model's tokens a text takes."""
        return len(encode(self.tokenizer, text, letters=True))


def python_topics() -> Haystack:
    """The Python documentation topics, which stand in the standard library of every machine.

    Raises `CorpusError` where Python came without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise CorpusError(
            "this Python came without its documentation topics (pydoc_data): give a text, or use a complete "
            "installation of Python"
        ) from error
    name = "Python documentation topics (pydoc_data.topics)"
    return Haystack(name, _BETWEEN.join(text for _, text in sorted(topics.items())))
