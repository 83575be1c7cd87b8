"""What a chat template writes. It is a program that came with a checkpoint: it runs in a process of its own,
which may take some time and memory and no more.

Jinja's sandbox, in which transformers runs it, keeps it from files and from Python, but neither from loops
without end nor from texts of gigabytes. The process is a fork, which has imported all that it needs.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from offload_decode.errors import ModelError
from offload_decode.memory import limit_memory, own_memory

SECONDS, MEMORY = 2, 256 << 20
"""Of the processor's time, and bytes: templates take hundredths of a second, and little memory."""
LONGEST = 1 << 16
"""Bytes that a template may write beside the messages."""

_WAITING_S = 60.0  # where others use the machine
_WRITTEN, _REFUSED = b"=", b"!"


class TemplateRefuses(Exception):
    """What the template, or Jinja, says is wrong with messages."""


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
    """The text of messages, as `tokenizer.apply_chat_template` writes it.

    Raises `TemplateRefuses`, and `ModelError` where the template takes too much.
    """
    most = LONGEST + 4 * len(json.dumps([messages, more]))  # some put a message there twice, or escaped
    fork = get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_render, args=(sender, tokenizer, messages, more), daemon=True)
    with receiver:
        with sender:
            child.start()
        try:
            told = receiver.recv_bytes(most) if receiver.poll(_WAITING_S) else b""
        except (EOFError, OSError):  # it was ended, or wrote more
            told = b""
        finally:
            child.kill()
            child.join()
            child.close()
    if not told:
        raise ModelError(
            f"the chat template of this model takes more than {SECONDS} s or {MEMORY >> 20} MiB, or writes "
            f"more than {LONGEST:,} letters of its own: mend it, or fetch the checkpoint again"
        )
    text = told[1:].decode("utf-8", "surrogatepass")
    if told.startswith(_REFUSED):
        raise TemplateRefuses(text)
    return text


def _render(sender: Connection, tokenizer: Any, messages: Any, more: dict[str, Any]) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    if sys.platform == "linux":
        limit_memory(own_memory() + MEMORY)
    try:
        told = _WRITTEN, str(tokenizer.apply_chat_template(messages, tokenize=False, **more))
    except MemoryError:
        return
    except Exception as error:  # noqa: BLE001  # a template is a program, and raises what it likes
        told = _REFUSED, str(error)[:LONGEST]
    sender.send_bytes(told[0] + told[1].encode("utf-8", "surrogatepass"))
