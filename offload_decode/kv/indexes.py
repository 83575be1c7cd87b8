"""The vector indexes of a store: one for each (layer, KV head), in `STORE.indexes/KIND/` beside it.

A kind is built in `KIND.partial/` and renamed when complete, so a killed build leaves an earlier one intact.
An incomplete kind is not searched: `auto` then searches all keys, and warns why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from offload_decode.common.errors import UnknownIndex, VectorIndexError
from offload_decode.indexes import files, registry
from offload_decode.indexes.base import RecallRecord, VectorIndex
from offload_decode.store.base import Store

if TYPE_CHECKING:
    from offload_decode.store.reader import KVStore


AUTO = "auto"
DEFAULT = "clusters"
"""The kind that is built and searched unless another one is asked for."""
PARTIAL, OLD = ".partial", ".old"


def index_path(folder: Path, layer: int, head: int) -> Path:
    """Base path (without suffix) of one index's files in the folder of a kind."""
    return folder / f"layer-{layer:03d}-head-{head:03d}"


def metadata_file(path: Path) -> Path:
    """The metadata of the index at a base path."""
    return path.with_name(path.name + ".json")


def indexes_folder(store: Path) -> Path:
    """Where the indexes of a store lie."""
    return store.with_name(store.name + ".indexes")


def kind_folder(store: Path, kind: str) -> Path:
    """Where the indexes of one kind lie."""
    return indexes_folder(store) / kind


def staging_folder(store: Path, kind: str) -> Path:
    """Where the indexes of one kind are built."""
    return indexes_folder(store) / (kind + PARTIAL)


def kind_folders(store: Path) -> list[Path]:
    """The folders of the kinds that were built, by name."""
    folder = indexes_folder(store)
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if path.is_dir() and path.suffix not in (PARTIAL, OLD))


def heads_of(store: Store) -> list[tuple[int, int]]:
    """Every (layer, KV head) that has keys to index, in the order in which they are built."""
    shape = store.manifest.shape
    return [(layer, head) for layer in shape.full_layers for head in range(shape.kv_heads)]


@dataclass(frozen=True)
class Built:
    """How far a kind of index is built: of `heads` those that are `there`, and the first problem."""

    kind: str
    heads: int
    there: int
    problem: VectorIndexError | None = None

    @property
    def whole(self) -> bool:
        """Whether it can be searched, as far as metadata and sizes tell."""
        return self.there == self.heads and self.problem is None

    def reason(self, store: Path) -> str:
        """Why it cannot be searched, and the way out."""
        if self.there < self.heads:
            return self.unfinished(store)
        return str(self.problem).rstrip(".")

    def unfinished(self, store: Path) -> str:
        """That some heads have no index yet, and the way out."""
        return (
            f"the '{self.kind}' index of {store} is unfinished ({self.there:,} of {self.heads:,} heads): "
            f"`offload-decode index {store} --kind {self.kind}` finishes it"
        )


def class_of(store: Store, kind: str) -> type[VectorIndex]:
    """The class of a kind, to search a store with. Raises as `indexes.registry.get`."""
    try:
        return registry.get(kind)
    except UnknownIndex:
        if kind not in [folder.name for folder in kind_folders(store.path)]:
            raise
        raise UnknownIndex(
            f"The '{kind}' index of {store.path} was built by an extension that is not installed here: "
            "install the package that brings this kind, or search with -o index=flat."
        ) from None


def examine(store: Store, kind: str) -> Built | None:
    """How far the indexes of a kind are built, by metadata and sizes; None where nobody began. Raises as
    `class_of`.
    """
    heads, folder = heads_of(store), kind_folder(store.path, kind)
    if not folder.is_dir():
        staging = staging_folder(store.path, kind)
        if not staging.is_dir():
            return None
        there = sum(metadata_file(index_path(staging, *place)).exists() for place in heads)
        return Built(kind, len(heads), min(there, len(heads) - 1))
    suffix = class_of(store, kind).suffix
    there, problem = 0, None
    for layer, head in heads:
        path = index_path(folder, layer, head)
        if not metadata_file(path).exists():  # it is written last
            continue
        there += 1
        try:
            keys, digest = store.keys(layer, head), store.digest(layer, head)
            files.check(path, files.identity(kind, keys, digest), suffix)
        except VectorIndexError as error:
            problem = problem or error
    return Built(kind, len(heads), there, problem)


