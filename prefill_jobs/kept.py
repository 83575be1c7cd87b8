"""Stores that are kept, and found again by whoever needs the same one: by what name, and each made once."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from offload_decode.errors import OffloadDecodeWarning, StoreBusy, StoreExists
from offload_decode.models.loading import LoadedModel
from offload_decode.prefill_jobs.build import build_indexes
from offload_decode.prefill_jobs.job import Settings
from offload_decode.store.reader import KVStore

LOOK_S = 0.5  # how often it is looked whether another process is done,
TRY_S = 5.0  # and whether it was killed, which takes a text to be tokenized again
_TOLD: set[Path] = set()  # folders: waiting is said once, not for each of hundreds of stores


def kept_name(loaded: LoadedModel, settings: Settings, *of: object) -> str:
    """A file's name, by the model, how it is prefilled, and what it is `of` (a text or tokens, and whatever
    else shapes what is stored of them): plain JSON values.
    """
    model = [loaded.weights_hash, loaded.config_hash, loaded.tokenizer_hash, loaded.dtype, loaded.weights]
    said = json.dumps([*of, model, asdict(settings)], sort_keys=True, default=dict)
    return f"{hashlib.sha256(said.encode()).hexdigest()[:32]}.kv"


def kept(path: Path, make: Callable[[], object], kinds: Iterable[str] = ()) -> KVStore:
    """The store at `path`, which `make` makes where it is not there yet, with indexes of these kinds.

    What another process is making is waited for, with a warning that says so; where that process is killed,
    this one goes on with what it began.
    """

    def made() -> None:
        if not path.exists():
            try:
                make()
            except StoreExists:
                if not path.exists():  # it is not that another process was faster
                    raise

    _patiently(made, path, path.exists)
    for kind in kinds:
        _patiently(partial(build_indexes, path, kind), path, lambda: True)
    return KVStore.open(path)


def _patiently(work: Callable[[], object], path: Path, done: Callable[[], bool]) -> None:
    while True:
        try:
            work()
            return
        except StoreBusy:
            if path.parent not in _TOLD:
                _TOLD.add(path.parent)
                told = (
                    f"Another process makes stores in {path.parent}: this one waits for those that both need."
                )
                warnings.warn(OffloadDecodeWarning(told), stacklevel=3)
        until = time.monotonic() + TRY_S
        time.sleep(LOOK_S)
        while not done() and time.monotonic() < until:
            time.sleep(LOOK_S)
