"""A store that begins as another one: an append to it, a corpus that has changed since, or a `--on`.

It does so up to a chunk boundary, so that what follows runs in the chunks of one prefill of the new corpus:
the last one (`Manifest.seam`), a mark (`store.marks`), or any other where all is kept token by token. What a
resumed prefill restores is seeded here: rows, windows, states, sums of errors. Files that stay the same
become hard links; where the file system copies on write (btrfs, XFS), blocks are shared; other bytes are
copied. Where the earlier store stays, its files are linked whole, and those of the new store go on within
one (`ArraySpec.base`).
"""

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import numpy as np

from offload_decode.common.errors import StoreDamaged
from offload_decode.common.files import remove
from offload_decode.store.files import Progress, hash_files, open_regular, render
from offload_decode.store.format import Array, Manifest
from offload_decode.store.layer_states import StateLog, WindowLog
from offload_decode.store.layout import ArraySpec, Samples, array_name, at, samples_of
from offload_decode.store.marks import Kept, row_bytes
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import PROGRESS, REPLACED, STORE, WINDOWS, Committed, Segment
from offload_decode.store.streams import allocate, kind_of, row_crcs, rows_at, write_all, write_array
from offload_decode.types import Document

BLOCK = 64 * 1024
"""Clones begin and end on the blocks of a file system, which have 4 to 64 KiB."""
_CLONE_RANGE = 0x4020940D  # FICLONERANGE of Linux
_PIECE = 1 << 20
_OWN = ("queries", "spare_queries", "marks")
"""Arrays that no other store's files begin: which rows they have depends on all tokens, or they are small."""


