"""Before heavy work: apply the caps that were given, and refuse at once what cannot fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cli import output
from cli.counts import byte_count
from cli.options import cache_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offload_decode.engine.engine import Engine
    from offload_decode.planning.caps import Caps
    from offload_decode.store.reader import KVStore


def caps_of(gpu_memory: str | None, ram: str | None) -> Caps:
    """The caps as they were written; raises `ConfigError`."""
    from offload_decode.planning.caps import Caps

    return Caps(*(None if size is None else byte_count(size) for size in (gpu_memory, ram)))


def open_engine(
    store: Path,
    model: str | None,
    selector: str,
    options: Mapping[str, object],
    weights: str,
    device: str,
    attend: str,
    device_cache: str | None,
    gpu_memory: str | None,
    ram: str | None,
) -> Engine:
    """Open a store to be asked with a command's options, under its caps. Raises `DoesNotFit`, `ConfigError`,
    `StoreError`.
    """
    cache = cache_size(device_cache)
    caps = caps_of(gpu_memory, ram)

    from offload_decode.engine.engine import Engine
    from offload_decode.planning.caps import apply_caps

    opened = check_store(store, model, selector, options, weights, device, caps, device_cache=cache)
    apply_caps(caps, device)
    return Engine.open(
        opened,
        model,
        selector=selector,
        options=options,
        device=device,
        weights=weights,
        attend=attend,
        device_cache=cache,
    )


def check_store(
    store: Path | str,
    model: str | None,
    selector: str,
    options: Mapping[str, object],
    weights: str,
    device: str,
    caps: Caps,
    held: int | None = None,
    device_cache: int = 0,
) -> KVStore:
    """Open a store if it can be asked. `held`: bytes that the program held before it loaded a model, where it
    has loaded one already.
    """
    from offload_decode.kv.head_indexes import default_kind
    from offload_decode.memory import own_memory
    from offload_decode.models.outline import outline
    from offload_decode.planning.caps import check_ask
    from offload_decode.store.reader import KVStore

    opened = KVStore.open(store)
    about = outline(opened.manifest.model_id if model is None else model)
    held = own_memory() if held is None else held
    sentences = check_ask(
        about,
        opened.manifest,
        selector,
        options,
        weights,
        device,
        caps,
        held,
        index=default_kind(opened),
        device_cache=device_cache,
    )
    for sentence in sentences:
        output.note(sentence)
    return opened


def admit_prefill(
    model: str,
    chunk: int,
    device: str = "auto",
    dtype: str = "auto",
    gpu_memory: str | None = None,
    ram: str | None = None,
) -> None:
    """Whether a model can prefill, under the caps. Raises `DoesNotFit`, `ConfigError` or `ModelError`."""
    caps = caps_of(gpu_memory, ram)

    from offload_decode.memory import own_memory
    from offload_decode.models.outline import outline
    from offload_decode.planning.caps import apply_caps, check_prefill

    about = outline(model)
    for sentence in check_prefill(about, chunk, dtype, device, caps, own_memory()):
        output.note(sentence)
    apply_caps(caps, device)
