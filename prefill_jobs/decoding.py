"""The bytes of one file to plain text: encodings, HTML, and refusing what is not text."""

from __future__ import annotations

import codecs
import re
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from offload_decode.errors import CorpusError

if TYPE_CHECKING:
    from bs4 import BeautifulSoup

HTML = frozenset({".html", ".htm", ".xhtml"})

_SIGNATURES = {
    b"%PDF-": "a PDF document",
    b"%!PS": "a PostScript document",
    b"{\\rtf": "an RTF document",
    b"PK\x03\x04": "a zip archive or an office document",
    b"\xd0\xcf\x11\xe0": "an office document",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"GIF8": "an image",
    b"II*\0": "an image",
    b"RIFF": "an image or a recording",
    b"ID3": "a recording",
    b"OggS": "a recording",
    b"\x1f\x8b": "a compressed file",
    b"BZh": "a compressed file",
    b"\xfd7zXZ": "a compressed file",
    b"\x28\xb5\x2f\xfd": "a compressed file",
    b"7z\xbc\xaf": "an archive",
    b"\x7fELF": "a program",
    b"SQLite format 3": "a database",
}
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

_UNSEEN = frozenset({"script", "style", "template", "noscript"})
_KEPT_AS_TYPED = frozenset({"pre", "textarea"})
_CELLS = frozenset({"td", "th"})
_BLOCKS = frozenset(
    [
        "address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "div", "dl", "dt",
        "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header",
        "hr", "li", "main", "nav", "ol", "p", "pre", "section", "summary", "table", "title", "tr", "ul",
    ]
)  # fmt: skip


def text_of(name: str, data: bytes) -> str:
    """The text of a file, its newlines as `\\n`, without blank lines around it; HTML as a browser shows it.

    Raises `CorpusError` with a reason ("it is a PDF document") that completes "cannot be read: …".
    """
    text = _decode(data)
    if PurePath(name).suffix.lower() in HTML:
        text = _visible(text)
    text = text.replace("\r\n", "\n").replace("\r", "\n").strip("\n")
    if not text.strip():
        raise CorpusError("it holds no text")
    return text


def _decode(data: bytes) -> str:
    for signature, kind in _SIGNATURES.items():
        if data.startswith(signature):
            raise CorpusError(f"it is {kind}")
    wide = next((encoding for mark, encoding in _WIDE.items() if data.startswith(mark)), None)
    if wide is None and b"\0" in data:
        raise CorpusError("it is binary")
    try:
        text = data.decode(wide or "utf-8-sig")
    except UnicodeDecodeError:
        text = _guess(data)
    if len(_CONTROLS.findall(text)) > _CONTROL_SHARE * len(text):
        raise CorpusError("it is binary")
    return text


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


def _visible(markup: str) -> str:
    from bs4 import BeautifulSoup, ParserRejectedMarkup

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # guesses about markup that looks like a file name or like XML
        try:
            soup = BeautifulSoup(markup, "html.parser")
        except ParserRejectedMarkup as error:
            raise CorpusError("it is not HTML that can be parsed") from error
    lines = [line.rstrip() for line in "".join(_pieces(soup)).split("\n")]
    return "\n".join(line for before, line in pairwise(["", *lines]) if line or before)


def _pieces(soup: BeautifulSoup) -> Iterator[str]:
    """What is seen, in order: blocks begin and end lines, and white space is one space but in `<pre>`.

    One pass without recursion or changes to the tree: large pages are too much for either.
    """
    from bs4.element import CData, NavigableString, Tag

    typed, new_line = 0, True
    below: list[tuple[Tag | None, Iterator[Any]]] = [(None, iter(soup.contents))]
    while below:
        parent, children = below[-1]
        child = next(children, None)
        piece = ""
        if child is None:
            below.pop()
            if parent is not None:
                typed -= parent.name in _KEPT_AS_TYPED
                piece = "\n" if parent.name in _BLOCKS else " " if parent.name in _CELLS else ""
        elif isinstance(child, Tag):
            if child.name not in _UNSEEN and not child.has_attr("hidden"):
                typed += child.name in _KEPT_AS_TYPED
                piece = "\n" if child.name in _BLOCKS or child.name == "br" else ""
                below.append((child, iter(child.contents)))
        elif type(child) in (NavigableString, CData):  # comments and declarations are of other types
            piece = str(child) if typed else re.sub(r"\s+", " ", child)
            if new_line and not typed:
                piece = piece.lstrip()
        if piece:
            new_line = piece.endswith("\n")
            yield piece
