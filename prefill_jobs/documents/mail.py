"""Messages of e-mail, and web pages saved as one file (MHTML), by the standard library.

Reads: who wrote to whom, when and about what; the plain texts of the body, or its HTML where it has none.
Leaves out: attachments, with a note that names them, and what `html` leaves out. Costs: up to two seconds a
megabyte, and about five times the file in memory.
"""

import re
from contextlib import suppress
from email.errors import MessageError
from email.header import decode_header, make_header
from email.message import Message
from email.parser import BytesParser

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents import encodings, html
from offload_decode.prefill_jobs.documents.base import Reading, damaged

_SHOWN = ("from", "to", "cc", "date", "subject")
_LONGEST_SHOWN = 10_000
_MOST_NAMED, _LONGEST_NAME = 10, 100

# What parses these takes time with the square of their length.
_CONTENT = re.compile(rb"(?im)^content-[a-z-]{1,30}:[^\r\n]*(?:(?:\r\n|\r|\n)[ \t][^\r\n]*)*")
_LONGEST_CONTENT = 4000


def read(data: bytes) -> Reading:
    """The headers that people read, and the body. Raises `CorpusError` with a reason, as `read_document`."""
    if any(len(found[0]) > _LONGEST_CONTENT for found in _CONTENT.finditer(data)):
        raise CorpusError(f"it is a message with a content header of more than {_LONGEST_CONTENT:,} bytes")
    with damaged("a message"):
        message = BytesParser().parsebytes(data)
        shown = [(name, value) for name, value in message.raw_items() if name.lower() in _SHOWN]
        shown.sort(key=lambda header: _SHOWN.index(header[0].lower()))
        headers = "\n".join(f"{name}: {_decoded(value)}" for name, value in shown)
        parts = [part for part in message.walk() if not part.is_multipart()]
        inline = [part for part in parts if part.get_filename() is None]
        plain = [part for part in inline if part.get_content_type() == "text/plain"]
        body = plain or [part for part in inline if part.get_content_type() == "text/html"]
        texts, chosen = [_text(part) for part in body], set(body)
        left = [part.get_filename() or part.get_content_type() for part in parts if part not in chosen]
        names = [name[:_LONGEST_NAME] for name in left if name != "text/html"]
    notes = dict.fromkeys(note for text in texts for note in text.notes)
    if names:
        more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
        notes[f"left out: attached {', '.join(names[:_MOST_NAMED])}{more}"] = None
    return Reading("\n\n".join([headers, *(text.text.strip() for text in texts)]), tuple(notes))


def _decoded(header: str) -> str:
    """The text of a header, as it stands where it names an encoding that there is not."""
    text = header[:_LONGEST_SHOWN].encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    with suppress(LookupError, ValueError, MessageError):
        text = str(make_header(decode_header(text)))
    return " ".join(text.split()) + (" …" if len(header) > _LONGEST_SHOWN else "")


def _text(part: Message) -> Reading:
    data = bytes(part.get_payload(decode=True) or b"")
    try:
        decoded = Reading(data.decode(part.get_content_charset("utf-8")))
    except (LookupError, UnicodeDecodeError):
        decoded = encodings.decode("", data)
    if part.get_content_subtype() == "html":
        page = html.read(decoded.text)
        return page._replace(notes=decoded.notes + page.notes)
    return decoded
