"""A store that begins as another one, up to that one's last chunk boundary: an append, or a `--on`.

The boundary (`Manifest.seam`) is the end of the last whole forward chunk, so that further tokens run in the
chunks of one prefill of the longer corpus. What a resumed prefill restores is seeded here: rows, windows,
states, sums of errors. Files that stay the same become hard links; where the file system copies on write
(btrfs, XFS), blocks are shared; other bytes are copied. Where the earlier store stays, its files are linked
whole, and those of the new store go on within one (`ArraySpec.base`).
"""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import numpy as np

from offload_decode.common.files import remove
from offload_decode.store import layout
from offload_decode.store.files import Progress, open_regular
from offload_decode.store.format import Array, Manifest
from offload_decode.store.layer_states import StateLog, WindowLog
from offload_decode.store.layout import ArraySpec, array_name, at, sample_plan
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import PROGRESS, REPLACED, STORE, WINDOWS, Committed, Segment
from offload_decode.store.streams import allocate, kind_of, row_crcs, rows_at, write_all, write_array

BLOCK = 64 * 1024
"""Clones begin and end on the blocks of a file system, which have 4 to 64 KiB."""
_CLONE_RANGE = 0x4020940D  # FICLONERANGE of Linux
_PIECE = 1 << 20


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


@dataclass
class Growth:
    """The store that another one begins as, and bytes of it that were shared and copied in this run. It
    `stays`, or is replaced by the other.
    """

    earlier: KVStore
    progress: Progress
    stays: bool = False
    shared: int = 0
    copied: int = 0

    def begin(self, partial: Path) -> None:
        """Raise where the earlier store is another one now, and forget a staging folder that it came from."""
        self.earlier.check_same()
        if not self.stays and is_left(partial, self.earlier.manifest):
            (partial / PROGRESS).unlink(missing_ok=True)
            remove(partial / REPLACED)

    def begun(
        self, manifest: Manifest, specs: Sequence[ArraySpec], samples: tuple[Array, Array]
    ) -> list[ArraySpec]:
        """The arrays of the longer store, with the files that they begin with."""
        rows = rows_at(manifest, samples[0], self.earlier.manifest.seam or 0)
        found = []
        for spec in specs:
            kind, before = kind_of(spec), self.earlier.specs.get(spec.name)
            base = before.base if before else ()
            if self.stays and before and kind not in (None, "queries"):
                base = before.beginning(rows[kind])
            found.append(replace(spec, chunk=(1, *spec.shape[1:]), base=base) if base else spec)
        return found

    def seed(
        self,
        partial: Path,
        manifest: Manifest,
        specs: Sequence[ArraySpec],
        samples: tuple[Array, Array],
        empty: Committed,
    ) -> Committed:
        """Check every byte of the earlier store and put what it holds up to its seam into the staging folder,
        where only metadata lies: what is committed then. samples: positions and heads of the longer corpus.
        """
        own, seam = self.earlier.manifest, self.earlier.manifest.seam
        assert seam is not None, "a store that keeps no seam is refused"
        self.earlier.verify(lambda done, total: self.progress("verify", done, total))
        if not seam:
            return empty
        root, crcs = partial / STORE, {}
        rows = rows_at(manifest, samples[0], seam)
        for number, spec in enumerate(specs):
            self.progress("copy", number, len(specs))
            kind = kind_of(spec)
            if kind is None:
                continue
            if kind == "queries":
                self._queries(root, spec, samples, rows[kind])
            else:
                self._rows(root, spec, rows[kind])
            crcs[spec.name] = row_crcs(root, spec, rows[kind])
        states = self._states(partial / WINDOWS, manifest, seam)
        errors = {
            array_name(entry["layer"], kind): entry["sums"]
            for kind, entries in own.kv_error.items()
            for entry in entries
        }
        reached = seam == manifest.seam
        return replace(
            empty,
            tokens=seam,
            crcs=crcs,
            segments=self._windows(partial / WINDOWS, manifest, seam),
            states=states,
            seam_states=states if reached and manifest.keeps_seam else {},
            errors=errors,
            seam_errors=errors if reached else empty.seam_errors,
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

    def _queries(self, root: Path, spec: ArraySpec, samples: tuple[Array, Array], count: int) -> None:
        """The first `count` samples of the longer corpus, all of which the shorter one has."""
        own, group = self.earlier.manifest, self.earlier.manifest.shape.group
        earlier = sample_plan(own.n_tokens, group, own.query_samples)
        theirs, ours = (positions * group + heads for positions, heads in (earlier, samples))
        wanted = ours[:count]
        slots = np.searchsorted(theirs, wanted)
        assert (theirs[slots] == wanted).all(), "samples of a longer corpus are samples of a shorter one"
        layer = int(spec.name.split("/")[1])
        allocate(root, spec)
        heads = [self.earlier.queries(layer, head)[slots] for head in range(spec.shape[0])]
        write_array(root, spec, np.stack(heads))

    def _windows(self, folder: Path, manifest: Manifest, seam: int) -> dict[str, list[Segment]]:
        logs = {}
        for layer in manifest.shape.local_layers:
            log = WindowLog(folder, layer, manifest, set())
            keys, values = self.earlier.window_at_seam(layer)
            log.append(keys, values, start=seam - keys.shape[1])
            logs[str(layer)] = log.segments
        return logs

    def _states(self, folder: Path, manifest: Manifest, seam: int) -> dict[str, Segment]:
        segments = {}
        for layer in manifest.shape.state_layers:
            log = StateLog(folder, layer, manifest.shape.layers[layer].states, set())
            segments[str(layer)] = log.put(seam, self.earlier.states_at_seam(layer))
        return segments


def is_left(partial: Path, manifest: Manifest) -> bool:
    """Whether an append that was killed after publishing the store of this `manifest` left this folder."""
    staged = layout.read_header(partial / STORE) or {}
    tokens = staged.get("n_tokens")
    begun = (partial / PROGRESS).exists() and type(tokens) is int and tokens > manifest.n_tokens
    return (partial / REPLACED).exists() or not begun
