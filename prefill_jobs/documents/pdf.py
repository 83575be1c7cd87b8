"""PDF documents, by PDFium (pypdfium2), in a process of its own.

Measured on its own 99 sample files, pypdf gives the same words but for six, in 15 times the time; of
scans that a machine has read PDFium divides more words. PDFium is C++: a document that crashes it, hangs or
wants all memory ends that process, and is refused like any damaged document.
"""

import json
import subprocess
import sys

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents import base
from offload_decode.prefill_jobs.documents.base import Reading

MAX_PAGES = 50_000
MAX_SECONDS = 120
MAX_MEMORY = 4 << 30
"""Bytes of address space of the process."""


def read(data: bytes) -> Reading:
    """The text of the pages, one after another, each followed by the values of its form and its free text.

    Raises `CorpusError` with a reason, as `read_document`.
    """
    # -P: no modules of the current folder.
    command = [sys.executable, "-P", "-m", "offload_decode.prefill_jobs.documents.pdf_pages"]
    bounds = map(str, (MAX_PAGES, base.MAX_SIZE, MAX_SECONDS, MAX_MEMORY))
    try:
        ended = subprocess.run([*command, *bounds], input=data, capture_output=True, timeout=MAX_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise CorpusError(f"it is a PDF document that takes more than {MAX_SECONDS} seconds") from error
    if ended.returncode:
        raise CorpusError(f"it is a PDF document that PDFium fails on (exit code {ended.returncode})")
    answer = json.loads(ended.stdout)
    if "reason" in answer:
        raise CorpusError(answer["reason"])
    return Reading(answer["text"], tuple(answer["notes"]))
