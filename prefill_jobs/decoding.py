"""The bytes of one file to plain text: encodings, HTML, PDF, Word, and refusing what is not text."""

from __future__ import annotations

import codecs
import mimetypes
import re
from pathlib import PurePath

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs import documents, html

# These are letters and no text.
_MARKUP = {b"%!PS": "a PostScript document", b"{\\rtf": "an RTF document"}

_WIDE = {  # UTF-32 first: its little-endian mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

# What text without a mark is written in. Among all encodings there are, guesses on short texts are wild.
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


def text_of(name: str, data: bytes) -> str:
    """The text of a file, its newlines as `\\n`, without blank lines around it; HTML as a browser shows it;
    PDF and Word documents as their libraries read them.

    Raises `CorpusError` with a reason ("it is an image") that completes "cannot be read: …".
    """
    suffix = PurePath(name).suffix.lower()
    if data.startswith(documents.PDF):
        text = documents.of_pdf(data)
    elif suffix == ".docx" and data.startswith(documents.ZIP):
        text = documents.of_docx(data)
    else:
        text = _decode(name, data)
        if suffix in html.SUFFIXES:
            text = html.visible(text)
    text = text.replace("\r\n", "\n").replace("\r", "\n").strip("\n")
    if not text.strip():
        raise CorpusError("it holds no text")
    return text


def _decode(name: str, data: bytes) -> str:
    for signature, kind in _MARKUP.items():
        if data.startswith(signature):
            raise CorpusError(f"it is {kind}")
    wide = next((encoding for mark, encoding in _WIDE.items() if data.startswith(mark)), None)
    if wide is None and b"\0" in data:
        raise CorpusError(f"it is {_kind(name, data) or 'binary'}")
    try:
        text = data.decode(wide or "utf-8-sig")
    except UnicodeDecodeError:
        kind = _kind(name, data) or ""
        if kind in _MEDIA.values():
            raise CorpusError(f"it is {kind}") from None
        text = _guess(data)
    if len(_CONTROLS.findall(text)) > _CONTROL_SHARE * len(text):
        raise CorpusError(f"it is {_kind(name, data) or 'binary'}")
    return text


def _kind(name: str, data: bytes) -> str | None:
    """What a file that is not Unicode text is, by its bytes and else by its name."""
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
    """The likeliest of the candidates; the Western one where another is no likelier."""
    from charset_normalizer import from_bytes

    matches = from_bytes(data, cp_isolation=_CANDIDATES)
    best = matches.best()
    if best is None:
        raise CorpusError("its encoding is unknown")
    for match in matches:
        if match.encoding == _WESTERN and match.chaos <= best.chaos and match.coherence >= best.coherence:
            best = match
    return str(best)
