"""What a prefill takes over from a finished store: one that it makes longer (`append`), or another store that
begins as that one (`prefill --on`).
"""

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from offload_decode.common.errors import ConfigError, StoreForeign, StoreMismatch
from offload_decode.hf.mla import tell_of_indexer
from offload_decode.models.loading import LoadedModel
from offload_decode.models.prompt import Prompt
from offload_decode.prefill_jobs.methods.base import Method
from offload_decode.prefill_jobs.methods.registry import create, get, names
from offload_decode.store.format import Manifest, running_software, token_hash
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import REPLACED, locked, partial_path
from offload_decode.store.writer import restore
from offload_decode.types import Document


def opened(path: Path) -> KVStore:
    """The store at `path`, if a prefill can go on where it ends. Raises `StoreError`."""
    where = Path(os.path.realpath(path))
    if (partial_path(where) / REPLACED).exists():
        with locked(partial_path(where)):
            restore(where, partial_path(where) / REPLACED)
    store = KVStore.open(path)
    last_boundary(store)
    return store


def last_boundary(store: KVStore) -> int:
    """The token at which the last full chunk ended."""
    if store.manifest.seam is None:
        raise StoreForeign(
            f"{store.path} was made by an earlier release ({store.manifest.software}), whose stores keep too "
            "little for a prefill to continue: prefill all of it again."
        )
    return store.manifest.seam


def method_of(store: KVStore) -> Method:
    """The method that a store was prefilled with, with its options. Raises `ConfigError` for one that is not
    installed, and `ExtensionError`.
    """
    stated = store.manifest.prefill
    name = str(stated["method"])
    if name not in names():
        raise ConfigError(
            f"{store.path} was prefilled by a method '{name}', which is neither built in nor installed: "
            "install the extension or the release that brings it"
        )
    known = {option.name for option in fields(get(name).options_type)}
    options = {key: value for key, value in stated.items() if key in known}
    return create(name, options, store.manifest.shape)


def check_model(store: KVStore, loaded: LoadedModel) -> None:
    """`StoreMismatch` where another model than this one made the store."""
    store.check_model(
        config_hash=loaded.config_hash,
        weights_hash=loaded.weights_hash,
        tokenizer_hash=loaded.tokenizer_hash,
        dtype=loaded.dtype,
        shape=loaded.shape,
        model_id=loaded.model_id,
    )
    if loaded.weights != store.manifest.weights:
        raise StoreMismatch(
            f"{store.path} was prefilled with {store.manifest.weights} weights, and this model has "
            f"{loaded.weights} ones: load it with the same."
        )


def prompt_of(store: KVStore, loaded: LoadedModel) -> Prompt:
    """The prompt that the tokens of a store open. Raises as `check_model`."""
    check_model(store, loaded)
    prompt = loaded.prompt.opened(store.manifest.opening)
    if prompt.template != store.manifest.template:
        raise StoreMismatch(
            f"{store.path} was prefilled in a {store.manifest.template} prompt, and this tokenizer makes a "
            f"{prompt.template} one: use the tokenizer that it was made with, or prefill all of it again."
        )
    return prompt


Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]


class Longer(NamedTuple):
    """All tokens `[N]` and documents of a store that goes on, its manifest, and how it is prefilled."""

    tokens: Tokens
    documents: list[Document]
    manifest: Manifest
    method: Method


def longer(store: KVStore, loaded: LoadedModel, tokens: Tokens, documents: Sequence[Document]) -> Longer:
    """A store that begins as `store` and has these further tokens and documents. Raises `ConfigError` where
    its positions do not allow for so many, and as `method_of`.
    """
    before, method = store.manifest.n_tokens, method_of(store)
    total, chunk = before + len(tokens), method.options.chunk
    loaded.lengths.of_store(store.manifest.rope, before).check(total + 1)
    tell_of_indexer(loaded.model.config, total)
    loaded.trained.tell(total)
    whole = np.concatenate([store.tokens, np.asarray(tokens, np.int32)])
    manifest = replace(
        store.manifest,
        n_tokens=total,
        token_hash=token_hash(whole),
        kv_error={},
        seam=total // chunk * chunk,
        software=running_software(),
    )
    return Longer(whole, [*store.documents, *documents], manifest, method)
