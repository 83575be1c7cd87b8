"""The arrays of a store: their shapes and chunk files, their Zarr v3 metadata, and which queries are sampled.

Metadata is written through zarr and checked as JSON; reading needs no zarr, so that a store opens at once.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from offload_decode.common import files
from offload_decode.common.errors import StoreDamaged
from offload_decode.common.rows import encodings
from offload_decode.store.files import LARGEST_LIST, LARGEST_MANIFEST, LARGEST_METADATA, read_regular
from offload_decode.store.format import ATTRIBUTE, MOST_TOKENS, Array, Manifest, check, numpy_dtype
from offload_decode.store.marks import row_bytes
from offload_decode.types import LayerKind, LayerShape

CHUNK_TOKENS = 65_536
"""Tokens of one head in a chunk file, until a head would have more than MAX_CHUNKS of them."""
MAX_CHUNKS = 32
MAX_KV_MAPS, MAX_PAGE_MAPS = 40_960, 10_240
"""Linux lets a process have 65,530 memory maps: a whole store stays under that, with room for the rest."""
SEAM = "_seam"
"""Ends the name of a state at the last chunk boundary (`Manifest.seam`)."""
ALIGNMENT = 64 * 1024
"""Chunk files that are mapped one after another end on a page of the machine, which has 4 to 64 KiB."""


class Part(NamedTuple):
    """A file of a head, its bytes, and how many of them, from its first on, are the head's."""

    file: str
    size: int
    used: int


def at(parts: Sequence[Part], place: int) -> tuple[str, int, int]:
    """The file of a head that has its byte `place`, where it is there, and how many of the head's follow."""
    for file, _, used in parts:
        if place < used:
            return file, place, used - place
        place -= used
    raise IndexError("the head ends before")


