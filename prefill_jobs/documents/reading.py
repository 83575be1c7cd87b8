"""A document of a corpus to its text: which format it is, and who reads it."""

from pathlib import PurePath

from offload_decode.common.errors import CorpusError
from offload_decode.common.files import without_surrogates
from offload_decode.prefill_jobs.documents import encodings, html, pdf, word
from offload_decode.prefill_jobs.documents.base import Reading

_PDF, _ZIP = b"%PDF-", b"PK\x03\x04"
_HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})


def read_document(name: str, data: bytes) -> Reading:
    """The text of a file, with `\\n` for newlines and no blank lines around it; HTML as a browser shows it.

    Raises `CorpusError` with a reason ("it is an image") that completes "cannot be read: …".
    """
    suffix = PurePath(name).suffix.lower()
    if data.startswith(_PDF):
        read = pdf.read(data)
    elif suffix == ".docx" and data.startswith(_ZIP):
        read = word.read(data)
    else:
        read = encodings.decode(name, data)
        if suffix in _HTML_SUFFIXES:
            page = html.read(read.text)
            read = Reading(page.text, read.notes + page.notes)
    text = without_surrogates(read.text).replace("\r\n", "\n").replace("\r", "\n").strip("\n")
    if not text.strip():
        raise CorpusError("it holds no text")
    return read._replace(text=text)
