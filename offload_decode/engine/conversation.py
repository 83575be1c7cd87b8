"""A conversation behind a stored prefix: tokens are run, generated, taken back, and branched from; how the
next one is picked.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from offload_decode.attention.rows import tensor_view
from offload_decode.common.errors import ConfigError, ContextEnds
from offload_decode.engine.citations import (
    OPENING,
    PLAIN_QUESTION,
    PLAIN_TIMES,
    PLAIN_TOKENS,
    Observer,
    Watch,
    cite,
    passages,
    template_length,
)
from offload_decode.engine.grounded import Evidence, Record, weights_of
from offload_decode.engine.step import StoredPrefix
from offload_decode.engine.text import Pieces, decode
from offload_decode.hf.cache import CorpusCache
from offload_decode.hf.compat import DTYPES
from offload_decode.hf.user_cache import cached
from offload_decode.models.adapters import last_call
from offload_decode.models.loading import LoadedModel, Processors, run_in_passes
from offload_decode.models.prompt import Prompt, next_turn
from offload_decode.selectors.base import Selector
from offload_decode.store.base import Store
from offload_decode.store.reader import KVStore
from offload_decode.types import CitedDocument, Passage

LOGITS = 1 << 24
"""Logits that a pass makes at most, where those of all its tokens are wanted."""


class Conversation:
    """A store, its model and a selector, with the tokens that followed the stored ones so far.

    `fork` gives an independent continuation, `crop` takes tokens back; the store itself is never changed.
    Several threads may each use a fork of their own.
    """

    def __init__(
        self, loaded: LoadedModel, store: Store, prefix: StoredPrefix, cache: CorpusCache | None = None
    ):
        self.loaded, self.store, self.prefix = loaded, store, prefix
        self.positions = loaded.lengths.of_store(store.manifest.rope, store.manifest.n_tokens)
        self.cache = self._cache_behind(self.prefix) if cache is None else cache.fork(self.prefix)
        # The tokens after the stored ones that were run.
        self.tokens: list[int] = []
        # The model that runs the next ones: `loaded` or, from the place among them where its adapter was
        # invoked last, the one that is activated.
        self.runs = loaded
        self.invoked: int | None = None
        # A token that was sampled but not run yet: it goes first in the next forward pass.
        self.pending: list[int] = []
        # Why the last answer ended: `stop`, or `length` where it was cut.
        self.finish = "stop"
        # What tells whether it stands in the text.
        self.evidence = Evidence()
        # Whether answers are recorded, to be checked (`engine.second_pass`), and the record of the last one.
        self.records, self.record = False, Record(())
        # Tokens of a question in one forward pass: fewer take less memory.
        self.pass_tokens = self.selector.pass_tokens
        # Asked before a question of several tokens runs: tokens behind the stored ones, and sequences.
        self.admit: Callable[[int, int], int] | None = None
        self._lock = threading.Lock()

    @property
    def selector(self) -> Selector:
        return self.prefix.selector

    @property
    def length(self) -> int:
        """Stored tokens and those that followed, the pending one not counted."""
        return self.prefix.length + self.cache.generated_length

    def fork(self) -> Self:
        """An independent continuation from here."""
        with self._lock:
            forked = type(self)(self.loaded, self.store, self.prefix.fork(), self.cache)
            forked.tokens, forked.pending = list(self.tokens), list(self.pending)
            forked.runs, forked.invoked = self.runs, self.invoked
            forked.pass_tokens, forked.admit = self.pass_tokens, self.admit
            forked.records = self.records
        return forked

    def crop(self, length: int) -> None:
        """Take back every token after the first `length`, which must not reach into the stored ones."""
        if not self.prefix.length <= length <= self.length:
            raise ConfigError(
                f"cannot crop to {length} of {self.length} tokens: the {self.prefix.length} stored ones stay"
            )
        if self.selector.remembers and length < self.length:
            if length > self.prefix.length:
                raise ConfigError(
                    f"selector '{self.selector.name}' cannot bring back tokens that it has dropped: crop "
                    f"to the {self.prefix.length} stored tokens, or fork the engine before you branch"
                )
            self.selector.reset()
        self.pending = []
        self.cache.cut(length - self.prefix.length)
        del self.tokens[length - self.prefix.length :]
        if self.invoked is not None and len(self.tokens) <= self.invoked:
            self._switch(None)

    def extend(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Run tokens (question or generated, one path) and return the logits `[V]` after the last one.

        `tokens`: ids `[T]`, or one row `[1, T]` as tokenizers return it. Raises `ConfigError` for anything
        else, for ids that are not in the vocabulary, and while another thread extends this engine.
        """
        run = self.to_run(tokens)
        self._forget_answer()
        with self.step():
            return self.run(self._activated(run))

    def to_run(self, tokens: Sequence[int] | Tensor) -> list[int]:
        """The ids of what a pass runs for `tokens`: the pending one before them. Raises as `extend` does."""
        if run := self.pending + _ids(tokens):
            return run
        raise ConfigError("there are no tokens to extend with")

    def run(self, run: list[int], every: bool = False) -> Tensor:
        """`extend` within a `step`: the logits `[V]` after the last one of `run`, or `[T, V]` of all."""
        began = time.perf_counter()
        ids = torch.tensor([run])
        if len(run) == 1:
            logits = self.runs.forward(ids, self.cache, every=every)[0]
        else:
            logits = run_in_passes(self.runs, ids, self.cache, self.admitted(len(run)), every=every)[0]
        self.has_run(run)
        self.prefix.stats.tokens += len(run)
        self.prefix.stats.total_s += time.perf_counter() - began
        return logits

    def has_run(self, run: list[int]) -> None:
        """The cache has grown by these ids."""
        self.tokens += run
        self.pending = []

    def admitted(self, tokens: int, sequences: int = 1) -> int:
        """Tokens of a forward pass, for so many more in each sequence. Raises as `admit` does."""
        if tokens == 1 or self.admit is None:
            return self.pass_tokens
        return min(self.pass_tokens, self.admit(self.cache.generated_length + tokens, sequences))

    @property
    def context(self) -> float:
        """Tokens that this conversation may have, stored ones included: as many as there are positions, and
        as the model was trained for, where the stored text is not longer already.
        """
        most, trained = self.positions.most or math.inf, self.loaded.trained.length or math.inf
        return min(most, trained) if self.prefix.length < trained else most

    def most_new(self, tokens: int, question: int = 0) -> int:
        """So many tokens of an answer, or fewer where the context ends; `question` tokens run before it."""
        # The last one is not run.
        left = self.context - self.length - len(self.pending) - question + 1
        return max(0, int(min(tokens, left)))

    def check_room(self, question: int) -> None:
        """Raise `ContextEnds` where the context has no room for so many tokens and an answer."""
        had = self.length + len(self.pending)
        self.positions.check(had + question)
        if not self.most_new(1, question):
            raise ContextEnds(
                f"the question has {question:,} tokens behind {had:,}, and the context of this model ends at "
                f"{self.context:,}: ask for less, or begin a new conversation"
            )

    def ask(self, question: str, begun: str = "") -> Tensor:
        """Put a question: logits `[V]` after its last token, or after `begun`, with which the answer is to
        begin. A selector that forgets starts afresh.
        """
        with self.step():
            self.selector.reset()
            tokens = self.question_tokens(question, begun)
            self.check_room(len(tokens))
            self.evidence = self.evidence_of(question, self.prefix.watches)
            self.prefix.watches = self.evidence.observers
            return self.run(self._activated(self.to_run(tokens), asked=True))

    def _activated(self, run: list[int], asked: bool = False) -> list[int]:
        """What is left to be run: all, or with an activated adapter the tokens from its last invocation on,
        as those before it run without it here, again where they ran with it. Raises `ConfigError` where an
        `asked` question does not invoke it.
        """
        if (activated := self.loaded.activated) is None:
            return run
        whole = self.tokens + run
        place = last_call(activated.invocation, whole)
        if place is None and asked:
            raise self._not_invoked(activated.invocation)
        if place == self.invoked:
            return run
        kept = min(one for one in (len(self.tokens), self.invoked, place) if one is not None)
        if kept < len(self.tokens):  # `step` goes back to what was there if this fails
            if self.selector.remembers and kept:
                raise ConfigError(
                    f"selector '{self.selector.name}' cannot run earlier turns again without the adapter, "
                    "which is invoked anew: begin a new conversation, or choose another selector"
                )
            self.cache, self.tokens = self.cache.fork(self.prefix), self.tokens[:kept]
            self.cache.cut(kept)
            if self.selector.remembers:
                self.selector.reset()
        self._switch(None)
        if place is None:  # an invocation that a crop has cut
            return whole[kept:]
        if before := whole[kept:place]:
            self.run(before)
        self._switch(place)
        return whole[place:]

    def _switch(self, invoked: int | None) -> None:
        """Run what follows with the adapter that was invoked there, or without."""
        adapted = self.loaded.activated if invoked is not None else None
        self.runs, self.invoked = adapted.loaded if adapted else self.loaded, invoked
        self.cache.decoder = self.runs.model.base_model

    def _not_invoked(self, invocation: Sequence[int]) -> ConfigError:
        text = self.store.tokens.tolist() if isinstance(self.store, KVStore) else []
        stored = last_call(invocation, text) is not None
        where = "only the stored text invokes" if stored else "the question does not invoke"
        return ConfigError(
            f"{where} the activated adapter {self.loaded.adapter}: write {self.decode(invocation)!r} in the "
            "question, or leave --adapter out"
        )

    def generate(self, logits: Tensor, max_new_tokens: int, sampler: Sampler | None = None) -> Iterator[int]:
        """Token ids from `logits [V]` on, until an end token or, without a chat template, the next question
        (neither is yielded), `max_new_tokens`, or the last position that the store serves.
        """
        max_new_tokens = self.most_new(max_new_tokens)
        sampler, ends, so_far = sampler or Sampler(), self.end_tokens, self.tokens + self.pending
        processors = Processors(self.loaded.model, self.loaded.tokenizer, so_far, ends, max_new_tokens)
        answer, self.finish, self.record = self.answer_end(), "length", Record(so_far if self.records else ())
        if self.evidence.tokens:  # of an answer before this one
            self._forget_answer()
        for step in range(max_new_tokens):
            token = int(sampler(processors(logits)[None]))
            if token in ends:
                self.finish = "stop"
                break
            if self.records:
                self.record.add(token, logits)
            if self.evidence.watch is not None:
                self.evidence.add(token)
                self.prefix.watches = self.evidence.observers
            self.pending = [token]
            so_far.append(token)
            yield from answer.push(token)
            if self.tokens + self.pending != so_far:
                raise ConfigError(
                    "this engine went on with something else before its answer ended: give answers that "
                    "are written at the same time a fork each (Engine.fork)"
                )
            if answer.reached or processors.append(token):
                self.finish = "stop"
                break
            if step + 1 < max_new_tokens:
                with self.step():
                    logits = self.run(self.pending)
        if answer.reached:
            self.evidence.cut(max(0, len(self.evidence.tokens) - answer.dropped))
            self.record.cut(max(0, len(self.record.tokens) - answer.dropped))
            self.take_back(answer.dropped)
        self.prefix.watches = self.evidence.beside
        yield from answer.rest()

    @property
    def grounded(self) -> float | None:
        """How likely the last answer stands in the stored text, 0 to 1: `grounds`."""
        return self.grounds(self.evidence)

    def evidence_of(self, question: str, beside: Sequence[Observer] = ()) -> Evidence:
        """Gathers what tells whether an answer to a question stands in the text, where that can be seen and
        was measured for this model.
        """
        known = self.prefix.watchable and weights_of(self.loaded.model.config) is not None
        if not (known and isinstance(self.store, KVStore)) or any(one.whole for one in beside):
            return Evidence(question, beside=beside)
        return Evidence(question, Watch(self.prefix.host), beside, max(OPENING, self._opening(self.store)))

    def grounds(self, evidence: Evidence) -> float | None:
        """How likely an answer stands in the stored text, 0 to 1; None where that is not known."""
        weights = weights_of(self.loaded.model.config)
        signs = evidence.signs(self.store, self.tokenizer) if isinstance(self.store, KVStore) else None
        return None if weights is None or signs is None else weights.of(signs)

    def _forget_answer(self) -> None:
        self.evidence = Evidence(beside=self.prefix.watches)
        self.prefix.watches = self.evidence.observers

    def take_back(self, last: int) -> None:
        """Take the last tokens back, unless a selector or a recurrent layer remembers them."""
        if last < len(self.pending):
            self.pending = self.pending[: len(self.pending) - last]
            return
        length = self.length + len(self.pending) - last
        generated = length - self.prefix.length
        if not self.selector.remembers and self.cache.kept(generated) == generated:
            self.crop(length)

    @contextmanager
    def watched(self, whole: bool = False) -> Iterator[Watch]:
        """Watches what this conversation attends to within the block, by the last token of every pass, or by
        all of them (`whole`); its forks are not watched.
        """
        watch, before = Watch(self.prefix.host, whole=whole), self.prefix.watches
        self.prefix.watches = (watch,)
        try:
            yield watch
        finally:
            self.prefix.watches = before

    def cited(self, watch: Watch) -> tuple[CitedDocument, ...]:
        """The documents and passages that were attended to, beyond what a question without content attends
        to: the first time, that is asked too. Raises as `cite`.
        """
        return cite(watch, self.store, self.tokenizer, **self._without_content(watch))

    def _opening(self, store: KVStore) -> int:
        """How many first tokens of the store are the chat template's."""
        return template_length(store, self.prompt.document(self.tokenizer, "", first=True))

    def passages(self, question: str, most: int = 5) -> tuple[Passage, ...]:
        """The passages that a question attends to, so many at `most`, most attended first, before any answer
        to it: the conversation stays. Raises as `ask` and `cite`.
        """
        forked = self.fork()
        with forked.watched(whole=True) as watch:
            forked.ask(question)
        return self.found(watch, most)

    def found(self, watch: Watch, most: int) -> tuple[Passage, ...]:
        """The passages that a question attended to, of which all tokens were seen. Raises as `cite`."""
        return passages(watch, self.store, self.tokenizer, most, **self._without_content(watch))

    def _without_content(self, watch: Watch) -> dict[str, Any]:
        """What `cite` leaves out of what a watch saw: the opening of the prompt, and what a question without
        content attends to.
        """
        if not isinstance(self.store, KVStore):
            return {"opening": 0, "plain": {}}  # they are not used: `cite` refuses it
        times = PLAIN_TIMES if watch.whole else 1
        plain = {token: times * share for token, share in self._plain_shares(watch.whole).items()}
        return {"opening": self._opening(self.store), "plain": plain}

    def _plain_shares(self, whole: bool) -> dict[int, float]:
        """What a question without content attends to behind this store, chosen as here and watched alike:
        asked once, and kept in the user's cache.
        """

        def ask() -> dict[int, float]:
            # Without an activated adapter, which it does not invoke.
            loaded = replace(self.loaded, activated=None)
            other = Conversation(loaded, self.store, self.prefix.fresh())
            with other.watched(whole) as watch:
                logits = other.ask(PLAIN_QUESTION)
                if not whole:
                    list(other.generate(logits, PLAIN_TOKENS))
            return watch.shares()

        def parse(saved: Any) -> dict[int, float]:
            shares = {int(token): float(share) for token, share in saved}
            if not all(0 <= token < self.prefix.length and 0 < shares[token] <= 1 for token in shares):
                raise ValueError("not of this store")
            return shares

        way = type(self.selector).__qualname__, self.selector.options, self.selector.searched
        model = self.loaded.weights_hash, self.loaded.weights, self.loaded.dtype
        of = (PLAIN_QUESTION, 0 if whole else PLAIN_TOKENS, self.store.store_digest, *model, *way)
        return cached(of, ask, lambda shares: list(shares.items()), parse)

    def pieces(self, generated: Iterable[int]) -> Iterator[str]:
        """The text of generated tokens, piece by piece as they come: no piece ends within a character."""
        pieces = Pieces(self.tokenizer)
        for token in generated:
            if piece := pieces.push(token):
                yield piece
        if rest := pieces.rest():
            yield rest

    def question_tokens(self, question: str, begun: str = "") -> list[int]:
        """Token ids of a question as it is put here, and of `begun`, how its answer begins."""
        put = self.prompt.next if self.cache.generated_length else self.prompt.first
        return put(self.tokenizer, question, begun)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of generated tokens, as they spell it: no spaces are removed before full stops."""
        return decode(self.tokenizer, tokens)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; raises `ModelError` if it came without one."""
        return self.loaded.known_tokenizer

    @property
    def prompt(self) -> Prompt:
        return self.loaded.prompt.opened(self.store.manifest.opening)

    def answer_end(self) -> AnswerEnd:
        """What ends an answer beside `end_tokens`; of ids without a tokenizer, nothing."""
        tokenizer = self.loaded.tokenizer
        return AnswerEnd(tokenizer, "" if tokenizer is None else next_turn(tokenizer))

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self.loaded.ends

    @contextmanager
    def step(self) -> Iterator[None]:
        """What the block runs is kept as a whole, or taken back where it fails or is interrupted. Nobody else
        extends this conversation meanwhile: raises `ConfigError` where somebody does.
        """
        if not self._lock.acquire(blocking=False):
            raise ConfigError(
                "another thread is extending this engine: give each thread its own fork (Engine.fork)"
            )
        try:
            before = self.cache.generated_layers[0].generated.length
            cache, tokens, invoked = self.cache, self.tokens, self.invoked
            pending, chosen = self.pending, self.prefix.chosen
            remembered = chosen.fork() if chosen.forks else chosen
            try:
                yield
            except BaseException:
                self.cache, self.tokens = cache, tokens
                if invoked != self.invoked:
                    self._switch(invoked)
                self.cache.cut(before)
                del self.tokens[before:]
                self.pending = pending
                self.prefix.chosen = remembered
                raise
        finally:
            self._lock.release()

    def _cache_behind(self, prefix: StoredPrefix) -> CorpusCache:
        def sent(array: Any) -> Tensor:
            return tensor_view(array)[None].to(self.loaded.device)

        shape, store = self.loaded.shape, self.store
        near = {layer: store.window(layer) for layer in shape.local_layers}
        windows = {layer: (sent(keys), sent(values)) for layer, (keys, values) in near.items()}
        states = {layer: [sent(one.copy()) for one in store.states(layer)] for layer in shape.state_layers}
        decoder, dtype = self.loaded.model.base_model, DTYPES[self.loaded.dtype]
        return CorpusCache.over(prefix, shape, windows, decoder, dtype, states, self.positions)


