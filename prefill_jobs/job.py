"""One prefill from corpus to published store, resumed if it was interrupted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from offload_decode.errors import ConfigError
from offload_decode.memory import own_memory
from offload_decode.models.loading import LoadedModel, load
from offload_decode.models.prompt import prompt_for
from offload_decode.store.format import Manifest, kv_encodings, stored_types, token_hash
from offload_decode.store.reader import KVStore
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import Document
from prefill_jobs.buckets import Transfer
from prefill_jobs.chunked import prefill_chunks
from prefill_jobs.corpus import Skipped, TextDocument, encode_corpus, read_corpus
from prefill_jobs.methods.base import Method
from prefill_jobs.methods.registry import create, parse
from prefill_jobs.places import Place, Progress, place_of, same_store

Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(frozen=True)
class Settings:
    """How a corpus is prefilled: the method and its options as users write them (`prefill_jobs.methods`), the
    prefill queries to keep for each KV head, and how keys and values are stored (`auto`, `int8` or
    `int4-values`).
    """

    method: str = "dense"
    options: Mapping[str, object] = field(default_factory=dict)
    query_samples: int = 1024
    kv: str = "auto"

    def __post_init__(self) -> None:
        kv_encodings(self.kv)  # mistakes show before the model is loaded
        parse(self.method, self.options)
        if self.query_samples < 1:
            raise ConfigError(f"query-samples must be 1 or more, not {self.query_samples}")

    @property
    def chunk(self) -> int:
        """Tokens in one forward pass."""
        return parse(self.method, self.options).chunk


@dataclass(frozen=True)
class PrefillReport:
    """What a prefill did: sizes in bytes, times in seconds, speed over the tokens of this run alone.

    `kept`: the store was there already. `pushed`: what was sent to a bucket, the time for which is not in
    `seconds`.
    """

    store: Path | str
    n_tokens: int
    documents: int
    skipped: tuple[Skipped, ...]
    resumed_from: int
    seconds: float
    tokens_per_second: float
    bytes: int
    peak_memory: int
    kept: bool = False
    pushed: Transfer | None = None


@dataclass(frozen=True)
class Work:
    """A corpus as the model reads it, the manifest that its store is to have, and how it is prefilled."""

    tokens: Tokens
    documents: list[Document]
    manifest: Manifest
    method: Method
    skipped: tuple[Skipped, ...]


def prefill(
    corpus: str,
    *,
    model: str,
    out: str | Path,
    settings: Settings = Settings(),
    device: str = "auto",
    dtype: str = "auto",
    staging: Path | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> PrefillReport:
    """Read `corpus` (a file, a folder, or `-`), run it through `model` and publish the store `out`, a path or
    a URL. A store for a URL is written below `staging` first.

    An interrupted prefill is resumed by the same call, and a store that is there already, of the same tokens,
    model and settings, is kept. Raises `CorpusError`, `ModelError`, `StoreError`, `BucketError`,
    `ConfigError`.
    """
    place = place_of(out, staging)
    place.admit()
    texts, skipped = read_corpus(corpus)
    loaded = load(model, device, dtype)
    progress("tokenize", 0, len(texts))
    work = prepare(loaded, texts, settings, tuple(skipped))
    return kept(work, place) or make(loaded, work, place, progress)


def prefill_texts(
    loaded: LoadedModel,
    texts: Sequence[TextDocument],
    out: Path,
    settings: Settings = Settings(),
    *,
    skipped: tuple[Skipped, ...] = (),
    progress: Progress = lambda stage, done, total: None,
) -> PrefillReport:
    """`prefill` for documents that are read and a model that is loaded already."""
    return _write(loaded, prepare(loaded, texts, settings, skipped), out, progress)


def prefill_tokens(
    loaded: LoadedModel,
    tokens: Tokens,
    documents: list[Document],
    out: Path,
    settings: Settings = Settings(),
    *,
    template: str = "plain",
    skipped: tuple[Skipped, ...] = (),
    progress: Progress = lambda stage, done, total: None,
) -> PrefillReport:
    """`prefill` for a corpus that is tokens already."""
    return _write(loaded, _planned(loaded, tokens, documents, settings, template, skipped), out, progress)


def prepare(
    loaded: LoadedModel, texts: Sequence[TextDocument], settings: Settings, skipped: tuple[Skipped, ...]
) -> Work:
    """Tokenize documents. Raises `ConfigError` for settings that the model cannot be prefilled with."""
    prompt = prompt_for(loaded.tokenizer)
    tokens, documents = encode_corpus(loaded.tokenizer, prompt, texts)
    return _planned(loaded, tokens, documents, settings, prompt.template, skipped)


def make(loaded: LoadedModel, work: Work, place: Place, progress: Progress) -> PrefillReport:
    """Prefill, and bring the store to its place; each goes on where an interrupted call stopped."""
    with place.opened() as path:
        written = place_of(path).found()
        report = _write(loaded, work, path, progress) if written is None else _there(written, work, path)
        pushed = place.deliver(progress)
    return replace(report, store=place.name, pushed=pushed)


def kept(work: Work, place: Place) -> PrefillReport | None:
    """What to say of the store that lies at `place` already; None where there is none.

    Raises `StoreError` where it is another one, or damaged.
    """
    found = place.found()
    return None if found is None else replace(_there(found, work, place.name), kept=True)


def _planned(
    loaded: LoadedModel,
    tokens: Tokens,
    documents: list[Document],
    settings: Settings,
    template: str,
    skipped: tuple[Skipped, ...],
) -> Work:
    method = create(settings.method, settings.options, loaded.shape)
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
        query_samples=settings.query_samples,
        kv=stored_types(settings.kv, loaded.dtype, loaded.shape.head_dim),
        prefill={"method": method.name, **asdict(method.options)},
        template=template,
    )
    return Work(tokens, documents, manifest, method, skipped)


def _write(loaded: LoadedModel, work: Work, out: Path, progress: Progress) -> PrefillReport:
    total = len(work.tokens)
    began = time.perf_counter()
    with KVStoreWriter.open(out, work.manifest, work.tokens, work.documents) as writer:
        resumed_from = writer.done
        progress("prefill", resumed_from, total)
        memory = own_memory()

        def after_chunk(done: int) -> None:
            nonlocal memory
            memory = max(memory, own_memory())
            progress("prefill", done, total)

        prefill_chunks(loaded, writer, work.tokens, work.method, after_chunk)
        progress("publish", 0, 1)
        writer.publish()
    seconds = time.perf_counter() - began
    return PrefillReport(
        store=out,
        n_tokens=total,
        documents=len(work.documents),
        skipped=work.skipped,
        resumed_from=resumed_from,
        seconds=seconds,
        tokens_per_second=(total - resumed_from) / seconds,
        bytes=sum(KVStore.open(out).cost().values()),
        peak_memory=memory,
    )


def _there(found: tuple[Manifest, int], work: Work, store: Path | str) -> PrefillReport:
    """The report of a store that took no work; StoreMismatch where it is not of this corpus and these
    settings.
    """
    manifest, size = found
    same_store(manifest, work.manifest, str(store))
    return PrefillReport(
        store=store,
        n_tokens=manifest.n_tokens,
        documents=len(work.documents),
        skipped=work.skipped,
        resumed_from=manifest.n_tokens,
        seconds=0.0,
        tokens_per_second=0.0,
        bytes=size,
        peak_memory=own_memory(),
    )
