"""Writing a store: chunk by chunk in bounded memory, resumable at every commit, published last."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from offload_decode.common import files
from offload_decode.common.errors import StoreBusy, StoreExists, StoreIncomplete
from offload_decode.store import layout, staging
from offload_decode.store.files import SEAL, SUMS, Report, hash_files, render, seal_of
from offload_decode.store.format import Array, Manifest, token_hash
from offload_decode.store.growth import Growth, base_digest
from offload_decode.store.layer_states import StateLog, WindowLog
from offload_decode.store.layout import SEAM, Samples, array_name, row_norms
from offload_decode.store.marks import Kept, pack
from offload_decode.store.pages import fold_pages, rounded_outward
from offload_decode.store.resuming import prepare, reopened_page, staged_specs
from offload_decode.store.staging import PROGRESS, REPLACED, STORE, WINDOWS, Committed, partial_path
from offload_decode.store.streams import Encoder, RowStream, kind_of, rows_at, write_array
from offload_decode.types import Document

_HERE, _EXCHANGE, _SWAP = -100, 2, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def exchange(new: Path, old: Path, aside: Path) -> None:
    """Swap the names of two folders: atomically where the system can.

    Elsewhere `old` is renamed to `aside` first and stays there, so that for a moment nothing has its name;
    `restore` brings it back if the process was killed then.
    """
    if _at_once(new, old):
        files.sync_names(old, new)
    else:
        files.rename(old, aside)
        files.rename(new, old)


def restore(old: Path, aside: Path) -> None:
    """Undo an `exchange` that was killed halfway."""
    if aside.exists() and not os.path.lexists(old):
        files.rename(aside, old)


def undo_exchange(path: Path) -> None:
    """`restore` the store at `path`, where a killed process has left it in the staging folder."""
    path = Path(os.path.realpath(path))
    partial = partial_path(path)
    if (partial / REPLACED).exists():
        with staging.locked(partial):
            restore(path, partial / REPLACED)


def _at_once(one: Path, other: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    try:
        if sys.platform == "darwin":
            failed = libc.renamex_np(*names, ctypes.c_uint(_SWAP))
        else:
            failed = libc.renameat2(_HERE, names[0], _HERE, names[1], ctypes.c_uint(_EXCHANGE))
    except AttributeError:  # an older C library
        return False
    if failed and (number := ctypes.get_errno()) not in _UNKNOWN:
        raise OSError(number, os.strerror(number), str(other))
    return not failed


def refuse_existing(path: Path, staging: Path | None = None) -> None:
    """StoreExists where `path` is taken; `remove_left` of its `staging` then."""
    if os.path.lexists(path):
        partial = staging or partial_path(path)
        remove_left(partial, over=not (partial / STORE).exists())
        raise StoreExists(f"{path} exists already: choose another path, or remove it first.")
    for parent in Path(os.path.abspath(path)).parents:
        if (parent / SEAL).exists():  # a file more would make it a damaged store
            raise StoreExists(f"{parent} is a store itself: choose a path outside of it.")


def remove_left(partial: Path, over: bool) -> None:
    """Remove the staging folder of a job that is `over`: it was killed after publishing."""
    if over and (partial / staging.LOCK).exists():
        with suppress(StoreBusy), staging.locked(partial):
            clear(partial)
    with suppress(OSError):  # a kill may leave an empty folder
        partial.rmdir()


def clear(partial: Path) -> None:
    """Remove a staging folder after publishing."""
    (partial / PROGRESS).unlink(missing_ok=True)
    for folder in (WINDOWS, STORE, REPLACED):
        with suppress(OSError):
            files.remove(partial / folder)
    # The lock goes last: it marks the folder as ours.
    files.sync_folders([partial])
    shutil.rmtree(partial)


class KVStoreWriter(AbstractContextManager["KVStoreWriter"]):
    """A store that is being written at `STORE.partial`.

    One forward chunk at a time: `append` for every layer, `put_queries` for every full-attention layer, then
    `commit`. After the last token, `publish`. A writer whose process was killed is opened again, continues
    from `done`, the tokens of its last commit, and ends with the same bytes.
    """

    def __init__(self, path: Path, manifest: Manifest, growth: Growth | None, samples: Samples) -> None:
        self.path, self.manifest, self.growth = path, manifest, growth
        self._sealed, self._stack = False, ExitStack()
        self._partial = partial = partial_path(path)
        self._root, folder = partial / STORE, partial / WINDOWS
        self._samples, self._latent = samples, manifest.shape.latent
        self._next_states: dict[int, Sequence[Array]] = {}
        self._written = written = set[Path]()  # since the last commit
        done, shape = Committed.load(partial), manifest.shape
        self.done, self._base, self._kept, self._shared = done.tokens, done.base, done.kept, done.shared
        self._specs = staged_specs(partial, manifest)
        self._streams = {
            name: RowStream(self._root, spec, written) for name, spec in self._specs.items() if kind_of(spec)
        }
        self._windows = {n: WindowLog(folder, n, manifest, written) for n in shape.local_layers}
        self._states = {n: StateLog(folder, n, shape.layers[n].states, written) for n in shape.state_layers}
        for name, rows in self._rows(done.tokens).items():
            if not self._streams[name].restore(rows, done.crcs.get(name, [])):
                raise staging.damaged(partial, name)
        for layer, window in self._windows.items():
            if not window.restore(done.segments.get(str(layer), [])) or window.rows != done.tokens:
                raise staging.damaged(partial, f"The window of layer {layer}")
        for layer, log in self._states.items():
            segments = done.states.get(str(layer)), done.seam_states.get(str(layer))
            if not log.restore(*segments) or log.rows != done.tokens:
                raise staging.damaged(partial, f"The state of layer {layer}")
        try:
            self._encoder = Encoder(manifest, done.errors, done.seam_errors)
        except ValueError as error:
            raise staging.damaged(partial, PROGRESS) from error
        self._open_pages = {
            layer: reopened_page(manifest, self._stream(layer, "keys")) for layer in shape.full_layers
        }

    @classmethod
    def open(
        cls,
        path: str | Path,
        manifest: Manifest,
        tokens: Array,
        documents: Sequence[Document],
        growth: Growth | None = None,
    ) -> KVStoreWriter:
        """Begin the store at `path`, or continue one that was begun there.

        `tokens [N]` and `documents`, which follow each other without gaps, are those of the whole corpus.
        With `growth` it begins as another store; where that is the one that lies there, it is replaced when
        this one is published. StoreExists, StoreBusy, or StoreMismatch where something else was begun there;
        StoreDamaged where what was begun, or the earlier store, has changed on disk.
        """
        replaces = growth is not None and growth.replaces(Path(path))
        path = Path(os.path.realpath(path) if replaces else os.path.abspath(path))
        tokens = np.ascontiguousarray(tokens, dtype="<i4")
        assert tokens.shape == (manifest.n_tokens,), "the manifest counts the tokens"
        assert token_hash(tokens) == manifest.token_hash, "the manifest is of these tokens"
        assert all(a.end == b.start for a, b in pairwise(documents)), "documents follow each other"
        partial = partial_path(path)
        with ExitStack() as stack:
            if not replaces:
                refuse_existing(path)
            with staging.surfaced(partial, "", growth.command if growth else "prefill"):
                stack.enter_context(staging.locked(partial))
                if not replaces:
                    refuse_existing(path)  # it may have been published while the lock was waited for
                if growth:
                    growth.begin(partial)
                writer = cls(path, manifest, growth, prepare(partial, manifest, tokens, documents, growth))
            writer._stack = stack.pop_all()
        return writer

    def samples(self, start: int, stop: int) -> tuple[slice, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The queries to keep of the tokens `start:stop`: slots, positions, and heads within the group."""
        positions, heads, _ = self._samples
        slots = slice(*np.searchsorted(positions, [start, stop]).tolist())
        return slots, positions[slots], heads[slots]

    def append(self, layer: int, keys: Array, values: Array) -> None:
        """Append keys `[Hkv, T, Dk]` and values `[Hkv, T, Dv]`, in the model's dtype, of the next T tokens of
        a layer. They are encoded as the manifest says; StoreError where they cannot be. The values of latents
        are their keys, and are not written.
        """
        assert keys.shape[:2] == values.shape[:2], f"{keys.shape} keys and {values.shape} values"
        with self._surfaced():
            if layer in self._windows:
                self._windows[layer].append(keys, values)
                return
            rows = {"keys": keys} if self._latent else {"keys": keys, "values": values}
            encoded = {kind: self._encoder.block(layer, kind, block) for kind, block in rows.items()}
            stored = encoded["keys"][1]
            start = self._stream(layer, "keys").rows
            lower, upper, open_page = fold_pages(
                self._open_pages[layer], start, stored, self.manifest.page_size, self.manifest.n_tokens
            )
            lower, upper = rounded_outward(lower, upper, self.manifest.numpy_dtype)
            blocks = {kind: block for kind, (block, _) in encoded.items()}
            blocks |= {"key_norms": row_norms(stored), "page_min": lower, "page_max": upper}
            for name, block in blocks.items():
                self._stream(layer, name).write(block)
        for name, block in blocks.items():
            self._stream(layer, name).advance(block)
        for kind, block in rows.items():
            self._encoder.count(layer, kind, block, encoded[kind][1])
        self._open_pages[layer] = open_page

    def put_queries(self, layer: int, slots: slice, queries: Array) -> None:
        """Keep the post-RoPE queries `[Hkv, slots, D]` that `samples` asked for."""
        spare = self._samples.spare[slots]
        assert len(spare) == queries.shape[1], "these are the samples"
        for kind, rows in (("queries", queries[:, ~spare]), ("spare_queries", queries[:, spare])):
            if stream := self._streams.get(array_name(layer, kind)):
                with self._surfaced():
                    stream.write(rows)
                stream.advance(rows)

    def keys(self, layer: int, kv_head: int) -> Array:
        """Keys of a full-attention layer so far, as `KVStore.keys`: a read-only view."""
        return self._stream(layer, "keys").view(kv_head)

    def values(self, layer: int, kv_head: int) -> Array:
        """Values of a full-attention layer so far, as `KVStore.values`: a read-only view."""
        return self._stream(layer, "keys" if self._latent else "values").view(kv_head)

    def key_norms(self, layer: int, kv_head: int) -> Array:
        """Length of each key appended so far, float32 `[tokens]`: a read-only view."""
        return self._stream(layer, "key_norms").view(kv_head)[:, 0]

    def window(self, layer: int) -> tuple[Array, Array]:
        """Keys and values `[Hkv, w, …]` of the last tokens that a local layer can still see, as copies."""
        seen = self.manifest.window(self.manifest.shape.layers[layer])
        keys, values = self._windows[layer].window()
        return keys[:, -seen:], values[:, -seen:]

    def put_states(self, layer: int, states: Sequence[Array]) -> None:
        """The states of a recurrent layer after the tokens that are committed next."""
        self._next_states[layer] = states

    def states(self, layer: int) -> tuple[Array, ...] | None:
        """The states of a recurrent layer after the tokens so far, as copies; None before the first."""
        return self._states[layer].states()

    def commit(self, tokens: int) -> None:
        """Make the first `tokens` tokens count: every layer has appended just these."""
        assert all(log.rows == tokens for log in self._windows.values()), (
            f"a local layer has not {tokens} tokens"
        )
        assert {*self._next_states} == {*self._states}, "every recurrent layer has put its states"
        if self.manifest.marks and tokens % self.manifest.marks == 0:
            self._mark()
        expected = self._rows(tokens)
        found = {name: stream.rows for name, stream in self._streams.items()}
        assert found == expected, f"not {tokens} tokens: {dict(found.items() - expected.items())}"
        with self._surfaced():
            for layer, states in self._next_states.items():
                self._states[layer].put(tokens, states)
            self._next_states = {}
            if tokens == self.manifest.seam:
                self._encoder.at_seam = dict(self._encoder.errors)
                if self.manifest.keeps_seam:
                    for state in self._states.values():
                        state.at_seam = state.segment
            files.sync_files(self._written)
            files.sync_folders([self._partial / WINDOWS])
            Committed(
                tokens=tokens,
                crcs={name: stream.crcs for name, stream in self._streams.items()},
                segments={str(layer): window.segments for layer, window in self._windows.items()},
                states={str(layer): log.segment for layer, log in self._states.items() if log.segment},
                seam_states={str(layer): log.at_seam for layer, log in self._states.items() if log.at_seam},
                errors=self._encoder.errors,
                seam_errors=self._encoder.at_seam,
                base=self._base,
                kept=self._kept,
                shared=self._shared,
            ).save(self._partial)
            self._written.clear()
            self.done = tokens
            logs: tuple[WindowLog | StateLog, ...] = (*self._windows.values(), *self._states.values())
            current = {file for log in logs for file in log.files()}
            for file in (self._partial / WINDOWS).iterdir():  # of earlier commits, or one that was not made
                if file not in current:
                    files.remove(file)

    def _mark(self) -> None:
        """Keep what each layer has now, for a store that will begin as this one."""
        for layer, own in enumerate(self.manifest.shape.layers):
            if (stream := self._streams.get(array_name(layer, "marks"))) is None:
                continue
            window: tuple[Array, ...] = ()
            if own.window:
                keys, values = self._windows[layer].window()
                window = keys[:, -(own.window - 1) :], values[:, -(own.window - 1) :]
            names = {kind: array_name(layer, kind) for kind in self.manifest.encoded}
            errors = {kind: sums for kind, name in names.items() if (sums := self._encoder.errors.get(name))}
            kept = Kept(window, tuple(self._next_states.get(layer, ())), errors)
            row = pack(self.manifest, own, kept)[None, None]
            with self._surfaced():
                stream.write(row)
            stream.advance(row)

    def publish(self, progress: Report | None = None) -> None:
        """Checksum everything, flush it to the disk, and give the store its name; then close.

        A crash at any point leaves the staging folder, from which this can be done again, or the store; one
        that is replaced has its name until the new one has it.
        """
        sealed = self.seal(progress)
        with self._surfaced():
            if self.growth and self.growth.replaces(self.path):
                exchange(sealed, self.path, aside=self._partial / REPLACED)
            else:
                refuse_existing(self.path)
                files.rename(sealed, self.path)
            clear(self._partial)
        self.close()

    def seal(self, progress: Report | None = None) -> Path:
        """Checksum everything and flush it to the disk; the path of the store, whole but without its name."""
        if self._sealed:
            return self._root
        if self.done != self.manifest.n_tokens:
            raise StoreIncomplete(
                f"{self._partial} holds {self.done:,} of {self.manifest.n_tokens:,} tokens: finish it first."
            )
        with self._surfaced():
            for layer, log in self._windows.items():
                for name, block in zip(("window_keys", "window_values"), log.window(), strict=True):
                    write_array(self._root, self._specs[array_name(layer, name)], block)
            for layer, states in self._states.items():
                shapes = self.manifest.shape.layers[layer].states
                for suffix in ("", SEAM) if self.manifest.keeps_seam else ("",):
                    for own, state in zip(shapes, states.states(at_seam=bool(suffix)) or (), strict=True):
                        spec = self._specs[array_name(layer, own.name + suffix)]
                        write_array(self._root, spec, state.reshape(-1))
            layout.record(self._partial, self._root, replace(self.manifest, kv_error=self._encoder.cost()))
            names = layout.group_files(self.manifest)
            for spec in self._specs.values():
                names += [spec.metadata_file, *spec.sizes()]
            hashed = hash_files(self._root, names, progress)
            if base_digest(self._specs.values(), hashed) != self._shared:
                raise staging.base_damaged(self._partial)
            sums = render(hashed)
            for name, data in ((SUMS, sums), (SEAL, seal_of(sums))):
                files.write(self._partial / name, data)  # its temporary file must not lie in the store
                files.rename(self._partial / name, self._root / name)
            files.sync_tree(self._root)
        self._sealed = True
        return self._root

    def close(self) -> None:
        """Let go of the staging folder; what was committed stays."""
        self._stack.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rows(self, tokens: int) -> dict[str, int]:
        """Rows of each stream when `tokens` tokens are written."""
        rows = rows_at(self.manifest, self._samples, tokens)
        return {name: rows[kind_of(stream.spec) or ""] for name, stream in self._streams.items()}

    def _stream(self, layer: int, kind: str) -> RowStream:
        return self._streams[array_name(layer, kind)]

    def _surfaced(self) -> AbstractContextManager[None]:
        kept = f"its first {self.done:,} tokens" if self.done else ""
        return staging.surfaced(self._partial, kept, self.growth.command if self.growth else "prefill")
