"""Opening a store: the checks before anything in it is read, and the error messages when they fail."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from offload_decode.common.errors import (
    StoreDamaged,
    StoreError,
    StoreForeign,
    StoreIncomplete,
    StoreNotFound,
)
from offload_decode.store import files, layout
from offload_decode.store.files import check_folders, check_sizes, listed, read_regular
from offload_decode.store.format import Manifest, check_version
from offload_decode.store.layout import ArraySpec
from offload_decode.store.staging import LOCK, STORE, Committed, partial_path

T = TypeVar("T")
_NO_STORE = "{} is not a KV store: give the path of one that `offload-decode prefill` made."


def checked(root: Path) -> tuple[Manifest, dict[str, ArraySpec], dict[str, str]]:
    """The manifest of the store at `root`, its arrays by name, and SHA-256 by file; all checked.
    Raises `StoreForeign` and `StoreDamaged`.
    """
    header = layout.read_header(root)
    if header is not None:
        check_version(header)
    elif not (root / files.SEAL).exists():  # with one, the checksums tell what is wrong
        raise StoreForeign(_NO_STORE.format(root))
    sums = files.read_sums(root)
    small = [name for name in sums if name.endswith("zarr.json")]
    if changed := [name for name in small if not _matches(root, name, sums[name])]:
        raise StoreDamaged(
            f"{listed(changed)} in {root} has changed or is missing: "
            "restore it from a copy, or prefill again."
        )
    if header is None:
        raise StoreForeign(f"{root} is a checksummed folder but not a KV store: give the path of a store.")
    manifest = Manifest.from_json(header)
    specs = layout.read_specs(root, manifest)
    _check_files(root, manifest, specs, sums)
    return manifest, specs, sums


def expected_sizes(root: Path, most: int) -> Mapping[str, int]:
    """Bytes of the arrays' files, by path; none if metadata cannot be read, or promise more than `most`."""
    try:
        specs = layout.read_specs(root, Manifest.from_json(layout.read_header(root) or {}))
    except StoreError:  # whoever reads the files names what is wrong with them
        return {}
    return _sizes(specs) if _count(specs) <= most else {}


def existing(path: Path) -> Path:
    """The whole path of what may be a store. Raises `StoreNotFound`, `StoreIncomplete`, `StoreForeign`."""
    path = Path(os.path.abspath(path))
    if not path.name:
        raise StoreForeign(_NO_STORE.format(path))
    if (path / layout.COLLECTION).exists():
        raise StoreForeign(
            f"{path} is a collection, and no store: `index`, `ask`, `batch`, `inspect` and `verify` take it "
            f"as a whole, and its stores lie in {path / 'stores'}."
        )
    for partial in (path, partial_path(path)):
        if (partial / LOCK).exists() and not (path / layout.ROOT).exists():
            raise StoreIncomplete(_how_far(partial))
    if not os.path.lexists(path):
        raise StoreNotFound(f"There is no store at {path}: make one with `offload-decode prefill`.")
    return path


def of_one(root: Path, work: Callable[[], T]) -> T:
    """What `work` finds in the store at `root`, done again where an append replaced the store meanwhile."""
    while True:
        before = identity(root)
        try:
            found = work()
        except (StoreError, OSError):
            if identity(root) == before:
                raise
        else:
            if identity(root) == before:
                return found


def _how_far(partial: Path) -> str:
    try:
        done = f"{Committed.load(partial).tokens:,}"
    except (FileNotFoundError, StoreDamaged):
        done = "an unknown number"
    total = (layout.read_header(partial / STORE) or {}).get("n_tokens")
    of_all = f" of {total:,}" if isinstance(total, int) else ""
    return f"The prefill in {partial} has not finished ({done}{of_all} tokens): run it again to go on."


def identity(path: Path) -> tuple[int, int] | None:
    """Tells the folder of a store from another one of the same name; None where it is gone."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def surfaced(root: Path) -> Iterator[None]:
    """Errors of the file system as StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{error.filename or root} cannot be read: {error.strerror}.") from error


def _matches(root: Path, name: str, digest: str) -> bool:
    try:
        most = files.LARGEST_MANIFEST if name == layout.ROOT else files.LARGEST_METADATA
        return hashlib.sha256(read_regular(root / name, most)).hexdigest() == digest
    except FileNotFoundError:
        return False


def _check_files(root: Path, manifest: Manifest, specs: dict[str, ArraySpec], sums: dict[str, str]) -> None:
    """StoreDamaged unless the arrays' files are those of the checksums, plain ones, of the right sizes."""
    if _count(specs) > len(sums):  # it may be too many to list
        raise StoreDamaged(f"The manifest in {root} describes more files than there are: prefill again.")
    sizes = _sizes(specs)
    described = {*sizes, *layout.group_files(manifest), *(spec.metadata_file for spec in specs.values())}
    if described != sums.keys():
        odd = listed(sorted(described ^ sums.keys()))
        raise StoreDamaged(
            f"The checksums in {root} are not of the files of its arrays ({odd}): prefill again."
        )
    check_folders(root, sizes)
    check_sizes((os.path.join(root, name), size) for name, size in sizes.items())


def _count(specs: Mapping[str, ArraySpec]) -> int:
    return sum(spec.file_count for spec in specs.values())


def _sizes(specs: Mapping[str, ArraySpec]) -> dict[str, int]:
    return {name: size for spec in specs.values() for name, size in spec.sizes().items()}