def default_kind(store: Store) -> str:
    """The `DEFAULT` where it is built, else `flat`, which needs no files."""
    built = examine(store, DEFAULT)
    return DEFAULT if built is not None and built.whole else "flat"


@dataclass(frozen=True)
class SavedIndexes:
    """One kind: bytes on disk, heads that are there and should be, and the recall that was measured at `k`.

    `recall` (mean over heads) and `lowest_recall` are None where nothing was measured, as for an exact index.
    `full_scans` heads are tuned to read every key. The rest is `attention_of` them.
    """

    kind: str
    bytes: int
    heads: int
    heads_in_all: int
    k: int | None
    recall: float | None
    lowest_recall: float | None
    full_scans: int
    mass: float | None
    low: float | None
    lost: float | None
    most_lost: float | None
    best: float | None
    least_best: float | None


def saved_kinds(store: KVStore) -> list[str]:
    """Kinds that were built beside the store, or begun."""
    folder = indexes_folder(store.path)
    begun = folder.glob("*" + PARTIAL) if folder.is_dir() else ()
    return sorted({path.name for path in kind_folders(store.path)} | {path.stem for path in begun})


def describe(store: KVStore, kind: str) -> SavedIndexes:
    """Read from the small metadata files alone."""
    folder = kind_folder(store.path, kind)
    folder = folder if folder.is_dir() else staging_folder(store.path, kind)
    paths = [index_path(folder, layer, head) for layer, head in heads_of(store)]
    there = [path for path in paths if metadata_file(path).exists()]
    found = []
    for path in there:
        with suppress(VectorIndexError):  # `verify` says what is wrong with it
            if record := files.recall_of(path, files.metadata(path)):
                found.append(record)
    measured = [record.measured for record in found]
    return SavedIndexes(
        kind=kind,
        bytes=sum(file.lstat().st_size for file in folder.iterdir()),
        heads=len(there),
        heads_in_all=len(paths),
        k=found[0].k if found else None,
        recall=sum(measured) / len(measured) if measured else None,
        lowest_recall=min(measured, default=None),
        full_scans=sum(record.full_scan for record in found),
        **attention_of(found),
    )


def attention_of(records: Sequence[RecallRecord]) -> dict[str, float | None]:
    """Of the heads of which it was measured: means of `mass`, `low`, `lost` and `best` (see `RecallRecord`),
    and what the worst head has of the last two; None where it was measured of none.
    """

    def over_heads(how: Callable[[list[float]], float], name: str) -> float | None:
        measured = [getattr(record, name) for record in records]
        known = [value for value in measured if value is not None]
        return how(known) if known else None

    means = {name: over_heads(fmean, name) for name in ("mass", "low", "lost", "best")}
    return means | {"most_lost": over_heads(max, "lost"), "least_best": over_heads(min, "best")}


def unfinished(store: KVStore, kind: str) -> str | None:
    """That some heads have no index yet, and the way out; None where all of them have one."""
    built = examine(store, kind)
    return None if built is None or built.there == built.heads else built.unfinished(store.path)


def verify(
    store: KVStore, kind: str, progress: Callable[[str, int, int], None]
) -> Iterator[VectorIndexError]:
    """Read every byte of the indexes of a kind, and load them; what is wrong with each. A head that has no
    file is not wrong: a build that was stopped did not come to it.
    """
    chosen, folder, heads = class_of(store, kind), kind_folder(store.path, kind), heads_of(store)
    if not folder.is_dir():
        return
    for done, (layer, head) in enumerate(heads, 1):
        path = index_path(folder, layer, head)
        try:
            native = path.with_name(path.name + chosen.suffix)
            # Kinds without native files are built in a moment: they have all.
            if not chosen.suffix or metadata_file(path).exists() or native.exists():
                keys, digest = store.keys(layer, head), store.digest(layer, head)
                files.load(path, files.identity(kind, keys, digest), chosen.suffix, anew=True)
                chosen.load(path, keys, digest=digest)
        except VectorIndexError as error:
            yield error
        progress("verify indexes", done, len(heads))
