"""One file of a corpus to plain text: its bytes, within bounds; encodings, HTML, PDF, Word; no other
binaries.
"""

from __future__ import annotations

import codecs
import mimetypes
import os
import re
from pathlib import PurePath
from typing import BinaryIO

from offload_decode.common.errors import CorpusError
from offload_decode.common.files import NotPlain, open_plain
from offload_decode.prefill_jobs import documents

LARGEST = 256 << 20
"""Bytes of a document: some fifty million tokens, more than a store is made of in one piece."""
_PIECE = 1 << 20

_MARKUP = {b"%!PS": "a PostScript document", b"{\\rtf": "an RTF document"}  # letters, but no text

_BYTE_ORDER_MARKS = {  # UTF-32 first: its little-endian mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

# Guesses among all encodings are wild on short texts.
_CANDIDATES = [
    "cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "koi8_r", "cp874",
    "cp932", "euc_jp", "gb18030", "big5", "cp949",
]  # fmt: skip
_WESTERN = "cp1252"

# Control characters that text has no use for; a page of another encoding has none or few of them.
_CONTROLS = re.compile(r"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f]")
_CONTROL_SHARE = 0.01

_MEDIA = {"image": "an image", "audio": "a recording", "video": "a video", "font": "a font"}
_SURE = 0.3  # of puremagic's confidence: signatures of three bytes and more


def read_plain(path: str, follow: bool = False) -> bytes:
    """The bytes of the regular file at `path`; a link is followed only with `follow`. Never blocks, as on a
    pipe.

    Raises `CorpusError` with a reason, as `text_of`, and `OSError`.
    """
    try:
        descriptor = open_plain(path, follow)
    except NotPlain as error:
        raise CorpusError(str(error)) from error
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > LARGEST:
            raise _too_large()
        return read_bounded(file)


def read_bounded(file: BinaryIO) -> bytes:
    """All of a file; `CorpusError` with a reason where that is more than `LARGEST`."""
    pieces: list[bytes] = []
    left = LARGEST
    while piece := file.read(_PIECE):
        left -= len(piece)
        if left < 0:
            raise _too_large()
        pieces.append(piece)
    return b"".join(pieces)


def _too_large() -> CorpusError:
    return CorpusError(f"it has more than {LARGEST >> 20} MiB")


def text_of(name: str, data: bytes) -> str:
    """The text of a file, with `\\n` for newlines and no blank lines around it; HTML as a browser shows it.

    Raises `CorpusError` with a reason ("it is an image") that completes "cannot be read: …".
    """
    suffix = PurePath(name).suffix.lower()
    if data.startswith(documents.PDF):
        text = documents.read_pdf(data)
    elif suffix == ".docx" and data.startswith(documents.ZIP):
        text = documents.read_docx(data)
    else:
        text = _decode(name, data)
        if suffix in documents.HTML_SUFFIXES:
            text = documents.visible_text(text)
    text = text.replace("\r\n", "\n").replace("\r", "\n").strip("\n")
    if not text.strip():
        raise CorpusError("it holds no text")
    return text


def _decode(name: str, data: bytes) -> str:
    for signature, kind in _MARKUP.items():
        if data.startswith(signature):
            raise CorpusError(f"it is {kind}")
    marked = next((encoding for mark, encoding in _BYTE_ORDER_MARKS.items() if data.startswith(mark)), None)
    if marked is None and b"\0" in data:
        raise CorpusError(f"it is {_binary_kind(name, data) or 'binary'}")
    try:
        text = data.decode(marked or "utf-8-sig")
    except UnicodeDecodeError:
        kind = _binary_kind(name, data) or ""
        if kind in _MEDIA.values():
            raise CorpusError(f"it is {kind}") from None
        text = _guess(data)
    if len(_CONTROLS.findall(text)) > _CONTROL_SHARE * len(text):
        raise CorpusError(f"it is {_binary_kind(name, data) or 'binary'}")
    return text


def _binary_kind(name: str, data: bytes) -> str | None:
    """The kind of a file that is not Unicode text, by its bytes or else by its name."""
    import puremagic

    try:
        matches = puremagic.magic_string(data, name)
    except (puremagic.PureError, ValueError):
        matches = []
    best = matches[0] if matches and matches[0].confidence >= _SURE else None
    mime = (best.mime_type if best else mimetypes.guess_type(name)[0]) or ""
    if mime.endswith("+xml"):
        return None
    return _MEDIA.get(mime.partition("/")[0]) or (f"binary ({best.name})" if best else None)


def _guess(data: bytes) -> str:
    """Decoded as the likeliest of the candidates; as the Western one where another is no likelier."""
    from charset_normalizer import from_bytes

    matches = from_bytes(data, cp_isolation=_CANDIDATES)
    best = matches.best()
    if best is None:
        raise CorpusError("its encoding is unknown")
    for match in matches:
        if match.encoding == _WESTERN and match.chaos <= best.chaos and match.coherence >= best.coherence:
            best = match
    return str(best)
