"""A stored text in a client's message: clients that know nothing of stores send a whole document with every
question, and are answered from the store that holds it.

Texts are compared, not tokens: those of a store are the tokens of its text, and where a client's own would
differ, at the seams, the text is the same. Every letter is compared; only the white space around documents
may be another.
"""

import hashlib
import logging
import re
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile, islice
from typing import Any, TypeVar

from offload_decode.common.errors import OffloadDecodeError, StoreMismatch
from offload_decode.models.loading import LoadedModel
from offload_decode.models.prompt import encode, special_tokens
from offload_decode.server.catalog import Entry
from offload_decode.server.messages import SEPARATOR, read_messages, without_system
from offload_decode.store.reader import KVStore

LOG = logging.getLogger("offload_decode.server")

LEAST = 1_000
"""Characters of a message that is looked at: a shorter one is read as quickly as it is matched."""
AHEAD = 8_192
"""Characters that may stand before the documents: what the system says, or a client's own words."""

_HEAD = 64  # characters by which a store is recognised, before all of it is compared
_HEAD_TOKENS = 256
_MOST = 4_096  # stores whose texts are known
_ENDS = re.compile(r"""\Z|\s|[<"'`)\]}]""")  # else the text goes on as another would

R = TypeVar("R")

_Key = tuple[str, ...]
"""The digest of a store, and what tells models apart."""


class Matcher:
    """Knows the texts of stores by their digests, each read once. Thread-safe; loads no model."""

    def __init__(self, least: int = LEAST):
        self._least = least
        self._heads: dict[_Key, str] = {}
        self._documents: dict[_Key, list[tuple[int, bytes]]] = {}  # characters of each, and their SHA-256
        self._lock = threading.Lock()

    def match(
        self, loaded: LoadedModel, messages: Sequence[Mapping[str, Any]], stores: Iterable[Entry]
    ) -> tuple[Entry, list[Mapping[str, Any]]] | None:
        """The store whose text the beginning of a chat holds whole, the longest of several, and the messages
        without it: what stood around it is the question. None where there is none.

        Of `stores`, those that were made with another model are passed over. Raises `WrongField` for messages
        that cannot be read.
        """
        first = without_system(read_messages(messages))[0]
        if first.role != "user" or len(first.text) < self._least:
            return None
        stored = [store for store in stores if store.path is not None]
        with self._lock:
            found = [
                (end - start, start, text, store)
                for text in dict.fromkeys(_spellings(first.text))
                for store in stored
                for start, end in self._places(loaded, store, text)
            ]
        if not found:
            return None
        length, start, text, store = max(found, key=lambda each: each[0])
        around = (text[:start].strip(), text[start + length :].strip())
        question = {"role": "user", "content": SEPARATOR.join(filter(None, around))}
        opening = ("system", "developer", "user")
        return store, [question, *dropwhile(lambda one: one["role"] in opening, messages)]

    def _places(self, loaded: LoadedModel, store: Entry, text: str) -> Iterator[tuple[int, int]]:
        """Where the text of a store lies in one, if it is there whole."""
        key = (store.digest, loaded.dtype, loaded.weights_hash, loaded.tokenizer_hash)
        if key not in self._heads:
            if len(self._heads) >= _MOST:
                self._heads, self._documents = {}, {}
            self._heads[key] = _read(store, lambda opened: _head(loaded, opened), "")
        head = self._heads[key]
        start = text.find(head, 0, AHEAD + len(head)) if head else -1
        if start < 0:
            return
        if key not in self._documents:
            self._documents[key] = _read(store, lambda opened: _documents(loaded, opened), [])
        end = start
        for length, digest in self._documents[key]:
            begin = next((place for place in range(end, len(text)) if not text[place].isspace()), len(text))
            end = begin + length
            if _sha256(text[begin:end]) != digest:
                return
        if end > start and _ENDS.match(text, end):
            yield start, end


def _spellings(text: str) -> Iterator[str]:
    """A text as it may have been stored: with `prefill`'s line ends, and with composed letters."""
    yield text
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    yield lines
    yield unicodedata.normalize("NFC", lines)


def _read(store: Entry, read: Callable[[KVStore], R], otherwise: R) -> R:
    assert store.path is not None, "only stores have texts"
    try:
        return read(KVStore.open(store.path))
    except (OffloadDecodeError, OSError) as error:
        if not isinstance(error, StoreMismatch):
            LOG.warning("no message is matched to %s: %s", store.path, error)
        return otherwise


def _head(loaded: LoadedModel, store: KVStore) -> str:
    """The first letters of the stored text. Raises `StoreMismatch` where it is of another model."""
    store.check_model(**loaded.identity)
    text = _first(loaded, store, min(store.documents[0].end, len(_ahead(loaded, store)) + _HEAD_TOKENS))
    # A character may be cut in two where the tokens end.
    return text[:_HEAD].rstrip("\ufffd").strip()


def _documents(loaded: LoadedModel, store: KVStore) -> list[tuple[int, bytes]]:
    """The documents of a store, without the white space around them."""
    first, *others = store.documents
    texts = [_first(loaded, store, first.end)]
    texts += [_decoded(loaded, store.tokens[each.start : each.end].tolist()).strip() for each in others]
    return [(len(text), _sha256(text)) for text in texts if text]


def _first(loaded: LoadedModel, store: KVStore, end: int) -> str:
    """The first document's text as far as the `end`th token; empty where it cannot be told from what the
    template puts before it.

    In stores of earlier releases that may name another day, so that it is known by its end, from the last
    special token on; decoders put spaces around these as they like.
    """
    ahead, special = _decoded(loaded, _ahead(loaded, store)), special_tokens(loaded.known_tokenizer)
    last = max((found.start() for found in special.finditer(ahead)), default=0) if special else 0
    letters = map(re.escape, "".join(ahead[last:].split()))
    pattern = re.compile(("" if last else r"\A") + r"\s*".join(["", *letters, ""]))
    text = _decoded(loaded, store.tokens[:end].tolist())
    times = len(pattern.findall(ahead))
    found = list(islice(pattern.finditer(text), times))
    return text[found[-1].end() :].strip() if len(found) == times else ""


def _ahead(loaded: LoadedModel, store: KVStore) -> list[int]:
    """Tokens before the first document."""
    prompt = loaded.prompt.opened(store.manifest.opening)
    return [*prompt.opening, *encode(loaded.known_tokenizer, prompt.before)]


def _decoded(loaded: LoadedModel, tokens: list[int]) -> str:
    return str(
        loaded.known_tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
