"""One prefill from corpus to published store, resumed if it was interrupted."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offload_decode.errors import ConfigError, StoreExists
from offload_decode.models.loading import LoadedModel, load
from offload_decode.models.prompt import prompt_for
from offload_decode.store.format import Manifest, token_hash
from offload_decode.store.reader import KVStore
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import Document
from prefill_jobs.chunked import prefill_chunks
from prefill_jobs.corpus import Skipped, encode_corpus, read_corpus

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PrefillReport:
    """What a prefill did: sizes in bytes, times in seconds, speed over the tokens of this run alone."""

    store: Path
    n_tokens: int
    documents: int
    skipped: tuple[Skipped, ...]
    resumed_from: int
    seconds: float
    tokens_per_second: float
    bytes: int
    peak_memory: int


def prefill(
    corpus: str,
    *,
    model: str,
    out: Path,
    chunk: int = 512,
    query_samples: int = 1024,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress = lambda stage, done, total: None,
) -> PrefillReport:
    """Read `corpus` (a file, a folder, or `-`), run it through `model` and publish the store `out`.

    An interrupted prefill is resumed by the same call. Raises `CorpusError`, `ModelError`, `StoreError`,
    `ConfigError`.
    """
    if chunk < 1 or query_samples < 1:
        raise ConfigError("chunk and query-samples must be 1 or more")
    if out.exists():
        raise StoreExists(f"{out} exists already: choose another path, or remove it first")
    texts, skipped = read_corpus(corpus)
    loaded = load(model, device, dtype)
    prompt = prompt_for(loaded.tokenizer)
    progress("tokenize", 0, len(texts))
    tokens, documents = encode_corpus(loaded.tokenizer, prompt, texts)
    return prefill_tokens(
        loaded,
        tokens,
        documents,
        out,
        chunk=chunk,
        query_samples=query_samples,
        template=prompt.template,
        skipped=tuple(skipped),
        progress=progress,
    )


def prefill_tokens(
    loaded: LoadedModel,
    tokens: np.ndarray[tuple[int], np.dtype[np.int32]],
    documents: list[Document],
    out: Path,
    *,
    chunk: int = 512,
    query_samples: int = 1024,
    template: str = "plain",
    skipped: tuple[Skipped, ...] = (),
    progress: Progress = lambda stage, done, total: None,
) -> PrefillReport:
    """`prefill` for a corpus that is tokens already."""
    manifest = Manifest(
        model_id=loaded.model_id,
        model_config_hash=loaded.config_hash,
        weights_hash=loaded.weights_hash,
        tokenizer_hash=loaded.tokenizer_hash,
        dtype=loaded.dtype,
        shape=loaded.shape,
        rope=loaded.rope,
        n_tokens=len(tokens),
        token_hash=token_hash(tokens),
        query_samples=query_samples,
        prefill={"method": "dense", "chunk": chunk},
        template=template,
    )
    began = time.perf_counter()
    with KVStoreWriter.open(out, manifest, tokens, documents) as writer:
        resumed_from = writer.done
        progress("prefill", resumed_from, len(tokens))
        memory = own_memory()

        def after_chunk(done: int) -> None:
            nonlocal memory
            memory = max(memory, own_memory())
            progress("prefill", done, len(tokens))

        prefill_chunks(loaded, writer, tokens, chunk, after_chunk)
        progress("publish", 0, 1)
        writer.publish()
    seconds = time.perf_counter() - began
    return PrefillReport(
        store=out,
        n_tokens=len(tokens),
        documents=len(documents),
        skipped=skipped,
        resumed_from=resumed_from,
        seconds=seconds,
        tokens_per_second=(len(tokens) - resumed_from) / seconds,
        bytes=sum(KVStore.open(out).cost().values()),
        peak_memory=memory,
    )


def own_memory() -> int:
    """Bytes of memory this process holds; pages of files are left out, as the system drops them at need."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["RssAnon"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: the peak of all pages, in bytes