def _ids(tokens: Sequence[int] | Tensor) -> list[int]:
    """Token ids `[T]` or `[1, T]` as a list; raises `ConfigError` for anything else."""
    try:
        given = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError("tokens must be one row of whole numbers, the ids of tokens") from error
    if not given.numel():
        return []
    if given.ndim == 2 and len(given) == 1:
        given = given[0]
    if given.ndim != 1:
        raise ConfigError(
            f"tokens of the shape {list(given.shape)} are not one row, and an engine holds one "
            "conversation: give each row its own fork (Engine.fork), or put questions to answer_many"
        )
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise ConfigError(f"tokens must be whole numbers, the ids of tokens, and not {given.dtype}")
    return [int(token) for token in given.tolist()]


_FEW = 1024


@dataclass
class Sampler:
    """Greedy at `temperature` 0, else nucleus sampling (`top_p`) from a generator seeded with `seed`."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    _generator: torch.Generator | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1:
            raise ConfigError("temperature must be 0 or more and finite, and top_p above 0 and at most 1")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed {self.seed} is out of range: it must be 0 or more and fit in 64 bits")

    def __call__(self, logits: Tensor) -> Tensor:
        """`logits [B, V]` to token ids `[B]`."""
        if self.temperature == 0:
            if logits.device.type == "cpu" and logits.dtype == torch.float32:
                # numpy's loop takes a twentieth of torch's time.
                return torch.from_numpy(logits.detach().numpy().argmax(-1))
            return logits.argmax(-1)
        if self._generator is None:
            self._generator = torch.Generator(logits.device).manual_seed(self.seed)
        # In float64 and from the largest down, so that no temperature is too low.
        scaled = (logits.double() - logits.amax(-1, keepdim=True)) / self.temperature
        weights, tokens = torch.softmax(scaled, -1).float(), None
        if self.top_p < 1:
            weights, tokens = _nucleus(weights, self.top_p)
        so_far = weights.cumsum(-1, dtype=torch.float64)
        total = so_far[:, -1:]
        drawn = torch.rand(total.shape, dtype=total.dtype, device=total.device, generator=self._generator)
        # A product may be rounded up to the total, behind which there is no token.
        drawn = torch.minimum(drawn * total, torch.nextafter(total, torch.zeros_like(total)))
        picked = torch.searchsorted(so_far, drawn, right=True)
        return (picked if tokens is None else tokens.gather(-1, picked)).squeeze(-1)


def _nucleus(weights: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The fewest largest of `weights [B, V]` that hold this share: `[B, K]`, others 0, and their places."""
    best, places = weights.topk(min(_FEW, weights.shape[-1]), -1)
    if bool((best.sum(-1) < share).any()):  # to sort all takes ten times as long
        best, places = weights.sort(-1, descending=True)
    # A token stays if the ones before it do not fill the nucleus yet; the first always stays.
    before = best.cumsum(-1, dtype=torch.float64) - best
    return torch.where(before < share, best, 0.0), places


class AnswerEnd:
    """Tokens of an answer, up to where the model writes the prompt's next `turn` itself, as base models do.

    Tokens that may begin the turn are held back, and `dropped` (so many) once it is `reached`. `turn` is
    empty where a chat template marks turns with special tokens: then nothing is held back.
    """

    def __init__(self, tokenizer: Any, turn: str):
        self._tokenizer, self._turn = tokenizer, turn
        self._held: list[int] = []
        self.reached, self.dropped = False, 0

    def push(self, token: int) -> list[int]:
        """The tokens that one more shows to belong to the answer."""
        if not self._turn:
            return [token]
        self._held.append(token)
        text = decode(self._tokenizer, self._held)
        if self._turn in text:
            self.reached = True
            # A full stop and the line break behind it may be one token.
            last = 1 if decode(self._tokenizer, self._held[:1]).strip() else 0
            kept, self.dropped, self._held = self._held[:last], len(self._held) - last, []
            return kept
        begins = any(text.endswith(self._turn[:size]) for size in range(1, len(self._turn)))
        return [] if begins else self.rest()

    def rest(self) -> list[int]:
        """The tokens held back, when no more come."""
        rest, self._held = self._held, []
        return rest
