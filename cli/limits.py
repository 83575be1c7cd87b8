"""Before heavy work: apply the caps that were given, and refuse at once what cannot fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from offload_decode.cli import output
from offload_decode.cli.options import (
    Attend,
    Device,
    DeviceCache,
    GpuMemory,
    Model,
    Options,
    Ram,
    Selector,
    Weights,
    byte_count,
    cache_size,
)
from offload_decode.config import EngineConfig, parse_options, split_pairs

if TYPE_CHECKING:
    from offload_decode.engine.engine import Engine
    from offload_decode.models.loading import LoadedModel
    from offload_decode.planning.caps import Caps
    from offload_decode.store.reader import KVStore


Admit = Callable[[int, int], int]
OpenEngine = Callable[[str], "Engine"]


def caps_of(gpu_memory: str | None, ram: str | None) -> Caps:
    """The caps as they were written; raises `ConfigError`."""
    from offload_decode.planning.caps import Caps

    return Caps(*(None if size is None else byte_count(size) for size in (gpu_memory, ram)))


@dataclass(frozen=True)
class Asking:
    """How a command's store is to be asked, and the caps that hold while it is."""

    config: EngineConfig
    gpu_memory: str | None = None
    ram: str | None = None

    @property
    def caps(self) -> Caps:
        """The caps as they were written; raises `ConfigError`."""
        return caps_of(self.gpu_memory, self.ram)


def asking(
    selector: Selector = "topk",
    option: Options = None,
    model: Model = None,
    weights: Weights = "auto",
    device: Device = "auto",
    attend: Attend = "auto",
    device_cache: DeviceCache = None,
    gpu_memory: GpuMemory = None,
    ram: Ram = None,
) -> Asking:
    """The options by which a store is asked."""
    options, cache = split_pairs(option or []), cache_size(device_cache)
    config = EngineConfig(model, selector, options, device, weights, attend, cache)
    return Asking(config, gpu_memory, ram)


def open_engine(store: Path, asked: Asking) -> Engine:
    """Open a store to be asked with a command's options, under its caps. Raises `DoesNotFit`, `ConfigError`,
    `StoreError`.
    """
    caps = asked.caps

    from offload_decode.engine.engine import Engine
    from offload_decode.planning.caps import apply_caps

    opened, admit = check_store(store, asked.config, caps)
    apply_caps(caps, asked.config.device)
    engine = Engine.open(opened, config=asked.config)
    engine.admit = admit
    return engine


def check_here(how: Asking, answers: bool = True) -> None:
    """What is wrong with the options is told before a model is loaded; the caps hold from here on where this
    process `answers`.
    """
    from offload_decode.planning.caps import apply_caps
    from offload_decode.selectors.registry import get

    config = how.config
    parse_options(get(config.selector).options_type, config.options, f"selector '{config.selector}'")
    if answers:
        apply_caps(how.caps, config.device)


def opener(how: Asking) -> OpenEngine:
    """Opens engines one after another; a model is loaded once while the stores share it."""
    from offload_decode.common.memory import own_memory

    held: dict[tuple[str, str, str], LoadedModel] = {}
    before: int | None = None

    def open_engine(path: str) -> Engine:
        nonlocal before
        from offload_decode.engine.engine import Engine
        from offload_decode.models.loading import load

        config = how.config
        store, admit = check_store(path, config, how.caps, before)
        before = before or own_memory()
        named = store.manifest.model_id if config.model is None else config.model
        wanted = named, store.manifest.dtype, config.weights_after(store.manifest.weights)
        if wanted not in held:
            held.clear()
            held[wanted] = load(wanted[0], config.device, *wanted[1:])
        engine = Engine.open(store, held[wanted], config)
        engine.admit = admit
        return engine

    return open_engine


def check_store(
    store: Path | str, config: EngineConfig, caps: Caps, held: int | None = None
) -> tuple[KVStore, Admit]:
    """Open a store if it can be asked, with what admits its questions (`Conversation.admit`). `held`: bytes
    that the program held before it loaded a model, where it has loaded one already.
    """
    from offload_decode.cli.compiling import tell_of_compiling
    from offload_decode.cli.faults import end_with_a_sentence
    from offload_decode.common.memory import own_memory
    from offload_decode.kv.indexes import default_kind
    from offload_decode.models.size_estimate import outline
    from offload_decode.planning.caps import admit_question, check_ask, planned_ask
    from offload_decode.store.reader import KVStore

    tell_of_compiling()
    end_with_a_sentence()
    opened = KVStore.open(store)
    about = outline(opened.manifest.model_id if config.model is None else config.model)
    held = own_memory() if held is None else held
    given = about, opened.manifest, config, caps, held
    index = default_kind(opened)
    for sentence in check_ask(*given, index=index):
        output.note(sentence)
    return opened, partial(admit_question, planned_ask(*given, index=index), caps)


def admit_prefill(
    model: str,
    chunk: int | None,
    device: str = "auto",
    dtype: str = "auto",
    weights: str = "auto",
    gpu_memory: str | None = None,
    ram: str | None = None,
) -> None:
    """Whether a model can prefill, under the caps. Raises `DoesNotFit`, `ConfigError` or `ModelError`."""
    caps = caps_of(gpu_memory, ram)

    from offload_decode.cli.compiling import tell_of_compiling
    from offload_decode.common.memory import own_memory
    from offload_decode.models.size_estimate import outline
    from offload_decode.planning.caps import apply_caps, check_prefill

    tell_of_compiling()
    about = outline(model)
    for sentence in check_prefill(about, chunk, dtype, device, caps, own_memory(), weights):
        output.note(sentence)
    apply_caps(caps, device)
