"""What a chat template writes. It is a program that came with a checkpoint: it runs in a process of its own,
which may take some time and memory and no more.

Jinja's sandbox, in which transformers runs it, keeps it from files and from Python, but neither from loops
without end nor from texts of gigabytes. The process is a fork, which has imported all that it needs. It
writes one text after the other, for a fork of a large process takes a tenth of a second, and soon makes room
for another, for it keeps the memory that its parent has given back meanwhile.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from math import ceil
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any, NoReturn

from offload_decode.common.errors import ModelError
from offload_decode.common.memory import limit_memory, own_memory

SECONDS, MEMORY = 2, 256 << 20
"""Of the processor's time, and bytes: templates take hundredths of a second, and little memory."""
LONGEST = 1 << 16
"""Bytes that a template may write beside the messages."""

_WAITING_S = 60.0  # where others use the machine
_LIFE_S = 10.0
_WRITTEN, _REFUSED = b"=", b"!"


class TemplateRefuses(Exception):
    """What the template, or Jinja, says is wrong with messages."""


class _Writer:
    """A process that writes what the template of one tokenizer makes of messages."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._template = tokenizer, tokenizer.chat_template
        self._owner, self._until = os.getpid(), time.monotonic() + _LIFE_S
        self._own, theirs = Pipe()
        # Not multiprocessing's: workers of its pools may start none. That other threads run does no harm: the
        # fork waits for nothing that they hold.
        with theirs, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process = os.fork()
            if not self._process:
                _fork(theirs, tokenizer)

    def serves(self, tokenizer: Any) -> bool:
        """Whether it may be asked: by the process that began it, for this tokenizer, and not much later."""
        same = tokenizer is self._tokenizer and tokenizer.chat_template == self._template
        return same and os.getpid() == self._owner and time.monotonic() < self._until

    def ask(self, request: bytes, most: int) -> bytes:
        """What it tells, or nothing where it was ended or told more than `most` bytes."""
        try:
            self._own.send_bytes(request)
            return self._own.recv_bytes(most) if self._own.poll(_WAITING_S) else b""
        except (EOFError, OSError):
            return b""

    def end(self) -> None:
        self._own.close()
        if os.getpid() == self._owner:
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)


_lock = Lock()
_writer: _Writer | None = None


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
    """The text of messages, as `tokenizer.apply_chat_template` writes it.

    Raises `TemplateRefuses`, and `ModelError` where the template takes too much.
    """
    global _writer
    request = json.dumps([list(messages), more]).encode()
    with _lock:
        if _writer is not None and not _writer.serves(tokenizer):
            _writer.end()
            _writer = None
        _writer = _writer or _Writer(tokenizer)
        told = _writer.ask(request, LONGEST + 4 * len(request))  # some put a message there twice, or escaped
        if not told:
            _writer.end()
            _writer = None
    if not told:
        raise ModelError(
            f"the chat template of this model takes more than {SECONDS} s or {MEMORY >> 20} MiB, or writes "
            f"more than {LONGEST:,} letters of its own: mend it, or fetch the checkpoint again"
        )
    text = told[1:].decode("utf-8", "surrogatepass")
    if told.startswith(_REFUSED):
        raise TemplateRefuses(text)
    return text


def _fork(own: Connection, tokenizer: Any) -> NoReturn:
    """All that the fork does: nothing of its parent's is flushed, told or cleaned up there."""
    try:
        # Else its parent would not end it, and what the parent closes (a client's connection) would stay
        # open.
        os.closerange(3, own.fileno())
        os.closerange(own.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _write(own, tokenizer)
    finally:
        os._exit(0)


def _write(own: Connection, tokenizer: Any) -> None:
    if sys.platform == "linux":
        limit_memory(own_memory() + MEMORY)
    while own.poll(2 * _LIFE_S):
        try:
            messages, more = json.loads(own.recv_bytes())
        except EOFError:
            return
        until = ceil(time.process_time()) + SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        try:
            told = _WRITTEN, str(tokenizer.apply_chat_template(messages, tokenize=False, **more))
        except MemoryError:
            return
        except Exception as error:  # noqa: BLE001  # a template is a program, and raises what it likes
            told = _REFUSED, str(error)[:LONGEST]
        own.send_bytes(told[0] + told[1].encode("utf-8", "surrogatepass"))
