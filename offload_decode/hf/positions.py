"""How long a text may become, and for which length its keys are rotated.

`longrope` has two sets of frequencies, one for texts up to the length that the model was first trained on and
one for longer texts; `dynamic` has a set for each length beyond `max_position_embeddings`. Either rotates the
first token by the length of the whole, so a store is rotated for one length, which is chosen before its
prefill begins. Learned positions end with their table.

transformers takes the largest position of a pass for the end of the text. In passes behind a store, each
rotary module of such a model therefore gets one position more, the last one of the store's length, whose
rotation is dropped: whatever the module does with lengths, it does as in one pass over all of the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload_decode.common.errors import ConfigError, StoreMismatch, UnsupportedModel

if TYPE_CHECKING:  # `inspect` tells positions without torch
    from torch import nn

CONTEXT = 512
"""Tokens that are expected to follow a prefix, by default: a usual question and its answer."""
DEPENDENT = ("dynamic", "longrope")
"""Kinds of RoPE whose frequencies change with the length of a text."""
UNSAID = 0
"""The length of a store that states none."""

_NOTED = "rotated_for"
_MOST = 1 << 40  # tokens of any text
_TABLES = re.compile(r"(^|\.)(wpe|embed_positions|positions?_embed(ding)?s?|pos_embed(ding)?s?)$")


@dataclass(frozen=True)
class Positions:
    """The positions of one store: it is rotated as a text of `length` tokens (None: the length does not
    matter), and holds `most` tokens with all that follow (None: as many as there is memory for).
    """

    length: int | None = None
    most: int | None = None

    @property
    def noted(self) -> dict[str, int]:
        """The entry in the manifest's `rope`."""
        return {} if self.length is None else {_NOTED: self.length}

    def check(self, tokens: int) -> None:
        """ConfigError where so many tokens, the stored ones included, do not fit."""
        if self.most is not None and tokens > self.most:
            why = "the model has no more positions"
            if self.length is not None:
                why = f"its keys are those of {self.length:,} tokens: prefill again with a larger --context"
            raise ConfigError(
                f"the stored tokens and those behind them would be {tokens:,}, and this store serves at most "
                f"{self.most:,}, because {why}"
            )


ANYWHERE = Positions()
"""Of models that rotate by a token's position alone."""


