"""Bytes to characters: the encoding of a text."""

import codecs
import mimetypes
import re

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents.base import Reading

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


def decode(name: str, data: bytes) -> Reading:
    """The characters of a text. Raises `CorpusError` with a reason, as `read_document`."""
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
    return Reading(text)


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
