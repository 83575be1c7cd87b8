"""Documents added to a finished store: the prefill continues, and the longer store takes its place.

The result equals one prefill of all tokens in the same chunks: the last chunk of the earlier store, if it was
not full, runs again with what follows.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from offload_decode.common.errors import ConfigError, CorpusError, StoreForeign, StoreMismatch, TextRefused
from offload_decode.common.memory import Peak, give_back
from offload_decode.hf.mla import tell_of_indexer
from offload_decode.models.loading import LoadedModel, load
from offload_decode.models.prompt import Prompt
from offload_decode.prefill_jobs.chunks import prefill_chunks
from offload_decode.prefill_jobs.corpus import (
    Note,
    TextDocument,
    check_some,
    encode_further,
    headed,
    notes_on,
    read_corpus,
)
from offload_decode.prefill_jobs.folders import EVERYTHING, Rules, Skipped
from offload_decode.prefill_jobs.indexing import BuildReport, build_indexes, extend_indexes, publish_indexes
from offload_decode.prefill_jobs.job import Settings, Tokens, admit_text, memory_errors, prefill_tokens
from offload_decode.prefill_jobs.methods.base import Method
from offload_decode.prefill_jobs.methods.registry import create, get, names
from offload_decode.store.files import Progress
from offload_decode.store.format import running_software, token_hash
from offload_decode.store.growth import Growth, is_left
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import REPLACED, locked, partial_path
from offload_decode.store.writer import KVStoreWriter, remove_left, restore
from offload_decode.types import Document


@dataclass(frozen=True, kw_only=True)
class AppendReport:
    """What an append did: sizes in bytes, times in seconds, speed over the tokens of this run alone.

    `added` and `known` name the new documents and those that were in the store already; `failed` are left
    out, because the tokenizer fails on them. Of `n_tokens`,
    `added_tokens` are new; `repeated` ones of the earlier store ran again. `shared` and `copied`: bytes of
    the earlier store that this run put into the new one. `left`: for each kind of index that was not
    extended, a sentence with the reason.
    """

    store: Path
    n_tokens: int
    added_tokens: int
    repeated: int
    documents: int
    added: tuple[str, ...]
    known: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    failed: tuple[Skipped, ...] = ()
    notes: tuple[Note, ...] = ()
    resumed_from: int
    seconds: float
    tokens_per_second: float
    bytes: int
    shared: int
    copied: int
    peak_memory: int
    indexes: tuple[BuildReport, ...]
    left: tuple[str, ...]

    @property
    def kept(self) -> bool:
        return not self.added


def append(
    store: Path,
    corpus: str,
    *,
    model: str | None = None,
    device: str = "auto",
    weights: str = "auto",
    rules: Rules = EVERYTHING,
    progress: Progress = lambda stage, done, total: None,
) -> AppendReport:
    """Add the documents of `corpus` (a file, a folder, or `-`) to a store, with the model, the method and the
    settings that it was made with; `model`: where that model is now. `weights`: `auto`, as the store was
    made, or `streamed` (`models.layer_streaming`). `rules`: what to read of a folder.

    An interrupted append is resumed by the same call; the earlier store stays in its place until the longer
    one takes it. Documents that the store has already are skipped. Raises `CorpusError`, `ModelError`,
    `StoreError`, `ConfigError`, `DoesNotFit` and `VectorIndexError`.
    """
    manifest = opened(store).manifest
    texts, skipped = read_corpus(corpus, rules)
    weights = manifest.weights if weights == "auto" else weights
    loaded = load(model or manifest.model_id, device, manifest.dtype, weights, manifest.scaled)
    progress("tokenize", 0, len(texts))
    return append_texts(loaded, texts, store, skipped=tuple(skipped), progress=progress)


def append_texts(
    loaded: LoadedModel,
    texts: Sequence[TextDocument],
    store: Path,
    *,
    skipped: tuple[Skipped, ...] = (),
    progress: Progress = lambda stage, done, total: None,
) -> AppendReport:
    """`append` with documents and a model that are loaded already."""
    earlier = opened(store)
    _check_model(earlier, loaded)
    prompt = loaded.prompt.opened(earlier.manifest.opening)
    if prompt.template != earlier.manifest.template:
        raise StoreMismatch(
            f"{store} was prefilled in a {earlier.manifest.template} prompt, and this tokenizer makes a "
            f"{prompt.template} one: use the tokenizer that it was made with, or prefill all of it again."
        )
    admit_text(sum(len(document.text) for document in texts))
    with Peak() as peak:
        fresh = [text for text in texts if not _is_known(earlier, loaded.tokenizer, prompt, text)]
        tokens, documents, failed = encode_further(loaded.tokenizer, prompt, fresh, earlier.manifest.n_tokens)
    give_back()
    check_some(failed, texts)
    known = tuple(text.name for text in texts if text not in fresh)
    with memory_errors():
        report = append_tokens(loaded, tokens, documents, store, progress=progress)
    memory = max(peak.bytes, report.peak_memory)
    report = replace(report, skipped=skipped, failed=tuple(failed), notes=notes_on(fresh))
    return replace(report, known=known, peak_memory=memory)


def append_tokens(
    loaded: LoadedModel,
    tokens: Tokens,
    documents: Sequence[Document],
    store: Path,
    *,
    progress: Progress = lambda stage, done, total: None,
) -> AppendReport:
    """`append` with documents that are tokens already: the first begins where the store ends."""
    earlier = opened(store)
    _check_model(earlier, loaded)
    before = earlier.manifest.n_tokens
    began = time.perf_counter()
    growth = Growth(earlier, progress)
    indexes: list[BuildReport] = []
    left: list[str] = []
    boundary = resumed_from = _last_boundary(earlier)
    with Peak() as peak:
        if documents:
            method = method_of(earlier)
            loaded.lengths.of_store(earlier.manifest.rope, before).check(before + len(tokens) + 1)
            tell_of_indexer(loaded.model.config, before + len(tokens))
            loaded.trained.tell(before + len(tokens))
            whole = np.concatenate([earlier.tokens, np.asarray(tokens, np.int32)])
            chunk = method.options.chunk
            manifest = replace(
                earlier.manifest,
                n_tokens=len(whole),
                token_hash=token_hash(whole),
                kv_error={},
                seam=len(whole) // chunk * chunk,
                software=running_software(),
            )
            listed = [*earlier.documents, *documents]
            with KVStoreWriter.open(store, manifest, whole, listed, growth) as writer:
                resumed_from = writer.done
                prefill_chunks(loaded, writer, whole, method, progress)
                grown = KVStore.open(writer.seal())
                indexes, left = extend_indexes(earlier, grown, progress)
                progress("exchange", 0, 1)  # this may wait for processes that ask the earlier store
                writer.publish()
        else:
            partial = partial_path(Path(os.path.realpath(store)))
            remove_left(partial, over=is_left(partial, earlier.manifest))
        after = KVStore.open(store)
        publish_indexes(after)
    seconds, total = time.perf_counter() - began, after.manifest.n_tokens
    ran = total - resumed_from if documents else 0
    return AppendReport(
        store=store,
        n_tokens=total,
        added_tokens=total - before,
        repeated=before - boundary if documents else 0,
        documents=len(after.documents),
        added=tuple(document.name for document in documents),
        resumed_from=resumed_from if resumed_from > boundary else 0,
        seconds=seconds,
        tokens_per_second=ran / seconds,
        bytes=sum(after.cost().values()),
        shared=growth.shared,
        copied=growth.copied,
        peak_memory=peak.bytes,
        indexes=tuple(indexes),
        left=tuple(left),
    )


def opened(path: Path) -> KVStore:
    """The store at `path`, if documents can be added to it. Raises `StoreError`."""
    where = Path(os.path.realpath(path))
    if (partial_path(where) / REPLACED).exists():
        with locked(partial_path(where)):
            restore(where, partial_path(where) / REPLACED)
    store = KVStore.open(path)
    _last_boundary(store)
    return store


def method_of(store: KVStore) -> Method:
    """The method that a store was prefilled with, with its options. Raises `ConfigError` for one that is not
    installed, and `ExtensionError`.
    """
    stated = store.manifest.prefill
    name = str(stated["method"])
    if name not in names():
        raise ConfigError(
            f"{store.path} was prefilled by a method '{name}', which is neither built in nor installed: "
            "install the extension or the release that brings it"
        )
    known = {option.name for option in fields(get(name).options_type)}
    options = {key: value for key, value in stated.items() if key in known}
    return create(name, options, store.manifest.shape)


def _last_boundary(store: KVStore) -> int:
    """The token at which the last full chunk ended."""
    if store.manifest.seam is None:
        raise StoreForeign(
            f"{store.path} was made by an earlier release ({store.manifest.software}), whose stores keep too "
            "little for a prefill to continue: prefill all of it again."
        )
    return store.manifest.seam


def _check_model(store: KVStore, loaded: LoadedModel) -> None:
    store.check_model(
        config_hash=loaded.config_hash,
        weights_hash=loaded.weights_hash,
        tokenizer_hash=loaded.tokenizer_hash,
        dtype=loaded.dtype,
        shape=loaded.shape,
        model_id=loaded.model_id,
    )
    if loaded.weights != store.manifest.weights:
        raise StoreMismatch(
            f"{store.path} was prefilled with {store.manifest.weights} weights, and this model has "
            f"{loaded.weights} ones: load it with the same."
        )


def _is_known(store: KVStore, tokenizer: Any, prompt: Prompt, text: TextDocument) -> bool:
    """Whether a document of that name and text is in the store. Raises `CorpusError` for another text."""
    named = [document for document in store.documents if document.name == text.name]
    if not named:
        return False
    stored = [store.tokens[document.start : document.end] for document in named]
    forms = _forms(tokenizer, prompt, text, first=named[0] == store.documents[0])
    try:
        if any(np.array_equal(form, tokens) for form in forms for tokens in stored):
            return True
    except TextRefused:
        return False  # it fails once more where it is to be added
    raise CorpusError(
        f"{text.name} is in {store.path} already, with another text, and a store only grows: leave it out "
        "(--exclude) or give it another name, or prefill all of it again"
    )


def _forms(tokenizer: Any, prompt: Prompt, text: TextDocument, first: bool) -> Iterator[list[int]]:
    """The possible tokens of a document in a store. The `first` one opens the prompt, and is headed by its
    name if others came with it.
    """
    if first:
        yield prompt.document(tokenizer, text.text, first)
    yield prompt.document(tokenizer, headed(text), first)


class GrowingStore:
    """One store in `folder` of the beginning of a text, made longer with every call, with the `indexes` kinds
    of index.

    `most`: the tokens that it may come to hold, with all that follow it.
    """

    def __init__(
        self, loaded: LoadedModel, folder: Path, most: int, settings: Settings, indexes: Sequence[str] = ()
    ):
        self._loaded, self._most, self._settings, self._indexes = loaded, most, settings, indexes
        self._path = folder / "store"
        self._tokens: Tokens = np.zeros(0, np.int32)

    def __call__(self, tokens: Tokens, report: Callable[[int], None]) -> KVStore:
        """The store of `tokens [N]`; where the last one holds their beginning, only new tokens are prefilled.

        Raises as `prefill_tokens` and `append_tokens`.
        """

        def progress(stage: str, done: int, total: int) -> None:
            if stage == "prefill":
                report(done)

        known = len(self._tokens)
        if known and np.array_equal(self._tokens, tokens[:known]):
            if known < len(tokens):
                document = Document(f"from {known}", known, len(tokens))
                append_tokens(self._loaded, tokens[known:], [document], self._path, progress=progress)
        else:
            shutil.rmtree(self._path, ignore_errors=True)
            document = Document("from 0", 0, len(tokens))
            # Rotations may depend on the length of the whole text, and so the first chunk must know it.
            settings = replace(self._settings, context=self._most - len(tokens))
            prefill_tokens(self._loaded, tokens, [document], self._path, settings, progress=progress)
            for kind in self._indexes:
                build_indexes(self._path, kind)
        self._tokens = tokens
        return KVStore.open(self._path)
