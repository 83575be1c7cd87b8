"""Before heavy work: apply the memory limits that were given, and refuse at once what cannot fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from offload_decode.cli import options as opts
from offload_decode.cli import output
from offload_decode.cli.options import byte_count
from offload_decode.common.errors import ConfigError
from offload_decode.config import EngineConfig, parse_options, split_pairs

if TYPE_CHECKING:
    from offload_decode.engine.engine import Engine
    from offload_decode.models.loading import LoadedModel
    from offload_decode.planning.caps import Caps
    from offload_decode.prefill_jobs.on_ray.workers import Cluster
    from offload_decode.store.reader import KVStore


Admit = Callable[[int, int], int]
OpenEngine = Callable[[str], "Engine"]


def caps_of(gpu_memory: str | None, ram: str | None) -> Caps:
    """The limits as they were written; raises `ConfigError`."""
    from offload_decode.planning.caps import Caps

    return Caps(*(None if size is None else byte_count(size) for size in (gpu_memory, ram)))


@dataclass
class AskOptions:
    """How stores are asked, and the memory limits meanwhile: a group of options. Raises `ConfigError`."""

    selector: opts.Selector = "topk"
    option: opts.Options = None
    attend: opts.Attend = "auto"
    device_cache: opts.DeviceCache = None
    model: opts.Model = None
    weights: opts.Weights = "auto"
    device: opts.Device = "auto"
    gpu_memory: opts.GpuMemory = None
    ram: opts.Ram = None
    config: EngineConfig = field(init=False)

    def __post_init__(self) -> None:
        cache = 0 if self.device_cache is None else byte_count(self.device_cache)
        options = split_pairs(self.option or [])
        self.config = EngineConfig(
            self.model, self.selector, options, self.device, self.weights, self.attend, cache
        )

    @property
    def caps(self) -> Caps:
        return caps_of(self.gpu_memory, self.ram)


def cluster_of(
    workers: str | None,
    count: int | None,
    gpu_memory: str | None = None,
    ram: str | None = None,
    *,
    no_sync: bool = False,
    server: bool = False,
) -> Cluster | None:
    """The Ray cluster of `--workers`, or None. Raises `ConfigError` for options that do not go together."""
    if workers is None:
        if count:
            raise ConfigError("--worker-count needs --workers: give --workers ray too, or leave it out")
        return None
    for option, given in (("--no-sync and --workers", no_sync), ("--workers and --server", server)):
        if given:
            raise ConfigError(f"{option} do not go together: leave one of them out")

    from offload_decode.prefill_jobs.on_ray.workers import Cluster

    return Cluster(workers, count, caps_of(gpu_memory, ram))


def open_engine(store: Path, options: AskOptions) -> Engine:
    """Open a store to be asked, within the limits. Raises `DoesNotFit`, `ConfigError`, `StoreError`."""
    caps = options.caps

    from offload_decode.engine.engine import Engine
    from offload_decode.planning.caps import apply_caps

    opened, admit = check_store(store, options.config, caps)
    apply_caps(caps, options.config.device)
    engine = Engine.open(opened, config=options.config)
    engine.admit = admit
    return engine


def check_options(options: AskOptions, local: bool = True) -> None:
    """Refuse wrong options before a model is loaded, and apply the limits where this process answers."""
    from offload_decode.planning.caps import apply_caps
    from offload_decode.selectors.registry import get

    config = options.config
    parse_options(get(config.selector).options_type, config.options, f"selector '{config.selector}'")
    if local:
        apply_caps(options.caps, config.device)


def engine_opener(options: AskOptions) -> OpenEngine:
    """Opens engines one after another; stores that share a model load it once."""
    from offload_decode.common.memory import own_memory

    loaded: dict[tuple[str, str, str], LoadedModel] = {}
    before: int | None = None

    def open_engine(path: str) -> Engine:
        nonlocal before
        from offload_decode.engine.engine import Engine
        from offload_decode.models.loading import load

        config = options.config
        store, admit = check_store(path, config, options.caps, before)
        before = before or own_memory()
        name = store.manifest.model_id if config.model is None else config.model
        wanted = name, store.manifest.dtype, config.weights_after(store.manifest.weights)
        if wanted not in loaded:
            loaded.clear()
            loaded[wanted] = load(name, config.device, *wanted[1:])
        engine = Engine.open(store, loaded[wanted], config)
        engine.admit = admit
        return engine

    return open_engine


def check_store(
    store: Path | str, config: EngineConfig, caps: Caps, before: int | None = None
) -> tuple[KVStore, Admit]:
    """Open a store if it can be asked, with what admits its questions (`Conversation.admit`). `before`: bytes
    that the process used before it loaded a model, where it has loaded one already.
    """
    from offload_decode.cli.bus_error import exit_on_bus_error
    from offload_decode.cli.compiling import announce_compiling
    from offload_decode.common.memory import own_memory
    from offload_decode.kv.indexes import default_kind
    from offload_decode.models.size_estimate import outline
    from offload_decode.planning.caps import admit_question, check_ask, planned_ask
    from offload_decode.store.reader import KVStore

    announce_compiling()
    exit_on_bus_error()
    opened = KVStore.open(store)
    estimate = outline(opened.manifest.model_id if config.model is None else config.model)
    given = estimate, opened.manifest, config, caps, own_memory() if before is None else before
    index = default_kind(opened)
    for sentence in check_ask(*given, index=index):
        output.note(sentence)
    return opened, partial(admit_question, planned_ask(*given, index=index), caps)
