"""A conversation with the bare model, through the engine that answers from a corpus."""

from __future__ import annotations

import numpy as np

from offload_decode.engine.conversation import Conversation
from offload_decode.engine.step import StoredPrefix
from offload_decode.kv.host import HostKV
from offload_decode.models.loading import LoadedModel
from offload_decode.store.empty import EmptyStore
from offload_decode.store.format import Manifest, token_hash


def without_corpus(loaded: LoadedModel, context: int | None = None) -> Conversation:
    """A conversation behind no stored tokens, which answers as the model itself does.

    `context`: the tokens that it may come to hold, by which a model that rotates by the length of its text
    does; None for the shortest length that it knows. Raises `ConfigError` where there are not so many
    positions.
    """
    positions = loaded.lengths.chosen(0, context)
    manifest = Manifest(
        **loaded.stated(positions),
        n_tokens=0,
        token_hash=token_hash(np.zeros(0, np.int32)),
        prefill={"method": "none"},
        kv={"keys": loaded.dtype, "values": loaded.dtype},
    )
    host = HostKV(EmptyStore(manifest), loaded.device)
    return Conversation(loaded, host.store, StoredPrefix.over(host, loaded.shape, "dense", {}))
