"""PDF documents, by pypdf, which bounds what a stream unpacks to (75 MB)."""

import io
import logging

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents.base import Reading, joined, library

MAX_PAGES = 50_000


def read(data: bytes) -> Reading:
    """The text of the pages, one after another. Raises `CorpusError` with a reason, as `read_document`."""
    with library("a PDF document", "pypdf", "pypdf") as pypdf:
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
        text = joined(page.extract_text() for page in file.pages)
    if not text.strip():
        raise CorpusError("it is a PDF document that holds no text, as if it was scanned")
    return Reading(text)
