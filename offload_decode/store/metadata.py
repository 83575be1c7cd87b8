"""The Zarr v3 side of a store: metadata is written through zarr, and checked as the JSON that it is.

Reading it needs no zarr, so that a store opens at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from offload_decode import plain_json
from offload_decode.errors import StoreDamaged
from offload_decode.indexes import durable
from offload_decode.store.files import LARGEST_LIST, LARGEST_MANIFEST, LARGEST_METADATA, read_regular
from offload_decode.store.format import ATTRIBUTE, Manifest, numpy_dtype
from offload_decode.store.layout import ALIGNMENT, ArraySpec, array_specs, layer_name
from offload_decode.types import LayerKind

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
        group.create_array(
            spec.name,
            shape=spec.shape,
            chunks=spec.chunk,
            dtype=_stored_dtype(spec.dtype),
            filters=None,
            compressors=None,
            attributes={"dtype": spec.dtype},
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
    durable.write(partial / ROOT, json.dumps(group, indent=2).encode())
    durable.rename(partial / ROOT, root / ROOT)


def read_header(root: Path) -> dict[str, Any] | None:
    """The manifest of the group at `root` as JSON, not yet looked at; None where there is none."""
    try:
        return header_of(read_regular(root / ROOT, LARGEST_MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return None


def header_of(data: bytes) -> dict[str, Any] | None:
    """`read_header` of the bytes of a root group's metadata."""
    try:
        header = plain_json.parse(data)["attributes"][ATTRIBUTE]
    except (KeyError, TypeError, ValueError):
        return None
    return header if isinstance(header, dict) else None


def read_specs(root: Path, manifest: Manifest) -> dict[str, ArraySpec]:
    """The arrays of the store at `root` by name; StoreDamaged where they are not what the manifest says."""
    offsets, names = (_length(root, f"documents/{name}") for name in ("offsets", "names"))
    if names > LARGEST_LIST or offsets > min(names, manifest.n_tokens + 2):
        raise StoreDamaged(f"{root} lists more documents than it has tokens, or names: prefill again.")
    specs = array_specs(manifest, offsets - 1, names)
    return {spec.name: _stored_spec(root, spec) for spec in specs}


def _stored_spec(root: Path, spec: ArraySpec) -> ArraySpec:
    """`spec` with the chunk length of the stored array: all else must agree."""
    metadata = _read(root, spec.name)
    try:
        chunk = tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])
        stored = replace(spec, chunk=chunk)
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
    expected = {
        "node_type": "array",
        "zarr_format": 3,
        "shape": list(spec.shape),
        "data_type": _stored_dtype(spec.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(spec.chunk)}},
        "chunk_key_encoding": _KEYS,
        "attributes": {"dtype": spec.dtype},
    }
    codec = metadata["codecs"][0]
    return (
        {key: metadata[key] for key in expected} == expected
        and [each["name"] for each in metadata["codecs"]] == ["bytes"]
        and codec.get("configuration", {}).get("endian", "little") == "little"
        and not metadata.get("storage_transformers")
    )


def _is_mappable(spec: ArraySpec) -> bool:
    """Whether the chunk files of a head can be mapped one after another."""
    whole = spec.chunk == (1, *spec.shape[1:]) if len(spec.shape) == 3 else spec.chunk == spec.shape
    split = (
        len(spec.shape) == 3 and spec.chunk[::2] == (1, spec.shape[2]) and spec.chunk_bytes % ALIGNMENT == 0
    )
    return min(spec.chunk) > 0 and (whole or split)


def _stored_dtype(dtype: str) -> str:
    """Zarr has neither bfloat16 nor encoded rows: their bits are stored, and the attribute `dtype` says what
    they are.
    """
    return "uint16" if dtype == "bfloat16" else numpy_dtype(dtype).name


def _length(root: Path, name: str) -> int:
    shape = _read(root, name).get("shape")
    if not (isinstance(shape, list) and len(shape) == 1 and type(shape[0]) is int and shape[0] > 0):
        raise StoreDamaged(f"{root / name} is not a list: restore the store from a copy, or prefill again.")
    return shape[0]


def _read(root: Path, name: str) -> dict[str, Any]:
    try:
        metadata = plain_json.parse(read_regular(root / name / "zarr.json", LARGEST_METADATA))
    except (FileNotFoundError, ValueError) as error:
        raise StoreDamaged(
            f"{root / name / 'zarr.json'} is missing or cannot be read: "
            "restore it from a copy, or prefill again."
        ) from error
    return metadata if isinstance(metadata, dict) else {}
