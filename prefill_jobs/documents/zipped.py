"""Documents that are ZIP archives: which format one is, by what lies in it, and else by its name."""

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents import epub, opendocument, slides, word, workbooks
from offload_decode.prefill_jobs.documents.archives import Archive
from offload_decode.prefill_jobs.documents.base import Reading, damaged
from offload_decode.prefill_jobs.documents.office import named

SIGNATURE = b"PK\x03\x04"
_KINDS = {
    ".docx": "a Word document",
    ".epub": "an EPUB book",
    ".pptx": "a PowerPoint presentation",
    ".xlsx": "an Excel workbook",
    **dict.fromkeys((".odp", ".ods", ".odt"), "an OpenDocument file"),
}


def read(suffix: str, data: bytes) -> Reading:
    """The text of a document in an archive. Raises `CorpusError` with a reason, as `read_document`."""
    kind = _KINDS.get(suffix, "a ZIP archive")
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
    raise CorpusError(f"it is {kind}" + (" without a document" if suffix in _KINDS else ""))
