"""From logits to the next token of an answer, and the log-probabilities that a client asks for."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from offload_decode.engine.sampler import Sampler
from offload_decode.models.loading import LoadedModel, Processors
from offload_decode.server.grammar import check_grammar, grammar_of
from offload_decode.server.requests import MOST_TOP, Generation, Scored, WrongField

MOST_STOPS, LONGEST_STOP = 64, 1024
MOST_BIASED = 4096
_ROWS = 16  # of logits, scored at a time


def check_generation(loaded: LoadedModel, wanted: Generation) -> None:
    """Raises `WrongField` for what no answer of this model can be written with."""
    numbers = {
        "temperature": (0.0, math.inf),
        "top_p": (0.0, 1.0),
        "frequency_penalty": (-2.0, 2.0),
        "presence_penalty": (-2.0, 2.0),
    }
    for name, (least, most) in numbers.items():
        value = getattr(wanted, name)
        if not (math.isfinite(value) and least <= value <= most):
            limits = f"from {least:g} to {most:g}" if most < math.inf else f"{least:g} or more, and finite"
            raise WrongField(f"{name} is {value:g}: it must be a number {limits}", name)
    if wanted.top_p == 0:
        raise WrongField("top_p is 0, which leaves no token to take: it must be above 0", "top_p")
    if wanted.max_tokens is not None and wanted.max_tokens < 0:
        raise WrongField(f"max_tokens is {wanted.max_tokens}: it must be 0 or more", "max_tokens")
    check_top(wanted.top_logprobs, "top_logprobs")
    if not all(wanted.stop):
        raise WrongField("stop has an empty string, which would end every answer at once", "stop")
    if len(wanted.stop) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in wanted.stop):
        limits = f"at most {MOST_STOPS} strings of at most {LONGEST_STOP} characters"
        raise WrongField(f"stop is too long: it may have {limits}", "stop")
    if len(wanted.logit_bias) > MOST_BIASED:
        raise WrongField(f"logit_bias names more than {MOST_BIASED} tokens: name fewer", "logit_bias")
    vocabulary = vocabulary_of(loaded)
    for token, bias in wanted.logit_bias.items():
        if not 0 <= token < vocabulary:
            message = f"logit_bias names token {token}, and this model's tokens are 0 to {vocabulary - 1}"
            raise WrongField(message, "logit_bias")
        if not -100 <= bias <= 100:
            message = f"logit_bias of token {token} is {bias:g}: it must be a number from -100 to 100"
            raise WrongField(message, "logit_bias")
    if wanted.grammar is not None:
        check_grammar(loaded, wanted.grammar)


def check_top(top: int | None, param: str) -> None:
    """Raises `WrongField` for more log-probabilities in a token's place than are told."""
    if top is not None and not 0 <= top <= MOST_TOP:
        raise WrongField(f"{param} is {top}: it must be from 0 to {MOST_TOP}", param)


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
        changed = self._processors(logits)
        if self._added is not None:
            changed = changed + self._added
        if self._grammar is not None:
            allowed = self._grammar.allowed(len(logits), self._ends).to(logits.device)
            held = torch.where(allowed, changed, -math.inf)
            changed = held if held.amax() > -math.inf else torch.where(allowed, logits, -math.inf)
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
        own = (rows.gather(-1, torch.tensor(taken, device=rows.device)[:, None]) - total)[:, 0].tolist()
        best, ids = rows.topk(min(top, rows.shape[-1]), -1)
        pairs = zip((best - total).tolist(), ids.tolist(), strict=True)
        tops = [tuple(zip(ids, best, strict=True)) for best, ids in pairs]
        found += [Scored(*each) for each in zip(taken, own, tops, strict=True)]
    return found


def _stream(seed: int | None, index: int) -> int:
    """The seed of one of the answers to a request."""
    if seed is None:
        return secrets.randbits(64)
    if index == 0:
        return seed % 2**64
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "little")
