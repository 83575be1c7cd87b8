"""What a store can be made of, said before a job is made of it."""

from __future__ import annotations

from collections.abc import Sequence

from offload_decode.server.job_files import Upload, Work
from offload_decode.server.requests import WrongField

MOST_DOCUMENTS, MOST_LETTERS = 10_000, 500


def check(work: Work, documents: Sequence[Upload]) -> None:
    """Raises `WrongField` or `ConfigError` for what no prefill could be made of."""
    from offload_decode.hf.compat import check_dtype
    from offload_decode.models.quantization import check_weights
    from offload_decode.prefill_jobs.job import Settings

    Settings(work.method, work.options, kv=work.kv)
    check_dtype(work.dtype)
    check_weights(work.weights)
    if not 0 < len(documents) <= MOST_DOCUMENTS:
        raise WrongField(f"give 1 to {MOST_DOCUMENTS:,} documents, not {len(documents):,}", "documents")
    names = [document.name for document in documents]
    for name in names:
        if not name.strip() or len(name) > MOST_LETTERS or not name.isprintable():
            raise WrongField(
                f"a document's name has 1 to {MOST_LETTERS} letters, all of them printable", "documents"
            )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise WrongField(f"two documents are called '{twice}': give each a name of its own", "documents")
