"""OpenDocument texts, presentations and spreadsheets, by lxml.

Reads: paragraphs in their order, cells between tabs; notes and boxes after the paragraph that they stand in.
Leaves out: deletions that are tracked; headers, footers, hidden text, images, comments and embedded objects,
with a note that counts them; the numbers and bullets of lists. Costs: about ten times the unpacked text in
memory.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents.archives import Archive
from offload_decode.prefill_jobs.documents.base import Lines, Reading, left_out

if TYPE_CHECKING:
    from lxml.etree import _Element

# Local names: each is of one namespace in all that OpenDocument writes.
_SKIPPED = frozenset(["desc", "forms", "meta", "scripts", "settings", "title", "tracked-changes"])
_LEFT_OUT = {
    "annotation": "comment",
    "image": "image",
    "object": "embedded object",
    "hidden-text": "hidden text",
}
_BOXES = frozenset(["note-body", "text-box"])
_CELLS = frozenset(["covered-table-cell", "table-cell"])
_MOST_REPEATED = 16_384
"""Columns of a sheet, and more spaces than stand in a row."""
_WHITE = re.compile(r"[ \t\r\n]+")


def read(archive: Archive) -> Reading:
    """The text of `content.xml`. Raises as `Archive`."""
    from lxml import etree

    if any(True for _ in archive.xml("META-INF/manifest.xml").iter("{*}encryption-data")):
        raise CorpusError("it is an encrypted OpenDocument file")
    root = archive.xml("content.xml")
    text = _Text(_hidden_styles(root))
    for event, element in etree.iterwalk(root, events=("start", "end", "comment", "pi")):
        if event == "start":
            text.start(element)
        elif event == "end":
            text.end(element)
        text.data(element.text if event == "start" else element.tail)
    for one in archive.xml("styles.xml").iter() if "styles.xml" in archive.names else ():
        name = _local(one.tag) if isinstance(one.tag, str) else ""
        text.counts[name] += name in ("header", "footer") and bool("".join(one.itertext()).strip())
    return Reading(text.lines.text, left_out(text.counts))


class _Text:
    """What is written as elements begin and end."""

    def __init__(self, hidden_styles: frozenset[str]) -> None:
        self.lines = Lines()
        self.counts: Counter[str] = Counter()
        self._hidden_styles = hidden_styles
        self._skipped: _Element | None = None  # what is being left out
        self._paragraphs = 0
        self._around: list[tuple[Lines, int]] = []  # what is written around each box
        self._boxes: list[str] = []  # what comes after the paragraph
        self._cell = self._citation = 0  # where they begin

    def start(self, element: _Element) -> None:
        name = _local(element.tag)
        if self._skipped is not None:
            return
        hidden = _attribute(element, "style-name") in self._hidden_styles
        if hidden or name in _SKIPPED or name in _LEFT_OUT:
            self._skipped = element
            if name in _LEFT_OUT or hidden:
                self.counts[_LEFT_OUT.get(name, "hidden text")] += 1
        elif name in _BOXES and self._paragraphs:
            self._around.append((self.lines, self._paragraphs))
            self.lines, self._paragraphs = Lines(), 0
        elif name == "note-citation":
            self._citation = len(self.lines.pieces)
            self.lines.write("[")
        elif name in ("h", "p"):
            self._paragraphs += 1
        elif name in _CELLS:
            self.lines.begin_cell()
            self._cell = len(self.lines.pieces)
        elif self._paragraphs:
            marks = {"tab": "\t", "line-break": "\n", "s": " " * _times(element, "c")}
            self.lines.write(marks.get(name, ""))

    def end(self, element: _Element) -> None:
        name = _local(element.tag)
        if self._skipped is not None:
            self._skipped = None if element is self._skipped else self._skipped
        elif name in _BOXES and self._around and not self._paragraphs:
            text = self.lines.text
            self.lines, self._paragraphs = self._around.pop()
            citation = "".join(self.lines.pieces[self._citation :]) if name == "note-body" else ""
            self._boxes.append(f"{citation} {text}")
        elif name == "note-citation":
            self.lines.write("]")
        elif name in ("h", "p"):
            self._paragraphs -= 1
            self.lines.end_line()
            if not self._around:
                for box in self._boxes:
                    self.lines.write(box.strip())
                    self.lines.end_line()
                self._boxes = []
        elif name in _CELLS:
            text = "".join(self.lines.pieces[self._cell :]).lstrip("\n")
            self.lines.end_cell()
            for _ in range(_times(element, "number-columns-repeated") - 1 if text else 0):
                self.lines.write(text)
                self.lines.end_cell()
        elif name in ("page", "table", "table-row"):
            self.lines.end_line(blank=name != "table-row")

    def data(self, text: str | None) -> None:
        if text and self._paragraphs and self._skipped is None:
            text = _WHITE.sub(" ", text)
            self.lines.write(text.lstrip() if self.lines.between_words else text)


def _times(element: _Element, name: str) -> int:
    stated = _attribute(element, name)
    return min(int(stated), _MOST_REPEATED) if stated.isdecimal() else 1


def _hidden_styles(root: _Element) -> frozenset[str]:
    return frozenset(
        _attribute(style, "name")
        for style in root.iter("{*}style")
        for properties in style
        if _attribute(properties, "display") == "none"
    )


def _attribute(element: _Element, name: str) -> str:
    return next((value for key, value in element.items() if _local(key) == name), "")


def _local(name: str) -> str:
    return name.rpartition("}")[2]
