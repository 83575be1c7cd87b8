"""Web pages, as a browser shows them, by lxml: libxml2 reads tags as HTML5 does, in time linear in the page.

Reads: the title, and what a browser's `innerText` has, with tabs between cells; in place of an image its
`alt`. Leaves out: scripts, styles, templates, comments, players and frames, and what an attribute hides
(`hidden`, `style="display: none"`). What a style sheet hides is read. Costs: up to 1.5 seconds a megabyte of
nothing but tags, a tenth of it for usual pages, and two to three times the page in memory.

Why lxml: parsers that build the tree of HTML5 need more than half a minute for a megabyte of nested `<div>`s
or `<b>`s (lexbor in selectolax, html5ever in markupever), and BeautifulSoup needs it for unclosed tags.
libxml2 can hand out tags as they come. Which end tags may be omitted it knows from HTML 4, so `_Page` has the
rules of HTML5.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents.base import Lines, Reading, left_out

MAX_HTML = 64 << 20
"""Characters of a page."""

_PIECE = 2048
_MOST_SEARCHED = 100_000_000
"""libxml2 looks for the element of an end tag among all that are open: what it may look at for end tags that
have none, a second's work.
"""

_UNSEEN = frozenset(
    ["audio", "canvas", "datalist", "iframe", "noembed", "noframes", "noscript", "script", "style",
     "template", "video"]
)  # fmt: skip
_EMPTY = frozenset(["bgsound", "embed", "keygen", "source", "track", "wbr"])
"""Elements without contents or an end tag of which libxml2 does not know that."""
_PREFORMATTED = frozenset(["listing", "plaintext", "pre", "textarea", "xmp"])
_CELLS = frozenset(["td", "th"])
_ROWS = frozenset(["table", "tbody", "tfoot", "thead", "tr"])
_HEADINGS = frozenset(["h1", "h2", "h3", "h4", "h5", "h6"])
_ENDS_P = _HEADINGS | frozenset(
    ["address", "article", "aside", "blockquote", "center", "dd", "details", "dialog", "dir", "div", "dl",
     "dt", "fieldset", "figcaption", "figure", "footer", "form", "header", "hgroup", "hr", "li", "listing",
     "main", "menu", "nav", "ol", "p", "plaintext", "pre", "search", "section", "summary", "table", "ul",
     "xmp"]
)  # fmt: skip
_BLOCKS = _ENDS_P | _ROWS | {"body", "caption", "legend", "optgroup", "option", "title"}

_Names = tuple[str, ...]
_P: tuple[_Names, _Names] = ("p",), ("button", "caption", "marquee", "object", "table", "td", "th")
_CELL = ("caption", "colgroup", "td", "th")
_OMITTED: dict[str, tuple[_Names, _Names]] = {
    **dict.fromkeys(_HEADINGS, (tuple(_HEADINGS), ("div", "section", "td", "th"))),
    **dict.fromkeys(("dd", "dt"), (("dd", "dt"), ("dl",))),
    **dict.fromkeys(("rb", "rp", "rt", "rtc"), (("rb", "rp", "rt", "rtc"), ("ruby",))),
    **dict.fromkeys(_CELL, (_CELL, ("table", "tr"))),
    **dict.fromkeys(("tbody", "tfoot", "thead"), (("tbody", "tfoot", "thead", "tr", *_CELL), ("table",))),
    "button": (("button",), _P[1]),
    "li": (("li",), ("dir", "menu", "ol", "ul")),
    "tr": (("tr", *_CELL), ("table",)),
    "option": (("option",), ("datalist", "optgroup", "select")),
    "optgroup": (("optgroup", "option"), ("datalist", "select")),
    "p": _P,
}
"""What an element ends by its start, where that is open and none of the second names is open within it."""

_WHITE = re.compile(r"\s+")
_END_TAG = re.compile(r"</([a-z][^\s/>]*)", re.IGNORECASE)


def read(markup: str) -> Reading:
    """The text of a page. Raises `CorpusError` with a reason, as `read_document`."""
    if len(markup) > MAX_HTML:
        raise CorpusError(f"it is HTML of more than {MAX_HTML >> 20} MiB")
    from lxml.etree import HTMLParser

    page, searched = _Page(), 0
    parser = HTMLParser(target=page, huge_tree=True)
    parser.feed("<html>")  # it raises where nothing begins
    for at in range(0, len(markup), _PIECE):
        piece, deepest = markup[at : at + _PIECE], page.depth
        page.ended.clear()
        parser.feed(piece)
        unfound = Counter(map(str.lower, _END_TAG.findall(piece))) - page.ended
        searched += unfound.total() * max(deepest, page.depth)
        if searched > _MOST_SEARCHED:
            raise CorpusError("it is HTML with too many elements within each other")
    parser.close()
    return Reading(page.lines.text, left_out({"embedded file": page.embedded}))


class _Page:
    """What lxml's parser calls with each tag and text. The elements that are open, in HTML5's sense, are a
    stack; where each name lies in it is at hand, so that no tag takes longer in a deep page.
    """

    def __init__(self) -> None:
        self.depth, self.ended = 0, Counter[str]()  # libxml2's own elements
        self._open: list[str] = []
        self._places: dict[str, list[int]] = defaultdict(list)
        self._hidden: int | None = None  # where in the stack
        self._preformatted = 0
        self._texts: list[str] = []
        self.data = self._texts.append
        self.lines = Lines()
        self.embedded = 0  # images that are written into the page

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self.depth += 1
        if self._texts:
            self._write()
        if tag in _EMPTY:
            return
        if self._places["p"] and tag in _ENDS_P:
            self._end(*_P)
        if tag in _OMITTED and tag != "p":
            self._end(*_OMITTED[tag])
        self._places[tag].append(len(self._open))
        self._open.append(tag)
        if self._hidden is None:
            if tag in _UNSEEN or ((attributes or tag == "dialog") and _is_hidden(tag, attributes)):
                self._hidden = len(self._open) - 1
                return
            self._preformatted += tag in _PREFORMATTED
            if tag == "br":
                self.lines.write("\n")
            elif tag == "img":
                self.embedded += attributes.get("src", "").startswith("data:")
                self._texts.append(attributes.get("alt", ""))
            elif tag in _CELLS:
                self.lines.begin_cell()
            elif tag in _BLOCKS:
                self._break(tag)

    def end(self, tag: str) -> None:
        self.depth -= 1
        self.ended[tag] += 1
        if self._texts:
            self._write()
        self._end((tag,), _OMITTED[tag][1] if tag in _OMITTED else ())

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        """Write the text since the last tag."""
        text = "".join(self._texts)
        self._texts.clear()
        if self._hidden is None:
            if not self._preformatted:
                text = _WHITE.sub(" ", text.lstrip() if self.lines.between_words else text)
            self.lines.write(text)

    def _end(self, names: _Names, within: _Names) -> None:
        """End the innermost element of these names, unless one of the others is open within it."""
        place, last = self._innermost(names), len(self._open) - 1
        if place < 0 or (place < last and place < self._innermost(within)):
            return
        while len(self._open) > place:
            tag = self._open.pop()
            self._places[tag].pop()
            if self._hidden is None:
                self._preformatted -= tag in _PREFORMATTED
                if tag in _CELLS:
                    self.lines.end_cell()
                elif tag in _BLOCKS:
                    self._break(tag)
            elif self._hidden == len(self._open):
                self._hidden = None

    def _innermost(self, names: _Names) -> int:
        """Where it lies in the stack; -1 where none is open."""
        place = -1
        for name in names:
            if (places := self._places[name]) and places[-1] > place:
                place = places[-1]
        return place

    def _break(self, tag: str) -> None:
        """End the line, around a paragraph with a blank one; what begins a cell follows the tab before it."""
        if tag in _ROWS or not self.lines.in_cell:
            self.lines.end_line(blank=tag == "p")


def _is_hidden(tag: str, attributes: Mapping[str, str]) -> bool:
    if "hidden" in attributes or (tag == "dialog" and "open" not in attributes):
        return True
    if "style" not in attributes:
        return False
    declared = [one.lower().split(":", 1) for one in attributes["style"].split(";") if ":" in one]
    style: dict[str, str] = {}
    for name, value in sorted(declared, key=lambda one: "!" in one[1]):  # the last important one counts
        style[name.strip()] = value.partition("!")[0].strip()
    return style.get("display") == "none" or style.get("visibility") in ("hidden", "collapse")