@dataclass(frozen=True)
class ArraySpec:
    """One array, cut into chunks of the shape `chunk`, of which those at the edges are padded with zeros: of
    rank 3, `[heads, rows, D]` in chunks of one head, or of rank 1 and one chunk.

    `base`: the files of another store with which every head begins, each by its bytes and how many of them,
    from its first on, are the head's. The rest of the head is one chunk file then.
    """

    name: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: str
    base: tuple[tuple[int, int], ...] = ()

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return numpy_dtype(self.dtype)

    @property
    def row_bytes(self) -> int:
        return self.numpy_dtype.itemsize * (self.shape[-1] if len(self.shape) == 3 else 1)

    @property
    def base_bytes(self) -> int:
        """Of each head."""
        return sum(used for _, used in self.base)

    @property
    def chunk_bytes(self) -> int:
        """Of each chunk file."""
        return math.prod(self.chunk) * self.numpy_dtype.itemsize - self.base_bytes

    @property
    def metadata_file(self) -> str:
        return f"{self.name}/zarr.json"

    @property
    def file_count(self) -> int:
        return math.prod(map(len, self._grid())) + self.shape[0] * len(self.base)

    def sizes(self) -> dict[str, int]:
        """Bytes of every file, with those of the base."""
        heads = range(self.shape[0] if self.base else 0)
        base = {file: size for head in heads for file, size, _ in self.head_parts(head)}
        return {**base, **dict.fromkeys(self.files(), self.chunk_bytes)}

    def files(self) -> Iterator[str]:
        """Every chunk file, head by head, in the order of the rows."""
        return (f"{self.name}/c." + ".".join(map(str, index)) for index in product(*self._grid()))

    def _grid(self) -> list[range]:
        return [range(-(-size // step)) for size, step in zip(self.shape, self.chunk, strict=True)]

    def head_files(self, head: int) -> list[str]:
        """The chunk files of one head, in the order of the rows."""
        assert 0 <= head < self.shape[0], f"{self.name} has no head {head}"
        return [f"{self.name}/c.{head}.{i}.0" for i in range(-(-self.shape[1] // self.chunk[1]))]

    def head_parts(self, head: int) -> list[Part]:
        """The files of one head, those of the base first."""
        base = [Part(f"{self.name}/base.{head}.{i}", *sizes) for i, sizes in enumerate(self.base)]
        return base + [Part(file, self.chunk_bytes, self.chunk_bytes) for file in self.head_files(head)]

    def base_files(self) -> list[str]:
        """The files of the base, head by head."""
        heads = range(self.shape[0] if self.base else 0)
        return [part.file for head in heads for part in self.head_parts(head)[: len(self.base)]]

    def beginning(self, rows: int) -> tuple[tuple[int, int], ...]:
        """The `base` of an array that begins with so many rows of this one: as many as can be mapped ahead of
        another file.
        """
        left, base = rows * self.row_bytes // ALIGNMENT * ALIGNMENT, []
        for _, size, used in self.head_parts(0)[:MAX_CHUNKS]:
            if taken := min(used, left):
                base.append((size, taken))
                left -= taken
        return tuple(base)


def chunk_rows(rows: int, row_bytes: int, target: int | None = None, most: int = MAX_CHUNKS) -> int:
    """Rows of a chunk: about `target`, more where that would make more than `most` chunks; each a multiple of
    ALIGNMENT, but a single one has exactly `rows`.
    """
    chunks = min(-(-rows // (target or CHUNK_TOKENS)), most)
    unit = ALIGNMENT // math.gcd(ALIGNMENT, row_bytes)
    return min(rows, -(-rows // chunks // unit) * unit) if chunks > 1 else rows


def layer_name(layer: int) -> str:
    """The group of one layer."""
    return f"layers/{layer:03d}"


@cache
def array_name(layer: int, kind: str) -> str:
    """The array of one layer and kind (`keys`, `page_min`, …); formatted once, as every chunk asks for it."""
    return f"{layer_name(layer)}/{kind}"


def grown_rows(rows: int, earlier: ArraySpec, most: int) -> int | None:
    """Rows of a chunk of a head that begins as an `earlier` array: as many as there, so that its chunk files
    can be shared, or twice as many for as long as there would be more than `most`. None where one of them has
    but one.
    """
    size = earlier.chunk[1]
    if size >= min(rows, earlier.shape[1]):
        return None
    while -(-rows // size) > most:
        size *= 2
    return size


def array_specs(
    manifest: Manifest, n_documents: int, name_bytes: int, earlier: Mapping[str, ArraySpec] | None = None
) -> Iterator[ArraySpec]:
    """Every array of a store that is to be written; `earlier` are those of the store that it begins as."""
    for name, length, dtype in (
        ("tokens", manifest.n_tokens, "int32"),
        ("documents/offsets", n_documents + 1, "int64"),
        ("documents/names", name_bytes, "uint8"),
        ("query_positions", manifest.n_samples, "int64"),
    ):
        yield ArraySpec(name, (length,), (length,), dtype)

    for layer, own in enumerate(manifest.shape.layers):
        if own.local:
            length = manifest.kept_window(own)
            for kind, dim in (("keys", own.key_dim), ("values", own.value_dim)):
                shape, chunk = (own.kv_heads, length, dim), (1, length, dim)
                yield ArraySpec(f"{layer_name(layer)}/window_{kind}", shape, chunk, manifest.dtype)
        elif own.kind is LayerKind.FULL:
            yield from _whole(manifest, layer_name(layer), own, earlier or {})
        if manifest.n_marks and (width := row_bytes(manifest, own)):
            shape = (1, manifest.n_marks, width)
            yield ArraySpec(f"{layer_name(layer)}/marks", shape, shape, "uint8")
        for state in own.states:
            length = math.prod(state.shape)
            for name in (state.name, state.name + SEAM) if manifest.keeps_seam else (state.name,):
                yield ArraySpec(f"{layer_name(layer)}/{name}", (length,), (length,), state.dtype)


def _whole(
    manifest: Manifest, group: str, own: LayerShape, earlier: Mapping[str, ArraySpec]
) -> Iterator[ArraySpec]:
    heads = own.kv_heads
    streams = 2 * heads * len(manifest.shape.full_layers)

    def rows(name: str, length: int, dim: int, maps: int | None, dtype: str = manifest.dtype) -> ArraySpec:
        width = dim if dtype == manifest.dtype else encodings.row_bytes(dtype, dim)
        most = max(1, min(MAX_CHUNKS, maps // streams)) if maps else 1
        before = earlier.get(f"{group}/{name}")
        size = before and grown_rows(length, before, most)
        size = size or chunk_rows(length, width * numpy_dtype(dtype).itemsize, most=most)
        return ArraySpec(f"{group}/{name}", (heads, length, width), (1, size, width), dtype)

    tokens, pages = manifest.n_tokens, -(-manifest.n_tokens // manifest.page_size)
    yield rows("keys", tokens, own.key_dim, MAX_KV_MAPS, manifest.kv["keys"])
    if not own.latent:
        yield rows("values", tokens, own.value_dim, MAX_KV_MAPS, manifest.kv["values"])
    yield ArraySpec(f"{group}/key_norms", (heads, tokens, 1), (1, tokens, 1), "float32")
    yield rows("page_min", pages, own.key_dim, MAX_PAGE_MAPS)
    yield rows("page_max", pages, own.key_dim, MAX_PAGE_MAPS)
    yield rows("queries", manifest.n_samples, own.key_dim, None)
    if spare := _spare(manifest):
        yield rows("spare_queries", spare, own.key_dim, None)


ROOT = "zarr.json"
COLLECTION = "collection.json"
"""In a folder of stores, and in none of a store (`collections.collection`)."""

# One folder an array; with the separator "/" there would be one a chunk, tens of thousands in a large store.
_KEYS: Any = {"name": "default", "configuration": {"separator": "."}}


def create_group(root: Path, manifest: Manifest, specs: Iterable[ArraySpec]) -> None:
    """Write the metadata of the group at `root` and of all its arrays; chunk files are not made."""
    import zarr

    group = zarr.create_group(str(root), zarr_format=3, attributes={ATTRIBUTE: manifest.to_json()})
    for spec in specs:
        shape, chunk, dtype, attributes = _stored(spec)
        group.create_array(
            spec.name,
            shape=shape,
            chunks=chunk,
            dtype=dtype,
            filters=None,
            compressors=None,
            attributes=attributes,
            chunk_key_encoding=_KEYS,
            config={"write_empty_chunks": True},
        )


def group_files(manifest: Manifest) -> list[str]:
    """The metadata files of the groups."""
    layers = (
        layer_name(layer)
        for layer, own in enumerate(manifest.shape.layers)
        if own.states or own.kind is not LayerKind.NONE
    )
    return [ROOT, "documents/zarr.json", "layers/zarr.json", *(f"{layer}/zarr.json" for layer in layers)]


def record(partial: Path, root: Path, manifest: Manifest) -> None:
    """Put another manifest into the group at `root`; its new file is made in the folder `partial`."""
    group = json.loads((root / ROOT).read_bytes())
    group["attributes"][ATTRIBUTE] = manifest.to_json()
    files.write(partial / ROOT, json.dumps(group, indent=2).encode())
    files.rename(partial / ROOT, root / ROOT)


def read_header(root: Path) -> dict[str, Any] | None:
    """The manifest of the group at `root` as JSON, not yet looked at; None where there is none."""
    try:
        return header_of(read_regular(root / ROOT, LARGEST_MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return None


def header_of(data: bytes) -> dict[str, Any] | None:
    """`read_header` of the bytes of a root group's metadata."""
    try:
        header = files.parse(data)["attributes"][ATTRIBUTE]
    except (KeyError, TypeError, ValueError):
        return None
    return header if isinstance(header, dict) else None


def read_specs(root: Path, manifest: Manifest) -> dict[str, ArraySpec]:
    """The arrays of the store at `root` by name; StoreDamaged where they are not what the manifest says."""
    lengths = []
    for name in ("documents/offsets", "documents/names"):
        match _read(root, name).get("shape"):
            case [int(length)] if length > 0 and length is not True:
                lengths.append(length)
            case _:
                raise StoreDamaged(
                    f"{root / name} is not a list: restore the store from a copy, or prefill again."
                )
    offsets, names = lengths
    if names > LARGEST_LIST or offsets > min(names, manifest.n_tokens + 2):
        raise StoreDamaged(f"{root} lists more documents than it has tokens, or names: prefill again.")
    specs = array_specs(manifest, offsets - 1, names)
    return {spec.name: _stored_spec(root, spec) for spec in specs}


def _stored_spec(root: Path, spec: ArraySpec) -> ArraySpec:
    """`spec` with the chunk length and the base of the stored array: all else must agree."""
    metadata = _read(root, spec.name)
    try:
        chunk = tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])
        if base := metadata["attributes"].get("base", ()):
            check("base", base, [[range(1, 2**63), range(2, 3)], range(1, MAX_CHUNKS + 1)])
            chunk = (1, *spec.shape[1:])
        stored = replace(spec, chunk=chunk, base=tuple((size, used) for size, used in base))
        sane = len(chunk) == len(spec.shape) and all(type(step) is int for step in chunk)
        if sane and _is_as_expected(metadata, stored) and _is_mappable(stored):
            return stored
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        pass
    raise StoreDamaged(
        f"{root / spec.metadata_file} does not describe the array that the manifest promises: "
        "restore the store from a copy, or prefill again."
    )


def _is_as_expected(metadata: dict[str, Any], spec: ArraySpec) -> bool:
    """Whether the metadata is that of `spec`, and a chunk file the little-endian bytes of its chunk."""
    shape, chunk, dtype, attributes = _stored(spec)
    expected = {
        "node_type": "array",
        "zarr_format": 3,
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": _KEYS,
        "attributes": attributes,
    }
    codec = metadata["codecs"][0]
    return (
        {key: metadata[key] for key in expected} == expected
        and [each["name"] for each in metadata["codecs"]] == ["bytes"]
        and codec.get("configuration", {}).get("endian", "little") == "little"
        and not metadata.get("storage_transformers")
    )


def _is_mappable(spec: ArraySpec) -> bool:
    """Whether the files of a head can be mapped one after another."""
    if spec.base:
        most = MOST_TOKENS * spec.row_bytes
        fits = all(used <= size <= most and used % ALIGNMENT == 0 for size, used in spec.base)
        return fits and len(spec.shape) == 3 and spec.chunk_bytes > 0
    whole = spec.chunk == (1, *spec.shape[1:]) if len(spec.shape) == 3 else spec.chunk == spec.shape
    split = (
        len(spec.shape) == 3 and spec.chunk[::2] == (1, spec.shape[2]) and spec.chunk_bytes % ALIGNMENT == 0
    )
    return min(spec.chunk) > 0 and (whole or split)


def _stored(spec: ArraySpec) -> tuple[tuple[int, ...], tuple[int, ...], str, dict[str, Any]]:
    """Shape, chunk shape, data type and attributes in Zarr, which has neither bfloat16 nor encoded rows: the
    attribute `dtype` says what their bits are. Behind a base, which may end within a row, lie bytes.
    """
    if spec.base:
        attributes = {"dtype": spec.dtype, "base": [list(sizes) for sizes in spec.base]}
        return (spec.shape[0], spec.chunk_bytes, 1), (1, spec.chunk_bytes, 1), "uint8", attributes
    name = "uint16" if spec.dtype == "bfloat16" else numpy_dtype(spec.dtype).name
    return spec.shape, spec.chunk, name, {"dtype": spec.dtype}


def _read(root: Path, name: str) -> dict[str, Any]:
    try:
        metadata = files.parse(read_regular(root / name / "zarr.json", LARGEST_METADATA))
    except (FileNotFoundError, ValueError) as error:
        raise StoreDamaged(
            f"{root / name / 'zarr.json'} is missing or cannot be read: "
            "restore it from a copy, or prefill again."
        ) from error
    return metadata if isinstance(metadata, dict) else {}


Int64s = npt.NDArray[np.int64]

_GOLDEN = 2654435769  # 2^32 divided by the golden ratio: its multiples are spread evenly modulo 2^32


def sample_plan(n_tokens: int, group: int, n: int) -> tuple[Int64s, Int64s]:
    """Positions and heads (within the GQA group) of `n` queries spread evenly over `n_tokens` tokens.

    Both are int64 `[min(n, n_tokens * group)]`, ordered by position, then head; no pair comes twice. The
    pairs of a longer corpus that lie in a shorter one are pairs of the shorter one too, for as many samples.
    """
    each, more = divmod(min(n, n_tokens * group), n_tokens)
    every = np.arange(n_tokens * each, dtype=np.int64)
    positions = np.concatenate([every // max(each, 1), _spread(n_tokens, more)])
    turns = np.concatenate([every % max(each, 1), np.full(more, each)])
    first = ((positions * _GOLDEN) % 2**32 * group) >> 32
    pairs = np.sort(positions * group + (first + turns) % group)
    return pairs // group, pairs % group


class Samples(NamedTuple):
    """The queries that a store keeps: their positions and heads, as `sample_plan` has them, and which of them
    are to `spare`.
    """

    positions: Int64s
    heads: Int64s
    spare: npt.NDArray[np.bool_]


def samples_of(manifest: Manifest) -> Samples:
    """Those of `sample_plan`; where `marks` are kept also the others of its last level, so that a corpus that
    shrinks finds its own among them.
    """
    tokens, group, n = manifest.n_tokens, manifest.shape.group, manifest.n_samples
    every, own = (sample_plan(tokens, group, count) for count in (n + _spare(manifest), n))
    numbers, ours = (positions * group + heads for positions, heads in (every, own))
    return Samples(*every, np.isin(numbers, ours, invert=True))


def _spare(manifest: Manifest) -> int:
    """How many queries to spare a store keeps."""
    more = manifest.n_samples % manifest.n_tokens
    level = manifest.n_tokens // (_step(manifest.n_tokens, more) // 2)
    return level - more if manifest.marks and more else 0


def _step(m: int, n: int) -> int:
    """The smallest power of two of which at most `n`, fewer than `m`, multiples are up to `m`."""
    return 1 << (m // (n + 1)).bit_length()


def _spread(m: int, n: int) -> Int64s:
    """`n` of the numbers below `m`, in order: the first n of them in an order that does not depend on `m`:
    counted from 1, the multiples of a power of two, then between them those of its half, and so on.
    """
    if n in (0, m):
        return np.arange(n, dtype=np.int64)
    step = _step(m, n)
    regular, half = np.arange(step - 1, m, step), step // 2
    between = half * (2 * _spread(m // half - len(regular), n - len(regular)) + 1) - 1
    return np.sort(np.concatenate([regular, between]))


def row_norms(keys: Array) -> Array:
    """Euclidean lengths `[Hkv, T, 1]` float32 of `keys [Hkv, T, D]`, for cosine scores (QuoKA, §3.2).

    Each row is summed on its own, so that the bytes do not depend on how the tokens were grouped.
    """
    wide = keys.astype(np.float32)
    norms: Array = np.sqrt((wide * wide).sum(axis=-1, keepdims=True, dtype=np.float32))
    return norms
