"""What a server logs: text or JSON, a line for each record, and one record for each request, with its id.

Nothing that a client wrote is logged but names: a request's id, the model it asked for, the route.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TextIO

LOG = logging.getLogger("offload_decode.server")
_ITS_OWN = ("offload_decode", "uvicorn", "uvicorn.error")
_line: ContextVar[dict[str, Any] | None] = ContextVar("line", default=None)


def line() -> dict[str, Any]:
    """The fields that will be logged of the HTTP request at hand, for whoever learns one to put it there;
    outside of a request, fields that nobody reads.
    """
    fields = _line.get()
    return {} if fields is None else fields


@contextmanager
def request(level: int = logging.INFO, **fields: Any) -> Iterator[dict[str, Any]]:
    """Inside, `line()` is this request's; when the block ends, it is logged with the seconds it took."""
    own = dict(fields)
    token, began = _line.set(own), time.perf_counter()
    try:
        yield own
    finally:
        own["seconds"] = round(time.perf_counter() - began, 4)
        LOG.log(level, "request", extra={"fields": dict(own)})
        _line.reset(token)


def configure(style: Literal["text", "json"] = "text", stream: TextIO | None = None) -> None:
    """Let everything that this process logs go to `stream` (stderr) in one form, uvicorn's own included:
    start it with `log_config=None, access_log=False`.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in _ITS_OWN:
        logging.getLogger(name).setLevel(logging.INFO)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What a record says beyond its message: its own fields, or the id of the request it belongs to."""
    own = getattr(record, "fields", None)
    if own is not None:
        return dict(own)
    known = line().get("request_id")
    return {} if known is None else {"request_id": known}


def _when(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"


class JsonLines(logging.Formatter):
    """An object in one line."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": _when(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


class TextLines(logging.Formatter):
    """Time, level, message and fields as `name=value`; what is not plain text is spelled out, so that no
    value can look like a line of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_spelled(value)}" for name, value in _fields(record).items())
        said = f"{_when(record)} {record.levelname.lower()} {_plain(record.getMessage())}{fields}"
        return f"{said}\n{self.formatException(record.exc_info)}" if record.exc_info else said


def _plain(text: str) -> str:
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def _spelled(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and not set(text) & set(' ="') else json.dumps(text)
