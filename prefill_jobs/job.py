"""One prefill from corpus to published store, resumed if it was interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from offload_decode.common.errors import ConfigError, CorpusError, DoesNotFit
from offload_decode.common.memory import OUT_OF_MEMORY, Peak, give_back, is_out_of_memory, own_memory, room
from offload_decode.hf.compat import device_room
from offload_decode.hf.mla import tell_of_indexer
from offload_decode.hf.rope_scaling import parse_rope
from offload_decode.models.loading import LoadedModel, load
from offload_decode.models.prompt import Prompt, with_system
from offload_decode.models.size_estimate import estimate_of
from offload_decode.planning.sizes import CARD_CHUNKS, CPU_CHUNK, TOKENIZING_BYTES, largest_chunk
from offload_decode.prefill_jobs.buckets import Transfer
from offload_decode.prefill_jobs.continuing import (
    Start,
    Tokens,
    check_length,
    check_model,
    is_known,
    method_of,
    opened,
    prompt_of,
    start_beside,
    start_of,
    write_store,
)
from offload_decode.prefill_jobs.corpus import (
    Note,
    TextDocument,
    check_some,
    encode_corpus,
    notes_on,
    read_corpus,
)
from offload_decode.prefill_jobs.destinations import Found, Place, destination_of, same_store
from offload_decode.prefill_jobs.folders import EVERYTHING, Rules, Skipped
from offload_decode.prefill_jobs.indexing import BuildReport, publish_indexes
from offload_decode.prefill_jobs.methods.base import Method
from offload_decode.prefill_jobs.methods.registry import create, get, parse
from offload_decode.store.files import Progress
from offload_decode.store.format import MOST_SAMPLES, Manifest, kv_encodings, stored_types, token_hash
from offload_decode.store.layout import read_header
from offload_decode.store.marks import marks_for
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import STORE, partial_path
from offload_decode.types import Document

AUTO = "auto"
"""The chunk that fits is chosen."""


@dataclass(frozen=True)
class Settings:
    """How a corpus is prefilled: the method and its options as users write them (`prefill_jobs.methods`; also
    `chunk=auto`: on a GPU as many tokens as fit, the default where results do not depend on it), the prefill
    queries to keep for each KV head, how keys and values are stored (`auto`, `int8` or `int4-values`), and
    the most tokens that will follow, which a model's rotation may depend on (`hf.positions`; None: what
    `Lengths.chosen` takes), how the RoPE of the model is scaled for longer texts (`hf.rope_scaling`), and the
    system message before the corpus (None: the chat template's own). With `base`, the path of a store that
    the new one begins as, all of this is as the base has it.
    """

    method: str = "dense"
    options: Mapping[str, object] = field(default_factory=dict)
    query_samples: int = 1024
    kv: str = "auto"
    context: int | None = None
    rope: str = ""
    system: str | None = None
    base: Path | None = None

    def __post_init__(self) -> None:
        kv_encodings(self.kv)  # mistakes show before the model is loaded
        parse(self.method, self.stated)
        if not 1 <= self.query_samples <= MOST_SAMPLES:
            raise ConfigError(f"query-samples must be 1 to {MOST_SAMPLES:,}, not {self.query_samples}")
        if self.rope:
            parse_rope(self.rope)
        if self.context is not None and self.context < 1:
            raise ConfigError(f"context must be 1 or more tokens, not {self.context}")
        plain = Settings() if self.base else self
        if given := [name for name, value in vars(self).items() if value != getattr(plain, name)][:-1]:
            options = ", ".join(
                "-o" if name == "options" else f"--{name.replace('_', '-')}" for name in given
            )
            raise ConfigError(f"a store on {self.base} is made as that one was: leave out {options}")

    @property
    def chunk(self) -> int | None:
        """Tokens in one forward pass; None for as many as fit (`chunk_for`)."""
        fits = "chunk" not in self.stated and ("chunk" in self.options or not get(self.method).chunk_shapes)
        return None if fits else parse(self.method, self.stated).chunk

    @property
    def stated(self) -> dict[str, object]:
        """The options without `chunk=auto`."""
        given = self.options.items()
        return {name: value for name, value in given if (name, str(value).strip()) != ("chunk", AUTO)}


@dataclass(frozen=True)
class Maker:
    """Makes stores, by a model that is loaded before the first one, as `models.loading.load` does."""

    model: str
    settings: Settings
    device: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"
    adapter: str = ""

    @cached_property
    def loaded(self) -> LoadedModel:
        how = as_made(self.settings, self.dtype, self.weights, self.adapter)
        return load(self.model, self.device, *how)


def as_made(settings: Settings, dtype: str, weights: str, adapter: str) -> tuple[str, str, str, str]:
    """The dtype, weights, RoPE and adapter to load a model with: those of the base, where there is one and no
    others are asked for. Raises `StoreError`.
    """
    if settings.base is None:
        return dtype, weights, settings.rope, adapter
    made = opened(settings.base).manifest
    dtype = made.dtype if dtype == "auto" else dtype
    weights = made.weights if weights == "auto" else weights
    return dtype, weights, made.scaled, adapter or made.adapter


@dataclass(frozen=True)
class PrefillReport:
    """What a prefill did: sizes in bytes, times in seconds, speed over the tokens of this run alone.

    `failed`: documents that are left out because the tokenizer fails on them. `kept`: the store was there
    already. `shared` and `copied`: bytes that this run took over from the base, of whose indexes `indexes`
    were extended, and `left` says why others were not. `pushed`: what was sent to a bucket, in time beyond
    `seconds`, as is `loading`, the time that the model took to load.
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
    failed: tuple[Skipped, ...] = ()
    notes: tuple[Note, ...] = ()
    kept: bool = False
    shared: int = 0
    copied: int = 0
    indexes: tuple[BuildReport, ...] = ()
    left: tuple[str, ...] = ()
    pushed: Transfer | None = None
    loading: float = 0.0


@dataclass(frozen=True)
class Work:
    """A corpus in tokens, the manifest of its store, and how it is prefilled. `chosen`: the chunk was chosen
    to fit. `start`: where it begins as another store, with that one's tokens and documents.
    """

    tokens: Tokens
    documents: list[Document]
    manifest: Manifest
    method: Method
    skipped: tuple[Skipped, ...] = ()
    failed: tuple[Skipped, ...] = ()
    notes: tuple[Note, ...] = ()
    peak_memory: int = 0
    chosen: bool = False
    start: Start | None = None

    def in_chunks_of(self, prefill: object) -> Work:
        """The same work in the chunks of an existing or begun store, whose manifest has this `prefill`:
        another chunk may fit today, and nobody asked for one.
        """
        chunk = prefill.get("chunk") if isinstance(prefill, dict) else None
        if not self.chosen or type(chunk) is not int or chunk not in CARD_CHUNKS:
            return self
        method = type(self.method)(replace(self.method.options, chunk=chunk), self.method.shape)
        stated = self.manifest.prefill | {"chunk": chunk}
        manifest = replace(self.manifest, prefill=stated, seam=len(self.tokens) // chunk * chunk)
        return replace(self, method=method, manifest=replace(manifest, marks=marks_for(manifest)))


def prefill(
    corpus: str,
    *,
    model: str,
    out: str | Path,
    settings: Settings = Settings(),
    device: str = "auto",
    dtype: str = "auto",
    weights: str = "auto",
    adapter: str = "",
    staging: Path | None = None,
    rules: Rules = EVERYTHING,
    progress: Progress = lambda stage, done, total: None,
) -> PrefillReport:
    """Read `corpus` (a file, a folder, or `-`), run it through `model` and publish the store `out`, a path or
    a URL. A store for a URL is written below `staging` first. `rules`: what to read of a folder. `device`,
    `dtype`, `weights` and `adapter` as in `models.loading.load`.

    An interrupted prefill is resumed by the same call; an existing store of the same tokens, model and
    settings is kept. Raises `CorpusError`, `ModelError`, `StoreError`, `BucketError`, `ConfigError`.
    """
    place = destination_of(out, staging)
    place.admit()
    texts, skipped = read_corpus(corpus, rules)
    loaded = load(model, device, *as_made(settings, dtype, weights, adapter))
    progress("tokenize", 0, len(texts))
    work = prepare(loaded, texts, settings, place, tuple(skipped))
    return settled(work, place) or make(loaded, work, place, progress)


def prefill_texts(
    loaded: LoadedModel,
    texts: Sequence[TextDocument],
    out: Path,
    settings: Settings = Settings(),
    *,
    skipped: tuple[Skipped, ...] = (),
    progress: Progress = lambda stage, done, total: None,
) -> PrefillReport:
    """`prefill` with documents and a model that are loaded already."""
    return _write(loaded, prepare(loaded, texts, settings, Place(out), skipped), out, progress)


def prefill_tokens(
    loaded: LoadedModel,
    tokens: Tokens,
    documents: list[Document],
    out: Path,
    settings: Settings = Settings(),
    *,
    progress: Progress = lambda stage, done, total: None,
) -> PrefillReport:
    """`prefill` with a corpus that is tokens already."""
    return _write(loaded, _planned(loaded, settings, None, tokens, documents), out, progress)


def prepare(
    loaded: LoadedModel,
    texts: Sequence[TextDocument],
    settings: Settings,
    place: Place,
    skipped: tuple[Skipped, ...] = (),
    opening: str | None = None,
) -> Work:
    """Tokenize documents, in the prompt of a store that is at `place` or was begun there: its template may
    have named another day. `opening`: that of an earlier store, where nothing is there yet. Raises
    `ConfigError` for settings that the model cannot be prefilled with, and `CorpusError` where the tokenizer
    fails on all documents. Where the store begins as another, `StoreError` too, and `CorpusError` where that
    has a document of one's name with another text, or all of them; those that it has are skipped.
    """
    base, behind = None, 0
    if settings.base:
        base = opened(settings.base)
        check_model(base, loaded)
        prompt, behind = prompt_of(base, loaded.prompt), base.manifest.n_tokens
        planned = partial(_on, base, loaded, place)
    else:
        prompt = loaded.prompt
        if settings.system is not None:
            prompt = with_system(loaded.tokenizer, prompt, settings.system)
        prompt = prompt.opened((place.header() or {"opening": opening}).get("opening"))
        planned = partial(_planned, loaded, settings, prompt)
    admit_text(sum(len(document.text) for document in texts))
    known = tuple[Skipped, ...]()
    with Peak() as peak:
        if base:
            names = {text.name for text in texts if is_known(base, loaded.tokenizer, prompt, text)}
            texts = [text for text in texts if text.name not in names]
            known = tuple(Skipped(name, f"it is in {base.path} already") for name in sorted(names))
        if base and not texts:
            raise CorpusError(f"all of these documents are in {settings.base} already: give others")
        tokens, documents, failed = encode_corpus(loaded.tokenizer, prompt, texts, behind)
    give_back()
    check_some(failed, texts)
    work = replace(planned(tokens, documents), skipped=skipped + known)
    return replace(work, failed=tuple(failed), notes=notes_on(texts), peak_memory=peak.bytes)


def _on(base: KVStore, loaded: LoadedModel, place: Place, tokens: Tokens, documents: list[Document]) -> Work:
    """The work of a store at `place` that begins as `base`, where that fills a chunk."""
    whole = np.concatenate([base.tokens, np.asarray(tokens, np.int32)])
    check_length(base, loaded, len(whole))
    start = start_of(base, whole)
    named = {"store": place.named(base.path), "digest": base.store_digest, "tokens": start.kept}
    manifest = replace(start.manifest, base=named if start.kept else None)
    listed = [*base.documents, *documents]
    return Work(whole, listed, manifest, method_of(base), start=start)


def admit_text(characters: int) -> None:
    """Raise `DoesNotFit` for text that cannot be tokenized under the memory cap: a tokenizer without memory
    ends the process.
    """
    need, left = characters * TOKENIZING_BYTES, room()
    if left is not None and need > left:
        raise DoesNotFit(
            f"tokenizing {characters:,} characters takes about {need / 2**20:,.0f} MiB, and "
            f"{max(0, left) / 2**20:,.0f} MiB are left under --ram: give more, or split the corpus"
        )


def make(
    loaded: LoadedModel, work: Work, place: Place, progress: Progress, earlier: KVStore | None = None
) -> PrefillReport:
    """Prefill, and bring the store to its place; both resume where an interrupted call stopped. Where it
    begins as an `earlier` store that was made in the same way, that much of it stays.

    Raises `StoreError`, `BucketError`, and `DoesNotFit` where memory runs out.
    """
    with place.opened() as path:
        written = destination_of(path).found()
        with memory_errors():
            report = _kept(written, work, path) if written else _write(loaded, work, path, progress, earlier)
        pushed = place.deliver(progress)
    return replace(report, store=place.name, pushed=pushed)


@contextmanager
def memory_errors() -> Iterator[None]:
    """`DoesNotFit` where memory runs out inside."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise DoesNotFit(OUT_OF_MEMORY) from error


def settled(work: Work, place: Place) -> PrefillReport | None:
    """The report of a store that is at `place` already; None where the place is free.

    Raises `StoreError` for another or a damaged store, and `StoreExists` for anything else.
    """
    found = place.found()
    if found is None:
        place.check()
        return None
    kept = replace(_kept(found, work, place.name), kept=True)
    if work.start and place.path.exists():  # a kill may have left its indexes unpublished
        publish_indexes(KVStore.open(place.path))
    return kept


def _planned(
    loaded: LoadedModel,
    settings: Settings,
    prompt: Prompt | None,
    tokens: Tokens,
    documents: list[Document],
) -> Work:
    if loaded.activated:
        raise ConfigError(
            f"{loaded.adapter} is an activated LoRA, before whose invocation the weights are the model's: "
            "prefill without --adapter, and ask with it"
        )
    chunk = settings.chunk or chunk_for(loaded, len(tokens), settings.kv)
    method = create(settings.method, {**settings.stated, "chunk": chunk}, loaded.shape)
    tell_of_indexer(loaded.model.config, len(tokens), loaded.shape.index is not None, method.name)
    loaded.trained.tell(len(tokens))
    positions = loaded.lengths.chosen(len(tokens), settings.context)
    manifest = Manifest(
        **loaded.stated(positions),
        n_tokens=len(tokens),
        token_hash=token_hash(tokens),
        query_samples=settings.query_samples,
        kv=stored_types(settings.kv, loaded.dtype, loaded.shape),
        seam=len(tokens) // method.options.chunk * method.options.chunk,
        prefill={"method": method.name, **asdict(method.options)}
        | ({} if loaded.weights == "auto" else {"weights": loaded.weights})
        | ({"rope": loaded.scaled} if loaded.scaled else {})
        | ({"adapter": loaded.adapter} if loaded.adapter else {})
        | ({} if settings.system is None else {"system": settings.system}),
        template="plain" if prompt is None else prompt.template,
        opening=None if prompt is None else prompt.before,
    )
    manifest = replace(manifest, marks=marks_for(manifest))
    return Work(tokens, documents, manifest, method, chosen=settings.chunk is None)


def chunk_for(loaded: LoadedModel, tokens: int, kv: str) -> int:
    """The tokens of a forward pass by default: 512 on a CPU; on a GPU as many as fit beside the model, from
    512 to 32,768 (`planning.sizes.largest_chunk`).
    """
    if loaded.device.type != "cuda":
        return CPU_CHUNK
    about = replace(estimate_of(loaded.model, loaded.model_id, loaded.shape), dtype=loaded.dtype)
    return largest_chunk(about, device_room(loaded.device), tokens, kv)


def _write(
    loaded: LoadedModel, work: Work, out: Path, progress: Progress, earlier: KVStore | None = None
) -> PrefillReport:
    begun = read_header(partial_path(out) / STORE) or (earlier.manifest.to_json() if earlier else {})
    work = work.in_chunks_of(begun.get("prefill"))
    start, command = work.start, "prefill"
    if earlier:
        start, command = start_beside(earlier, work.manifest, work.tokens), "collect"
    given = loaded, work.manifest, work.tokens, work.documents, work.method, out, progress
    done = write_store(*given, start, command, stays=work.start is not None)
    kept = work.start.kept if work.start else 0
    return PrefillReport(
        store=out,
        n_tokens=done.n_tokens,
        documents=len(work.documents),
        skipped=work.skipped,
        notes=work.notes,
        resumed_from=0 if done.resumed_from == kept else done.resumed_from,
        seconds=done.seconds,
        tokens_per_second=done.tokens_per_second,
        bytes=done.bytes,
        peak_memory=max(done.peak_memory, work.peak_memory),
        failed=work.failed,
        shared=done.shared,
        copied=done.copied,
        indexes=done.indexes,
        left=done.left,
        loading=loaded.loading,
    )


def _kept(found: Found, work: Work, store: Path | str) -> PrefillReport:
    """The report of an existing store; `StoreMismatch` where it is of another corpus or other settings."""
    work = work.in_chunks_of(found.manifest.prefill)
    same_store(found, work.manifest, work.documents, str(store))
    total = found.manifest.n_tokens
    sizes = total, 0.0, 0.0, found.bytes, own_memory()
    told = work.failed, work.notes
    return PrefillReport(store, total, len(work.documents), work.skipped, *sizes, *told)
