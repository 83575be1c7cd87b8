"""The engine: open a store with its model, and answer from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload_decode.common.errors import ConfigError
from offload_decode.config import EngineConfig
from offload_decode.engine.batching import answer_batch
from offload_decode.engine.conversation import Conversation, Sampler
from offload_decode.engine.crossover import decide
from offload_decode.engine.second_pass import checked
from offload_decode.engine.step import StoredPrefix
from offload_decode.hf.cache import CorpusCache
from offload_decode.hf.compat import generate_name
from offload_decode.hf.mla import tell_of_indexer
from offload_decode.kv.host_cache import HostKV
from offload_decode.kv.placement import check_placement
from offload_decode.models.loading import LoadedModel, load, wrap
from offload_decode.store.format import Manifest, token_hash
from offload_decode.store.memory import EmptyStore
from offload_decode.store.reader import KVStore
from offload_decode.types import Answer


class Engine(Conversation):
    """Opens a store with its model, and answers questions; it is a conversation itself.

    Answers obey the model's `generation_config` as `model.generate` does: repetition penalties, n-grams that
    must not come again, forbidden, suppressed and forced tokens, least lengths and stop strings. These count
    every token after the stored ones. How a token is picked is said by a `Sampler` alone: `do_sample`,
    `temperature`, `top_k`, `top_p`, `num_beams` and `max_time` of the `generation_config` are ignored.
    """

    @classmethod
    def open(
        cls,
        store: str | Path | KVStore,
        model: Any = None,
        config: EngineConfig | None = None,
        **settings: Any,
    ) -> Engine:
        """Open a store for questions; `settings` are those of `EngineConfig`, and go before `config`'s.

        `model` is an id as for `load`, a transformers model that is loaded already, a `LoadedModel`, or
        None for the one that the settings or the store name. Raises `StoreError` if the store is damaged or
        of another model or tokenizer, `ConfigError` for options that the selector does not have, and for a
        placement that the device does not have.
        """
        config = (config or EngineConfig()).changed(settings)
        model = config.model if model is None else model
        opened = store if isinstance(store, KVStore) else KVStore.open(store)
        if model is None or isinstance(model, str):
            own = opened.manifest
            how = own.dtype, config.weights_after(own.weights), own.scaled, config.adapter or own.adapter
            loaded = load(own.model_id if model is None else model, config.device, *how)
        else:
            loaded = model if isinstance(model, LoadedModel) else wrap(model)
        without = {"tokenizer_hash": None} if loaded.tokenizer is None else {}
        opened.check_model(**loaded.identity | without)
        check_placement(config.attend, config.device_cache, loaded.device)
        loaded.trained.tell(opened.manifest.n_tokens)
        host = HostKV(opened, loaded.device, config.attend, config.device_cache)
        prefix = StoredPrefix.over(host, loaded.shape, config.selector, config.options)
        stored = loaded.shape.index is not None
        tell_of_indexer(loaded.model.config, opened.manifest.n_tokens, stored, prefix.selector.name)
        decide(prefix, loaded.shape, config.crossover)
        return cls(loaded, opened, prefix)

    def new_cache(self) -> CorpusCache:
        """An empty cache behind the stored prefix, for a loop of your own or `generate(cache=…)`, which is
        `past_key_values=` before transformers 5.24. Raises `ConfigError` where an adapter is activated.
        """
        if self.loaded.activated:
            raise ConfigError(
                "an activated adapter is applied from its invocation on, which a loop of your own does not: "
                "use Engine.answer, or extend and generate"
            )
        return self._cache_behind(self.prefix.fresh())

    def inputs(self, question: str) -> dict[str, Any]:
        """Arguments of `model.generate`: the question's ids, a mask over all tokens, a fresh cache."""
        ids = torch.tensor([self.prompt.first(self.tokenizer, question)], device=self.loaded.device)
        mask = torch.ones(1, self.prefix.length + ids.shape[1], dtype=torch.bool, device=self.loaded.device)
        # A config may say otherwise, and every step would run all tokens again.
        given = {"input_ids": ids, "attention_mask": mask, "use_cache": True}
        return {**given, generate_name(): self.new_cache()}

    def stream(
        self, question: str, max_new_tokens: int = 128, sampler: Sampler | None = None
    ) -> Iterator[str]:
        """Ask a question and yield the answer piece by piece; the conversation goes on from there."""
        yield from self.pieces(self.generate(self.ask(question), max_new_tokens, sampler))

    def answer(
        self,
        question: str,
        max_new_tokens: int = 128,
        sampler: Sampler | None = None,
        cites: bool = False,
        check: bool = False,
    ) -> Answer:
        """Answer one question on its own: the conversation stays. `cites`: with what it attended to; `check`:
        with how far it agrees with dense attention (`engine.second_pass`), whose cost is not counted.
        """
        forked = self.fork()
        forked.records = check
        with forked.watched() if cites else nullcontext() as watch:
            logits = forked.ask(question)
            tokens = tuple(forked.generate(logits, max_new_tokens, sampler))
        cited = None if watch is None else self.cited(watch)
        text, cost = self.decode(tokens).strip(), forked.prefix.take_stats()
        again = checked(forked, forked.record) if check else None
        return Answer(text, tokens, cost, forked.finish, cited, forked.grounded, again)

    def answer_many(
        self,
        questions: Sequence[str],
        max_new_tokens: int = 128,
        batch_size: int = 8,
        cites: bool = False,
        check: bool = False,
    ) -> list[Answer]:
        """`answer` for each question, greedily, `batch_size` of them in one forward pass; one by one where
        the selector looks at a whole question, or where an answer may grow so long that it chooses among the
        conversation's own tokens.
        """
        if isinstance(questions, str):
            raise ConfigError("answer_many takes a list of questions, and this is one: use answer")
        if batch_size < 1:
            raise ConfigError(f"a batch of {batch_size} questions answers none: batch_size must be 1 or more")
        room = (
            self.selector.whole_generated - self.cache.generated_length - len(self.pending) - max_new_tokens
        )
        outgrown = room < math.inf and any(len(self.question_tokens(one)) > room for one in questions)
        if self.prefix.chosen.one_question or outgrown or self.loaded.activated:
            how = None, cites, check
            return [self.answer(question, max_new_tokens, *how) for question in questions]
        answers: list[Answer] = []
        for start in range(0, len(questions), batch_size):
            part = questions[start : start + batch_size]
            answers += answer_batch(self, part, max_new_tokens, cites, check)
        return answers


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
