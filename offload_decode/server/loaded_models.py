"""What is in memory: loaded models, and stores that are open with a selector, the least used out first."""

import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from offload_decode.common.errors import ConfigError
from offload_decode.common.memory import own_memory
from offload_decode.engine.conversation import Conversation
from offload_decode.engine.crossover import decide
from offload_decode.engine.engine import Engine, without_corpus
from offload_decode.engine.step import StoredPrefix
from offload_decode.kv.host_cache import HostKV
from offload_decode.kv.indexes import default_kind
from offload_decode.models.loading import LoadedModel, load
from offload_decode.models.size_estimate import estimate_size
from offload_decode.planning.caps import admit_question, check_ask, planned_ask
from offload_decode.server.catalog import Entry
from offload_decode.server.prefix_cache import PrefixKey, is_of, prefix_key
from offload_decode.server.requests import Loading, Settings
from offload_decode.store.reader import KVStore

LOG = logging.getLogger("offload_decode.server")
RETURN_S = 10.0
"""So long a model that was loaded waits for the request that wanted it, before another may take its place."""
MOST_WAYS = 8
"""Selectors and options with which one store is open: each keeps what it searches in memory."""
MOST_FILES = 1 << 15
"""Of stores that are open: Linux gives a process 65,530 maps of memory by default."""
PATIENCE_S = 30.0
"""`Releases` waits so long for a moment in which nobody asks; then nobody may ask until it is done."""
_POLL_S = 0.02


class ModelKey(NamedTuple):
    """What tells loaded models apart, as `load` takes them."""

    model_id: str
    dtype: str
    weights: str
    scaled: str = ""
    adapter: str = ""


@dataclass(frozen=True)
class Target:
    """A name that can be asked, with a selector: forks of `start` answer.

    key: equal for those whose remembered turns may stand for each other. files: of the store.
    """

    entry: Entry
    key: PrefixKey
    loaded: LoadedModel
    start: Conversation
    files: int = 0

    @property
    def stored(self) -> bool:
        """There is a corpus before the question."""
        return self.entry.path is not None


