"""A text in memory to a store, with a model that is loaded already."""

from __future__ import annotations

from pathlib import Path

from offload_decode.models.loading import LoadedModel
from offload_decode.models.prompt import prompt_for
from prefill_jobs.corpus import TextDocument, encode_corpus
from prefill_jobs.job import PrefillReport, Progress, prefill_tokens


def prefill_text(
    loaded: LoadedModel,
    document: TextDocument,
    out: Path,
    progress: Progress = lambda stage, done, total: None,
) -> PrefillReport:
    """Prefill one document into the new store `out`; raises as `prefill_jobs.job.prefill`."""
    prompt = prompt_for(loaded.tokenizer)
    tokens, documents = encode_corpus(loaded.tokenizer, prompt, [document])
    return prefill_tokens(loaded, tokens, documents, out, template=prompt.template, progress=progress)
