"""Reading a store: opened without reading its data, mapped when asked for, verified on demand."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from stat import S_ISREG

import numpy as np

from offload_decode.common.errors import StoreDamaged, StoreMismatch
from offload_decode.common.files import parse
from offload_decode.store import files
from offload_decode.store.files import check_sizes, read_regular
from offload_decode.store.format import Array, Manifest, fingerprint_version, token_hash
from offload_decode.store.layout import SEAM, ArraySpec, array_name, sample_plan, samples_of
from offload_decode.store.marks import Kept, unpack
from offload_decode.store.opening import checked, existing, expected_sizes, identity, of_one, surfaced
from offload_decode.store.streams import EncodingLoss, head_view, list_view
from offload_decode.types import Document, ModelShape

# Checked before parsing: empty lists and objects take thirty times the memory of their text.
_LIST_OF_TEXTS = re.compile(rb"""\s*+\[(?:\s*+"(?:[^"\\]|\\.)*+"\s*+,?+)*+\]\s*+""", re.DOTALL)


def names_of(data: bytes) -> list[str]:
    """The names of documents; `ValueError` for anything else."""
    if not _LIST_OF_TEXTS.fullmatch(data):
        raise ValueError("it is no list of names")
    names: list[str] = parse(data)
    return names


BASE = "shared with its base"
"""In `KVStore.cost`, the files that were taken over from another store."""
_KINDS = {
    "key_norms": "key norms",
    "page_min": "page bounds",
    "page_max": "page bounds",
    "window_keys": "windows",
    "window_values": "windows",
    "offsets": "documents",
    "names": "documents",
    "query_positions": "queries",
    "spare_queries": "queries",
    "conv": "states",
    "recurrent": "states",
}