@dataclass(frozen=True)
class Lengths:
    """The lengths at which a model changes: `switches`, beyond which other frequencies hold (longrope);
    `grows`, beyond which each length has its own (dynamic); `table`, the rows of its learned positions.
    """

    switches: tuple[int, ...] = ()
    grows: int | None = None
    table: int | None = None

    @property
    def matter(self) -> bool:
        """Whether the length of a text changes how its tokens are rotated."""
        return bool(self.switches) or self.grows is not None

    def chosen(self, tokens: int, context: int | None = None) -> Positions:
        """For a prefix of `tokens` that at most `context` tokens will follow.

        None: what is left of a length within which the rotation stays the same, if that is `CONTEXT` tokens
        or an eighth of it, else `CONTEXT`: as transformers rotates the text with a usual answer. Raises
        `ConfigError` where there are not so many positions.
        """
        if self.table is not None and tokens + (context or 1) > self.table:
            follow = "a question" if context is None else f"the {context:,} of --context"
            raise ConfigError(
                f"the model has {self.table:,} learned positions, and {tokens:,} tokens and {follow} are "
                "more: split the corpus, or use a model with rotary positions"
            )
        if context is None:
            rooms = ((length - tokens, min(CONTEXT, length // 8)) for length in self._lengths)
            room = [left for left, least in rooms if left >= least]
            context = min(room, default=CONTEXT)
        return self._rotated_for(tokens + context)

    def of_store(self, rope: Mapping[str, Any], tokens: int) -> Positions:
        """The positions of a store of `tokens` by its manifest's `rope`. Raises `StoreMismatch`."""
        if not self.matter:
            return Positions(most=self.table)
        noted = rope.get(_NOTED)
        known = noted if type(noted) is int and 0 < noted <= _MOST else 0
        positions = self._rotated_for(known)
        if not known or positions.length != noted or tokens > (positions.most or math.inf):
            raise StoreMismatch(
                "This model rotates keys by the length of the whole text, which the store does not "
                "state: prefill again."
            )
        return positions

    def describe(self, positions: Positions) -> str:
        """A store's positions as part of a sentence; empty where there is nothing to say."""
        length = f"{positions.length or 0:,}"
        if positions.length is None:
            return f"{self.table:,} learned ones, with what is asked and answered" if self.table else ""
        if self.grows is not None:
            return f"rotated as in a text of {length} tokens (dynamic RoPE), the most that are served"
        if positions.most is None:
            return f"rotated with the long factors of longrope, as in any text of {length} tokens or more"
        return (
            f"rotated with the short factors of longrope, as in any text of up to {length} tokens, the most "
            "that are served"
        )

    @property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(sorted({*self.switches, *([] if self.grows is None else [self.grows])}))

    def _rotated_for(self, total: int) -> Positions:
        """The same positions for all lengths that are rotated as a text of `total` tokens."""
        if not self.matter:
            return Positions(most=self.table)
        if self.grows is not None and total > self.grows:
            return Positions(total, min(total, self.table or total))
        within = [length for length in self._lengths if total <= length]
        if within:
            return Positions(within[0], min(within[0], self.table or within[0]))
        return Positions(self._lengths[-1] + 1, self.table)


NO_LENGTHS = Lengths()
"""Of a model that rotates by a token's position alone, however many there are."""


def lengths_of(config: Any, decoder: nn.Module) -> Lengths:
    """The lengths at which a model with this text config changes."""
    rope = rope_parameters(config)
    grows = int(config.max_position_embeddings) if "dynamic" in _kinds(rope) else None
    return Lengths(_switches(rope), grows, min(_tables(decoder), default=None))


def describe_positions(rope: Mapping[str, Any], tokens: int) -> str:
    """`Lengths.describe` by a manifest's `rope` alone. Raises `StoreMismatch` or `UnsupportedModel`."""
    # Where a dynamic rotation begins to scale does not matter here: the manifest states the length.
    lengths = Lengths(_switches(rope), 0 if "dynamic" in _kinds(rope) else None)
    return lengths.describe(lengths.of_store(rope, tokens))


def rope_parameters(config: Any) -> dict[str, Any]:
    """RoPE parameters as the config states them: one set, or one for each layer type (Gemma 3)."""
    return dict(getattr(config, "rope_parameters", None) or {})


def rotations(rope: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The one set of RoPE parameters, or the set of each layer type."""
    return [one for one in rope.values() if isinstance(one, dict)] or [rope]


def _kinds(rope: Mapping[str, Any]) -> list[object]:
    return [one.get("rope_type") for one in rotations(rope)]


def _switches(rope: Mapping[str, Any]) -> tuple[int, ...]:
    found = set()
    for one in rotations(rope):
        if one.get("rope_type") == "longrope":
            length = one.get("original_max_position_embeddings")
            if type(length) is not int or not 0 < length <= _MOST:
                raise UnsupportedModel(
                    "longrope parameters must state the length that the model was first trained on "
                    "(original_max_position_embeddings), and these do not: mend config.json"
                )
            found.add(length)
    return tuple(sorted(found))


def _tables(decoder: nn.Module) -> Iterator[int]:
    """Positions in each table of them: an embedding, or a buffer of sines (GPT-J)."""
    from torch import nn

    for path, module in decoder.named_modules():
        if isinstance(module, nn.Embedding) and _TABLES.search(path):
            before = 0 if module.padding_idx is None else module.padding_idx + 1
            yield module.num_embeddings - int(getattr(module, "offset", before))
    for path, buffer in decoder.named_buffers():
        if _TABLES.search(path) and buffer.ndim == 2:
            yield len(buffer)


def depends_on_length(module: nn.Module) -> bool:
    """Whether it is a rotary embedding that changes with the length of a text."""
    kinds = getattr(module, "rope_type", None)
    return any(kind in DEPENDENT for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))
