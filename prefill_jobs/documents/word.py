"""Word documents, by python-docx. Their unpacked size is checked before they are opened."""

import io
import zipfile
from collections.abc import Iterator
from typing import Any

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents import base
from offload_decode.prefill_jobs.documents.base import Reading, joined, library


def read(data: bytes) -> Reading:
    """Paragraphs and tables in order, the cells of a row separated by tabs. Raises as `read_document`."""
    with library("a Word document", "docx", "python-docx") as docx:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(part.file_size for part in archive.infolist()) > base.MAX_SIZE:
                raise CorpusError(
                    f"it is a Word document that unpacks to more than {base.MAX_SIZE >> 20} MiB"
                )
        return Reading(joined(_lines(docx.Document(io.BytesIO(data)))))


def _lines(container: Any) -> Iterator[str]:
    """The lines of a document or of a cell of a table."""
    for block in container.iter_inner_content():
        if not hasattr(block, "rows"):
            yield block.text
            continue
        for row in block.rows:
            cells = {id(cell._tc): cell for cell in row.cells}  # a merged cell is listed several times
            yield "\t".join("\n".join(_lines(cell)) for cell in cells.values())
