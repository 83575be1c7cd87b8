"""Begin a store, or resume one that a killed process began: both continue from what is committed."""

import functools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from offload_decode.common import files
from offload_decode.common.errors import StoreDamaged, StoreMismatch
from offload_decode.common.rows.encodings import decode
from offload_decode.store import layout, staging
from offload_decode.store.files import LARGEST_MANIFEST, check_sizes, hash_files, open_regular, read_regular
from offload_decode.store.format import Array, Manifest, unplaced
from offload_decode.store.growth import Growth, base_digest
from offload_decode.store.layout import ArraySpec, Samples, array_specs, samples_of
from offload_decode.store.pages import fold_pages
from offload_decode.store.reader import names_of
from offload_decode.store.staging import PROGRESS, REPLACED, STORE, WINDOWS, Committed
from offload_decode.store.streams import RowStream, allocate, as_bytes, kind_of, no_errors, write_array
from offload_decode.types import Document

_OF_THE_TEXT = ("n_tokens", "token_hash", "seam")
"""What a manifest says of the tokens, and users do not know by these names."""


def prepare(
    partial: Path, manifest: Manifest, tokens: Array, documents: Sequence[Document], growth: Growth | None
) -> Samples:
    """Make the store in the staging folder `partial`, which is held, or see that it is this one; its samples.

    Something else that was begun there makes way where the `growth` supersedes it: it was derived from the
    earlier store, which stays, and from a corpus that is no longer the one to store. StoreMismatch where it
    does not; StoreDamaged where what was begun has changed.
    """
    offsets = np.array([*(d.start for d in documents[:1]), *(d.end for d in documents)] or [0], "<i8")
    names = np.frombuffer(json.dumps([d.name for d in documents]).encode(), np.uint8)
    samples = samples_of(manifest)
    arrays = {"tokens": tokens, "documents/offsets": offsets, "documents/names": names}
    arrays["query_positions"] = samples.positions[~samples.spare]
    begun = (partial / PROGRESS).exists() and (partial / STORE).exists()
    others = _others(partial, manifest, arrays) if begun else []
    if others and growth and growth.supersedes(_begun_names(partial), documents):
        growth.discarded, begun = Committed.load(partial).ran, False
    if not begun:
        _create(partial, manifest, arrays, samples, growth)
        others = _others(partial, manifest, arrays)
    if others and (partial / REPLACED).exists():  # the only copy of it
        raise StoreMismatch(
            f"{partial} holds the store that an append or a renewal was replacing when it was killed: "
            "run that again to go on, or choose another path."
        )
    if others:
        raise StoreMismatch(
            f"{partial} was begun with another {' and another '.join(others)}: remove it to begin "
            f"again{', or go on with the same corpus' if growth else ', or choose another path'}."
        )
    if begun:
        _check_base(partial, manifest, growth)
    return samples


def _create(
    partial: Path,
    manifest: Manifest,
    arrays: Mapping[str, Array],
    samples: Samples,
    growth: Growth | None,
) -> None:
    root = partial / STORE
    (partial / PROGRESS).unlink(missing_ok=True)  # of a store that was published and removed
    for folder in (root, partial / WINDOWS):
        files.remove(folder)
        folder.mkdir()
    earlier = growth.earlier.specs if growth else None
    sizes = len(arrays["documents/offsets"]) - 1, len(arrays["documents/names"])
    specs = list(array_specs(manifest, *sizes, earlier))
    if growth:
        specs = growth.begun(manifest, specs, samples)
    layout.create_group(root, manifest, specs)
    committed = Committed(
        crcs={s.name: [0] * s.shape[0] for s in specs if kind_of(s)},
        segments={str(layer): [] for layer in manifest.shape.local_layers},
        errors=no_errors(manifest),
        seam_errors=no_errors(manifest),
    )
    if growth:
        try:
            committed = growth.seed(partial, manifest, specs, samples, committed)
        except BaseException:
            shutil.rmtree(root)  # what was copied would only fill the disk
            raise
    for spec in specs:
        allocate(root, spec)
        if spec.name in arrays:
            write_array(root, spec, arrays[spec.name])
    for folder in (root, partial / WINDOWS):
        files.sync_tree(folder)
    committed.save(partial)


def staged_specs(partial: Path, manifest: Manifest) -> dict[str, ArraySpec]:
    """The arrays, whose files had their full size from the beginning: a larger one would be published so."""
    root = partial / STORE
    specs = layout.read_specs(root, manifest)
    for name in (*layout.group_files(manifest), *specs):
        try:
            if spec := specs.get(name):
                check_sizes((str(root / file), size) for file, size in spec.sizes().items())
            else:
                read_regular(root / name, LARGEST_MANIFEST)
        except (FileNotFoundError, StoreDamaged) as error:
            raise staging.damaged(partial, name) from error
    return specs


def _check_base(partial: Path, manifest: Manifest, growth: Growth | None) -> None:
    """StoreDamaged where the files of a base have changed since they were taken over. Publishing would find
    it too, after hours.
    """
    specs = staged_specs(partial, manifest).values()
    report = functools.partial(growth.progress, "verify") if growth else None
    names = [file for spec in specs for file in spec.base_files()]
    if base_digest(specs, hash_files(partial / STORE, names, report)) != Committed.load(partial).shared:
        raise staging.base_damaged(partial)


def _others(partial: Path, manifest: Manifest, arrays: Mapping[str, Array]) -> list[str]:
    """What is other in the staged store than in the one that is asked for, as users know it."""
    staged, wanted = layout.read_header(partial / STORE), manifest.to_json()
    if staged is None:
        raise staging.damaged(partial, layout.ROOT)
    # The first is there already where publishing was interrupted; the others change no number but by tokens.
    wanted |= {name: staged.get(name) for name in ("kv_error", "opening", "trained")}
    staged["base"], wanted["base"] = (unplaced(one.get("base")) for one in (staged, wanted))
    differ = {name for name in {*staged, *wanted} if staged.get(name) != wanted.get(name)}
    others = sorted({"text" if name in _OF_THE_TEXT else name for name in differ})
    changed = [
        name
        for name, array in arrays.items()
        if _staged_bytes(partial / STORE, name, array.nbytes) != as_bytes(array)
    ]
    if not others and "documents" in {name.partition("/")[0] for name in changed}:
        others = ["list of documents"]
    if changed and not others:
        raise staging.damaged(partial, changed[0])
    return others


def _begun_names(partial: Path) -> list[str]:
    """The documents of the staged store."""
    name = "documents/names"
    try:
        return names_of(read_regular(partial / STORE / name / "c.0"))
    except (FileNotFoundError, ValueError) as error:
        raise staging.damaged(partial, name) from error


def _staged_bytes(root: Path, name: str, size: int) -> bytes:
    """What lies there of an array of `size` bytes, and one byte more if there is one."""
    file = root / name / "c.0"
    if not os.path.lexists(file):
        return b""
    with os.fdopen(open_regular(file), "rb") as staged:
        return staged.read(size + 1)


def reopened_page(manifest: Manifest, keys: RowStream) -> Array | None:
    """The bounds of the page that the last commit left open, from the staged keys of its layer."""
    if not (rows := keys.rows % manifest.page_size) or keys.rows == manifest.n_tokens:
        return None
    start = keys.rows - rows
    newest = np.stack([keys.view(head)[start:] for head in range(manifest.shape.kv_heads)])
    if manifest.encoding("keys"):
        newest = decode(newest)
    return fold_pages(None, start, newest, manifest.page_size, manifest.n_tokens)[2]
