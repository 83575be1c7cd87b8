"""The text of Office Open XML: paragraphs and tables as Word and PowerPoint write them.

What is not known to hold none is searched for text: content controls, insertions, moves, smart tags, fields,
custom XML, hyperlinks, shapes and whatever comes next, and rows and cells within them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from offload_decode.prefill_jobs.documents.archives import Archive, Link
from offload_decode.prefill_jobs.documents.base import Lines

if TYPE_CHECKING:
    from lxml.etree import _Element

# The namespaces whose names count; those of *Strict* files differ.
_PREFIXES = {
    "http://schemas.openxmlformats.org/wordprocessingml/2006/main": "w",
    "http://purl.oclc.org/ooxml/wordprocessingml/main": "w",
    "http://schemas.openxmlformats.org/officeDocument/2006/math": "m",
    "http://purl.oclc.org/ooxml/officeDocument/math": "m",
    "http://schemas.openxmlformats.org/drawingml/2006/main": "a",
    "http://purl.oclc.org/ooxml/drawingml/main": "a",
    "http://schemas.openxmlformats.org/drawingml/2006/diagram": "dgm",
    "http://purl.oclc.org/ooxml/drawingml/diagram": "dgm",
    "http://schemas.openxmlformats.org/drawingml/2006/chart": "c",
    "http://purl.oclc.org/ooxml/drawingml/chart": "c",
    "http://schemas.openxmlformats.org/markup-compatibility/2006": "mc",
    "urn:schemas-microsoft-com:vml": "v",
}

# Properties, some with elements that are named like text (tab); what is deleted; what says a thing again for
# programs that do not know its first form.
_SKIPPED = frozenset(
    ["w:pPr", "w:rPr", "w:tblPr", "w:tcPr", "w:trPr", "w:sdtPr", "w:sectPr", "a:pPr",
     "w:del", "w:moveFrom", "w:delText", "w:instrText", "w:delInstrText", "mc:Fallback"]
)  # fmt: skip
_TEXTS = frozenset(["w:t", "m:t", "a:t"])
_MARKS = {
    "w:tab": "\t", "w:ptab": "\t", "a:tab": "\t", "w:br": "\n", "w:cr": "\n", "a:br": "\n",
    "w:noBreakHyphen": "-",
}  # fmt: skip
_OPERATORS = {"m:den": "/", "m:sup": "^", "m:sub": "_", "m:e": " "}
"""What stands before these parts of an equation, unless they are empty."""
_SIGNS = {"m:nary": ("chr", "∫"), "m:d": ("begChr", "("), "m:rad": ("", "√")}
"""What begins these parts of an equation: a property, and what is meant without it."""
_LEFT_OUT = {
    "a:blip": "image", "v:imagedata": "image", "c:chart": "chart", "w:altChunk": "embedded document",
    "w:object": "embedded object",
}  # fmt: skip
_MAY_BE_GONE = frozenset(["w:p", "w:r", "w:tr", "a:fld"])
_OFF = frozenset(["0", "false", "off"])


class Text:
    """The text of parts of a document, read one after another. `counts`: what was left out."""

    def __init__(self, archive: Archive, hidden_styles: frozenset[str] = frozenset()) -> None:
        self.lines = Lines()
        self.counts: Counter[str] = Counter()
        self._archive = archive
        self._hidden_styles = hidden_styles
        self.noted: dict[tuple[str, str], int] = {}  # kind and id of each footnote and endnote: its number
        self._fields: list[int | None] = []  # where the code of each open field begins, until its result does
        self._operators = ""  # before the next text
        self._links: dict[str, Link] = {}
        self._diagrams: set[str] = set()

    def read(self, part: str) -> None:
        """Write the text of a part."""
        self._links = self._archive.links(part)
        self.walk(self._archive.xml(part))

    def walk(self, root: _Element) -> None:
        """Write the text below an element. What stands in boxes comes after the paragraph of their anchor."""
        from lxml import etree

        boxes: list[_Element] = []
        in_paragraph = False
        walker = etree.iterwalk(root, events=("start", "end"))
        for event, element in walker:
            name = named(element)
            if event == "end":
                self._end(element, name)
            elif name in _SKIPPED or (name in _MAY_BE_GONE and self._is_gone(element, name)):
                walker.skip_subtree()
            elif name == "w:txbxContent" and element is not root:
                boxes.append(element)
                walker.skip_subtree()
            elif name == "dgm:relIds":
                boxes += self._diagram(attribute(element, "dm"))
            else:
                self._start(element, name)
            if name == "w:p":
                in_paragraph = event == "start"
            while boxes and not in_paragraph:
                self.walk(boxes.pop(0))
                self.lines.end_line()

    def _start(self, element: _Element, name: str) -> None:
        if name in _TEXTS:
            self.lines.write(self._operators + (element.text or ""))
            self._operators = ""
        elif name in _MARKS:
            self.lines.write(_MARKS[name])
        elif name in _OPERATORS:
            self._operators += _operator(element, name)
        elif name in _SIGNS:
            self.lines.write(self._operators + _property(element, *_SIGNS[name]))
            self._operators = ""
        elif name in ("w:tc", "a:tc"):
            self.lines.begin_cell()
        elif name in _LEFT_OUT:
            self.counts[_LEFT_OUT[name]] += 1
        elif name == "w:fldChar":
            self.lines.write(_form_value(element))
            self._field(attribute(element, "fldCharType"))
        elif name in ("w:footnoteReference", "w:endnoteReference"):
            number = self.noted.setdefault((name[2:-9], attribute(element, "id")), len(self.noted) + 1)
            self.lines.write(f"[{number}]")
        elif name == "w:sym":
            self._symbol(attribute(element, "char"))
        elif name == "v:textpath":
            self.lines.write(element.get("string", ""))
            self.lines.end_line()

    def _diagram(self, id: str) -> list[_Element]:
        """The data of a diagram, once."""
        link = self._links.get(id)
        if link is None or link.part in self._diagrams:
            return []
        self._diagrams.add(link.part)
        return [self._archive.xml(link.part)]

    def _end(self, element: _Element, name: str) -> None:
        if name in ("w:p", "a:p"):
            if not any(named(one) in ("w:del", "w:moveFrom") for one in _mark(element)):
                self.lines.end_line()
        elif name in ("w:tc", "a:tc"):
            self.lines.end_cell()
        elif name in ("w:tr", "a:tr"):
            self.lines.end_line()
        elif name in _OPERATORS:
            self._operators = ""
        elif name == "m:d":
            self.lines.write(_property(element, "endChr", ")"))

    def _is_gone(self, element: _Element, name: str) -> bool:
        """Whether a row was deleted, a paragraph or run is hidden, or a field is the number of a slide."""
        if name == "a:fld":
            return attribute(element, "type") == "slidenum"
        inner = {named(one): one for child in element if named(child) == name + "Pr" for one in child}
        if name == "w:tr":
            return "w:del" in inner
        if name == "w:r" and "w:vanish" in inner:
            hidden = is_hidden(inner["w:vanish"])
        else:
            style = inner.get("w:pStyle" if name == "w:p" else "w:rStyle")
            hidden = style is not None and attribute(style, "val") in self._hidden_styles
        if hidden:
            texts = [one.text or "" for one in element.iter() if named(one) == "w:t"]
            self.counts["hidden word"] += len("".join(texts).split())
        return hidden

    def _field(self, kind: str) -> None:
        """Forget the code of a field once its result begins: the result of another may stand in it."""
        if kind == "begin":
            self._fields.append(len(self.lines.pieces))
        elif self._fields:
            begin = self._fields.pop()
            if begin is not None:
                self.lines.forget(begin)
            if kind == "separate":
                self._fields.append(None)

    def _symbol(self, code: str) -> None:
        """A character of a font; those of symbol fonts have no meaning outside of it."""
        try:
            character = chr(int(code, 16))
        except (ValueError, OverflowError):
            return
        if 0xE000 <= ord(character) <= 0xF8FF:
            self.counts["symbol"] += 1
        else:
            self.lines.write(character)


def named(element: _Element) -> str:
    """The name of an element, with a short prefix where its namespace is known; "" of comments and others."""
    tag = element.tag
    if not isinstance(tag, str):
        return ""
    space, _, name = tag[1:].partition("}")
    return f"{_PREFIXES.get(space, '')}:{name}"


def attribute(element: _Element, name: str, of: str = "") -> str:
    """An attribute, in any namespace, or in one whose name ends with `of`."""
    key: str
    value: str
    for key, value in element.items():
        space, _, local = key.rpartition("}")
        if local == name and space.endswith(of):
            return value
    return ""


def is_hidden(setting: _Element) -> bool:
    """Whether it is the property that hides text."""
    return named(setting) == "w:vanish" and attribute(setting, "val") not in _OFF


def _operator(element: _Element, name: str) -> str:
    """What stands before a part of an equation: between brackets, nothing or what separates parts."""
    around = element.getparent()
    if name != "m:e" or around is None or named(around) != "m:d":
        return _OPERATORS[name]
    before = element.getprevious()
    return _property(around, "sepChr", "|") if before is not None and named(before) == "m:e" else ""


def _form_value(field: _Element) -> str:
    """What an old form's list or check box shows; empty for other fields."""
    for one in field.iter():
        within = {named(child): child for child in one}
        if named(one) == "w:ddList":
            choices = [attribute(child, "val") for child in one if named(child) == "w:listEntry"]
            chosen = within.get("w:result", within.get("w:default"))
            number = "0" if chosen is None else attribute(chosen, "val")
            return choices[int(number)] if number.isdecimal() and int(number) < len(choices) else ""
        if named(one) == "w:checkBox":
            state = within.get("w:checked", within.get("w:default"))
            return "☒" if state is not None and attribute(state, "val") not in _OFF else "☐"
    return ""


def _property(element: _Element, name: str, default: str) -> str:
    """The character that a part of an equation has for this, which may be none."""
    for properties in element:
        if named(properties) == named(element) + "Pr":
            for one in properties:
                if named(one) == f"m:{name}":
                    return attribute(one, "val")
    return default


def has_text(root: _Element) -> bool:
    return any(named(one) in _TEXTS and one.text for one in root.iter())


def _mark(paragraph: _Element) -> list[_Element]:
    """The properties of the mark that ends a paragraph."""
    for outer in paragraph:
        if named(outer) == "w:pPr":
            return [one for inner in outer if named(inner) == "w:rPr" for one in inner]
    return []
