"""How an index lies on disk: `<path>.json` and, for most kinds, one native file beside it.

The metadata names the native file's size and SHA-256 and is itself covered by one. That finds damage; whoever
changed a file on purpose has made the checksums anew, so every number is checked again before it is used:
those of the metadata here, those of a native file by its kind. Metadata is renamed into place last, and one
writer at a time has the folder, so that two builds of one index cannot leave a pair of which each wrote half.
"""

import hashlib
import json
import os
import reprlib
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from offload_decode.common import files
from offload_decode.common.errors import IndexDamaged, IndexMismatch, IndexNotFound, IndexNotWritten
from offload_decode.common.files import NotPlain, lock, open_plain
from offload_decode.common.rows import encodings
from offload_decode.common.rows.arrays import MAX_KEYS, Keys
from offload_decode.indexes import verified
from offload_decode.indexes.arrays import ALIGNMENT, Array, base_path
from offload_decode.indexes.base import SOURCES, RecallRecord, StrPath

FORMAT_VERSION = 2
_REBUILD = "build the index again with `offload-decode index`"
_LARGEST_METADATA = 1 << 20  # bytes
_NUMBER = (int, float)


_RECALL: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("target", "measured"), lambda value: type(value) in _NUMBER and 0 <= value <= 1),
    **dict.fromkeys(("k", "queries"), lambda value: type(value) is int and 1 <= value <= MAX_KEYS),
    "source": lambda value: value in SOURCES,
    "parameter": lambda value: isinstance(value, str),
    "value": lambda value: type(value) in _NUMBER and 0 < value <= MAX_KEYS,
    "full_scan": lambda value: isinstance(value, bool),
}
_ATTENTION = ("mass", "lost", "best", "low")  # of a recall, since they are measured
_RECALL |= dict.fromkeys(
    _ATTENTION, lambda value: value is None or (type(value) in _NUMBER and 0 <= value <= 1)
)


def identity(kind: str, keys: Keys, digest: str) -> dict[str, Any]:
    """The fields by which a saved index is told from one of another kind or other keys."""
    dim, dtype = encodings.dim(keys), encodings.name_of(keys)
    return {"kind": kind, "digest": digest, "n": len(keys), "dim": dim, "dtype": dtype}


def save(
    path: StrPath,
    metadata: dict[str, Any],
    suffix: str = "",
    write: Callable[[str], None] | None = None,
    bases: Callable[[], Mapping[str, os.stat_result]] = dict,
) -> None:
    """Writes the native file through `write(file name)`, when there is one, then links to the files that it
    shares bytes of, the `bases()`, then the metadata.

    Raises IndexNotWritten where the file system or the library refuses; what was there before then stays.
    """
    target = _metadata_path(path)
    body: dict[str, Any] = {"format_version": FORMAT_VERSION, **metadata, "native": None}
    try:
        with _alone_in(target.parent):
            if write is not None:
                native = Path(f"{os.fspath(path)}{suffix}")
                with files.replacing(native) as beside:
                    write(str(beside))
                    body["native"] = {"suffix": suffix, **_described(beside)}
                    if links := [_linked(native, *each) for each in enumerate(bases().items())]:
                        body["native"]["bases"] = [*map(_described, links)]
            files.write(target, _rendered(body | {"sha256": _body_sha256(body)}).encode())
    except (OSError, RuntimeError) as error:  # RuntimeError is how the libraries report the file system
        reason = getattr(error, "strerror", None) or error
        raise IndexNotWritten(
            f"The index at {os.fspath(path)} could not be written ({reason}): make room or mend this, and "
            "run the same command again to go on; the indexes that are done are kept."
        ) from error


def _described(file: Path) -> dict[str, Any]:
    return {"size": file.stat().st_size, "sha256": _file_sha256(file)}


def _linked(native: Path, number: int, base: tuple[str, os.stat_result]) -> Path:
    """Beside a native file, the file that it shares bytes of: linked, or copied where that cannot be.
    RuntimeError where it has been replaced since it was mapped.
    """
    target, (file, then) = Path(base_path(native, number)), base
    with files.replacing(target) as beside:
        try:
            os.link(file, beside)
        except OSError:
            shutil.copyfile(file, beside)
        if not os.path.samestat(os.stat(file), then):
            raise RuntimeError(f"{file} has been replaced meanwhile")
    return target


def metadata(path: StrPath) -> dict[str, Any]:
    """What was written of the index at `path`, to the letter; nothing beside it is looked at.

    Raises IndexNotFound, IndexMismatch for another format version, IndexDamaged.
    """
    target = _metadata_path(path)
    data = _small(target)
    try:
        text = data.decode()
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise IndexDamaged(f"{target} is not readable JSON; {_REBUILD}.") from None
    if not isinstance(body, dict) or "format_version" not in body:
        raise _no_metadata(target)
    if body["format_version"] != FORMAT_VERSION:
        version = body["format_version"]
        raise IndexMismatch(
            f"{target} has format version {reprlib.repr(version)}, not {FORMAT_VERSION}; {_REBUILD}."
        )
    if text != _rendered(body) or body.pop("sha256", None) != _body_sha256(body):
        raise IndexDamaged(f"{target} was changed after it was written; {_REBUILD}.")
    return body


