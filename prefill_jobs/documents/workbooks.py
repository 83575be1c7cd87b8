"""Excel workbooks, by openpyxl, row by row.

Reads: the sheets in their order, each below its name, with tabs between cells; dates as ISO 8601 writes them;
of formulas the last result. Leaves out: hidden sheets, images, charts, comments, text boxes, and formulas
that were never computed, with a note that counts them; empty rows. Costs: about ten seconds for a million
cells.
"""

import io
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents.archives import Archive
from offload_decode.prefill_jobs.documents.base import Reading, joined, left_out, library
from offload_decode.prefill_jobs.documents.office import has_text

_NOT_COMPUTED = re.compile(rb"(?:</f>|<f\b[^<>]*/>)\s*(?:<v\s*/>|<v></v>)?\s*</c>")


MAX_CELLS = 20_000_000
"""With those that are empty before the last of a row: a short file may have a cell in each last column."""


def read(archive: Archive, main: str, data: bytes) -> Reading:
    """The cells of a workbook. Raises as `read_document`."""
    if archive.xml(main).get("conformance") == "strict":
        raise CorpusError("it is a Strict workbook, which openpyxl does not read")
    counts: Counter[str] = Counter()
    with library("an Excel workbook", "openpyxl", "openpyxl") as openpyxl, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on what it does not read
        book = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True, keep_links=False)
        text = joined(_lines(book, counts))
    for part in archive.names:
        counts["image"] += part.startswith("xl/media/")
        counts["chart"] += part.startswith("xl/charts/chart")
        if part.startswith(("xl/comments", "xl/threadedComments/")):
            counts["comment"] += sum(1 for _ in archive.xml(part).iter("{*}comment", "{*}threadedComment"))
        elif part.startswith("xl/drawings/drawing"):
            counts["text box"] += sum(map(has_text, archive.xml(part).iter("{*}txBody")))
        elif part.startswith("xl/worksheets/sheet"):
            counts["uncomputed formula"] += len(_NOT_COMPUTED.findall(archive.read(part)))
    return Reading(text, left_out(counts))


def _lines(book: Any, counts: Counter[str]) -> Iterator[str]:
    cells = 0
    for sheet in book.worksheets:
        if sheet.sheet_state != "visible":
            counts["hidden sheet"] += 1
            continue
        yield sheet.title
        sheet.reset_dimensions()  # which a file may state as it likes
        for row in sheet.iter_rows(values_only=True):
            cells += 1 + len(row)
            if cells > MAX_CELLS:
                raise CorpusError(f"it is an Excel workbook of more than {MAX_CELLS:,} cells")
            if line := "\t".join(map(_shown, row)).rstrip():
                yield line
        yield ""


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, datetime):
        return value.isoformat(" ").removesuffix(" 00:00:00")
    return " ".join(str(value).split("\n"))
