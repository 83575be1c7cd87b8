"""Markdown and its kin, and SVG: text that is read as it stands, but for files written into its addresses.

Reads: all of the source. Leaves out: what `data:` addresses hold, whose kind stays (`data:image/png`), with a
note that counts them: a picture of 60 kB would be some 70,000 tokens.
"""

import re

from offload_decode.prefill_jobs.documents.base import Reading, left_out

SUFFIXES = frozenset(
    [
        ".adoc",
        ".markdown",
        ".md",
        ".mdown",
        ".mdx",
        ".mkd",
        ".org",
        ".qmd",
        ".rmd",
        ".rst",
        ".svg",
        ".textile",
    ]
)

# Each class ends at what the next begins with, so that no place is looked at twice.
_DATA = re.compile(
    r"(\bdata:[\w.+-]{1,64}/[\w.+-]{1,64})(?:;[\w.+=-]{1,64}){0,4},[^\s\"'()<>\[\]`\\]+", re.IGNORECASE
)


def read(text: str) -> Reading:
    """The source without the contents of `data:` addresses."""
    text, times = _DATA.subn(r"\1", text)
    return Reading(text, left_out({"embedded file": times}))
