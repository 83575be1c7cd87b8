"""How an index lies on disk: `<path>.json` and, for most kinds, one file in the library's own format.

The metadata names the native file's size and SHA-256 and is itself covered by one, because the libraries
may crash on damaged input: nothing reaches them unchecked. Metadata is renamed into place last, and one
writer at a time has the folder, so that two builds of one index cannot leave a pair of which each wrote half.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from indexes.base import StrPath
from indexes.errors import IndexDamaged, IndexMismatch, IndexNotFound, IndexNotWritten
from indexes.keys import Keys
from indexes.rows import encodings

FORMAT_VERSION = 1
_REBUILD = "build the index again with `offload-decode index`"
_BESIDE = ".tmp"


def identity(kind: str, keys: Keys, digest: str) -> dict[str, Any]:
    """The fields by which a saved index is told from one of another kind or other keys."""
    dim, dtype = encodings.dim(keys), encodings.name_of(keys)
    return {"kind": kind, "digest": digest, "n": len(keys), "dim": dim, "dtype": dtype}


def save(
    path: StrPath,
    metadata: dict[str, Any],
    suffix: str = "",
    write: Callable[[str], None] | None = None,
) -> None:
    """Writes the native file through `write(file name)`, when there is one, then the metadata.

    Raises IndexNotWritten where the file system or the library refuses; what was there before then stays.
    """
    target = _metadata_path(path)
    body: dict[str, Any] = {"format_version": FORMAT_VERSION, **metadata, "native": None}
    try:
        with _alone_in(target.parent):
            if write is not None:
                native = Path(f"{os.fspath(path)}{suffix}")
                with _replacing(native) as beside:
                    write(str(beside))
                    size, sha256 = beside.stat().st_size, _file_sha256(beside)
                    body["native"] = {"suffix": suffix, "size": size, "sha256": sha256}
            with _replacing(target) as beside:
                beside.write_text(_rendered(body | {"sha256": _body_sha256(body)}), encoding="utf-8")
    except (OSError, RuntimeError) as error:  # RuntimeError is how the libraries report the file system
        reason = getattr(error, "strerror", None) or error
        raise IndexNotWritten(
            f"The index at {os.fspath(path)} could not be written ({reason}): make room or mend this, and "
            "run the same command again to go on; the indexes that are done are kept."
        ) from error


def load(path: StrPath, expected: dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """The metadata and the native file of the index at `path`, every byte of both checked.

    `expected` holds the fields that must be equal, in the order in which a difference is reported.
    """
    target = _metadata_path(path)
    try:
        text = target.read_text(encoding="utf-8")
        body = json.loads(text)
    except FileNotFoundError:
        raise IndexNotFound(f"There is no index at {target}; {_REBUILD}.") from None
    except OSError as error:
        raise IndexDamaged(f"{target} cannot be read ({error.strerror}); {_REBUILD}.") from error
    except (ValueError, RecursionError):
        raise IndexDamaged(f"{target} is not readable JSON; {_REBUILD}.") from None
    if not isinstance(body, dict) or "format_version" not in body:
        raise IndexDamaged(f"{target} is not the metadata of an index; {_REBUILD}.")
    if body["format_version"] != FORMAT_VERSION:
        version = body["format_version"]
        raise IndexMismatch(f"{target} has format version {version!r}, not {FORMAT_VERSION}; {_REBUILD}.")
    if text != _rendered(body) or body.pop("sha256", None) != _body_sha256(body):
        raise IndexDamaged(f"{target} was changed after it was written; {_REBUILD}.")
    for field, value in expected.items():
        if body.get(field) != value:
            raise IndexMismatch(
                f"The index at {os.fspath(path)} is of other keys or another kind "
                f"({field} is {body.get(field)!r}, not {value!r}); {_REBUILD}."
            )
    return body, _checked_native(path, body["native"])


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """The folder, made if need be, without other writers; what killed ones left in it is removed."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for left in folder.glob(f"*{_BESIDE}"):
            left.unlink()
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """The name of a new file beside `target`, which takes its place, or is removed where that fails."""
    beside = target.with_name(target.name + _BESIDE)
    try:
        yield beside
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def _checked_native(path: StrPath, native: dict[str, Any] | None) -> Path | None:
    if native is None:
        return None
    file = Path(f"{os.fspath(path)}{native['suffix']}")
    if not file.is_file():
        raise IndexDamaged(f"{file} is missing; {_REBUILD}.")
    size = file.stat().st_size
    if size != native["size"]:
        raise IndexDamaged(f"{file} has {size:,} bytes instead of {native['size']:,}; {_REBUILD}.")
    try:
        same = _file_sha256(file) == native["sha256"]
    except OSError as error:
        raise IndexDamaged(f"{file} cannot be read ({error.strerror}); {_REBUILD}.") from error
    if not same:
        raise IndexDamaged(f"The bytes of {file} are not those that were written; {_REBUILD}.")
    return file


def _metadata_path(path: StrPath) -> Path:
    return Path(f"{os.fspath(path)}.json")


def _rendered(body: dict[str, Any]) -> str:
    return json.dumps(body, indent=1) + "\n"


def _file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _body_sha256(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
