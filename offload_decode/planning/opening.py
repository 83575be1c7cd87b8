"""Stores opened to be asked, one after another, within the limits of a process that holds one model."""

from collections.abc import Callable, Sequence
from functools import partial

from offload_decode.common.errors import ConfigError
from offload_decode.common.memory import own_memory
from offload_decode.config import EngineConfig
from offload_decode.engine.engine import Engine
from offload_decode.kv.indexes import default_kind
from offload_decode.models.loading import LoadedModel, load
from offload_decode.models.size_estimate import estimate_size
from offload_decode.planning.caps import Caps, admit_question, apply_caps, check_ask, planned_ask
from offload_decode.planning.plan import Plan
from offload_decode.store.format import Manifest
from offload_decode.store.reader import KVStore


class Opener:
    """Opens engines; stores that share a model load it once. `tell` gets sentences on what to know before;
    `release` lets go of the engines of a model before another one takes its place. Unless the process is
    `limited` already, the limits are applied when a store is known to fit: a refusal says what would.
    """

    def __init__(
        self,
        config: EngineConfig,
        caps: Caps,
        *,
        limited: bool = True,
        tell: Callable[[str], None] = lambda sentence: None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.caps, self.limited, self.tell, self.release = config, caps, limited, tell, release
        self.before = 0  # bytes that the process used before it loaded a model
        self._model: tuple[tuple[str, ...], LoadedModel] | None = None

    def open_all(self, paths: Sequence[str]) -> list[Engine]:
        """Stores that are asked together: their memory is checked in sum. Raises as `open`, and `ConfigError`
        for stores of several models, or of one that is loaded in several ways.
        """
        stores = [KVStore.open(path) for path in paths]
        first = stores[0].manifest
        for path, own in zip(paths, (store.manifest for store in stores), strict=True):
            if own.weights_hash != first.weights_hash:
                one, other = (
                    f"{made.model_id}{made.adapter and ' with '}{made.adapter}" for made in (own, first)
                )
                raise ConfigError(
                    f"{path} was made by {one}, and {paths[0]} by {other}: give stores of one model"
                )
            if (form := self._form(own)) != (other := self._form(first)):
                made = f"{path} is asked with another form of the model ({form}) than {paths[0]} ({other})"
                raise ConfigError(f"{made}: give stores that were prefilled alike")
        if len(stores) > 1:
            whole = self._planned(stores[0]).changed(tokens=sum(one.manifest.n_tokens for one in stores))
            check_ask(whole, self.caps, f"asking {len(stores)} stores together")
        return [self.open(path) for path in paths]

    def _form(self, manifest: Manifest) -> str:
        weights = self.config.weights_after(manifest.weights)
        return f"{manifest.dtype}, weights {weights}{manifest.scaled and ', rope '}{manifest.scaled}"

    def _planned(self, store: KVStore) -> Plan:
        config, manifest, index = self.config, store.manifest, default_kind(store)
        estimate = estimate_size(manifest.model_id if config.model is None else config.model)
        self.before = self.before or own_memory()
        return planned_ask(estimate, manifest, config, self.caps, self.before, index=index)

    def open(self, path: str) -> Engine:
        """Raises `DoesNotFit`, `ConfigError`, `StoreError`, `ModelError`."""
        config, caps, store = self.config, self.caps, KVStore.open(path)
        manifest = store.manifest
        named = manifest.model_id if config.model is None else config.model
        planned = self._planned(store)
        for sentence in check_ask(planned, caps):
            self.tell(sentence)
        if not self.limited:
            apply_caps(caps, config.device)
        how = manifest.dtype, config.weights_after(manifest.weights), manifest.scaled
        wanted = named, *how, config.adapter or manifest.adapter
        if self._model is None or self._model[0] != wanted:
            self.release()
            self._model = None
            self._model = wanted, load(named, config.device, *wanted[1:])
        engine = Engine.open(store, self._model[1], config)
        engine.admit = partial(admit_question, planned, caps)
        return engine
