"""What a model's `generation_config` makes of its logits, and the strings at which it ends an answer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StopStringCriteria

from offload_decode.common.errors import ConfigError
from offload_decode.models.checkpoint import told

_NOT_OBEYED = "the model's generation_config cannot be obeyed"


class Processors:
    """The logits processors of one answer, those that `model.generate` itself makes: penalties for
    repetition, forbidden and forced tokens, least lengths.

    They see `tokens`, the conversation after the stored ones, and what is generated; `ends` are the tokens
    that end the answer, which has at `most` so many. Sampling (`do_sample`, `temperature`, `top_k`, `top_p`)
    and beams are left out, unless `asked` has keyword arguments of `model.generate`: `samples` then says
    whether a token is to be drawn. Raises `ConfigError` for arguments that are none, and for beams.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        tokens: Sequence[int],
        ends: frozenset[int],
        most: int,
        asked: Mapping[str, Any] | None = None,
    ):
        if most < 1:
            raise ConfigError(f"an answer of {most} tokens is none: max_new_tokens must be 1 or more")
        if asked is None:
            config = copy.deepcopy(model.generation_config)
            config.do_sample = False
        else:
            config = _told(model, asked)
        self.samples = bool(config.do_sample)
        self._ids = torch.tensor([list(tokens)], dtype=torch.long, device=model.device)
        self._stop = None
        with told(_NOT_OBEYED):
            config.eos_token_id = sorted(ends) or None
            config.pad_token_id = 0  # nothing is padded, and without one there is a warning
            config.max_length = len(tokens) + most
            model._prepare_special_tokens(config, device=model.device)
            self._processors = model._get_logits_processor(
                config, len(tokens), self._ids, device=model.device, model_kwargs={}
            )
            if config.stop_strings:
                self._stop = StopStringCriteria(tokenizer, config.stop_strings)

    def __call__(self, logits: Tensor) -> Tensor:
        """`logits [V]` of the next token, changed."""
        if not self._processors:
            return logits
        with told(_NOT_OBEYED):  # some look at their tokens only now
            changed: Tensor = self._processors(self._ids, logits[None].clone())
        return changed[0]

    def append(self, token: int) -> bool:
        """Take note of a generated token; whether the answer ends with it."""
        if self._processors or self._stop is not None:
            self._ids = torch.cat([self._ids, self._ids.new_tensor([[token]])], dim=1)
        return self._stop is not None and bool(self._stop(self._ids, None)[0])


def _told(model: Any, asked: Mapping[str, Any]) -> Any:
    """The `generation_config` of `model.generate(**asked)`."""
    try:
        config, unknown = model._prepare_generation_config(None, **asked)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"these arguments of a generation cannot be used: {error}") from error
    if unknown:
        raise ConfigError(f"a generation has no argument '{next(iter(unknown))}': leave it out")
    if (mode := config.get_generation_mode()) not in ("greedy_search", "sample"):
        raise ConfigError(f"{mode.value} is not done here: leave it out, for greedy decoding or sampling")
    return config
