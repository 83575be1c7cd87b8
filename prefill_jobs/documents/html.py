"""Web pages, as a browser shows them, by BeautifulSoup.

Why BeautifulSoup: inscriptis, measured beside it, loses the title, shows hidden text, pads tables with
blanks, and gives nothing of a page of 20,000 nested elements. trafilatura takes 93 MB, and drops what it
takes for boilerplate.
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

MAX_HTML = 64 << 20
"""Characters of a page: parsed, it takes about 30 times its size in memory."""

_UNSEEN = frozenset({"script", "style", "template", "noscript"})
_PREFORMATTED = frozenset({"pre", "textarea"})
_CELLS = frozenset({"td", "th"})
_BLOCKS = frozenset(
    [
        "address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "div", "dl", "dt",
        "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header",
        "hr", "li", "main", "nav", "ol", "p", "pre", "section", "summary", "table", "title", "tr", "ul",
    ]
)  # fmt: skip


def visible_text(markup: str) -> str:
    """The text of a page as a browser shows it. Raises as `read_document`."""
    if len(markup) > MAX_HTML:
        raise CorpusError(f"it is HTML of more than {MAX_HTML >> 20} MiB")
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
    """What is seen, in order: blocks begin and end lines; outside of `<pre>`, white space is one space.

    One pass without recursion or changes to the tree: large pages are too much for either.
    """
    from bs4.element import CData, NavigableString, Tag

    preformatted, new_line = 0, True
    stack: list[tuple[Tag | None, Iterator[Any]]] = [(None, iter(soup.contents))]
    while stack:
        parent, children = stack[-1]
        child = next(children, None)
        piece = ""
        if child is None:
            stack.pop()
            if parent is not None:
                preformatted -= parent.name in _PREFORMATTED
                piece = "\n" if parent.name in _BLOCKS else " " if parent.name in _CELLS else ""
        elif isinstance(child, Tag):
            if child.name not in _UNSEEN and not child.has_attr("hidden"):
                preformatted += child.name in _PREFORMATTED
                piece = "\n" if child.name in _BLOCKS or child.name == "br" else ""
                stack.append((child, iter(child.contents)))
        elif type(child) in (NavigableString, CData):  # comments and declarations are of other types
            piece = str(child) if preformatted else re.sub(r"\s+", " ", child)
            if new_line and not preformatted:
                piece = piece.lstrip()
        if piece:
            new_line = piece.endswith("\n")
            yield piece
