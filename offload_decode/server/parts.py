"""Texts and known tokens that stand one behind the other, to the tokens of the whole."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from offload_decode.models.loading import LoadedModel
from offload_decode.models.pieces import Piece, encode_after, encode_first
from offload_decode.server.errors import WrongField

_HALVES = re.compile("[\ud800-\udfff]")


class Spelt(NamedTuple):
    """A text in the tokens as which it was generated."""

    tokens: tuple[int, ...]


Part = Piece | Spelt


def encoded(loaded: LoadedModel, stored: bool, parts: Iterable[Part], param: str = "messages") -> list[int]:
    """Token ids of parts behind what is stored, or of a whole prompt; what stands between known tokens is one
    text.
    """
    tokens: list[int] = []
    run: list[Piece] = []
    begun = False

    def close() -> None:
        nonlocal begun
        check_characters([piece.text for piece in run], param)
        if begun or stored:
            tokens.extend(encode_after(loaded.known_tokenizer, "" if begun else loaded.prompt.gap[0], run))
        else:
            tokens.extend([*loaded.prompt.opening, *encode_first(loaded.known_tokenizer, run)])
        run.clear()
        begun = True

    for part in parts:
        if isinstance(part, Piece):
            run.append(part)
        else:
            close()
            tokens.extend(part.tokens)
    if run:
        close()
    return tokens


def check_characters(texts: Iterable[str], param: str) -> None:
    """Raise `WrongField` for what JSON may spell and no tokenizer takes."""
    if any(_HALVES.search(text) for text in texts):
        raise WrongField("the text holds half of a character (a lone surrogate): send it as UTF-8", param)
