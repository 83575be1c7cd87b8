"""Jupyter notebooks, by the standard library.

Reads: the cells in their order, each with the text of its outputs. Leaves out: images, outputs without text,
and what `data:` addresses hold, with a note that counts them. Costs: about five times the file in memory.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from offload_decode.prefill_jobs.documents import html, markup
from offload_decode.prefill_jobs.documents.base import Reading, damaged, joined, left_out

_TEXTS = ("text/markdown", "text/plain", "text/latex", "text/html")
"""The forms of an output that are text: the first is taken."""
_PLACEHOLDER = re.compile(r"<[^\n]*>")
"""What stands in plain text for an object, such as `<Figure size 640x480 with 1 Axes>`."""
_OLDER = {
    "text": "text/plain", "markdown": "text/markdown", "latex": "text/latex", "html": "text/html",
    "png": "image/png", "jpeg": "image/jpeg", "svg": "image/svg+xml",
}  # fmt: skip
"""Their names in notebooks of version 3."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def read(text: str) -> Reading:
    """The cells, between blank lines. Raises `CorpusError` with a reason, as `read_document`."""
    counts: Counter[str] = Counter()
    with damaged("a notebook"):
        notebook = json.loads(text)
        sheets = notebook.get("worksheets", [notebook])  # of version 3, or the only one
        cells = [cell for sheet in sheets for cell in sheet["cells"]]
        source = markup.read(joined(_pieces(cells, counts)))
        return Reading(source.text, left_out(counts) + source.notes)


def _pieces(cells: list[Any], counts: Counter[str]) -> Iterator[str]:
    for cell in cells:
        counts["image"] += len(cell.get("attachments", {}))
        source = _text(cell.get("source", cell.get("input", "")))
        for piece in (source, *(_output(one, counts) for one in cell.get("outputs", []))):
            if piece.strip():
                yield piece.strip("\n") + "\n"


def _output(output: Any, counts: Counter[str]) -> str:
    kind = output["output_type"]
    if kind in ("error", "pyerr"):
        return _COLOURS.sub("", _text(output.get("traceback", []), "\n"))
    if kind == "stream":
        return _COLOURS.sub("", _text(output["text"]))
    forms = output.get("data") or {_OLDER.get(name, name): value for name, value in output.items()}
    images = sum(form.startswith("image/") for form in forms)
    counts["image"] += images > 0
    for form in _TEXTS:
        text = _text(forms.get(form, ""))
        if form == "text/html":
            text = html.read(text).text
        if text.strip() and not (form == "text/plain" and _PLACEHOLDER.fullmatch(text.strip())):
            return _COLOURS.sub("", text)
    counts["output without text"] += not images
    return ""


def _text(lines: Any, between: str = "") -> str:
    return lines if isinstance(lines, str) else between.join(lines)
