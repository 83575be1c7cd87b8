"""The user's cache: fingerprints of large files, and other short values that take long to compute.

`note` and `noted` keep the result of an equivalence check by a model's fingerprint.
"""

import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from offload_decode.common.errors import OffloadDecodeWarning
from offload_decode.indexes.verified import Identity, cache_folder, identity, make_room, settled

_FINGERPRINT = re.compile(r"[0-9a-f:]{1,128}")
_MOST = 1 << 16  # characters of a value
_LONG_S = 2.0  # that a fingerprint may take again without a word
_NOT_KEPT = (
    "The hash of the weights cannot be kept in {} ({}), so that every process hashes them anew: "
    "free some space there, or name another folder by XDG_CACHE_HOME."
)

_known: dict[str, Any] = {}
T = TypeVar("T")


def cached(
    of: Sequence[Any],
    compute: Callable[[], T],
    dump: Callable[[T], Any],
    parse: Callable[[Any], T],
    slow_s: float = 0.0,
) -> T:
    """`compute()`, or its value of earlier: from this process, or from the user's cache if `parse` accepts
    the JSON there (else it raises TypeError or ValueError). Saved by `dump` where it took `slow_s` seconds.
    `of`: what the value follows from, for JSON, besides the installed torch and transformers.
    """
    key = json.dumps([version("torch"), version("transformers"), *of], sort_keys=True, default=str)
    if key not in _known:
        with suppress(TypeError, ValueError, RecursionError):
            _known[key] = parse(json.loads(load_text(key) or ""))
    if key not in _known:
        began = time.monotonic()
        value = compute()
        if time.monotonic() - began >= slow_s:
            save_text(key, json.dumps(dump(value)))
        _known[key] = value
    return _known[key]  # type: ignore[no-any-return]


def cached_fingerprint(files: Sequence[Path], reading: str, compute: Callable[[], str]) -> str:
    """`compute()`, a fingerprint of `files` read as `reading` says, or its value for the same files.

    `indexes.verified` tells when a file is the same. A cache that cannot be read is not used; where it cannot
    be written a warning says so, if the fingerprint took long.
    """
    before = _identities(files)
    key = json.dumps([reading, before])
    if before is not None and (known := load_text(key)) and _FINGERPRINT.fullmatch(known):
        return known
    began = time.monotonic()
    value = compute()
    took = time.monotonic() - began
    if before is not None and before == _identities(files) and all(map(settled, before)):
        failed = save_text(key, value)
        if failed is not None and took >= _LONG_S:
            text = _NOT_KEPT.format(_folder(), failed.strerror or failed)
            warnings.warn(OffloadDecodeWarning(text), stacklevel=2)
    return value


def load_text(key: str) -> str | None:
    """The text under `key`; None where there is none that can be read."""
    try:
        with open(_path(key), encoding="ascii") as file:
            text = file.read(_MOST + 1)
    except (OSError, ValueError):
        return None
    with suppress(OSError):  # a read-only cache
        os.utime(_path(key))
    return text if len(text) <= _MOST else None


def save_text(key: str, value: str) -> OSError | None:
    """Save a text of ASCII under `key`; returns why not, where the cache cannot be written."""
    path = _path(key)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        make_room(path.parent)
        temporary.write_text(value, encoding="ascii")
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):  # a full disk leaves an empty file
            temporary.unlink()
        return error
    return None


def note(config_hash: str, difference: float) -> None:
    """Save a passed equivalence check's difference in the user's cache, for programs that load no model."""
    if noted(config_hash) != difference:
        save_text(_check_key(config_hash), repr(difference))


def noted(config_hash: str) -> float | None:
    """The difference that was saved for a model with the installed transformers; None without a check."""
    try:
        return float(load_text(_check_key(config_hash)) or "")
    except ValueError:
        return None


def _folder() -> Path:
    return cache_folder() / "fingerprints"


def _path(key: str) -> Path:
    return _folder() / hashlib.sha256(key.encode()).hexdigest()


def _identities(files: Sequence[Path]) -> list[Identity] | None:
    found = [one for one in map(identity, files) if one is not None]
    return found if len(found) == len(files) else None


def _check_key(config_hash: str) -> str:
    return f"checked {version('transformers')} {version('torch')} {config_hash}"
