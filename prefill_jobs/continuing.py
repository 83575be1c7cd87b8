"""A store is written, from its first token or behind those that it begins with as an earlier one does.

The result equals one prefill of all tokens in the same chunks. So the earlier store is kept up to a chunk
boundary before the first token that differs, at which all that the next chunk needs is kept (`store.marks`).
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload_decode.common.errors import (
    ConfigError,
    CorpusError,
    IndexNotWritten,
    StoreBusy,
    StoreDamaged,
    StoreForeign,
    StoreMismatch,
    TextRefused,
)
from offload_decode.common.memory import Peak
from offload_decode.hf.cache import CorpusCache
from offload_decode.hf.mla import tell_of_indexer
from offload_decode.models.loading import LoadedModel, load
from offload_decode.models.prompt import Prompt
from offload_decode.prefill_jobs.chunks import WrittenPrefix, output_to, prefill_chunks
from offload_decode.prefill_jobs.corpus import TextDocument, headed
from offload_decode.prefill_jobs.finite import Extremes
from offload_decode.prefill_jobs.indexing import BuildReport, extend_indexes, publish_indexes
from offload_decode.prefill_jobs.methods.base import Method
from offload_decode.prefill_jobs.methods.registry import create, get, names
from offload_decode.store.files import Progress
from offload_decode.store.format import Array, Manifest, running_software, token_hash
from offload_decode.store.growth import Growth, is_left, missing_samples
from offload_decode.store.marks import marks_for, row_bytes
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import Committed, partial_path
from offload_decode.store.writer import KVStoreWriter, remove_left, undo_exchange
from offload_decode.types import Document

Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]


def opened(path: Path) -> KVStore:
    """The store at `path`, if it can be continued. Raises `StoreError`."""
    undo_exchange(path)
    store = KVStore.open(path)
    if store.manifest.seam is None:
        raise StoreForeign(
            f"{store.path} was made by an earlier release ({store.manifest.software}), whose stores keep too "
            "little for a prefill to continue: prefill all of it again."
        )
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


def load_for(store: KVStore, model: str | None, device: str, weights: str, adapter: str = "") -> LoadedModel:
    """The model of a store, or the `model` and the `adapter` that are named in its place; `weights`: `auto`,
    as the store was made, or `streamed`. Raises as `models.loading.load`.
    """
    own = store.manifest
    weights = own.weights if weights == "auto" else weights
    return load(model or own.model_id, device, own.dtype, weights, own.scaled, adapter or own.adapter)


def check_model(store: KVStore, loaded: LoadedModel) -> None:
    """Raise `StoreMismatch` for another model than that of the store."""
    store.check_model(**loaded.identity)
    if loaded.weights != store.manifest.weights:
        raise StoreMismatch(
            f"{store.path} was prefilled with {store.manifest.weights} weights, and this model has "
            f"{loaded.weights} ones: load it with the same."
        )


def check_length(store: KVStore, loaded: LoadedModel, tokens: int) -> None:
    """Raise `ConfigError` where the positions of a store do not allow for so many `tokens` in all; what is
    beyond the training is told.
    """
    loaded.lengths.of_store(store.manifest.rope, store.manifest.n_tokens).check(tokens + 1)
    method = str(store.manifest.prefill.get("method"))
    tell_of_indexer(loaded.model.config, tokens, loaded.shape.index is not None, method)
    loaded.trained.tell(tokens)


def prompt_of(store: KVStore, prompt: Prompt) -> Prompt:
    """The prompt of the store's model with the opening of the store, which may name another day. Raises
    `StoreMismatch`.
    """
    if prompt.template != store.manifest.template:
        raise StoreMismatch(
            f"{store.path} was prefilled in a {store.manifest.template} prompt, and this tokenizer makes a "
            f"{prompt.template} one: use the tokenizer that it was made with, or prefill all of it again."
        )
    return prompt.opened(store.manifest.opening)


def is_known(store: KVStore, tokenizer: Any, prompt: Prompt, text: TextDocument) -> bool:
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


@dataclass(frozen=True)
class Start:
    """Where a prefill of other tokens begins: behind the first `kept` of the `earlier` store. `again`: tokens
    before, of chunks that run once more because a shorter store keeps other queries of them.
    """

    earlier: KVStore
    manifest: Manifest
    kept: int
    again: int


def start_of(earlier: KVStore, tokens: Tokens) -> Start:
    """The start from which `tokens` take the fewest. Raises as `method_of`."""
    own, chunk = earlier.manifest, method_of(earlier).options.chunk
    new = replace(
        own,
        n_tokens=len(tokens),
        token_hash=token_hash(tokens),
        kv_error={},
        seam=len(tokens) // chunk * chunk,
        software=running_software(),
    )
    shorter = min(len(tokens), own.n_tokens)
    same = np.append(earlier.tokens[:shorter] == tokens[:shorter], False).argmin()
    # The last chunk runs in any case, so that it is known which page and chunk were left open.
    cuts = np.arange(0, min(int(same), len(tokens) - 1) + 1, chunk)
    if any(row_bytes(own, layer) for layer in own.shape.layers):
        marked = cuts % own.marks == 0 if own.marks else cuts == 0
        cuts = cuts[marked | (cuts == own.seam)]
    lacking = np.unique(missing_samples(own, new) // chunk) * chunk
    again = np.searchsorted(lacking, cuts)
    if own.shape.local_layers or own.shape.state_layers:  # a chunk does not run alone
        cuts, again = cuts[again == 0], again[again == 0]
    best = int(np.argmin(again * chunk - cuts))
    kept = int(cuts[best])
    if not kept:
        new = replace(new, marks=marks_for(new), base=None)
    elif new.base:
        new = replace(new, base={**new.base, "tokens": min(kept, new.base["tokens"])})
    return Start(earlier, new, kept, int(again[best]) * chunk)


def start_beside(earlier: KVStore, manifest: Manifest, tokens: Tokens) -> Start | None:
    """The start of a store of `tokens` with this `manifest` beside the `earlier` one; None where that was
    made in another way, or has nothing that could stay.
    """
    start = start_of(earlier, tokens)
    other = dict.fromkeys(("opening", "trained"))  # the one is in the tokens, the other makes no difference
    same = vars(start.manifest) | other == vars(manifest) | other
    return start if same and start.kept else None


class _Earlier:
    """A store as if it were being written and had come to the token `done`; what is written next is dropped,
    but for its queries at some places.
    """

    def __init__(self, store: KVStore, done: int, positions: Array, heads: Array, found: dict[int, Array]):
        self.manifest, self.done = store.manifest, done
        self.keys, self.values, self.key_norms = store.keys, store.values, store.key_norms
        self._positions, self._heads, self._found = positions, heads, found

    def samples(self, start: int, stop: int) -> tuple[slice, Array, Array]:
        slots = slice(*np.searchsorted(self._positions, [start, stop]).tolist())
        return slots, self._positions[slots], self._heads[slots]

    def put_queries(self, layer: int, slots: slice, queries: Array) -> None:
        count = len(self._positions)
        every = self._found.setdefault(
            layer, np.empty((len(queries), count, queries.shape[2]), queries.dtype)
        )
        every[:, slots] = queries

    def append(self, layer: int, keys: Array, values: Array) -> None: ...

    def commit(self, tokens: int) -> None: ...


def _run_again(
    loaded: LoadedModel, earlier: KVStore, progress: Progress, positions: Array, heads: Array
) -> dict[int, Array]:
    """The queries `[Hkv, n, D]` of each layer at n places of the earlier store: their chunks run again."""
    method, found = method_of(earlier), dict[int, Array]()
    chunk = method.options.chunk
    starts = np.unique(positions // chunk).tolist()
    where = loaded.lengths.of_store(earlier.manifest.rope, earlier.manifest.n_tokens)
    for number, start in enumerate(starts):
        progress("run again", number, len(starts))
        done = start * chunk
        written = _Earlier(earlier, done, positions, heads, found)
        with Extremes(loaded) as extremes, output_to(written, loaded.device) as output:
            prefix = WrittenPrefix(written, method, output, loaded.device, extremes)
            cache = CorpusCache.over(prefix, loaded.shape, {}, positions=where)
            prefix.begin_chunk(cache)
            part = np.array(earlier.tokens[done : done + chunk], np.int64)
            loaded.encode(torch.from_numpy(part)[None], cache)
    return found


@dataclass(frozen=True)
class WriteReport:
    """What was done: of `n_tokens` the first `kept_tokens` stay as they were; `again` are those that ran once
    more for their queries; `resumed_from`: tokens at which an interrupted run had stopped, or these. Sizes in
    bytes, times in seconds, speed over the tokens of this run alone. `shared` and `copied`: bytes of the
    earlier store that this run put into the new one. `grown`: the earlier store is the beginning of the new
    one, so that its indexes are extended where no key has changed, and not built anew. `left`: for each kind
    of index of which neither was done, a sentence with the reason. `discarded`: tokens that an interrupted
    run for another text had run, which this one does not go on from.
    """

    n_tokens: int
    kept_tokens: int
    again: int
    resumed_from: int
    seconds: float
    tokens_per_second: float
    bytes: int
    shared: int
    copied: int
    peak_memory: int
    grown: bool
    indexes: tuple[BuildReport, ...]
    left: tuple[str, ...]
    discarded: int


def write_store(
    loaded: LoadedModel,
    manifest: Manifest,
    tokens: Tokens,
    documents: Sequence[Document],
    method: Method,
    store: Path,
    progress: Progress,
    start: Start | None = None,
    command: str = "prefill",
    stays: bool = False,
    whole: bool = False,
) -> WriteReport:
    """Prefill `tokens` and publish the `store`: behind a `start`, where there is one, and with the indexes of
    that store, which `stays` or is over then. An interrupted run is resumed by the same
    call, which users know as `command`; one for other documents is discarded where `Growth.supersedes` it.

    Raises `StoreError` and `VectorIndexError`.
    """
    began = time.perf_counter()
    growth, grown = None, False
    indexes, left = list[BuildReport](), list[str]()
    if start:
        queries = partial(_run_again, loaded, start.earlier, progress)
        growth = Growth(start.earlier, start.kept, progress, command, queries, stays, whole)
    with Peak() as peak, KVStoreWriter.open(store, manifest, tokens, documents, growth) as writer:
        resumed_from = writer.done
        prefill_chunks(loaded, writer, tokens, method, progress)
        replaces = growth is not None and growth.replaces(store)
        if start:
            earlier, new = start.earlier, KVStore.open(writer.seal())
            # A kill may have left those of the earlier store unpublished. Where it stays others may be at it.
            with nullcontext() if replaces else suppress(StoreBusy, IndexNotWritten):
                publish_indexes(earlier)
            grown = np.array_equal(earlier.tokens, new.tokens[: len(earlier.tokens)])
            where = earlier.path if replaces else writer.path
            # The last chunk ran again with more tokens, for which a sparse method may choose others.
            sure = start.kept if method.chunk_shapes else earlier.manifest.n_tokens
            indexes, left = extend_indexes(earlier, new, where, grown, sure, progress)
        if replaces:
            progress("exchange", 0, 1)  # this may wait for processes that ask the earlier store
        writer.publish()
    after = KVStore.open(store)
    if start:
        publish_indexes(after)
    seconds = time.perf_counter() - began
    return WriteReport(
        n_tokens=len(tokens),
        kept_tokens=start.kept if start else 0,
        again=start.again if start else 0,
        resumed_from=resumed_from,
        seconds=seconds,
        tokens_per_second=(len(tokens) - resumed_from) / seconds,
        bytes=sum(after.cost().values()),
        shared=growth.shared if growth else 0,
        copied=growth.copied if growth else 0,
        peak_memory=peak.bytes,
        grown=grown,
        indexes=tuple(indexes),
        left=tuple(left),
        discarded=growth.discarded if growth else 0,
    )


def replaced(
    loaded: LoadedModel,
    earlier: KVStore,
    tokens: Tokens,
    documents: Sequence[Document],
    store: Path,
    command: str,
    progress: Progress,
    whole: bool = False,
) -> WriteReport:
    """Put a store of `tokens` in the place of the `earlier` one at `store`. `command` goes on where it was
    interrupted; until the new store is whole the earlier one stays. `whole` as in `Growth`.

    Raises `ConfigError`, `StoreError` and `VectorIndexError`.
    """
    check_model(earlier, loaded)
    method, start = method_of(earlier), start_of(earlier, tokens)
    check_length(earlier, loaded, len(tokens))
    return write_store(
        loaded,
        start.manifest,
        tokens,
        documents,
        method,
        store,
        progress,
        start,
        command=command,
        whole=whole,
    )


def settle(store: Path, earlier: KVStore, whole: bool = False) -> int:
    """Finish what a run that was killed after publishing left, where there is nothing else to do. With
    `whole`, the `earlier` store is of all of the corpus as it is now, and what was begun for another is
    removed; the tokens that this had run.
    """
    partial_folder = partial_path(Path(os.path.realpath(store)))
    over = is_left(partial_folder, earlier)
    begun = 0
    if whole and not over:
        with suppress(StoreDamaged):
            begun = Committed.load(partial_folder).ran
    remove_left(partial_folder, over=over or whole)
    publish_indexes(earlier)
    return 0 if partial_folder.exists() else begun  # another process may be at work there