def check(path: StrPath, expected: dict[str, Any], suffix: str = "") -> tuple[dict[str, Any], Path | None]:
    """The metadata and the native file of the index at `path`; the file, and those that it shares bytes of,
    have the sizes that were written.

    `expected` holds the fields that must be equal, in the order in which a difference is reported; `suffix`
    is that of the native file, empty for none.
    """
    body = metadata(path)
    for field, value in expected.items():
        if body.get(field) != value:
            raise IndexMismatch(
                f"{_metadata_path(path)} is of other keys or another kind "
                f"({field} is {reprlib.repr(body.get(field))}, not {value!r}); {_REBUILD}."
            )
    match body.get("native"):
        case None:
            described = not suffix
        case {"suffix": own, "size": _, "sha256": _, **others}:
            described = bool(suffix) and own == suffix and others.keys() <= {"bases"}
        case _:
            described = False
    if not described or not all(map(_is_file, _natives(body))):
        raise IndexDamaged(f"{_metadata_path(path)} does not describe its index file; {_REBUILD}.")
    if not suffix:
        return body, None
    native = Path(f"{os.fspath(path)}{suffix}")
    for file, own in _files_of(native, body):
        _check_size(file, own["size"])
    return body, native


def _natives(body: dict[str, Any]) -> list[Any]:
    """What the metadata says of the native file and of those that it shares bytes of."""
    native = body.get("native")
    bases = native.get("bases", []) if isinstance(native, dict) else []
    return [*([native] if native else []), *(bases if isinstance(bases, list) else [None])]


def _is_file(own: Any) -> bool:
    return isinstance(own, dict) and type(own.get("size")) is int and isinstance(own.get("sha256"), str)


def _files_of(native: Path, body: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    own, *bases = _natives(body)
    yield native, own
    for number, base in enumerate(bases):
        yield Path(base_path(native, number)), base


def _check_size(file: Path, size: int) -> None:
    """`IndexDamaged` unless it is a plain file of that size."""
    try:
        about = file.lstat()
    except OSError as error:
        raise IndexDamaged(f"{file} is missing ({error.strerror}); {_REBUILD}.") from None
    if not stat.S_ISREG(about.st_mode):
        raise IndexDamaged(
            f"{file} is not a plain file but a link, a folder, a pipe or a device; {_REBUILD}."
        )
    if about.st_size != size:
        raise IndexDamaged(f"{file} has {about.st_size:,} bytes instead of {size:,}; {_REBUILD}.")


def recall_of(path: StrPath, body: dict[str, Any], field: str = "recall") -> RecallRecord | None:
    """The recall that a field of the metadata of the index at `path` tells; None where none was measured.

    Raises IndexDamaged for a record whose fields are not those of one, each of its type and in its range.
    """
    found = body.get(field)
    if found is None:
        return None
    sane = isinstance(found, dict) and found.keys() | set(_ATTENTION) == _RECALL.keys()
    if not sane or not all(_RECALL[name](value) for name, value in found.items()):
        raise IndexDamaged(f"{_metadata_path(path)} tells of a recall that cannot be; {_REBUILD}.")
    return RecallRecord(**found)


def load(
    path: StrPath, expected: dict[str, Any], suffix: str = "", anew: bool = False
) -> tuple[dict[str, Any], Path | None]:
    """As `check`, and the bytes of the files are those that were written: they are read, unless they were
    before and the file has not changed since (`offload_decode.indexes.verified`), or in any case `anew`.
    """
    body, native = check(path, expected, suffix)
    for file, own in _files_of(native, body) if native else ():
        try:
            right = verified.holds(file, f"sha256 {own['sha256']}", partial(_has, file, own["sha256"]), anew)
        except OSError as error:
            raise IndexDamaged(f"{file} cannot be read ({error.strerror}); {_REBUILD}.") from error
        if not right:
            raise IndexDamaged(f"The bytes of {file} are not those that were written; {_REBUILD}.")
    return body, native


def _has(file: Path, sha256: str) -> bool:
    return _file_sha256(file) == sha256


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """The folder, made if need be, without other writers; what killed ones left in it is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor, wait=True)
        for left in folder.glob(f"*{files.BESIDE}"):
            left.unlink()
        yield
    finally:
        os.close(descriptor)


def _small(target: Path) -> bytes:
    """A small plain file: a pipe would never end, a link leads anywhere, a large one is no metadata."""
    try:
        with os.fdopen(open_plain(target), "rb") as file:
            data = file.read(_LARGEST_METADATA + 1)
    except NotPlain:
        raise _no_metadata(target) from None
    except FileNotFoundError:
        raise IndexNotFound(f"There is no index at {target}; {_REBUILD}.") from None
    except OSError as error:
        raise IndexDamaged(f"{target} cannot be read ({error.strerror}); {_REBUILD}.") from error
    if len(data) > _LARGEST_METADATA:
        raise _no_metadata(target)
    return data


def _no_metadata(target: Path) -> IndexDamaged:
    return IndexDamaged(f"{target} is not the metadata of an index; {_REBUILD}.")


def _metadata_path(path: StrPath) -> Path:
    return Path(f"{os.fspath(path)}.json")


def _rendered(body: dict[str, Any]) -> str:
    return json.dumps(body, indent=1) + "\n"


def _file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _body_sha256(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def aligned(array: Array) -> Array:
    """The array, or a contiguous copy that begins at a multiple of 64 bytes: rows take a cache line less."""
    if array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0:
        return array
    room = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    own: Array = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    own[...] = array
    return own
