"""A document of a corpus to its text: which format it is, by content and else by name, and who reads it."""

from pathlib import PurePath

from offload_decode.common.errors import CorpusError
from offload_decode.common.files import without_surrogates
from offload_decode.prefill_jobs.documents import (
    encodings,
    epub,
    html,
    mail,
    markup,
    notebooks,
    opendocument,
    pdf,
    slides,
    word,
    workbooks,
)
from offload_decode.prefill_jobs.documents.archives import Archive
from offload_decode.prefill_jobs.documents.base import Reading, damaged
from offload_decode.prefill_jobs.documents.office import named

_PDF = b"%PDF-"
_ZIP = b"PK\x03\x04"
_COMPOUND = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_MAIL = frozenset({".eml", ".mht", ".mhtml"})
_SOURCES = {
    **dict.fromkeys((".html", ".htm", ".xhtml"), html.read),
    **dict.fromkeys(markup.SUFFIXES, markup.read),
    ".ipynb": notebooks.read,
}
_ZIPPED = {
    ".docx": "a Word document",
    ".epub": "an EPUB book",
    ".pptx": "a PowerPoint presentation",
    ".xlsx": "an Excel workbook",
    **dict.fromkeys((".odp", ".ods", ".odt"), "an OpenDocument file"),
}


def read_document(name: str, data: bytes) -> Reading:
    """The text of a file, with `\\n` for newlines and no blank lines around it, by the reader of its format.

    Raises `CorpusError` with a reason ("it is an image") that completes "cannot be read: …".
    """
    suffix = PurePath(name).suffix.lower()
    begin = data[:1024]  # readers of PDF take what comes before its mark
    if begin.lstrip().startswith(_PDF) or (suffix == ".pdf" and _PDF in begin):
        read = pdf.read(data)
    elif data.startswith(_ZIP):
        read = _of_archive(suffix, data)
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


def _of_archive(suffix: str, data: bytes) -> Reading:
    """The text of a document in a ZIP archive, by the reader of what lies in it."""
    kind = _ZIPPED.get(suffix, "a ZIP archive")
    with damaged(kind):
        archive = Archive(data)
        main = next((link.part for link in archive.links("").values() if link.kind == "officeDocument"), "")
        match named(archive.xml(main)) if main else "":
            case "w:document":
                return word.read(archive, main)
            case ":presentation":
                return slides.read(archive, main)
            case ":workbook":
                return workbooks.read(archive, main, data)
        if "META-INF/container.xml" in archive.names:
            return epub.read(archive)
        if "content.xml" in archive.names and "META-INF/manifest.xml" in archive.names:
            return opendocument.read(archive)
    raise CorpusError(f"it is {kind}" + (" without a document" if suffix in _ZIPPED else ""))


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
