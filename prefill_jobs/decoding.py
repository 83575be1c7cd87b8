"""One file of a corpus to plain text: its bytes, within bounds; encodings; HTML by BeautifulSoup; PDF and
Word by pypdf and python-docx (the extra `documents`); no other binaries.

Documents come from anywhere, and can unpack to far more than they are. pypdf bounds that (75 MB a stream);
the unpacked size of a Word document is checked before it is opened.

Why BeautifulSoup: inscriptis, measured beside it, loses the title, shows hidden text, pads tables with
blanks, and gives nothing of a page of 20,000 nested elements. trafilatura takes 93 MB, and drops what it
takes for boilerplate.
"""

from __future__ import annotations

import codecs
import io
import logging
import mimetypes
import os
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, BinaryIO

from offload_decode.common.errors import CorpusError
from offload_decode.common.files import NotPlain, open_plain

if TYPE_CHECKING:
    from bs4 import BeautifulSoup

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

_PDF, _ZIP = b"%PDF-", b"PK\x03\x04"
_HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})
MAX_PAGES = 50_000
MAX_SIZE = 256 << 20
"""Characters of a text, and unpacked bytes of a Word document."""
MAX_HTML = 64 << 20
"""Characters of a page: parsed, it takes about 30 times its size in memory."""

_UNSEEN = frozenset({"script", "style", "template", "noscript"})
_PREFORMATTED = frozenset({"pre", "textarea"})
_CELLS = frozenset({"td", "th"})
_BLOCKS = frozenset(
    [
        "address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "div", "dl", "dt",
        "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header",
        "hr", "li", "main", "nav", "ol", "p", "pre", "section", "summary", "table", "title", "tr", "ul",
    ]
)  # fmt: skip


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
        return read_bounded(file, os.fstat(descriptor).st_size)


def read_bounded(file: BinaryIO, size: int = 0) -> bytes:
    """All of a file; `CorpusError` with a reason where that, or its stated `size`, is more than `LARGEST`."""
    pieces: list[bytes] = []
    left = LARGEST if size <= LARGEST else -1
    while left >= 0 and (piece := file.read(_PIECE)):
        left -= len(piece)
        pieces.append(piece)
    if left < 0:
        raise CorpusError(f"it has more than {LARGEST >> 20} MiB")
    return b"".join(pieces)


def text_of(name: str, data: bytes) -> str:
    """The text of a file, with `\\n` for newlines and no blank lines around it; HTML as a browser shows it.

    Raises `CorpusError` with a reason ("it is an image") that completes "cannot be read: …".
    """
    suffix = PurePath(name).suffix.lower()
    if data.startswith(_PDF):
        text = _read_pdf(data)
    elif suffix == ".docx" and data.startswith(_ZIP):
        text = _read_docx(data)
    else:
        text = _decode(name, data)
        if suffix in _HTML_SUFFIXES:
            text = _visible_text(text)
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


@contextmanager
def _library(kind: str, module: str, package: str) -> Iterator[Any]:
    """A module that reads a `kind` of document. Whatever it raises becomes a `CorpusError`: hostile files
    bring out errors of every type.
    """
    try:
        library = import_module(module)
    except ImportError as error:
        raise CorpusError(
            f"it is {kind}, for which {package} is missing (pip install 'offload-decode[documents]')"
        ) from error
    try:
        yield library
    except (CorpusError, MemoryError):
        raise
    except Exception as error:
        raise CorpusError(f"it is {kind} that is damaged ({type(error).__name__})") from error


def _read_pdf(data: bytes) -> str:
    """The text of the pages, one after another. Raises `CorpusError` with a reason, as `text_of`."""
    with _library("a PDF document", "pypdf", "pypdf") as pypdf:
        logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it reports each flaw that it works around
        file = pypdf.PdfReader(io.BytesIO(data))
        if file.is_encrypted:
            try:
                opened = bool(file.decrypt(""))
            except pypdf.errors.DependencyError:
                opened = False
            if not opened:
                raise CorpusError("it is an encrypted PDF document")
        if len(file.pages) > MAX_PAGES:
            raise CorpusError(f"it is a PDF document of more than {MAX_PAGES:,} pages")
        text = _joined(page.extract_text() for page in file.pages)
    if not text.strip():
        raise CorpusError("it is a PDF document that holds no text, as if it was scanned")
    return text


def _read_docx(data: bytes) -> str:
    """Paragraphs and tables in order, the cells of a row separated by tabs. Raises as `_read_pdf`."""
    with _library("a Word document", "docx", "python-docx") as docx:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(part.file_size for part in archive.infolist()) > MAX_SIZE:
                raise CorpusError(f"it is a Word document that unpacks to more than {MAX_SIZE >> 20} MiB")
        return _joined(_docx_lines(docx.Document(io.BytesIO(data))))


def _docx_lines(container: Any) -> Iterator[str]:
    """The lines of a document or of a cell of a table."""
    for block in container.iter_inner_content():
        if not hasattr(block, "rows"):
            yield block.text
            continue
        for row in block.rows:
            cells = {id(cell._tc): cell for cell in row.cells}  # a merged cell is listed several times
            yield "\t".join("\n".join(_docx_lines(cell)) for cell in cells.values())


def _joined(pieces: Iterator[str]) -> str:
    """The pieces, each on lines of its own. Raises `CorpusError` beyond `MAX_SIZE`."""
    kept: list[str] = []
    length = 0
    for piece in pieces:
        kept.append(piece)
        length += len(piece) + 1
        if length > MAX_SIZE:
            raise CorpusError(f"it holds more than {MAX_SIZE >> 20} MiB of text")
    return "\n".join(kept)


def _visible_text(markup: str) -> str:
    """The text of a page as a browser shows it. Raises as `_read_pdf`."""
    if len(markup) > MAX_HTML:
        raise CorpusError(f"it is HTML of more than {MAX_HTML >> 20} MiB")
    from bs4 import BeautifulSoup, ParserRejectedMarkup

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # guesses about markup that looks like a file name or like XML
        try:
            soup = BeautifulSoup(markup, "html.parser")
        except ParserRejectedMarkup as error:
            raise CorpusError("it is not HTML that can be parsed") from error
    lines = [line.rstrip() for line in "".join(_html_pieces(soup)).split("\n")]
    return "\n".join(line for before, line in pairwise(["", *lines]) if line or before)


def _html_pieces(soup: BeautifulSoup) -> Iterator[str]:
    """What is seen, in order: blocks begin and end lines; outside of `<pre>`, white space is one space.

    One pass without recursion or changes to the tree: large pages are too much for either.
    """
    from bs4.element import CData, NavigableString, Tag

    preformatted, new_line = 0, True
    stack: list[tuple[Tag | None, Iterator[Any]]] = [(None, iter(soup.contents))]
    while stack:
        parent, children = stack[-1]
        child = next(children, None)
        piece = ""
        if child is None:
            stack.pop()
            if parent is not None:
                preformatted -= parent.name in _PREFORMATTED
                piece = "\n" if parent.name in _BLOCKS else " " if parent.name in _CELLS else ""
        elif isinstance(child, Tag):
            if child.name not in _UNSEEN and not child.has_attr("hidden"):
                preformatted += child.name in _PREFORMATTED
                piece = "\n" if child.name in _BLOCKS or child.name == "br" else ""
                stack.append((child, iter(child.contents)))
        elif type(child) in (NavigableString, CData):  # comments and declarations are of other types
            piece = str(child) if preformatted else re.sub(r"\s+", " ", child)
            if new_line and not preformatted:
                piece = piece.lstrip()
        if piece:
            new_line = piece.endswith("\n")
            yield piece
