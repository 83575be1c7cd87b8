"""Several stores as one: their documents prefilled one behind the other, kept in the user's cache and found
again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from offload_decode.common.errors import ConfigError, DoesNotFit
from offload_decode.engine.citations import template_length, text_ids
from offload_decode.engine.grounded import check_measured
from offload_decode.engine.joint import Joint
from offload_decode.engine.reading import Reading
from offload_decode.engine.text import decode
from offload_decode.indexes.verified import cache_folder
from offload_decode.models.loading import LoadedModel
from offload_decode.planning.opening import Opener
from offload_decode.planning.sizes import store_bytes
from offload_decode.prefill_jobs.buckets.cache import Cache
from offload_decode.prefill_jobs.corpus import TextDocument, headed
from offload_decode.prefill_jobs.job import Settings, prefill_texts
from offload_decode.store.files import Progress
from offload_decode.store.reader import KVStore

FOLDER = "joined"
JOINED_BYTES = 20 << 30
"""Of all such stores of a user: those that were asked longest ago leave first."""


@contextmanager
def joined_store(
    paths: Sequence[Path],
    loaded: LoadedModel,
    progress: Progress = lambda stage, done, total: None,
    limit: int = JOINED_BYTES,
) -> Iterator[Path]:
    """A store of all documents of the stores at `paths`, of one model, prefilled with exact attention,
    while it is used. `limit`: bytes that stores of this kind may take. A prefill that was killed goes on.

    Raises `DoesNotFit` and what a prefill raises.
    """
    stores = [KVStore.open(path) for path in paths]
    systems = {store.manifest.prefill.get("system") for store in stores}
    if len(systems) > 1:
        raise ConfigError("the stores have different system messages: give stores of one, or another --join")
    settings = Settings(system=systems.pop())
    made = loaded.weights_hash, loaded.weights, loaded.dtype, settings.system
    key = json.dumps([*made, *(store.store_digest for store in stores)])

    def fill(path: Path, admit: Callable[[int], None]) -> None:
        tokens = sum(store.manifest.n_tokens for store in stores)
        size = store_bytes(loaded.shape, tokens, "auto", loaded.dtype)
        try:
            admit(size)
        except DoesNotFit as error:
            raise DoesNotFit(
                f"the documents take {size:,} bytes as one store, and all such stores may take {limit:,}, of "
                "which others are in use: ask fewer documents, or give another --join"
            ) from error
        prefill_texts(loaded, list(_texts(stores, loaded)), path, settings, progress=progress)

    with Cache(cache_folder() / FOLDER, limit).holding(key, fill) as path:
        yield path


@contextmanager
def opened_together(
    opener: Opener,
    paths: Sequence[Path],
    way: str,
    cites: bool,
    measured: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> Iterator[Joint]:
    """The stores at `paths` as conversations that answer together, in a way of `--join`; `cites` as for
    `Joint`. Raises as this, as `joined_store`, as `Opener.open_all`, and before anything is prefilled as
    `check_measured`, where it is to be a model for which `grounded` was `measured`.
    """
    with ExitStack() as held:
        engines = opener.open_all([str(path) for path in paths])
        if measured:
            check_measured(engines[0].loaded.model.config)
        if way == "exact":
            whole = held.enter_context(joined_store(paths, engines[0].loaded, progress))
            engines, way = [opener.open(str(whole))], "mixture"
        yield Reading(engines) if way == "read" else Joint(engines, way, cites)


def _texts(stores: Sequence[KVStore], loaded: LoadedModel) -> Iterator[TextDocument]:
    """The documents as they were read, without the template's own tokens before the first of each store."""
    tokenizer = loaded.known_tokenizer
    for store in stores:
        begun = loaded.prompt.opened(store.manifest.opening).document(tokenizer, "", first=True)
        first = template_length(store, begun)
        for document in store.documents:
            tokens = text_ids(store, tokenizer, max(first, document.start), document.end)
            text, heading = decode(tokenizer, tokens), headed(TextDocument(document.name, ""))
            # Where there are several, each stands behind its name, and will again.
            if len(store.documents) > 1 and text.lstrip().startswith(heading):
                text = text.lstrip().removeprefix(heading)
            yield TextDocument(document.name, text)
