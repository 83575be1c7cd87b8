"""Documents added to a finished store: the prefill continues, and the longer store takes its place.

The result equals one prefill of all tokens in the same chunks: the last chunk of the earlier store, if it was
not full, runs again with what follows.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from offload_decode.common.memory import Peak, give_back
from offload_decode.models.loading import LoadedModel
from offload_decode.prefill_jobs.continuing import (
    Tokens,
    check_model,
    is_known,
    load_for,
    opened,
    prompt_of,
    replaced,
    settle,
)
from offload_decode.prefill_jobs.corpus import (
    Note,
    TextDocument,
    check_some,
    encode_corpus,
    notes_on,
    read_corpus,
)
from offload_decode.prefill_jobs.folders import EVERYTHING, Rules, Skipped
from offload_decode.prefill_jobs.indexing import BuildReport, build_indexes
from offload_decode.prefill_jobs.job import Settings, admit_text, memory_errors, prefill_tokens
from offload_decode.store.files import Progress
from offload_decode.store.reader import KVStore
from offload_decode.types import Document


@dataclass(frozen=True, kw_only=True)
class AppendReport:
    """What an append did: sizes in bytes, times in seconds, speed over the tokens of this run alone.

    `added` and `known` name the new documents and those that were in the store already; `failed` are left
    out, because the tokenizer fails on them. Of `n_tokens`,
    `added_tokens` are new; `repeated` ones of the earlier store ran again. `shared` and `copied`: bytes of
    the earlier store that this run put into the new one. `left`: for each kind of index that was not
    extended, a sentence with the reason. `discarded`: tokens that an interrupted run with another text of
    these documents had run.
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
    shared: int = 0
    copied: int = 0
    peak_memory: int = 0
    indexes: tuple[BuildReport, ...] = ()
    left: tuple[str, ...] = ()
    discarded: int = 0

    @property
    def kept(self) -> bool:
        return not self.added


def append(
    store: Path,
    corpus: str,
    *,
    model: str | None = None,
    adapter: str = "",
    device: str = "auto",
    weights: str = "auto",
    rules: Rules = EVERYTHING,
    progress: Progress = lambda stage, done, total: None,
) -> AppendReport:
    """Add the documents of `corpus` (a file, a folder, or `-`) to a store, with the model, the method and the
    settings that it was made with; `model` and `adapter`: where these are now. `weights`: `auto`, as the
    store was made, or `streamed` (`models.layer_streaming`). `rules`: what to read of a folder.

    An interrupted append is resumed by the same call, and discarded where its documents have another text by
    then; the earlier store stays in its place until the longer one takes it. Documents that the store has
    already are skipped. Raises `CorpusError`, `ModelError`, `StoreError`, `ConfigError`, `DoesNotFit` and
    `VectorIndexError`.
    """
    earlier = opened(store)
    texts, skipped = read_corpus(corpus, rules)
    loaded = load_for(earlier, model, device, weights, adapter)
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
    check_model(earlier, loaded)
    prompt = prompt_of(earlier, loaded.prompt)
    admit_text(sum(len(document.text) for document in texts))
    with Peak() as peak:
        fresh = [text for text in texts if not is_known(earlier, loaded.tokenizer, prompt, text)]
        tokens, documents, failed = encode_corpus(loaded.tokenizer, prompt, fresh, earlier.manifest.n_tokens)
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
    check_model(earlier, loaded)
    before = earlier.manifest.n_tokens
    if not documents:
        settle(store, earlier)
        size = sum(earlier.cost().values())
        nothing: dict[str, Any] = {"added_tokens": 0, "repeated": 0, "added": (), "resumed_from": 0}
        nothing |= {"seconds": 0.0, "tokens_per_second": 0.0, "bytes": size}
        return AppendReport(store=store, n_tokens=before, documents=len(earlier.documents), **nothing)
    whole = np.concatenate([earlier.tokens, np.asarray(tokens, np.int32)])
    listed = [*earlier.documents, *documents]
    done = replaced(loaded, earlier, whole, listed, store, "append", progress)
    return AppendReport(
        store=store,
        n_tokens=done.n_tokens,
        added_tokens=done.n_tokens - before,
        repeated=before - done.kept_tokens,
        documents=len(listed),
        added=tuple(document.name for document in documents),
        resumed_from=done.resumed_from if done.resumed_from > done.kept_tokens else 0,
        seconds=done.seconds,
        tokens_per_second=done.tokens_per_second,
        bytes=done.bytes,
        shared=done.shared,
        copied=done.copied,
        peak_memory=done.peak_memory,
        indexes=done.indexes,
        left=done.left,
        discarded=done.discarded,
    )


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
