"""EPUB books, whose chapters are web pages, read as `html` reads them.

Reads: the chapters, in the order of the book. Leaves out: what `html` leaves out, and a table of contents
that is no chapter. Encrypted books are refused. Costs: what the web pages cost.
"""

import posixpath
from urllib.parse import unquote

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents import encodings, html
from offload_decode.prefill_jobs.documents.archives import Archive
from offload_decode.prefill_jobs.documents.base import Reading, joined, left_out

_ENCRYPTED = "META-INF/encryption.xml"


def read(archive: Archive) -> Reading:
    """The text of the chapters, one after another. Raises as `Archive`."""
    container = archive.xml("META-INF/container.xml")
    package = next(one.get("full-path", "") for one in container.iter("{*}rootfile"))
    book, folder = archive.xml(package), posixpath.dirname(package)
    parts = {
        item.get("id"): posixpath.normpath(posixpath.join(folder, unquote(item.get("href", ""))))
        for item in book.iter("{*}item")
    }
    chapters = dict.fromkeys(parts.get(item.get("idref"), "") for item in book.iter("{*}itemref"))
    if _ENCRYPTED in archive.names:
        encrypted = archive.xml(_ENCRYPTED).iter("{*}CipherReference")
        if not chapters.keys().isdisjoint(unquote(one.get("URI", "")) for one in encrypted):
            raise CorpusError("it is an encrypted EPUB book")
    notes: dict[str, None] = {}
    texts, missing = [], 0
    for chapter in chapters:
        if chapter not in archive.names:
            missing += 1
            continue
        page = encodings.decode(chapter, archive.read(chapter))
        read = html.read(page.text)
        notes |= dict.fromkeys(page.notes + read.notes)
        texts.append(read.text.strip("\n") + "\n")
    return Reading(joined(texts), (*notes, *left_out({"missing chapter": missing})))
