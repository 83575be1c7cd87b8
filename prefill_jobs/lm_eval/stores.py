"""Prefixes as stores: made when they are asked behind, and kept where a folder for them is named."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from offload_decode.config import EngineConfig
from offload_decode.engine.conversation import Conversation
from offload_decode.engine.corpusless import without_corpus
from offload_decode.engine.engine import Engine
from offload_decode.errors import StoreMismatch
from offload_decode.kv.head_indexes import AUTO
from offload_decode.models.loading import LoadedModel
from offload_decode.prefill_jobs.job import Settings, prefill_tokens
from offload_decode.prefill_jobs.kept import kept, kept_name
from offload_decode.prefill_jobs.lm_eval.prefixes import Tokens
from offload_decode.store.format import token_hash
from offload_decode.types import Document


class Stores:
    """Of one model, prefilled with the same `settings`, and asked as `config` says. `folder`: where they are
    kept, for later runs too; None for a temporary one, from which each is removed after use.
    """

    def __init__(self, loaded: LoadedModel, settings: Settings, config: EngineConfig, folder: Path | None):
        self.loaded = loaded
        self.settings = settings
        self.config = config
        self.folder = folder

    @contextmanager
    def behind(
        self, prefix: Tokens, following: int, progress: Callable[[int], None]
    ) -> Iterator[Conversation]:
        """A conversation behind `prefix [P]`, which at most `following` tokens will follow; behind none, that
        with the bare model. `progress` is told the tokens that are prefilled so far.

        Raises `StoreError`, `ConfigError`, `DoesNotFit`.
        """
        if not len(prefix):
            yield without_corpus(self.loaded, following)
        elif self.folder is not None:
            yield self._opened(self.folder, prefix, following, progress)
        else:
            folder = Path(tempfile.mkdtemp(prefix="offload-decode-"))
            try:
                yield self._opened(folder, prefix, following, progress)
            finally:
                shutil.rmtree(folder)

    def _opened(
        self, folder: Path, prefix: Tokens, following: int, progress: Callable[[int], None]
    ) -> Engine:
        settings = replace(self.settings, context=following)
        path = folder / self._name(prefix, following)

        def make() -> None:
            documents = [Document("context", 0, len(prefix))]
            prefill_tokens(
                self.loaded,
                prefix,
                documents,
                path,
                settings,
                progress=lambda stage, done, total: progress(done) if stage == "prefill" else None,
            )

        kind = str(self.config.options.get("index", AUTO))
        store = kept(path, make, () if kind == AUTO else (kind,))
        if store.manifest.token_hash != token_hash(prefix):
            raise StoreMismatch(f"{path} is of another text than its name says: remove it.")
        return Engine.open(store, self.loaded, self.config)

    def _name(self, prefix: Tokens, following: int) -> str:
        """What follows shapes what is stored as far as the model's rotation depends on it."""
        rotation = self.loaded.lengths.chosen(len(prefix), following).noted
        return kept_name(self.loaded, self.settings, token_hash(prefix), rotation)
