"""Pieces of a text to the tokens that they have in the whole.

Tokenizers treat the start of a text in their own way: those in SentencePiece's manner put a space before it,
for one. So a piece is encoded behind an anchor, a letter whose tokens are then taken off again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from offload_decode.errors import ModelError
from offload_decode.memory import is_out_of_memory

ANCHORS = ("a", ".", "0")


class Piece(NamedTuple):
    """Text of a template, or of the user: special tokens that a user's text spells out are its letters."""

    text: str
    users: bool = False


def encode(tokenizer: Any, template: str) -> list[int]:
    """Token ids of a template; special tokens in it are recognised, none are added."""
    return _encoded(tokenizer, template, letters=False)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a user's text: a special token in it (`</s>`) is its letters, not the token."""
    special = special_tokens(tokenizer)
    ids = _letters(tokenizer, text)
    if special is None or not special.search(text) or _special_ids(tokenizer).isdisjoint(ids):
        return ids
    # The tokenizer's model knows the special token as a word of its own: it must not see it whole.
    cuts = [0, *(found.start() + 1 for found in special.finditer(text)), len(text)]
    return [token for start, end in pairwise(cuts) for token in _letters(tokenizer, text[start:end])]


def _letters(tokenizer: Any, text: str) -> list[int]:
    return _encoded(tokenizer, text, letters=True)


def _encoded(tokenizer: Any, text: str, letters: bool) -> list[int]:
    # Said each time: a tokenizer may have been told otherwise for all its texts.
    how = {"add_special_tokens": False, "split_special_tokens": letters, "verbose": False}
    try:
        return list(tokenizer.encode(text, **how))
    except BaseException as error:
        if is_out_of_memory(error) or not (isinstance(error, Exception) or panicked(error)):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"the tokenizer gives up on the text ({reason}): fetch the checkpoint again, or take another"
        ) from error


def panicked(error: BaseException) -> bool:
    """Whether a library in Rust gave up: its error is known by name alone, and no `Exception`."""
    return type(error).__name__ == "PanicException"


def encode_first(tokenizer: Any, pieces: Sequence[Piece]) -> list[int]:
    """Token ids of pieces with which a text begins."""
    return _encode(tokenizer, "", pieces)


def encode_after(tokenizer: Any, before: str, pieces: Sequence[Piece]) -> list[int]:
    """Token ids of pieces in a text that went on until `before`, the last of what was encoded ahead of them.

    Where the tokens of `before` depend on what follows, they are those of the pieces alone.
    """
    for anchor in ANCHORS:
        head = encode(tokenizer, anchor + before)
        ids = _encode(tokenizer, anchor + before, pieces)
        if ids[: len(head)] == head and tokenizer.unk_token_id not in head:
            return ids[len(head) :]
    return _encode(tokenizer, "", pieces)


def _encode(tokenizer: Any, anchor: str, pieces: Sequence[Piece]) -> list[int]:
    """Token ids of the anchor and the pieces: in one encoding, unless a user spells a special token."""
    special = special_tokens(tokenizer)
    parts = [Piece(anchor), *pieces]
    whole = "".join(piece.text for piece in parts)
    if special is None or _places(special, whole) == _written(special, parts):
        return encode(tokenizer, whole)
    ids: list[int] = []
    for text, token in _runs(tokenizer, special, parts):
        if token is not None:
            ids.append(token)
        elif text:
            ids += _behind_a_special(tokenizer, ids[-1], text) if ids else encode_text(tokenizer, text)
    return ids


def special_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """Matches the special tokens, None where there are none; the longest first, as tokenizers do."""
    known = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts = sorted({text for text in known if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _special_ids(tokenizer: Any) -> set[int]:
    known = tokenizer.added_tokens_decoder.items()
    return {number for number, token in known if token.special} - {tokenizer.unk_token_id}


def _places(special: re.Pattern[str], text: str, start: int = 0) -> list[tuple[int, str]]:
    return [(start + found.start(), found[0]) for found in special.finditer(text)]


def _written(special: re.Pattern[str], parts: Sequence[Piece]) -> list[tuple[int, str]]:
    """Where the templates' special tokens lie in the whole."""
    places, start = [], 0
    for part in parts:
        places += [] if part.users else _places(special, part.text, start)
        start += len(part.text)
    return places


def _runs(
    tokenizer: Any, special: re.Pattern[str], parts: Sequence[Piece]
) -> Iterator[tuple[str, int | None]]:
    """The text between the templates' special tokens, and these, in turn."""
    text, eats = "", False
    for part in parts:
        end = 0
        for found in special.finditer(part.text) if not part.users else ():
            token = tokenizer.convert_tokens_to_ids(found[0])
            flags = tokenizer.added_tokens_decoder[token]
            text += part.text[end : found.start()]
            text = text.lstrip() if eats else text
            yield (text.rstrip() if flags.lstrip else text), None
            yield "", token
            text, eats, end = "", flags.rstrip, found.end()
        text += part.text[end:]
    yield (text.lstrip() if eats else text), None


def _behind_a_special(tokenizer: Any, token: int, text: str) -> list[int]:
    """Token ids of a user's text as this tokenizer goes on behind a special token."""
    special = tokenizer.convert_ids_to_tokens(token)
    plain = [encode(tokenizer, special + probe)[1:] for probe in ("is", "\nis", " is")]
    for anchor in ("", *ANCHORS):
        head = encode_text(tokenizer, anchor)
        probed = [encode_text(tokenizer, f"{anchor}{probe}") for probe in ("is", "\nis", " is")]
        if plain == [ids[len(head) :] for ids in probed]:
            return encode_text(tokenizer, anchor + text)[len(head) :]
    return encode_text(tokenizer, text)