class LoadedModels:
    """Opens what requests name. Any thread may ask; a model is loaded in a thread of its own, and until it is
    there its requests are refused with `Loading`. `tell_closed` is told the keys of those that are
    closed to make room for others, or with their model; it must not come back to ask.
    """

    def __init__(self, settings: Settings, tell_closed: Callable[[PrefixKey], None] = lambda key: None):
        self.settings = settings
        self._tell_closed = tell_closed
        self._held = own_memory()  # before any model
        self._open: OrderedDict[PrefixKey, Target] = OrderedDict()
        self._hosts: WeakValueDictionary[tuple[str, str], HostKV] = WeakValueDictionary()
        self._models: OrderedDict[ModelKey, Future[LoadedModel]] = OrderedDict()
        # Until when (by `time.monotonic`) one that has answered nobody yet keeps its place.
        self._unused: dict[ModelKey, float] = {}
        self._since: dict[ModelKey, float] = {}  # when its loading began
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._loader = ThreadPoolExecutor(1, "loader")

    def preload(self, entry: Entry) -> Future[LoadedModel]:
        """Begin to load an entry's model."""
        with self._lock:
            return self._loading(self._model_key(entry))

    def loading(self) -> bool:
        """A model is being loaded."""
        with self._lock:
            return any(not model.done() for model in self._models.values())

    def models(self) -> list[str]:
        """Ids of the models that are in memory."""
        with self._lock:
            return [key.model_id for key in self._ready()]

    def open_stores(self) -> list[str]:
        """Names that are open."""
        with self._lock:
            return sorted({target.entry.name for target in self._open.values()})

    def get(
        self, entry: Entry, selector: str | None = None, options: Mapping[str, object] | None = None
    ) -> Target:
        """An entry with a selector and its options, the server's own where none is named. Raises `Loading`,
        `ConfigError`, `StoreError`, `ModelError` or `DoesNotFit`.
        """
        config = self.settings.config
        if entry.path is None:
            selector, merged = "", {}
        elif selector is None:
            selector, merged = config.selector, {**config.options, **(options or {})}
        else:
            merged = dict(options or {})
        key = prefix_key(entry.name, selector, merged, entry.digest)
        with self._lock:
            if key in self._open:
                self._open.move_to_end(key)
                return self._open[key]
        loaded = self.model(entry)
        with self._opening:  # of several requests for one store, one opens it
            with self._lock:
                if key in self._open:
                    return self._open[key]
            if entry.path is None:
                target = Target(entry, key, loaded, without_corpus(loaded))
            else:
                engine = self._opened(entry, entry.path, loaded, selector, merged)
                assert isinstance(engine.store, KVStore), "it was opened from disk"
                files = sum(spec.file_count for spec in engine.store.specs.values())
                target = Target(entry, key, loaded, engine, files)
            with self._lock:
                if any(loaded is ready for ready in self._ready().values()):
                    self._open[key] = target  # else another model took the place of its own meanwhile
                self._make_room(key.model)
        return target

    def model(self, entry: Entry) -> LoadedModel:
        """The model of an entry. Raises `Loading` while it is being loaded, and what its loading raised."""
        with self._lock:
            key = self._model_key(entry)
            found = self._loading(key)
            if not found.done():
                since = time.monotonic() - self._since[key]
                raise Loading(
                    f"the model of '{entry.name}' has been loading for {since:.0f} s: try again soon", 2
                )
            self._unused.pop(key, None)
            if found.exception() is not None:
                del self._models[key]  # the next request tries again
            else:
                self._models.move_to_end(key)
        return found.result()

    def forget(self, name: str) -> None:
        """Close what is open under a name, and the documents of a collection of that name; answers that are
        being written go on.
        """
        with self._lock:
            for key in [key for key in self._open if is_of(key.model, name)]:
                del self._open[key]
            for host in [host for host in self._hosts if is_of(host[0], name)]:
                del self._hosts[host]

    def close(self) -> None:
        """Load nothing more."""
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _make_room(self, opened: str) -> None:
        """With the lock held: close what was used longest ago, until there is room."""
        ways = [key for key in self._open if key.model == opened]
        for key in ways[: max(0, len(ways) - MOST_WAYS)]:
            self._close(key)
        while len(self._open) > 1:
            files = {key.model: one.files for key, one in self._open.items()}
            if len(self._open) <= self.settings.max_open and sum(files.values()) <= MOST_FILES:
                break
            self._close(next(iter(self._open)))

    def _close(self, key: PrefixKey) -> None:
        del self._open[key]
        self._tell_closed(key)

    def _model_key(self, entry: Entry) -> ModelKey:
        config = self.settings.config
        named, weights = config.model or entry.model_id, config.weights_after(entry.weights)
        adapter = config.adapter or entry.adapter
        if entry.path is None:  # a bare model answers in the dtype in which it is there
            for key in reversed(self._models):
                if key._replace(dtype="") == (named, "", weights, entry.scaled, adapter):
                    return key
        return ModelKey(named, entry.dtype, weights, entry.scaled, adapter)

    def _loading(self, key: ModelKey) -> Future[LoadedModel]:
        """With the lock held: the model, or the promise of it, in the place of the one that was used longest
        ago. One that was loaded and has answered nobody yet stays for a while: two that are asked for in turn
        would keep each other out.
        """
        if key in self._models:
            return self._models[key]
        while len(self._models) >= self.settings.max_models:
            now = time.monotonic()
            oldest = next((one for one in self._models if self._unused.get(one, now) <= now), None)
            if oldest is None:
                raise Loading("another model is being loaded: try again in a moment", 5)
            self._drop(oldest)
        self._unused[key] = math.inf
        self._since[key] = time.monotonic()
        self._models[key] = self._loader.submit(self._load, key)
        return self._models[key]

    def _ready(self) -> dict[ModelKey, LoadedModel]:
        """With the lock held."""
        done = ((key, model) for key, model in self._models.items() if model.done())
        return {key: model.result() for key, model in done if model.exception() is None}

    def _drop(self, key: ModelKey) -> None:
        loaded = self._ready().get(key)
        self._models.pop(key).cancel()
        self._unused.pop(key, None)
        if loaded is not None:
            for one in [one for one, target in self._open.items() if target.loaded is loaded]:
                self._close(one)
            LOG.info("dropped the model %s", key.model_id)

    def _load(self, key: ModelKey) -> LoadedModel:
        LOG.info("loading the model %s", key.model_id)
        try:
            loaded = load(key.model_id, self.settings.config.device, *key[1:])
            if loaded.activated:
                raise ConfigError(
                    f"{key.adapter} is an activated LoRA, which a server does not switch on in a request: "
                    "leave --adapter out, or use `offload-decode ask`, `chat` or `batch`"
                )
        finally:
            with self._lock:
                if key in self._unused:
                    self._unused[key] = time.monotonic() + RETURN_S
        passes = "shares passes" if loaded.packs else "answers one conversation at a time"  # checked here
        LOG.info("loaded the model %s, which %s", key.model_id, passes)
        return loaded

    def _opened(
        self, entry: Entry, path: Path, loaded: LoadedModel, selector: str, options: Mapping[str, object]
    ) -> Engine:
        """The store at its end, as a selector sees it; those of one store share its rows and indexes."""
        caps = self.settings.caps
        config = replace(self.settings.config, selector=selector, options=options)
        if host := self._hosts.get((entry.name, entry.digest)):
            prefix = StoredPrefix.over(host, loaded.shape, selector, options)
            decide(prefix, loaded.shape, config.crossover)
            engine = Engine(loaded, host.store, prefix)
        else:
            engine = Engine.open(KVStore.open(path), loaded, config)
            with self._lock:  # `forget` walks through them
                self._hosts[entry.name, entry.digest] = engine.prefix.host
        store = engine.store
        estimate, index = estimate_size(loaded.model_id), default_kind(store)
        planned = planned_ask(estimate, store.manifest, config, caps, self._held, index=index)
        for sentence in check_ask(planned, caps):
            LOG.info("%s: %s", entry.name, sentence)
        engine.admit = partial(admit_question, planned, caps)
        return engine