def link(source: Path, target: Path) -> bool:
    """Whether `target` is now a hard link to `source`; not every file system has them."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def copy_range(source: Path, start: int, target: Path, at: int, count: int) -> int:
    """Make `count` bytes of `target` from `at` on those of `source` from `start` on; how many are shared."""
    here, there = open_regular(source), os.open(target, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        whole = count // BLOCK * BLOCK
        shared = whole if whole and _cloned(here, start, there, at, whole) else 0
        for done in range(shared, count, _PIECE):
            _copy(here, start + done, there, at + done, min(_PIECE, count - done))
        return shared
    finally:
        os.close(here)
        os.close(there)


def _cloned(here: int, start: int, there: int, at: int, count: int) -> bool:
    import fcntl

    try:
        fcntl.ioctl(there, _CLONE_RANGE, struct.pack("=qQQQ", here, start, count, at))
    except OSError:  # it cannot, or not these two
        return False
    return True


def _copy(here: int, start: int, there: int, at: int, count: int) -> None:
    data = memoryview(os.pread(here, count, start))
    if len(data) != count:
        raise OSError(0, "it ends too early")
    write_all(there, at, data)


def missing_samples(earlier: Manifest, new: Manifest) -> Array:
    """The positions of the queries that a store keeps and an earlier one, of the same tokens, does not: a
    shorter corpus is sampled more densely.
    """
    return np.setdiff1d(_numbered(new), _numbered(earlier)) // new.shape.group


def _numbered(manifest: Manifest) -> Array:
    """The sampled queries, each as one number, in order."""
    positions, heads, _ = samples_of(manifest)
    return positions * manifest.shape.group + heads


@dataclass
class Growth:
    """The store that another one begins as, up to the token `cut`; and bytes of it that were shared and
    copied in this run. `command` goes on where it was interrupted. `queries` gives by layer the queries
    `[Hkv, n, D]` at n places, of positions and heads, which the earlier store does not keep. With `stays` the
    earlier store is there for good, and its files are shared. With `whole` the documents are those of all of
    a corpus as it is now. `discarded`: tokens that were run for another text, in whose place this one began.
    """

    earlier: KVStore
    cut: int
    progress: Progress
    command: str
    queries: Callable[[Array, Array], Mapping[int, Array]]
    stays: bool = False
    whole: bool = False
    shared: int = 0
    copied: int = 0
    discarded: int = 0

    def replaces(self, path: Path) -> bool:
        """Whether the store that is written at `path` takes the place of the earlier one."""
        return not self.stays and os.path.realpath(self.earlier.path) == os.path.realpath(path)

    def begin(self, partial: Path) -> None:
        """Raise where the earlier store is another one now, and forget a staging folder that it came from."""
        self.earlier.check_same()
        if not self.stays and is_left(partial, self.earlier):
            (partial / PROGRESS).unlink(missing_ok=True)
            remove(partial / REPLACED)

    def supersedes(self, begun: Iterable[str], documents: Iterable[Document]) -> bool:
        """Whether other work on the earlier store, which was `begun` with documents of these names, is over
        where a store of `documents` is asked for: those of all of the corpus, or all of them once more.
        """
        return not self.stays and (self.whole or {*begun} <= {document.name for document in documents})

    def begun(self, manifest: Manifest, specs: Sequence[ArraySpec], samples: Samples) -> list[ArraySpec]:
        """The arrays of the new store, with the files that they begin with."""
        rows = rows_at(manifest, samples, self.cut)
        found = []
        for spec in specs:
            kind, before = kind_of(spec), self.earlier.specs.get(spec.name)
            base: tuple[tuple[int, int], ...] = ()
            if before and kind and kind not in _OWN:
                whole = not self.stays and before.base_bytes <= rows[kind] * spec.row_bytes
                base = before.base if whole else before.beginning(rows[kind])
            found.append(replace(spec, chunk=(1, *spec.shape[1:]), base=base) if base else spec)
        return found

    def seed(
        self,
        partial: Path,
        manifest: Manifest,
        specs: Sequence[ArraySpec],
        samples: Samples,
        empty: Committed,
    ) -> Committed:
        """Check every byte of the earlier store and put what it holds up to the cut into the staging folder,
        where only metadata lies: what is committed then.
        """
        empty = replace(empty, base=self.earlier.store_digest, kept=self.cut)
        self.earlier.verify(lambda done, total: self.progress("verify", done, total))
        if not self.cut:
            return empty
        root, crcs = partial / STORE, {}
        rows = rows_at(manifest, samples, self.cut)
        queries = self._queries(manifest, samples)
        for number, spec in enumerate(specs):
            self.progress("copy", number, len(specs))
            kind = kind_of(spec)
            if kind is None:
                continue
            if kind in ("queries", "spare_queries"):
                spare = samples.spare[: np.searchsorted(samples.positions, self.cut)]
                of_kind = spare if kind == "spare_queries" else ~spare
                allocate(root, spec)
                write_array(root, spec, queries(int(spec.name.split("/")[1]))[:, of_kind])
            elif rows[kind]:
                self._rows(root, spec, rows[kind])
            crcs[spec.name] = row_crcs(root, spec, rows[kind])
        kept = {
            layer: self.earlier.kept_at(layer, self.cut)
            for layer, own in enumerate(manifest.shape.layers)
            if row_bytes(manifest, own)
        }
        states = self._states(partial / WINDOWS, manifest, kept)
        errors = {array_name(n, kind): sums for n, own in kept.items() for kind, sums in own.errors.items()}
        reached = self.cut == manifest.seam
        return replace(
            empty,
            tokens=self.cut,
            crcs=crcs,
            segments=self._windows(partial / WINDOWS, manifest, kept),
            states=states,
            seam_states=states if reached and manifest.keeps_seam else {},
            errors=errors,
            seam_errors=errors if reached else empty.seam_errors,
            shared=base_digest(specs, self._base_sums(root, specs)),
        )

    def _rows(self, root: Path, spec: ArraySpec, rows: int) -> None:
        """The first `rows` rows of every head. Only files that hold nothing else are links: what is written
        later goes to others.
        """
        before, source = self.earlier.specs[spec.name], self.earlier.path
        same = len(spec.base) or (rows // spec.chunk[1] if spec.chunk == before.chunk else 0)
        heads = [(spec.head_parts(head), before.head_parts(head)) for head in range(spec.shape[0])]
        (root / spec.name).mkdir(parents=True, exist_ok=True)
        links = []  # bytes of each head, until a file could not be linked
        for ours, theirs in heads:
            pairs = zip(theirs[:same], ours, strict=False)
            made = (new.used * link(source / old.file, root / new.file) for old, new in pairs)
            links.append(sum(takewhile(bool, made)))
        self.shared += sum(links)
        allocate(root, spec)
        for (ours, theirs), place in zip(heads, links, strict=True):
            end = rows * spec.row_bytes
            while place < end:
                (file, to, room), (old, start, left) = (at(parts, place) for parts in (ours, theirs))
                count = min(end - place, room, left)
                shared = copy_range(source / old, start, root / file, to, count)
                self.shared, self.copied = self.shared + shared, self.copied + count - shared
                place += count

    def _base_sums(self, root: Path, specs: Sequence[ArraySpec]) -> dict[str, str]:
        """The SHA-256 of the files of a base: of links as the earlier store has it, by which they were just
        checked, so that what changes from then on is found.
        """
        taken = {
            ours.file: theirs.file
            for spec in specs
            for head in range(spec.shape[0] if spec.base else 0)
            for ours, theirs in zip(
                spec.head_parts(head)[: len(spec.base)],
                self.earlier.specs[spec.name].head_parts(head),
                strict=False,
            )
        }
        source = self.earlier.path
        copies = [new for new, old in taken.items() if not os.path.samefile(root / new, source / old)]
        return {new: self.earlier.checksum(old) for new, old in taken.items()} | hash_files(root, copies)

    def _queries(self, manifest: Manifest, samples: Samples) -> Callable[[int], Array]:
        """What gives the samples of a layer of the new store, up to the cut."""
        count = int(np.searchsorted(samples.positions, self.cut))
        ours, theirs = _numbered(manifest)[:count], _numbered(self.earlier.manifest)
        slots = np.minimum(np.searchsorted(theirs, ours), len(theirs) - 1)
        lacking = theirs[slots] != ours
        further: Mapping[int, Array] = {}
        if lacking.any():
            further = self.queries(samples.positions[:count][lacking], samples.heads[:count][lacking])

        def of(layer: int) -> Array:
            stored = (self.earlier.every_query(layer, head)[slots] for head in range(manifest.shape.kv_heads))
            every = np.stack([*stored])
            if lacking.any():
                every[:, lacking] = further[layer]
            return every

        return of

    def _windows(
        self, folder: Path, manifest: Manifest, kept: Mapping[int, Kept]
    ) -> dict[str, list[Segment]]:
        logs = {}
        for layer in manifest.shape.local_layers:
            log = WindowLog(folder, layer, manifest, set())
            keys, values = kept[layer].window
            log.append(keys, values, start=self.cut - keys.shape[1])
            logs[str(layer)] = log.segments
        return logs

    def _states(self, folder: Path, manifest: Manifest, kept: Mapping[int, Kept]) -> dict[str, Segment]:
        segments = {}
        for layer in manifest.shape.state_layers:
            log = StateLog(folder, layer, manifest.shape.layers[layer].states, set())
            segments[str(layer)] = log.put(self.cut, kept[layer].states)
        return segments


def base_digest(specs: Iterable[ArraySpec], sums: Mapping[str, str]) -> str:
    """Names the bytes of the files of a base, which no row's checksum counts, by the SHA-256 of each; empty
    where there are none.
    """
    found = {file: sums[file] for spec in specs for file in spec.base_files()}
    return hashlib.sha256(render(found)).hexdigest() if found else ""


def is_left(partial: Path, earlier: KVStore) -> bool:
    """Whether this folder is not of a store that is to take the place of the `earlier` one: that was put
    there from it, or nothing was begun.
    """
    try:
        begun = Committed.load(partial).base == earlier.store_digest
    except FileNotFoundError:
        begun = False
    except StoreDamaged:  # whoever goes on with it is told
        begun = True
    return (partial / REPLACED).exists() or not begun
