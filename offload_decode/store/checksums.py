"""SHA-256 of every file of a store, in the format of `sha256sum -c`, and of that list itself.

`SHA256SUMS` has a line for every other file but `SHA256SUMS.sha256`, which has the one line of `SHA256SUMS`.
Both must read exactly as they were written, so that no bit of the folder can change unseen.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath

from offload_decode.errors import StoreDamaged
from offload_decode.store.files import LARGEST_LIST, LARGEST_SUMS, listed, open_regular, read_regular

SUMS = "SHA256SUMS"
SEAL = "SHA256SUMS.sha256"

_DEEPEST = 8
"""Folders within each other: a store has three."""
_NAME = re.compile(rf"(?:\w[\w.]*/){{0,{_DEEPEST}}}\w[\w.]*", re.ASCII)  # none leads out of the store

Report = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


def hash_files(root: Path, files: Iterable[str], progress: Report | None = None) -> dict[str, str]:
    """Hex SHA-256 of the files under `root`, by path in order."""

    def digest(name: str) -> str:
        with os.fdopen(open_regular(root / name), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    names = sorted(files)
    sizes = [os.path.getsize(root / name) for name in names]
    total, done, digests = sum(sizes), 0, {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for name, size, value in zip(names, sizes, pool.map(digest, names), strict=True):
            digests[name] = value
            done += size
            if progress:
                progress(done, total)
    return digests


def render(sums: Mapping[str, str]) -> bytes:
    """The lines of `sha256sum`, ordered by path."""
    return "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode()


def seal_of(sums: bytes) -> bytes:
    """What SHA256SUMS.sha256 must hold when SHA256SUMS holds `sums`."""
    return render({SUMS: hashlib.sha256(sums).hexdigest()})


def read_sums(root: Path) -> dict[str, str]:
    """The checksums of the store at `root`, by path; StoreDamaged where the list itself cannot be trusted."""
    try:
        sums, seal = (read_regular(root / name, LARGEST_SUMS) for name in (SUMS, SEAL))
    except FileNotFoundError as error:
        raise StoreDamaged(
            f"{error.filename} is missing, so nothing of the store can be checked: "
            "restore the store from a copy, or prefill again."
        ) from error
    if seal != seal_of(sums):
        raise StoreDamaged(
            f"{SUMS} and {SEAL} in {root} do not belong together: "
            "restore the store from a copy, or prefill again."
        )
    found = _by_path(sums)
    if render(found) != sums or not all(map(_NAME.fullmatch, found)):
        raise StoreDamaged(
            f"{SUMS} in {root} is not a list of the files of a store: "
            "restore the store from a copy, or prefill again."
        )
    return found


def check_tree(
    root: Path, sizes: Callable[[int], Mapping[str, int]] = lambda files: {}, progress: Report | None = None
) -> None:
    """Read every byte under `root`; StoreDamaged names each file that is missing, changed or odd. `sizes`: as
    `opening.expected_sizes`; a file of another size is not read.

    Where the checksums themselves are damaged, what is left of them still tells of the other files.
    """
    lists = {
        name: read_regular(root / name, LARGEST_SUMS) if _is_plain(root / name) else None
        for name in (SUMS, SEAL)
    }
    problems = {name: "missing, or no plain file" for name, data in lists.items() if data is None}
    text = lists[SUMS] or b""
    if not problems and lists[SEAL] != seal_of(text):
        problems = dict.fromkeys(lists, "one of the two has changed")
    named = _by_path(text)
    sums = {name: digest for name, digest in named.items() if _NAME.fullmatch(name)}
    if not problems and len(sums) < len(named):
        problems[SUMS] = "it names what is no file of a store"
    folders = {str(folder) for name in sums for folder in PurePath(name).parents[:-1]}
    found = set(_walk(root)) - {SUMS, SEAL, "."} - folders
    kept = {name for name in found & sums.keys() if _is_plain(root / name)}
    wrong = _of_wrong_size(root, kept, sizes(len(kept)))
    digests = hash_files(root, kept - wrong.keys(), progress)
    problems |= wrong
    problems |= dict.fromkeys(sums.keys() - found, "missing")
    problems |= dict.fromkeys(sums.keys() & found - kept, "a link, a pipe or a device")
    problems |= {name: "changed" for name in digests if digests[name] != sums[name]}
    problems |= dict.fromkeys(found - sums.keys(), "not of this store")
    problems |= {folder: "a link" for folder in folders if (root / folder).is_symlink()}
    if problems:
        found_wrong = listed([f"{name} ({what})" for name, what in sorted(problems.items())])
        raise StoreDamaged(
            f"{root} is damaged: {found_wrong}; restore these files from a copy, or prefill again."
        )


def _of_wrong_size(root: Path, names: set[str], sizes: Mapping[str, int]) -> dict[str, str]:
    """What is wrong with the sizes of these files. Where nobody knows how large one should be, it may still
    be too large to read: a hole of terabytes takes no place on a disk.
    """
    wrong = {}
    for name in names:
        found = os.stat(root / name)
        expected = sizes.get(name)
        if expected is not None and found.st_size != expected:
            wrong[name] = f"{found.st_size:,} bytes instead of {expected:,}"
        elif expected is None and found.st_size > max(LARGEST_LIST, 512 * found.st_blocks):
            wrong[name] = f"{found.st_size:,} bytes, most of which are on no disk"
    return wrong


def _is_plain(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()


def _by_path(sums: bytes) -> dict[str, str]:
    return {line[66:]: line[:64] for line in sums.decode(errors="replace").splitlines()}


def _walk(root: Path) -> Iterator[str]:
    """Paths of everything under `root` that is not a folder with something in it, or lies too deep."""
    for folder, folders, files in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        here = os.path.relpath(folder, root)
        if here.count(os.sep) >= _DEEPEST:
            folders.clear()  # where they end nobody knows
        if not folders and not files:
            yield here
        for name in files + links:
            yield os.path.normpath(os.path.join(here, name))
