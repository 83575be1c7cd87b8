"""From logits to the next token of an answer, and the log-probabilities that a client asks for."""

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload_decode.engine.conversation import Sampler
from offload_decode.models.loading import LoadedModel, Processors
from offload_decode.server.grammar import check_grammar, grammar_of
from offload_decode.server.requests import Generation, Scored, WrongField

_ROWS = 16  # of logits, scored at a time


def check_generation(loaded: LoadedModel, wanted: Generation) -> None:
    """Raises `WrongField` for biases and grammars that this model's vocabulary has no place for, and
    `ConfigError` for a temperature or top_p out of range, which may be the server's own.
    """
    Sampler(wanted.temperature, wanted.top_p)
    vocabulary = vocabulary_of(loaded)
    for token in wanted.logit_bias:
        if not 0 <= token < vocabulary:
            message = f"logit_bias names token {token}, and this model's tokens are 0 to {vocabulary - 1}"
            raise WrongField(message, "logit_bias")
    if wanted.grammar is not None:
        check_grammar(loaded, wanted.grammar, wanted.grammar_field)


def vocabulary_of(loaded: LoadedModel) -> int:
    """Tokens of the model's logits: a tokenizer may have fewer."""
    return int(loaded.model.config.get_text_config().vocab_size)


class Picker:
    """Picks the tokens of one answer, one after the other.

    In this order: what the model's `generation_config` asks for (`Processors`, which see `before`, the
    conversation after the stored tokens); `frequency_penalty` and `presence_penalty`, which count the
    tokens of this answer, as OpenAI defines them (`c * frequency + (c > 0) * presence` is taken off the
    logit of a token that came `c` times); `logit_bias`; the grammar, which goes before all of these where
    they leave no token that it allows; temperature and top_p (`Sampler`). At temperature 0 and with nothing
    else asked for, these are the tokens of `Engine.answer`.

    `ends` are the tokens that end the answer, which has at most `most`; to `ignore_end`, none do. Of `n`
    answers to one request, the one of `index` 0 is that of a request for one; the others draw from streams
    of their own, made from the seed and the index. Without a seed each draws afresh.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        before: Sequence[int],
        ends: frozenset[int],
        wanted: Generation,
        most: int,
        index: int = 0,
    ):
        self._top = wanted.top_logprobs
        self._penalties = wanted.frequency_penalty, wanted.presence_penalty
        self._ends = ends = frozenset() if wanted.ignore_end else ends
        self._processors = Processors(loaded.model, loaded.tokenizer, before, ends, most)
        self._sampler = Sampler(wanted.temperature, wanted.top_p, _stream(wanted.seed, index))
        self._grammar = None if wanted.grammar is None else grammar_of(loaded, wanted.grammar)
        self._came: set[int] = set()
        # Added to the logits: biases, and penalties as tokens come. None for nothing.
        self._added: Tensor | None = None
        if wanted.logit_bias or any(self._penalties):
            self._added = torch.zeros(vocabulary_of(loaded), device=loaded.device)
            for token, bias in wanted.logit_bias.items():
                self._added[token] += bias

    def pick(self, logits: Tensor) -> Scored:
        """The next token from `logits [V]`, which stay as they are. Its log-probability is the model's own:
        at temperature 1, of the logits before anything is changed, as vLLM's `raw_logprobs`.
        """
        return self.choose(self._processors(logits), logits, lambda: logits)

    def choose(self, changed: Tensor, logits: Tensor, unchanged: Callable[[], Tensor]) -> Scored:
        """`pick` from what the `generation_config` made of the logits: of a joint answer, from joined scores
        `[V]`, which are then those of its log-probability too. `unchanged`: those that it did not touch.
        """
        if self._added is not None:
            changed = changed + self._added
        if self._grammar is not None:
            allowed = self._grammar.allowed(len(logits), self._ends).to(logits.device)
            fitting = torch.where(allowed, changed, -math.inf)
            left = bool(fitting.amax() > -math.inf)
            changed = fitting if left else torch.where(allowed, unchanged(), -math.inf)
        token = int(self._sampler(changed[None]))
        if self._top is None:
            return Scored(token)
        return scored(logits[None], [token], self._top)[0]

    def append(self, token: int) -> bool:
        """Take note of a token; whether the answer ends with it: by a stop string of the `generation_config`,
        or because nothing may follow in its grammar.
        """
        if self._added is not None:
            frequency, presence = self._penalties
            self._added[token] -= frequency if token in self._came else frequency + presence
            self._came.add(token)
        complete = self._grammar is not None and self._grammar.append(token)
        return self._processors.append(token) or complete


def scored(logits: Tensor, tokens: Sequence[int], top: int) -> list[Scored]:
    """Log-probabilities of `tokens`, each under its row of `logits [T, V]`, and the `top` likeliest ones in
    its place, best first: natural logarithms of the model's distribution at temperature 1.
    """
    found: list[Scored] = []
    for start in range(0, len(tokens), _ROWS):
        rows, taken = logits[start : start + _ROWS], list(tokens[start : start + _ROWS])
        total = rows.logsumexp(-1, keepdim=True)
        logprobs = (rows.gather(-1, torch.tensor(taken, device=rows.device)[:, None]) - total)[:, 0].tolist()
        best, ids = rows.topk(min(top, rows.shape[-1]), -1)
        pairs = zip((best - total).tolist(), ids.tolist(), strict=True)
        tops = [tuple(zip(ids, best, strict=True)) for best, ids in pairs]
        found += [Scored(*each) for each in zip(taken, logprobs, tops, strict=True)]
    return found


def _stream(seed: int | None, index: int) -> int:
    if seed is None:
        return secrets.randbits(64)
    if index == 0:
        return seed % 2**64
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "little")
