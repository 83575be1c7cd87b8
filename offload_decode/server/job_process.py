"""The process of one job: it yields to answers, reports its progress in lines of JSON, and ends with its
server.

`python -P -m offload_decode.server.job_process FOLDER DEVICE`, by `jobs`. On stdout: `{"stage", "done",
"total"}`, then `{"result"}` or `{"error"}`. The last stage of an append is `exchange`, before which it waits
for a line on stdin: only then does the longer store take the place of the one that is being asked.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offload_decode.common.errors import CorpusError, OffloadDecodeError
from offload_decode.common.fast_import import skip_slow_imports
from offload_decode.common.memory import OUT_OF_MEMORY, is_out_of_memory
from offload_decode.server.job_files import Job, Work, read

LOG = logging.getLogger("offload_decode.server")
NICE = 10
"""Answers go first: of a processor that both want, such a process gets one part in ten."""
EXCHANGE = "exchange"

Progress = Callable[[str, int, int], None]


def main() -> None:
    """Run the job in the folder that is named."""
    folder, device = Path(sys.argv[1]), sys.argv[2]
    os.nice(NICE)
    skip_slow_imports()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # lines that libraries print are no messages
    allowed = threading.Event()
    threading.Thread(target=_listen, args=(allowed,), daemon=True).start()
    warnings.simplefilter("ignore")

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    def progress(stage: str, done: int, total: int) -> None:
        send({"stage": stage, "done": done, "total": total})
        if stage == EXCHANGE:
            allowed.wait()

    try:
        send({"result": run(folder, device, progress)})
    except OffloadDecodeError as error:
        send({"error": str(error)})
    except Exception as error:  # whatever a library raises: the log has all of it
        LOG.error("a job failed", exc_info=error)
        send({"error": OUT_OF_MEMORY if is_out_of_memory(error) else reason_of(error)})
    os._exit(0)


def _listen(allowed: threading.Event) -> None:
    while sys.stdin.readline():
        allowed.set()
    os._exit(1)  # the server is gone; the next one goes on from here


def reason_of(error: Exception) -> str:
    """Why a job failed, where the error has no sentence for its user."""
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or "something went wrong; the server's log says what"


def run(folder: Path, device: str, progress: Progress) -> dict[str, Any]:
    """Do the job in `folder`; its result. Raises what prefills, appends and indexes raise."""
    job = read(folder)
    work, store = job.work, Path(job.work.path)
    progress("read", 0, len(job.documents))
    documents = _texts(folder, job)
    progress("load", 0, 1)

    from offload_decode.common.memory import own_memory
    from offload_decode.models.loading import load
    from offload_decode.models.size_estimate import outline
    from offload_decode.planning.caps import Caps, check_prefill
    from offload_decode.prefill_jobs.append import append_texts, method_of, opened
    from offload_decode.prefill_jobs.corpus import TextDocument
    from offload_decode.prefill_jobs.destinations import destination_of
    from offload_decode.prefill_jobs.job import Settings, make, prepare, settled

    texts = [TextDocument(*each) for each in documents]
    if work.kind == "append":
        earlier = opened(store)
        manifest = earlier.manifest
        chunk: int | None = method_of(earlier).options.chunk
        dtype, weights = manifest.dtype, manifest.weights
    else:
        settings = Settings(work.method, work.options, kv=work.kv)
        chunk, dtype, weights = settings.chunk, work.dtype, work.weights
    check_prefill(outline(work.model), chunk, dtype, device, Caps(), own_memory(), weights)
    loaded = load(work.model, device, dtype, weights)
    progress("tokenize", 0, len(texts))
    if work.kind == "append":
        report = asdict(append_texts(loaded, texts, store, progress=progress))
        kept = ("n_tokens", "added_tokens", "documents", "added", "known", "bytes", "seconds")
        return {name: report[name] for name in kept}
    place = destination_of(store)
    prepared = prepare(loaded, texts, settings, ())
    made = asdict(settled(prepared, place) or make(loaded, prepared, place, progress))
    result = {name: made[name] for name in ("n_tokens", "documents", "bytes", "seconds")}
    return result | {"recall": _index(work, store, progress)}


def _texts(folder: Path, job: Job) -> list[tuple[str, str]]:
    from offload_decode.prefill_jobs.decoding import read_plain, text_of

    texts = []
    for number, document in enumerate(job.documents):
        try:
            data = read_plain(str(folder / str(number)))
            texts.append((document.name, text_of("" if document.text else document.name, data)))
        except CorpusError as error:
            raise CorpusError(f"{document.name} cannot be read, because {error}: leave it out") from error
    return texts


def _index(work: Work, store: Path, progress: Progress) -> float | None:
    from offload_decode.kv.indexes import heads_of
    from offload_decode.prefill_jobs.indexing import build_indexes
    from offload_decode.store.reader import KVStore

    if not work.index or not heads_of(KVStore.open(store)):
        return None
    return build_indexes(store, "clusters", progress=progress).recall


if __name__ == "__main__":
    main()
