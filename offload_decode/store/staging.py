"""A store that is being written: `STORE.partial/`, with what a prefill needs to continue after it was killed.

STORE.partial/
├── lock            held by the writer
├── progress.json   how many tokens count, and checksums of what was appended up to them
├── windows/        KV of the last appends of each local layer, a file an append; states, a file a layer
└── store/          becomes STORE
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from offload_decode.common import files
from offload_decode.common.errors import StoreBusy, StoreDamaged, StoreError, StoreForeign
from offload_decode.common.files import lock
from offload_decode.store.files import read_regular, require_posix
from offload_decode.store.format import MOST_TOKENS, check

LOCK, PROGRESS, STORE, WINDOWS, REPLACED = "lock", "progress.json", "store", "windows", "replaced"


def partial_path(path: Path) -> Path:
    """Where the store at `path` is written until it is whole."""
    return path.with_name(path.name + ".partial")


@contextmanager
def locked(partial: Path) -> Iterator[None]:
    """Hold the staging folder `partial`, made if need be; StoreBusy where another process does. A job that
    fails before it has put anything there leaves no folder.
    """
    require_posix()
    fresh = not partial.exists()
    files.make_folders(partial)
    try:
        # One look: in between two, another process may make its lock.
        found = os.listdir(partial)
        if found and LOCK not in found:
            raise StoreForeign(
                f"{partial} is not the staging folder of a store: move it away, or choose another path."
            )
        file = open(partial / LOCK, "ab", opener=_plain_lock)  # noqa: SIM115
    except FileNotFoundError as error:  # the process that held it has published the store just now
        raise _busy(partial) from error
    with file:
        gone = not lock(file.fileno()) or not (partial / LOCK).exists()
        if gone or not os.path.samestat(os.fstat(file.fileno()), os.stat(partial / LOCK)):
            raise _busy(partial)
        if fresh:  # without its lock the folder would be taken for another's
            files.sync_folders([partial])
        try:
            yield
        except BaseException:
            with suppress(OSError):
                if os.listdir(partial) == [LOCK]:
                    shutil.rmtree(partial)
            raise


def _plain_lock(path: str, flags: int) -> int:
    """Opened without waiting for a pipe's other end, and without making a file where a link leads."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        descriptor = None
    if descriptor is None or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise damaged(Path(path).parent, LOCK)
    return descriptor


def _busy(partial: Path) -> StoreBusy:
    return StoreBusy(f"Another process is writing {partial}: wait for it to end, or stop it first.")


class Segment(NamedTuple):
    """One append to a local layer, or states: tokens `start:stop` and the CRC-32 of their file."""

    start: int
    stop: int
    crc: int


@dataclass(frozen=True)
class Committed:
    """What is committed: the first `tokens` tokens.

    `crcs` are CRC-32 of the rows of each head, by array; `segments` are by local layer, `states` by recurrent
    layer; `errors` are the running `streams.EncodingLoss` of each encoded array; `seam_states` and
    `seam_errors` are those at the seam, once it is reached. `base` is the digest of the store that this one
    begins as, and empty where it begins anew; the first `kept` tokens are of it, and were not run. `shared`
    is the `growth.base_digest` of its arrays, whose base has no part in `crcs`. The file ends with a CRC-32
    of itself.
    """

    tokens: int = 0
    crcs: dict[str, list[int]] = field(default_factory=dict)
    segments: dict[str, list[Segment]] = field(default_factory=dict)
    states: dict[str, Segment] = field(default_factory=dict)
    seam_states: dict[str, Segment] = field(default_factory=dict)
    errors: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    seam_errors: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    base: str = ""
    kept: int = 0
    shared: str = ""

    @property
    def ran(self) -> int:
        """The tokens that were run so far."""
        return self.tokens - self.kept

    def save(self, partial: Path) -> None:
        body = asdict(self)
        files.write(partial / PROGRESS, json.dumps({**body, "crc": _crc(body)}).encode())

    @classmethod
    def load(cls, partial: Path) -> Committed:
        """StoreDamaged where the file cannot be read."""
        try:
            data = files.parse(read_regular(partial / PROGRESS))
            if data.pop("crc") != _crc(data):
                raise ValueError("it has changed")
            check("tokens", data["tokens"], range(MOST_TOKENS + 1))
            segments = {layer: [_segment(s) for s in found] for layer, found in data.pop("segments").items()}
            states, at_seam = (
                {layer: _segment(found) for layer, found in data.pop(name).items()}
                for name in ("states", "seam_states")
            )
            for crcs in data["crcs"].values():
                check("checksums", crcs, [range(2**32), range(MOST_TOKENS)])
            check("base", data.get("base", ""), str)
            check("shared", data.get("shared", ""), str)
            check("kept", data.get("kept", 0), range(data["tokens"] + 1))
            for sums in (*data["errors"].values(), *data["seam_errors"].values()):
                check("errors", sums, [float, range(3, 4)])
            return cls(**data, segments=segments, states=states, seam_states=at_seam)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(partial, PROGRESS) from error


def _segment(found: Any) -> Segment:
    check("a segment", found, [range(2**32), range(3, 4)])
    return Segment(*found)


def _crc(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body).encode())


def damaged(partial: Path, name: str) -> StoreDamaged:
    return StoreDamaged(f"{name} in {partial} is damaged: remove {partial} and prefill again.")


def base_damaged(partial: Path) -> StoreDamaged:
    return StoreDamaged(
        f"The files that {partial} took over from another store have changed: run `offload-decode verify` on "
        f"that store, restore what it names from a copy, remove {partial} and prefill again."
    )


_WAYS = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space")
_WAYS[errno.EMFILE] = "allow more open files (ulimit -n)"


@contextmanager
def surfaced(partial: Path, contents: str, command: str) -> Iterator[None]:
    """Errors of the file system as StoreError: `partial` keeps these `contents`, if any, and `command` goes
    on.
    """
    try:
        yield
    except OSError as error:
        way = _WAYS.get(error.errno or 0, "mend this")
        raise StoreError(
            f"{partial} cannot be written ({error.strerror}){contents and f' and keeps {contents}'}: "
            f"{way} and run the same {command} again to go on."
        ) from error