class Releases:
    """Waits for the answers that read a store which is to be replaced or removed. `busy` says whether a name
    is being answered from, and `close` closes what is open under it.
    """

    def __init__(self, busy: Callable[[str], bool], close: Callable[[str], None]) -> None:
        self._busy, self._close = busy, close
        self._lock = threading.Lock()
        self._beginning: Counter[str] = Counter()
        self._closed: set[str] = set()

    @contextmanager
    def asking(self, *names: str) -> Iterator[None]:
        """While a request for names is begun. Raises `Loading` while a store of theirs is being replaced."""
        with self._lock:
            for name in self._closed.intersection(names):
                raise Loading(f"'{name}' is being replaced: try again in a moment", 1)
            self._beginning += Counter(names)
        try:
            yield
        finally:
            with self._lock:
                self._beginning -= Counter(names)  # which drops those at 0: names are what clients write

    @contextmanager
    def released(self, name: str) -> Iterator[None]:
        """A time in which nothing uses the store of a name; one at a time for each."""
        patient_until = time.monotonic() + PATIENCE_S
        while True:
            if time.monotonic() >= patient_until or not self._used(name):
                with self._lock:
                    if name not in self._closed:
                        self._closed.add(name)
                        break
            time.sleep(_POLL_S)
        try:
            while self._used(name):
                time.sleep(_POLL_S)
            self._close(name)
            yield
        finally:
            with self._lock:
                self._closed.discard(name)

    def _used(self, name: str) -> bool:
        with self._lock:
            begins = name in self._beginning
        return begins or self._busy(name)
