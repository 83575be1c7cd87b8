"""The files of a store as they are opened: plain files, of a bounded size where they are read whole.

A link could lead anywhere, and a pipe would keep its reader waiting.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from offload_decode.errors import StoreDamaged
from offload_decode.plain_files import NotPlain, open_plain

LARGEST_LIST = 64 << 20
"""Bytes of a file of metadata or checksums, which are read whole: far more than any store has."""

_WAY_OUT = "restore it from a copy, or prefill again"


def open_regular(path: str | Path) -> int:
    """A descriptor of the plain file at `path`, for reading. `StoreDamaged` where it is a link, a folder, a
    pipe or a device; `OSError` where it cannot be opened.
    """
    try:
        return open_plain(path)
    except NotPlain as error:
        raise _not_plain(path) from error


def read_regular(path: str | Path) -> bytes:
    """The bytes of a plain file of at most `LARGEST_LIST`; errors as `open_regular`."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(LARGEST_LIST + 1)
    if len(data) > LARGEST_LIST:
        raise StoreDamaged(f"{path} has more bytes than any store needs there: {_WAY_OUT}.")
    return data


def check_sizes(files: Iterable[tuple[str, int]]) -> None:
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


def _not_plain(path: str | Path) -> StoreDamaged:
    return StoreDamaged(f"{path} is not a plain file but a link, a folder, a pipe or a device: {_WAY_OUT}.")
