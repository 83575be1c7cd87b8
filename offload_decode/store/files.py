"""The files of a store: opened as regular files of bounded size, mapped as arrays, and checked by SHA-256.

`SHA256SUMS`, in the format of `sha256sum -c`, has a line for every file but itself and `SHA256SUMS.sha256`,
which has its own. Both must read exactly as written, so that no bit of the folder can change unseen.
"""

import hashlib
import mmap
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath

import numpy as np
import numpy.typing as npt

from offload_decode.common.errors import StoreDamaged, StoreError
from offload_decode.common.files import NotPlain, open_plain
from offload_decode.common.mapping import map_over, reserve

LARGEST_LIST = 64 << 20
"""Bytes of a list of names, which is read whole: far more than any store has."""
LARGEST_SUMS = 16 << 20
"""Bytes of a list of checksums: of a hundred thousand files, of which a process could map but 65,530."""
LARGEST_MANIFEST, LARGEST_METADATA = 4 << 20, 64 << 10
"""Bytes of the manifest and of an array's metadata: in memory JSON takes up to thirty times as many."""
_NAMED = 50

_WAY_OUT, _STORE_OUT = (f"restore {what} from a copy, or prefill again" for what in ("it", "the store"))


def open_regular(path: str | Path) -> int:
    """A descriptor of the plain file at `path`, for reading; `StoreDamaged` where it is of another kind."""
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
    for folder in sorted({folder for name in names for folder in Path(name).parents[:-1]}):
        if os.path.islink(root / folder):
            raise StoreDamaged(f"{root / folder} is a link, not a folder: {_WAY_OUT}.")


def listed(names: Sequence[str]) -> str:
    """The names in a sentence: the first fifty."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _not_plain(path: str | Path) -> StoreDamaged:
    return StoreDamaged(f"{path} is not a plain file but a link, a folder, a pipe or a device: {_WAY_OUT}.")


def require_posix() -> None:
    """StoreError on a system where stores cannot be mapped."""
    if sys.platform not in ("linux", "darwin"):
        raise StoreError(f"KV stores need Linux or macOS, and this is {sys.platform}: use WSL on Windows.")


def map_files(files: Sequence[Path], file_bytes: int) -> npt.NDArray[np.uint8]:
    """As `map_parts`, of whole files of one size."""
    return map_parts([(file, file_bytes, file_bytes) for file in files])


def map_parts(files: Sequence[tuple[Path, int, int]]) -> npt.NDArray[np.uint8]:
    """The bytes of `files`, each given with its size and how many bytes of it count, as one read-only,
    zero-copy array, which keeps the maps alive: an anonymous map reserves the addresses, and each file is
    mapped over its part.

    What counts of all but the last must be a multiple of the page size. Bytes that are written to the files
    later are seen. A file of another size is StoreDamaged, so that no later access can run off its end.
    """
    require_posix()
    assert all(0 < used <= size for _, size, used in files)
    assert not any(used % mmap.PAGESIZE for _, _, used in files[:-1]), "files end on a page"
    length = sum(used for _, _, used in files)
    try:
        _, view = reserve(length)
    except (OSError, OverflowError) as error:
        raise StoreError(
            f"{files[0][0]} and what follows it cannot be mapped into memory ({length:,} bytes): "
            "raise the limit of addresses (ulimit -v), or prefill again."
        ) from error
    address = view.ctypes.data
    for file, size, used in files:
        _map_over(address, file, size, used)
        address += used
    return view


def _map_over(address: int, file: Path, size: int, used: int) -> None:
    try:
        descriptor = open_regular(file)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{file} is missing: {_WAY_OUT}.") from error
    except OSError as error:
        raise StoreError(f"{file} cannot be opened: {error.strerror}.") from error
    try:
        if (found := os.fstat(descriptor).st_size) != size:
            raise StoreDamaged(f"{file} has {found:,} bytes and should have {size:,}: {_WAY_OUT}.")
        try:
            map_over(address, descriptor, 0, used)
        except OSError as error:
            raise StoreError(
                f"{file} cannot be mapped into memory ({error.strerror}): raise the limit vm.max_map_count."
            ) from error
    finally:
        os.close(descriptor)


SUMS = "SHA256SUMS"
SEAL = "SHA256SUMS.sha256"

_DEEPEST = 8
"""Folders within each other: a store has three."""
_NAME = re.compile(rf"(?:\w[\w.]*/){{0,{_DEEPEST}}}\w[\w.]*", re.ASCII)  # none leads out of the store

Report = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""
Progress = Callable[[str, int, int], None]
"""Called with the stage of a job, and how much of how much is done."""


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
        missing = f"{error.filename} is missing, so nothing of the store can be checked"
        raise StoreDamaged(f"{missing}: {_STORE_OUT}.") from error
    if seal != seal_of(sums):
        raise StoreDamaged(f"{SUMS} and {SEAL} in {root} do not belong together: {_STORE_OUT}.")
    found = _by_path(sums)
    if render(found) != sums or not all(map(_NAME.fullmatch, found)):
        raise StoreDamaged(f"{SUMS} in {root} is not a list of the files of a store: {_STORE_OUT}.")
    return found


def check_tree(
    root: Path, sizes: Callable[[int], Mapping[str, int]] = lambda files: {}, progress: Report | None = None
) -> None:
    """Read every byte under `root`; StoreDamaged names each file that is missing, changed or odd. `sizes`: as
    `opening.expected_sizes`; a file of another size is not read.

    Where the checksums themselves are damaged, their legible lines still check the other files.
    """
    both = (SUMS, SEAL)
    lists = {name: read_regular(root / name, LARGEST_SUMS) for name in both if _is_plain(root / name)}
    problems = dict.fromkeys({*both} - lists.keys(), "missing, or no plain file")
    text = lists.get(SUMS, b"")
    if not problems and lists[SEAL] != seal_of(text):
        problems = dict.fromkeys(both, "one of the two has changed")
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
        wrong_ones = listed([f"{name} ({what})" for name, what in sorted(problems.items())])
        raise StoreDamaged(
            f"{root} is damaged: {wrong_ones}; restore these files from a copy, or prefill again."
        )


def _of_wrong_size(root: Path, names: set[str], sizes: Mapping[str, int]) -> dict[str, str]:
    """Files of a wrong size; one of unknown size may be too large to read, a sparse one of terabytes."""
    wrong = {}
    for name in names:
        found, expected = os.stat(root / name), sizes.get(name)
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
            folders.clear()  # no store is that deep
        if not folders and not files:
            yield here
        for name in files + links:
            yield os.path.normpath(os.path.join(here, name))
