"""A corpus: a file, a folder or standard input to documents, and documents to tokens."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload_decode.common.errors import CorpusError, TextRefused
from offload_decode.models.prompt import Prompt
from offload_decode.prefill_jobs.documents.files import read_bounded, read_plain
from offload_decode.prefill_jobs.documents.reading import read_document
from offload_decode.prefill_jobs.folders import (
    EVERYTHING,
    LEFT_OUT,
    STDIN,
    Rules,
    Skipped,
    Walk,
    check_corpus,
    clean,
)
from offload_decode.types import Document

_SHOWN = 5  # documents in an error


class TextDocument(NamedTuple):
    """One document: its path relative to the corpus, with `/`, its text, and `Reading.notes` on it."""

    name: str
    text: str
    notes: tuple[str, ...] = ()


class Encoded(NamedTuple):
    """Token ids `[N]`, the span of each document in them, and the documents that the tokenizer fails on."""

    tokens: NDArray[np.int32]
    documents: list[Document]
    failed: list[Skipped]


class Note(NamedTuple):
    """What was guessed about a document, or left out of it."""

    name: str
    note: str


def first_notes(notes: Sequence[Note], most: int, elsewhere: str = "") -> list[str]:
    """The first `most` notes, a line each, and a line with how many there are `elsewhere`."""
    lines, more = [f"{name}: {note}" for name, note in notes[:most]], len(notes) - most
    return [*lines, f"and {more:,} more{elsewhere}"] if more > 0 else lines


def notes_on(documents: Sequence[TextDocument]) -> tuple[Note, ...]:
    return tuple(Note(document.name, note) for document in documents for note in document.notes)


def read_corpus(corpus: str, rules: Rules = EVERYTHING) -> tuple[list[TextDocument], list[Skipped]]:
    """The documents of a file, of a folder (recursive, by relative path) or of standard input (`-`).

    Of a folder, `rules` say what to read. Hidden files and folders and caches are ignored; other files that
    cannot be read, or are left out, are reported. Raises `CorpusError` where nothing can be read, and for a
    store.
    """
    if corpus == STDIN:
        return [_read_alone("stdin", "standard input", lambda: read_bounded(sys.stdin.buffer))], []
    check_corpus(corpus)
    path = Path(corpus)
    if not path.is_dir():
        return [_read_alone(clean(path.name), corpus, lambda: read_plain(corpus, follow=True))], []
    documents: list[TextDocument] = []
    walk = Walk(path, rules)
    for name, file in sorted(walk.files()):
        try:
            documents.append(
                TextDocument(clean(name), *read_document(name, read_plain(file, rules.follow_links)))
            )
        except CorpusError as error:
            walk.skip(name, str(error))
        except OSError as error:
            walk.skip(name, error.strerror or str(error))
    skipped = sorted(walk.skipped)
    if not documents:
        raise CorpusError(nothing_in(path, skipped))
    return documents, skipped


def encode_corpus(
    tokenizer: Any, prompt: Prompt, documents: Sequence[TextDocument], behind: int = 0
) -> Encoded:
    """The tokens of the prompt before any question; or those of further documents, `behind` so many tokens.

    The spans tile the tokens: the opening of the prompt belongs to the first. Documents that are not alone
    are headed by their name. Special tokens that a text spells out (`</s>`) are encoded as letters.
    """
    alone = not behind and len(documents) == 1
    tokens: list[int] = []
    spans: list[Document] = []
    failed: list[Skipped] = []
    for document in documents:
        text = document.text if alone else headed(document)
        try:
            ids = prompt.document(tokenizer, text, first=not behind and not spans)
        except TextRefused as error:
            failed.append(Skipped(document.name, str(error)))
            continue
        start = behind + len(tokens)
        spans.append(Document(document.name, start, start + len(ids)))
        tokens += ids
    return Encoded(np.array(tokens, np.int32), spans, failed)


def check_some(failed: Sequence[Skipped], documents: Sequence[TextDocument]) -> None:
    """Raise `CorpusError` where all documents are among those that failed."""
    if failed and len(failed) == len(documents):
        named = [f"{one.name}: {one.reason}" for one in failed[:_SHOWN]]
        raise CorpusError("; ".join(named) if len(named) > 1 else failed[0].reason)


def headed(document: TextDocument) -> str:
    return f"Document: {document.name}\n{document.text}"


def _read_alone(name: str, shown: str, read: Callable[[], bytes]) -> TextDocument:
    try:
        return TextDocument(name, *read_document(name, read()))
    except CorpusError as error:
        reason = str(error)
        ways_out = {"no text": "give a corpus with text in it", "MiB": "split it"}
        way_out = next((ways_out[word] for word in ways_out if word in reason), "convert it to text first")
        raise CorpusError(f"{shown} cannot be read, because {reason}: {way_out}") from error
    except OSError as error:
        raise CorpusError(f"{shown} cannot be read: {error.strerror}") from error


def nothing_in(folder: Path, skipped: Sequence[Skipped]) -> str:
    nothing = f"there is nothing to read in {folder}:"
    if not skipped:
        return f"{nothing} it has no files; give a folder with text files"
    if all(one.reason in LEFT_OUT for one in skipped):
        return f"{nothing} all of it is left out, {skipped[0].name} because {skipped[0].reason}"
    return (
        f"{nothing} none of its {len(skipped)} files is readable text "
        f"({skipped[0].name}: {skipped[0].reason}); give a folder with text files"
    )
