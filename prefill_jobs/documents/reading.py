"""A document of a corpus to its text: which format it is, and who reads it."""

from pathlib import PurePath

from offload_decode.common.errors import CorpusError
from offload_decode.common.files import without_surrogates
from offload_decode.prefill_jobs.documents import encodings, html, mail, markup, notebooks, pdf, zipped
from offload_decode.prefill_jobs.documents.base import Reading

_PDF = b"%PDF-"
_COMPOUND = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_MAIL = frozenset({".eml", ".mht", ".mhtml"})
_SOURCES = {
    **dict.fromkeys((".html", ".htm", ".xhtml"), html.read),
    **dict.fromkeys(markup.SUFFIXES, markup.read),
    ".ipynb": notebooks.read,
}


def read_document(name: str, data: bytes) -> Reading:
    """The text of a file, with `\\n` for newlines and no blank lines around it, by the reader of its format.

    Raises `CorpusError` with a reason ("it is an image") that completes "cannot be read: …".
    """
    suffix = PurePath(name).suffix.lower()
    begin = data[:1024]  # readers of PDF take what comes before its mark
    if begin.lstrip().startswith(_PDF) or (suffix == ".pdf" and _PDF in begin):
        read = pdf.read(data)
    elif data.startswith(zipped.SIGNATURE):
        read = zipped.read(suffix, data)
    elif data.startswith(_COMPOUND):
        raise CorpusError(f"it is {_compound_kind(data)}")
    elif suffix in _MAIL:
        read = mail.read(data)
    else:
        read = encodings.decode(name, data)
        if suffix in _SOURCES:
            source = _SOURCES[suffix](read.text)
            read = Reading(source.text, read.notes + source.notes)
    text = without_surrogates(read.text).replace("\r\n", "\n").replace("\r", "\n").strip("\n")
    if not text.strip():
        raise CorpusError(f"it holds no text{''.join(f' ({note})' for note in read.notes)}")
    return Reading(text, read.notes)


def _compound_kind(data: bytes) -> str:
    """Which of the formats in Microsoft's compound files: by its first stream, not one of a file within."""
    streams = {
        "EncryptedPackage": "an encrypted Office document",
        "__properties_version1.0": "an Outlook message (.msg)",
        "WordDocument": "a Word document of before 2007 (.doc)",
        "Workbook": "an Excel workbook of before 2007 (.xls)",
        "PowerPoint Document": "a PowerPoint presentation of before 2007 (.ppt)",
    }
    places = {data.find(stream.encode("utf-16-le")): kind for stream, kind in streams.items()}
    places.pop(-1, None)
    return places[min(places)] if places else "a compound file of an older program"
