"""A corpus: a file, a folder or standard input to documents, and documents to tokens."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload_decode.errors import CorpusError
from offload_decode.models.prompt import Prompt, encode, encode_text
from offload_decode.store.staging import LOCK, PROGRESS
from offload_decode.types import Document
from prefill_jobs.decoding import text_of

STDIN = "-"
_NOT_TEXT = ("__pycache__", "node_modules")
_BETWEEN = "\n\n"


class TextDocument(NamedTuple):
    """One document: its path relative to the corpus, with `/`, and its text."""

    name: str
    text: str


class Skipped(NamedTuple):
    """A file of a folder that was left out, and why."""

    name: str
    reason: str


def read_corpus(corpus: str) -> tuple[list[TextDocument], list[Skipped]]:
    """The documents of a file, of a folder (recursive, by relative path) or of standard input (`-`).

    Hidden files and folders are passed over in silence, as are caches; what else cannot be read in a folder
    is skipped and reported. Raises `CorpusError` where nothing can be read.
    """
    if corpus == STDIN:
        return [_read_alone("stdin", "standard input", sys.stdin.buffer.read())], []
    path = Path(corpus)
    if path.is_dir():
        return _read_folder(path)
    try:
        return [_read_alone(_clean(path.name), corpus, path.read_bytes())], []
    except FileNotFoundError as error:
        raise CorpusError(
            f"there is no corpus at {corpus}: give a file, a folder, or - for standard input"
        ) from error
    except OSError as error:
        raise CorpusError(f"{corpus} cannot be read: {error.strerror}") from error


def encode_corpus(
    tokenizer: Any, prompt: Prompt, documents: Sequence[TextDocument]
) -> tuple[NDArray[np.int32], list[Document]]:
    """Token ids int32 `[N]` of what stands before any question, and where each document lies in them.

    The spans tile the tokens: what opens the prompt belongs to the first. Several documents are each headed
    by their name. Special tokens that a text spells out (`</s>`) are its letters, not the tokens.
    """
    tokens = encode(tokenizer, prompt.before)
    spans = []
    end = 0
    for number, document in enumerate(documents):
        text = document.text
        if len(documents) > 1:
            text = f"{_BETWEEN if number else ''}Document: {document.name}\n{text}"
        tokens += encode_text(tokenizer, text)
        spans.append(Document(document.name, end, len(tokens)))
        end = len(tokens)
    return np.array(tokens, np.int32), spans


def _read_alone(name: str, shown: str, data: bytes) -> TextDocument:
    try:
        return TextDocument(name, text_of(name, data))
    except CorpusError as error:
        way_out = "give a corpus with text in it" if "no text" in str(error) else "convert it to text first"
        raise CorpusError(f"{shown} cannot be read, because {error}: {way_out}") from error


def _read_folder(folder: Path) -> tuple[list[TextDocument], list[Skipped]]:
    documents: list[TextDocument] = []
    skipped: list[Skipped] = []
    for name, path in sorted(_files(folder, skipped)):
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # reading a pipe would wait forever
                raise CorpusError("it is not a regular file")
            documents.append(TextDocument(name, text_of(name, path.read_bytes())))
        except CorpusError as error:
            skipped.append(Skipped(name, str(error)))
        except OSError as error:
            skipped.append(Skipped(name, error.strerror or str(error)))
    if not documents:
        found = f"none of its {len(skipped)} files is readable text" if skipped else "it has no files"
        raise CorpusError(f"there is nothing to read in {folder}: {found}; give a folder with text files")
    return documents, sorted(skipped)


def _files(folder: Path, skipped: list[Skipped]) -> Iterator[tuple[str, Path]]:
    """Names and paths of the files below `folder`; stores and unreadable folders are skipped."""

    def unreadable(error: OSError) -> None:
        skipped.append(Skipped(_name(folder, Path(error.filename)), error.strerror or str(error)))

    for root, folders, files in os.walk(folder, onerror=unreadable):
        here = Path(root)
        for name in list(folders):
            if name.startswith(".") or name in _NOT_TEXT:
                folders.remove(name)
            elif (here / name).is_symlink():  # not followed: it may lead back to where it lies
                skipped.append(Skipped(_name(folder, here / name), "it is a link to a folder"))
                folders.remove(name)
            elif _is_store(here / name):
                skipped.append(Skipped(_name(folder, here / name), "it is a KV store or belongs to one"))
                folders.remove(name)
        yield from ((_name(folder, here / name), here / name) for name in files if not name.startswith("."))


def _is_store(folder: Path) -> bool:
    """Whether `folder` is of a store: one that lies within its corpus must not become part of it."""
    if folder.suffix == ".partial":
        return any((folder / name).exists() for name in (LOCK, PROGRESS))
    store = folder.with_suffix("") if folder.suffix == ".indexes" else folder
    return (store / "zarr.json").exists()


def _name(folder: Path, path: Path) -> str:
    return _clean(path.relative_to(folder).as_posix())


def _clean(name: str) -> str:
    """File names may hold bytes that are not UTF-8; a store's names are text."""
    return os.fsencode(name).decode("utf-8", "replace")
