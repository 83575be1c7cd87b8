"""Before heavy work: apply the memory limits that were given, and refuse at once what cannot fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from offload_decode.cli import options as opts
from offload_decode.cli import output
from offload_decode.cli.options import byte_count
from offload_decode.common.errors import ConfigError
from offload_decode.config import AUTO, EngineConfig, parse_options, split_pairs

if TYPE_CHECKING:
    from offload_decode.engine.engine import Engine
    from offload_decode.planning.caps import Caps
    from offload_decode.planning.opening import Opener
    from offload_decode.prefill_jobs.on_ray.workers import Cluster


def caps_of(gpu_memory: str | None, ram: str | None) -> Caps:
    """The limits as they were written; raises `ConfigError`."""
    from offload_decode.planning.caps import Caps

    return Caps(*(None if size is None else byte_count(size) for size in (gpu_memory, ram)))


@dataclass
class AskOptions:
    """How stores are asked, and the memory limits meanwhile: a group of options. Raises `ConfigError`."""

    selector: opts.Selector = AUTO
    option: opts.Options = None
    attend: opts.Attend = "auto"
    device_cache: opts.DeviceCache = None
    model: opts.Model = None
    adapter: opts.Adapter = ""
    weights: opts.Weights = "auto"
    device: opts.Device = "auto"
    gpu_memory: opts.GpuMemory = None
    ram: opts.Ram = None
    config: EngineConfig = field(init=False)

    def __post_init__(self) -> None:
        cache = 0 if self.device_cache is None else byte_count(self.device_cache)
        options = split_pairs(self.option or [])
        own = self.model, self.selector, options, self.device, self.weights, self.attend, cache
        self.config = EngineConfig(*own, crossover=True, adapter=self.adapter)

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


def check_options(options: AskOptions, local: bool = True) -> None:
    """Refuse wrong options before a model is loaded, and apply the limits where this process answers."""
    from offload_decode.planning.caps import apply_caps
    from offload_decode.selectors.registry import get

    config = options.config
    parse_options(get(config.selector).options_type, config.options, f"selector '{config.selector}'")
    if local:
        apply_caps(options.caps, config.device)


def open_engine(store: Path, options: AskOptions, least: float | None = None) -> Engine:
    """Open a store to be asked, within the limits; `least` as for `engine_opener`. Raises `DoesNotFit`,
    `ConfigError`, `StoreError`.
    """
    return engine_opener(options, limited=False, least=least)(str(store))


def engine_opener(
    options: AskOptions, limited: bool = True, least: float | None = None
) -> Callable[[str], Engine]:
    """Opens engines one after another, in a process that is `limited` already or not (`planning.opening`).
    Where answers must be grounded by `least`, a model of which that is not known is refused.
    """
    opener = opener_of(options, limited)
    return opener.open if least is None else lambda store: _measured(opener.open(store))


def opener_of(options: AskOptions, limited: bool = True) -> Opener:
    """What opens them, which also opens several that are asked together."""
    caps = options.caps

    from offload_decode.cli.compiling import announce_compiling, exit_on_bus_error
    from offload_decode.planning.opening import Opener

    announce_compiling()
    exit_on_bus_error()
    return Opener(options.config, caps, limited=limited, tell=output.note)


def _measured(engine: Engine) -> Engine:
    from offload_decode.engine.grounded import check_measured

    check_measured(engine.loaded.model.config)
    return engine
