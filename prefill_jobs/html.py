"""HTML to the text that a browser shows.

BeautifulSoup parses it. inscriptis, measured beside it, loses the title, shows what is hidden, pads tables
with blanks, and gives nothing of a page of 20,000 nested elements. trafilatura takes 93 MB, and is made to
drop what it takes for boilerplate, which a corpus may be asked about.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from offload_decode.common.errors import CorpusError

if TYPE_CHECKING:
    from bs4 import BeautifulSoup

SUFFIXES = frozenset({".html", ".htm", ".xhtml"})
LARGEST = 64 << 20
"""Characters of a page: parsed, one takes some 30 times its size in memory."""

_UNSEEN = frozenset({"script", "style", "template", "noscript"})
_KEPT_AS_TYPED = frozenset({"pre", "textarea"})
_CELLS = frozenset({"td", "th"})
_BLOCKS = frozenset(
    [
        "address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "div", "dl", "dt",
        "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header",
        "hr", "li", "main", "nav", "ol", "p", "pre", "section", "summary", "table", "title", "tr", "ul",
    ]
)  # fmt: skip


def visible(markup: str) -> str:
    """The text of a page. Raises `CorpusError` with a reason as `decoding.text_of`."""
    if len(markup) > LARGEST:
        raise CorpusError(f"it is HTML of more than {LARGEST >> 20} MiB")
    from bs4 import BeautifulSoup, ParserRejectedMarkup

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # guesses about markup that looks like a file name or like XML
        try:
            soup = BeautifulSoup(markup, "html.parser")
        except ParserRejectedMarkup as error:
            raise CorpusError("it is not HTML that can be parsed") from error
    lines = [line.rstrip() for line in "".join(_pieces(soup)).split("\n")]
    return "\n".join(line for before, line in pairwise(["", *lines]) if line or before)


def _pieces(soup: BeautifulSoup) -> Iterator[str]:
    """What is seen, in order: blocks begin and end lines, and white space is one space but in `<pre>`.

    One pass without recursion or changes to the tree: large pages are too much for either.
    """
    from bs4.element import CData, NavigableString, Tag

    typed, new_line = 0, True
    below: list[tuple[Tag | None, Iterator[Any]]] = [(None, iter(soup.contents))]
    while below:
        parent, children = below[-1]
        child = next(children, None)
        piece = ""
        if child is None:
            below.pop()
            if parent is not None:
                typed -= parent.name in _KEPT_AS_TYPED
                piece = "\n" if parent.name in _BLOCKS else " " if parent.name in _CELLS else ""
        elif isinstance(child, Tag):
            if child.name not in _UNSEEN and not child.has_attr("hidden"):
                typed += child.name in _KEPT_AS_TYPED
                piece = "\n" if child.name in _BLOCKS or child.name == "br" else ""
                below.append((child, iter(child.contents)))
        elif type(child) in (NavigableString, CData):  # comments and declarations are of other types
            piece = str(child) if typed else re.sub(r"\s+", " ", child)
            if new_line and not typed:
                piece = piece.lstrip()
        if piece:
            new_line = piece.endswith("\n")
            yield piece
