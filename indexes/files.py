"""How an index lies on disk: `<path>.json` and, for most kinds, one file in the library's own format.

The metadata names the native file's size and SHA-256 and is itself covered by one, because the libraries
may crash on damaged input: nothing reaches them unchecked. Metadata is renamed into place last.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from indexes.base import StrPath
from indexes.errors import IndexDamaged, IndexMismatch, IndexNotFound
from indexes.keys import Keys

FORMAT_VERSION = 1
_REBUILD = "build the index again with `offload-decode index`"


def identity(kind: str, keys: Keys, digest: str) -> dict[str, Any]:
    """The fields by which a saved index is told from one of another kind or other keys."""
    n, dim = keys.shape
    return {"kind": kind, "digest": digest, "n": n, "dim": dim, "dtype": keys.dtype.name}


def save(
    path: StrPath,
    metadata: dict[str, Any],
    suffix: str = "",
    write: Callable[[str], None] | None = None,
) -> None:
    """Writes the native file through `write(file name)`, when there is one, then the metadata."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    body: dict[str, Any] = {"format_version": FORMAT_VERSION, **metadata, "native": None}
    if write is not None:
        native = Path(f"{os.fspath(path)}{suffix}")
        with _replacing(native) as beside:
            try:
                write(str(beside))
            except RuntimeError as error:  # how faiss and hnswlib report the file system
                raise OSError(
                    f"{native} could not be written ({error}); make room or choose another path."
                ) from error
            body["native"] = {"suffix": suffix, "size": beside.stat().st_size, "sha256": _file_sha256(beside)}
    body["sha256"] = _body_sha256(body)
    with _replacing(_metadata_path(path)) as beside:
        beside.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def load(path: StrPath, expected: dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """The metadata and the native file of the index at `path`, every byte of both checked.

    `expected` holds the fields that must be equal, in the order in which a difference is reported.
    """
    target = _metadata_path(path)
    try:
        body = json.loads(target.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise IndexNotFound(f"There is no index at {os.fspath(path)}; {_REBUILD}.") from None
    except (ValueError, RecursionError):
        raise IndexDamaged(f"{target} is not readable JSON; {_REBUILD}.") from None
    if not isinstance(body, dict) or "format_version" not in body:
        raise IndexDamaged(f"{target} is not the metadata of an index; {_REBUILD}.")
    if body["format_version"] != FORMAT_VERSION:
        version = body["format_version"]
        raise IndexMismatch(f"{target} has format version {version!r}, not {FORMAT_VERSION}; {_REBUILD}.")
    if body.pop("sha256", None) != _body_sha256(body):
        raise IndexDamaged(f"{target} was changed after it was written; {_REBUILD}.")
    for field, value in expected.items():
        if body.get(field) != value:
            raise IndexMismatch(
                f"The index at {os.fspath(path)} is of other keys or another kind "
                f"({field} is {body.get(field)!r}, not {value!r}); {_REBUILD}."
            )
    return body, _checked_native(path, body["native"])


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """The name of a new file beside `target`, which takes its place, or is removed where that fails.

    No two writers are given the same name.
    """
    beside = target.with_name(f"{target.name}.{uuid4().hex}.tmp")
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
    if _file_sha256(file) != native["sha256"]:
        raise IndexDamaged(f"The bytes of {file} are not those that were written; {_REBUILD}.")
    return file


def _metadata_path(path: StrPath) -> Path:
    return Path(f"{os.fspath(path)}.json")


def _file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _body_sha256(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
