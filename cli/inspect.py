"""`offload-decode inspect`: the contents and size of a store, or of a collection."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from offload_decode.cli import output
from offload_decode.cli.options import Json, StoreOrCollection
from offload_decode.common.errors import StoreDamaged

if TYPE_CHECKING:
    from offload_decode.collections.collection import Collection
    from offload_decode.collections.journal import Entry
    from offload_decode.kv.indexes import SavedIndexes
    from offload_decode.store.format import Manifest
    from offload_decode.store.reader import KVStore
    from offload_decode.types import ModelShape


_SHOWN = 10
_TOLD = ("method", "weights")  # apart from the options of a prefill


def inspect(store: StoreOrCollection, as_json: Json = False) -> None:
    """Show what a store, or a collection, holds and costs.

    A store's indexes are shown too, with the recall measured when they were built. For a collection: its
    model, its documents with their tokens and bytes, and their metadata fields.
    """
    from offload_decode.collections.collection import is_collection

    if is_collection(store):
        _inspect_collection(store, as_json)
        return
    from offload_decode.kv.indexes import describe, saved_kinds
    from offload_decode.store.reader import KVStore

    opened = KVStore.open(store)
    indexes = [describe(opened, kind) for kind in saved_kinds(opened)]
    if as_json:
        output.answer_json(_store_fields(opened, indexes))
        return
    tables = (_costs(opened), _errors(opened.manifest), _documents(opened), _indexes(indexes))
    parts = [output.facts(_facts(opened)), *(output.table(rows) for rows in tables if len(rows) > 1)]
    output.answer("\n\n".join(parts))


def _store_fields(store: KVStore, indexes: list[SavedIndexes]) -> dict[str, object]:
    from offload_decode.hf.user_cache import noted
    from offload_decode.store.tree import bases_of, begun_as

    manifest, cost = store.manifest, store.cost()
    difference, size = noted(manifest.model_config_hash), sum(cost.values())
    return {
        "store": str(store.path),
        "digest": store.store_digest,
        "manifest": manifest.to_json(),
        "note": _note(manifest) or None,
        "begins_as": [base._asdict() for base in bases_of(store)],
        "beginning_of": begun_as(store),
        "equivalence_check": {"difference": difference, "transformers": version("transformers")},
        "documents": list(map(asdict, store.documents)),
        **{"bytes": size, "bytes_per_token": size / manifest.n_tokens, "cost": cost},
        "indexes": list(map(asdict, indexes)),
    }


def _facts(store: KVStore) -> list[tuple[str, str]]:
    from offload_decode.hf.positions import describe_positions

    manifest = store.manifest
    given = [f", {name} {value}" for name, value in manifest.prefill.items() if name not in _TOLD]
    positions = describe_positions(manifest.rope, manifest.n_tokens)
    weights, keys, values = manifest.weights, manifest.kv["keys"], manifest.kv["values"]
    quantized = ": the keys and values are the quantized model's"
    tokens, samples = _short(manifest.token_hash), f"{manifest.n_samples:,}"
    return [
        ("store", str(store.path)),
        ("digest", _short(store.store_digest)),
        ("made by", f"{manifest.software}, format version {manifest.format_version}"),
        ("model", f"{manifest.model_id} (configuration {_short(manifest.model_config_hash)})"),
        ("tokenizer", _short(manifest.tokenizer_hash)),
        ("layers", _layers(manifest)),
        ("checked", _check(manifest)),
        ("tokens", f"{manifest.n_tokens:,} (hash {tokens}), a {manifest.template} prompt"),
        *([("positions", positions)] if positions else []),
        *([("note", note)] if (note := _note(manifest)) else []),
        ("prefill", f"{manifest.prefill['method']}{''.join(given)}"),
        *([] if weights == "auto" else [("weights", f"{weights}{quantized}")]),
        ("stored as", f"latents {keys}" if manifest.shape.latent else f"keys {keys}, values {values}"),
        *_tree(store),
        ("extras", f"pages of {manifest.page_size} tokens, {samples} sampled queries for each KV head"),
    ]


def _tree(store: KVStore) -> list[tuple[str, str]]:
    from offload_decode.store.tree import AS_IT_WAS, bases_of, begun_as

    rows = []
    for path, tokens, now in bases_of(store):
        kept = "" if now == AS_IT_WAS else "; its bytes are kept here"
        rows.append(("begins as", f"{path}, its first {tokens:,} tokens ({now}{kept})"))
    if names := begun_as(store):
        rows.append(("beginning of", output.some(names)))
    return rows


def _note(manifest: Manifest) -> str:
    from offload_decode.hf.rope_scaling import Trained

    return Trained(**manifest.trained or {}).note(manifest.n_tokens)


def _check(manifest: Manifest) -> str:
    from offload_decode.hf.user_cache import noted

    release = f"transformers {version('transformers')}"
    difference = noted(manifest.model_config_hash)
    if difference is None:
        return f"not run here with {release}: offload-decode models {manifest.model_id} runs it"
    return f"equal to plain generation, to {difference:.0e} of the spread of the logits ({release})"


def _layers(manifest: Manifest) -> str:
    shape = manifest.shape
    windows = Counter(layer.window for layer in shape.layers if layer.window)
    some = [f"{count} with a window of {window:,} tokens" for window, count in windows.items()]
    some += [f"{len(shape.state_layers)} with a recurrent state"] if shape.state_layers else []
    details = f" ({', '.join(some)})" if some else ""
    return f"{len(shape.layers)}{details}, {_heads(shape)}, {manifest.dtype}"


def _heads(shape: ModelShape) -> str:
    if shape.latent:
        numbers = f"latents of {shape.head_dim} numbers, keys and values in one"
        return f"{numbers}, for {shape.query_heads} query heads"
    width = f"head dimension {shape.head_dim}"
    if shape.value_dim != shape.head_dim:
        width = f"keys of {shape.head_dim} numbers and values of {shape.value_dim}"
    return f"{shape.kv_heads} KV heads for {shape.query_heads} query heads, {width}"


def _costs(store: KVStore) -> list[list[str]]:
    cost, tokens = store.cost(), store.manifest.n_tokens
    rows = [*sorted(cost.items(), key=lambda item: -item[1]), ("total", sum(cost.values()))]
    return [
        ["cost on disk", "size", "bytes a token"],
        *([kind, output.size(count), f"{count / tokens:,.1f}"] for kind, count in rows),
    ]


def _errors(manifest: Manifest) -> list[list[str]]:
    """The error of encoding in each layer: its root mean square, relative to that of the values."""
    kinds = manifest.kv_error or {}
    rows = [["error of encoding", *(part for kind in kinds for part in (f"{kind}, relative", "largest"))]]
    for found in zip(*kinds.values(), strict=True):
        cells = [cell for each in found for cell in (f"{each['relative_rms']:.2%}", f"{each['largest']:.3g}")]
        rows.append([f"layer {found[0]['layer']}", *cells])
    return rows


def _documents(store: KVStore) -> list[list[str]]:
    documents = store.documents
    rows = [[document.name, f"{document.end - document.start:,}"] for document in documents[:_SHOWN]]
    if more := documents[_SHOWN:]:
        rows.append([f"… {len(more):,} more (--json lists them)", f"{more[-1].end - more[0].start:,}"])
    return [[f"documents ({len(documents):,})", "tokens"], *rows]


def _indexes(indexes: list[SavedIndexes]) -> list[list[str]]:
    columns = "index, size, heads, recall measured, worst head, attention, queries that lose over a tenth, "
    columns += "worst head, best key found, worst head, tuned to a full scan"
    rows = [columns.split(", ")]
    for found in indexes:
        whole = found.heads == found.heads_in_all
        heads = f"{found.heads:,}" if whole else f"{found.heads:,} of {found.heads_in_all:,}, unfinished"
        unmeasured = "exact" if found.kind == "flat" else "none"
        mean = unmeasured if found.recall is None else f"{found.recall:.3f} (@{found.k})"
        lowest = "" if found.lowest_recall is None else f"{found.lowest_recall:.3f}"
        scans = f"{found.full_scans:,} heads" if found.full_scans else ""  # where an index saves nothing
        scans = "all heads" if scans and found.full_scans == found.heads else scans
        measured = found.mass, found.lost, found.most_lost, found.best, found.least_best
        shares = ["" if share is None else f"{share:.2%}" for share in measured]
        rows.append([found.kind, output.size(found.bytes), heads, mean, lowest, *shares, scans])
    return rows


def _short(digest: str) -> str:
    return digest[:12] or "none"


def _inspect_collection(path: Path, as_json: bool) -> None:
    from offload_decode.collections.collection import Collection
    from offload_decode.collections.words import WORDS

    collection = Collection(path)
    entries, header = collection.entries, collection.header
    sizes = [_store_bytes(collection, entry) for entry in entries]
    lists = sum(each.stat().st_size for each in path.iterdir() if each.is_file())
    fields = Counter(field for entry in entries for field in entry.metadata)
    tokens = sorted(entry.tokens for entry in entries) or [0]
    has_words = (path / WORDS).exists()
    if as_json:
        documents = [
            {"name": entry.name, "tokens": entry.tokens, "bytes": size}
            | {"store": collection.address(entry), "metadata": entry.metadata}
            for entry, size in zip(entries, sizes, strict=True)
        ]
        total = {"tokens": sum(tokens), "bytes": lists + sum(filter(None, sizes))}
        output.answer_json(
            {"collection": str(path), "model": header.model_id, "dtype": header.dtype}
            | {"weights": header.weights, "settings": header.settings, "documents": documents, **total}
            | {"missing": sizes.count(None), "metadata": fields, "words": has_words}
        )
        return
    facts = [
        ("collection", str(path)),
        ("model", f"{header.model_id}, {header.dtype}"),
        ("weights", header.weights),
        ("prefill", ", ".join(f"{name} {value}" for name, value in header.settings.items() if value)),
        ("documents", f"{len(entries):,} of {tokens[0]:,} to {tokens[-1]:,} tokens, {sum(tokens):,} in all"),
        ("on disk", f"{output.size(sum(filter(None, sizes)))} of stores, {output.size(lists)} of lists"),
        ("metadata", ", ".join(f"{name} ({count:,})" for name, count in fields.most_common()) or "none"),
    ]
    if missing := sizes.count(None):
        facts.append(("missing", f"{output.count(missing, 'store')}: collect again"))
    if not has_words:
        facts.append(("words", "missing, so --top finds nothing: collect again"))
    output.answer(f"{output.facts(facts)}\n\n{output.table(_collection_documents(entries, sizes))}")


def _store_bytes(collection: Collection, entry: Entry) -> int | None:
    """The size of a store and its indexes; None where the store is missing."""
    try:
        store = collection.store(entry)
    except StoreDamaged:  # a symbolic link, which is not followed
        return None
    if not store.is_dir():
        return None
    indexes = store.with_name(f"{store.name}.indexes")
    return sum(
        os.lstat(os.path.join(folder, name)).st_size
        for top in (store, indexes)
        for folder, _, files in os.walk(top)
        for name in files
    )


def _collection_documents(entries: Sequence[Entry], sizes: Sequence[int | None]) -> list[list[str]]:
    rows = [
        [entry.name, f"{entry.tokens:,}", "missing" if size is None else output.size(size)]
        for entry, size in zip(entries[:_SHOWN], sizes, strict=False)
    ]
    if more := entries[_SHOWN:]:
        tokens, rest = sum(entry.tokens for entry in more), sum(filter(None, sizes[_SHOWN:]))
        rows.append([f"… {len(more):,} more (--json lists them)", f"{tokens:,}", output.size(rest)])
    return [["documents", "tokens", "size"], *rows]
