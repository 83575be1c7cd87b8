"""The files of a store as they are opened: plain files, of a bounded size where they are read whole.

A link could lead anywhere, and a pipe would keep its reader waiting.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from offload_decode.errors import StoreDamaged
from offload_decode.indexes.plain_files import NotPlain, open_plain

LARGEST_LIST = 64 << 20
"""Bytes of a list of names, which is read whole: far more than any store has."""
LARGEST_SUMS = 16 << 20
"""Bytes of a list of checksums: of a hundred thousand files, of which a process could map but 65,530."""
LARGEST_MANIFEST, LARGEST_METADATA = 4 << 20, 64 << 10
"""Bytes of the manifest and of an array's metadata: in memory JSON takes up to thirty times as many."""
_NAMED = 50

_WAY_OUT = "restore it from a copy, or prefill again"


def open_regular(path: str | Path) -> int:
    """A descriptor of the plain file at `path`, for reading. `StoreDamaged` where it is a link, a folder, a
    pipe or a device; `OSError` where it cannot be opened.
    """
    try:
        return open_plain(path)
    except NotPlain as error:
        raise _not_plain(path) from error


def read_regular(path: str | Path, most: int = LARGEST_LIST) -> bytes:
    """The bytes of a plain file of at most `most`; errors as `open_regular`."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise StoreDamaged(f"{path} has more bytes than any store needs there: {_WAY_OUT}.")
    return data


def check_sizes(files: Iterable[tuple[str | Path, int]]) -> None:
    """`StoreDamaged` unless every one of these paths is a plain file of that many bytes."""
    for path, size in files:
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreDamaged(f"{path} is missing: {_WAY_OUT}.") from None
        if not stat.S_ISREG(found.st_mode):
            raise _not_plain(path)
        if found.st_size != size:
            raise StoreDamaged(f"{path} has {found.st_size:,} bytes and should have {size:,}: {_WAY_OUT}.")


def check_folders(root: Path, names: Iterable[str]) -> None:
    """`StoreDamaged` unless the folders of these files, up to `root` itself, are no links to others."""
    folders = {str(folder) for name in names for folder in Path(name).parents[:-1]}
    for folder in sorted(folders):
        if os.path.islink(root / folder):
            raise StoreDamaged(f"{root / folder} is a link, not a folder: {_WAY_OUT}.")


def listed(names: Sequence[str]) -> str:
    """The names in a sentence, of very many the first ones."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _not_plain(path: str | Path) -> StoreDamaged:
    return StoreDamaged(f"{path} is not a plain file but a link, a folder, a pipe or a device: {_WAY_OUT}.")
