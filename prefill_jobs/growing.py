"""A store of a text's beginning that is made longer again and again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from offload_decode.models.loading import LoadedModel
from offload_decode.prefill_jobs.append import append_tokens
from offload_decode.prefill_jobs.build import build_indexes
from offload_decode.prefill_jobs.job import Settings, Tokens, prefill_tokens
from offload_decode.store.reader import KVStore
from offload_decode.types import Document


class GrowingStore:
    """One store in `folder`, of the tokens that were asked for last, with indexes of the `indexes` kinds.

    `most`: the tokens that it may come to hold, with all that follow it.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        folder: Path,
        most: int,
        settings: Settings,
        indexes: Sequence[str] = (),
    ):
        self._loaded, self._most, self._settings, self._indexes = loaded, most, settings, indexes
        self._path = folder / "store"
        self._held: Tokens = np.zeros(0, np.int32)

    def __call__(self, tokens: Tokens, report: Callable[[int], None]) -> KVStore:
        """The store of `tokens [N]`: only what is new is prefilled where the last one holds their beginning.

        Raises as `prefill_tokens` and `append_tokens`.
        """

        def progress(stage: str, done: int, total: int) -> None:
            if stage == "prefill":
                report(done)

        held = len(self._held)
        if held and np.array_equal(self._held, tokens[:held]):
            if held < len(tokens):
                document = Document(f"from {held}", held, len(tokens))
                append_tokens(self._loaded, tokens[held:], [document], self._path, progress=progress)
        else:
            shutil.rmtree(self._path, ignore_errors=True)
            document = Document("from 0", 0, len(tokens))
            # Keys may be rotated by the length of the whole, which is said before the first is stored.
            settings = replace(self._settings, context=self._most - len(tokens))
            prefill_tokens(self._loaded, tokens, [document], self._path, settings, progress=progress)
            for kind in self._indexes:
                build_indexes(self._path, kind)
        self._held = tokens
        return KVStore.open(self._path)
