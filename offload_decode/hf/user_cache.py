"""Fingerprints of large files, kept in the user's cache for as long as these are the same files, and other
short texts that take long to find.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from offload_decode.indexes.verified import Identity, cache_folder, identity, settled

KEPT = 256
"""Values at most; those that nobody asked for longest go first."""
_FORM = re.compile(r"[0-9a-f:]{1,128}")
_MOST = 1 << 16  # characters of a value


def remembered(files: Sequence[Path], how: str, compute: Callable[[], str]) -> str:
    """`compute()`, a fingerprint of `files` that were read as `how` says, or what it was for the same files.

    When a file is the same, `indexes.verified` says. A cache that cannot be read or written is done without.
    """
    before = _identities(files)
    key = json.dumps([how, before])
    if before is not None and (known := recall(key)) and _FORM.fullmatch(known):
        return known
    value = compute()
    if before is not None and before == _identities(files) and all(map(settled, before)):
        keep(key, value)
    return value


def recall(key: str) -> str | None:
    """The text that was kept under `key`; None where there is none that can be read."""
    try:
        with open(_place(key), encoding="ascii") as file:
            text = file.read(_MOST + 1)
    except (OSError, ValueError):
        return None
    with suppress(OSError):  # in a cache that is only read, none goes
        os.utime(_place(key))
    return text if len(text) <= _MOST else None


def keep(key: str, value: str) -> None:
    """Keep a text of ASCII under `key`, where the cache can be written."""
    with suppress(OSError):
        _write(_place(key), value)


def _place(key: str) -> Path:
    return _folder() / hashlib.sha256(key.encode()).hexdigest()


def _folder() -> Path:
    return cache_folder() / "fingerprints"


def _identities(files: Sequence[Path]) -> list[Identity] | None:
    found = [one for one in map(identity, files) if one is not None]
    return found if len(found) == len(files) else None


def _write(place: Path, value: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    kept = sorted(place.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for path in kept[: max(0, len(kept) - KEPT + 1)]:
        path.unlink(missing_ok=True)
    temporary = place.with_name(f"{place.name}.{os.getpid()}")
    temporary.write_text(value, encoding="ascii")
    os.replace(temporary, place)