class KVStore:
    """A published store. All arrays are read-only; those of a head are zero-copy views of its files."""

    def __init__(
        self, path: Path, manifest: Manifest, specs: dict[str, ArraySpec], sums: dict[str, str]
    ) -> None:
        self.path, self.manifest, self.specs, self._sums = path, manifest, specs, sums
        self._identity = identity(path)
        self._views: dict[tuple[str, int], Array] = {}
        self._mapped: dict[int, list[tuple[str, int]]] = {}  # files of each layer, with their sizes

    @classmethod
    def open(cls, path: str | Path) -> KVStore:
        """Open the store at `path`: its metadata and the sizes of its files are checked, no data is read.
        Raises StoreNotFound, StoreIncomplete, StoreForeign or StoreDamaged.
        """
        root = existing(Path(path))
        with surfaced(root):
            return of_one(root, lambda: cls(root, *checked(root)))

    @cached_property
    def tokens(self) -> Array:
        """Token ids, int32 `[N]`."""
        return self._small("tokens")

    @cached_property
    def documents(self) -> tuple[Document, ...]:
        """The documents in the order of their tokens."""
        offsets = self._small("documents/offsets")
        if not 0 <= offsets[0] <= offsets[-1] <= self.manifest.n_tokens or (np.diff(offsets) < 0).any():
            raise self._contradiction()
        try:
            names = names_of(self._small("documents/names").tobytes())
            spans = zip(names, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
            return tuple(Document(*found) for found in spans)
        except ValueError as error:
            raise StoreDamaged(
                f"The list of documents in {self.path} is damaged: restore it from a copy, or prefill again."
            ) from error

    @cached_property
    def query_positions(self) -> Array:
        """Token positions of the sampled queries, int64 `[n]`, in order."""
        positions = self._small("query_positions")
        if positions.min() < 0 or positions.max() >= self.manifest.n_tokens:
            raise self._contradiction()
        return positions

    @cached_property
    def query_heads(self) -> Array:
        """Which head of its group each of the sampled queries is of, int64 `[n]`."""
        own, group = self.manifest, self.manifest.shape.group
        if own.seam is None:
            return np.arange(own.n_samples) % group
        return sample_plan(own.n_tokens, group, own.n_samples)[1]

    def keys(self, layer: int, kv_head: int) -> Array:
        """Post-RoPE keys `[N, D]` of a full-attention layer, or encoded `[N]` (`common.rows.encodings`)."""
        return self._rows(layer, "keys", kv_head)

    def values(self, layer: int, kv_head: int) -> Array:
        """Values `[N, Dv]` of a full-attention layer, or encoded `[N]`; of latents their keys."""
        return self._rows(layer, "keys" if self.manifest.shape.latent else "values", kv_head)

    def key_norms(self, layer: int, kv_head: int) -> Array:
        """Lengths of the keys, float32 `[N]`."""
        return self._rows(layer, "key_norms", kv_head)[:, 0]

    def pages(self, layer: int, kv_head: int) -> tuple[Array, Array]:
        """Channel-wise minimum and maximum `[ceil(N / page_size), D]` of the keys of each page."""
        return self._rows(layer, "page_min", kv_head), self._rows(layer, "page_max", kv_head)

    def queries(self, layer: int, kv_head: int) -> Array:
        """Sampled post-RoPE prefill queries `[n, D]` of the heads that share `kv_head`."""
        return self._rows(layer, "queries", kv_head)

    def every_query(self, layer: int, kv_head: int) -> Array:
        """As `queries`, with those to spare, as copies: in the order of `layout.samples_of`."""
        spare = samples_of(self.manifest).spare
        own = self.queries(layer, kv_head)
        every = np.empty((len(spare), own.shape[1]), own.dtype)
        every[~spare] = own
        if spare.any():
            every[spare] = self._rows(layer, "spare_queries", kv_head)
        return every

    def window(self, layer: int) -> tuple[Array, Array]:
        """Keys and values `[Hkv, w, …]` of the last `w = min(N, window - 1)` tokens of a local layer."""
        if not (own := self.manifest.shape.layers[layer]).local:
            raise KeyError(layer)
        return self._window(layer, slice(-self.manifest.window(own), None))

    def states(self, layer: int) -> tuple[Array, ...]:
        """The recurrent states of a layer after the last token, in the order of its shape."""
        return self._states(layer, "")

    def kept_at(self, layer: int, tokens: int) -> Kept:
        """What a layer keeps after the first `tokens`: those up to the seam or to a mark (`Manifest`)."""
        manifest, own = self.manifest, self.manifest.shape.layers[layer]
        if tokens != manifest.seam:
            row = tokens // (manifest.marks or tokens) - 1
            return unpack(manifest, own, self._rows(layer, "marks", 0)[row], tokens)
        errors = {
            kind: EncodingLoss(*entry["sums"])
            for kind, entries in manifest.kv_error.items()
            for entry in entries
            if entry["layer"] == layer
        }
        window: tuple[Array, ...] = ()
        if own.local:
            window = self._window(layer, slice(tokens - manifest.n_tokens + manifest.kept_window(own)))
        return Kept(window, self._states(layer, SEAM if manifest.keeps_seam else ""), errors)

    def check_mapped(self, layer: int) -> None:
        """StoreDamaged where a mapped file of a layer has changed its size. To be called before its views are
        read again: the system ends a process that reads beyond the end of a truncated file (SIGBUS).

        A microsecond a file. One that shrinks while it is being read is still fatal.
        """
        mapped = self._mapped.get(layer, ())
        try:
            seen = [(os.lstat(file), size) for file, size in mapped]
            whole = all(found.st_size == size and S_ISREG(found.st_mode) for found, size in seen)
        except OSError:
            whole = False
        if not whole:
            with self._of_this():
                check_sizes(mapped)

    def check_same(self) -> None:
        """StoreMismatch where another store has replaced this one, as an append does."""
        if identity(self.path) == self._identity:
            return
        with surfaced(self.path):
            if read_regular(self.path / files.SEAL) != files.seal_of(files.render(self._sums)):
                raise StoreMismatch(
                    f"{self.path} is another store now than when it was opened: open it again."
                )

    def checksum(self, file: str) -> str:
        """The SHA-256 that a file of the store, by its path below it, had when it was published."""
        return self._sums[file]

    def digest(self, layer: int, kv_head: int) -> str:
        """SHA-256 over the checksums of one head's key files: names the keys without reading them."""
        names = self.specs[array_name(layer, "keys")].head_parts(kv_head)
        return hashlib.sha256(files.render({name: self._sums[name] for name, *_ in names})).hexdigest()

    @cached_property
    def store_digest(self) -> str:
        """SHA-256 of SHA256SUMS: names the whole store."""
        return hashlib.sha256(files.render(self._sums)).hexdigest()

    def cost(self) -> dict[str, int]:
        """Bytes on disk by kind of array."""
        cost: dict[str, int] = {}
        for spec in self.specs.values():
            name = spec.name.rpartition("/")[2].removesuffix(SEAM)
            kind = _KINDS.get(name.rstrip("0123456789"), name)
            base = spec.shape[0] * sum(size for size, _ in spec.base)
            cost[kind] = cost.get(kind, 0) + sum(spec.sizes().values()) - base
            if base:
                cost[BASE] = cost.get(BASE, 0) + base
        small = [name for name in self._sums if name.endswith("zarr.json")] + [files.SUMS, files.SEAL]
        cost["metadata and checksums"] = sum(os.path.getsize(self.path / name) for name in small)
        return cost

    def check_model(
        self,
        *,
        config_hash: str | None = None,
        weights_hash: str | None = None,
        tokenizer_hash: str | None = None,
        dtype: str | None = None,
        shape: ModelShape | None = None,
        model_id: str | None = None,
        adapter: str = "",
    ) -> None:
        """StoreMismatch where what is given of a model differs from the model that made the store; its name
        and the folder of its `adapter` are not compared, but tell why.
        """
        ours = self.manifest
        for difference, stored, current in (
            ("another configuration", ours.model_config_hash, config_hash),
            (f"another dtype, {dtype}", ours.dtype, dtype),
            ("other weights", ours.weights_hash, weights_hash),
            ("another tokenizer", ours.tokenizer_hash, tokenizer_hash),
            ("another shape", ours.shape, shape),
        ):
            if current is None or current == stored:
                continue
            if isinstance(current, str) and fingerprint_version(current) != fingerprint_version(str(stored)):
                raise StoreMismatch(
                    f"{self.path} was made by another release ({ours.software}), which knows models by other "
                    "fingerprints, so it cannot be told whether this model made it: prefill again, or use "
                    "that release."
                )
            if model_id is not None and _is_gguf(model_id) != _is_gguf(ours.model_id):
                made, other = ("is", "is not") if _is_gguf(ours.model_id) else ("is not", "is")
                raise StoreMismatch(
                    f"{self.path} was prefilled by {ours.model_id}, which {made} a GGUF file, and {model_id} "
                    f"{other}: a GGUF file is known by its bytes, so that a copy of its weights is another "
                    "model. Open the store with the model that made it, or prefill again."
                )
            if current == weights_hash and (adapter or ours.adapter):
                raise StoreMismatch(self._other_adapter(adapter))
            raise StoreMismatch(
                f"{self.path} was prefilled by the model {ours.model_id} in {ours.dtype}, and this model has "
                f"{difference}: open the store with the model that made it, or prefill again."
            )

    def _other_adapter(self, given: str) -> str:
        made = self.manifest.adapter
        was = f"with the adapter {made}" if made else "without an adapter"
        now = (
            f"has {'other weights with' if given == made else 'the adapter'} {given}" if given else "has none"
        )
        way = f"open it with --adapter {made} as it was then" if made else "leave --adapter out"
        return (
            f"{self.path} was prefilled {was}, and this model {now}, so that the stored keys and values are "
            f"of other weights: {way}, or prefill again. Only an activated LoRA, which has "
            "alora_invocation_tokens, answers from the stores of its base model."
        )

    def verify(self, progress: files.Report | None = None) -> None:
        """Read every byte; see `verify_store`."""
        verify_store(self.path, progress)

    def _rows(self, layer: int, kind: str, kv_head: int) -> Array:
        name = array_name(layer, kind)
        spec = self.specs[name]
        sizes = [(os.path.join(self.path, file), size) for file, size, _ in spec.head_parts(kv_head)]
        with self._of_this():
            if (name, kv_head) in self._views:
                check_sizes(sizes)
                return self._views[name, kv_head]
            view = head_view(self.path, spec, kv_head)
        self.check_same()
        self._views[name, kv_head] = view
        self._mapped.setdefault(layer, []).extend(sizes)
        return view

    def _window(self, layer: int, rows: slice) -> tuple[Array, Array]:
        heads = range(self.manifest.shape.layers[layer].kv_heads)
        keys, values = (
            np.stack([self._rows(layer, kind, head)[rows] for head in heads])
            for kind in ("window_keys", "window_values")
        )
        return keys, values

    def _states(self, layer: int, suffix: str) -> tuple[Array, ...]:
        return tuple(
            self._small(array_name(layer, own.name + suffix)).reshape(own.shape)
            for own in self.manifest.shape.layers[layer].states
        )

    def _small(self, name: str) -> Array:
        with self._of_this():
            found = list_view(self.path, self.specs[name])
        self.check_same()
        return found

    @contextmanager
    def _of_this(self) -> Iterator[None]:
        """What seems damaged may belong to another store that has replaced this one."""
        try:
            yield
        except StoreDamaged:
            self.check_same()
            raise

    def _contradiction(self) -> StoreDamaged:
        return StoreDamaged(f"The tokens or documents in {self.path} contradict its manifest: prefill again.")


def verify_store(path: str | Path, progress: files.Report | None = None) -> None:
    """Read every byte of the store at `path`. Raises as `KVStore.open`; StoreDamaged names every file that is
    missing, changed or not of the store.
    """
    root = existing(Path(path))

    def verify() -> None:
        if (root / files.SEAL).exists():
            files.check_tree(root, partial(expected_sizes, root), progress)
        store = KVStore.open(root)
        if token_hash(store.tokens) != store.manifest.token_hash:
            raise store._contradiction()
        _ = store.documents, store.query_positions

    with surfaced(root):
        of_one(root, verify)


def _is_gguf(model_id: str) -> bool:
    return model_id.endswith(".gguf")
