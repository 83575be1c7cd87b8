"""Passkey retrieval by Quest's protocol (arXiv 2406.10774, section 4.2.2), in the wording of Mohtashami and
Jaggi (arXiv 2305.16300), which Quest has by way of YaRN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from offload_decode.common.errors import ConfigError
from offload_decode.evals.haystack import Material
from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import Context, Question, Task
from offload_decode.evals.tasks.ruler import NOISE

_TELL = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
_DIGITS = 5
_ROUNDS = 40  # of the five sentences, to count their tokens


@dataclass(frozen=True)
class Passkey(Task):
    """A number of five digits among five sentences that repeat, at a depth drawn evenly.

    In the control the five sentences go on instead. Chance: 1 in 18,000, as many keys as there are.
    """

    name: ClassVar[str] = "passkey"
    max_new_tokens: ClassVar[int] = 16

    def context(self, rng: random.Random, material: Material) -> Context:
        key = words.number(rng, _DIGITS)
        fact = f"The pass key is {key}. Remember it. {key} is the pass key."
        size = material.count(_noise(_ROUNDS * len(NOISE))) / (_ROUNDS * len(NOISE))
        sentences = int((material.tokens - material.count(f"{_TELL}\n\n{fact}\n\n")) / size)
        if sentences < 1:
            raise ConfigError(f"{material.tokens:,} tokens do not hold a pass key: take a longer text")
        before = round(rng.random() * sentences)
        after = sentences - before
        instead = round(material.count(fact) / size)
        return Context(
            "\n".join([_TELL, _noise(before), fact, _noise(after)]),
            "\n".join([_TELL, _noise(before), _noise(instead), _noise(after)]),
            (Question("What is the pass key?", " The pass key is", (key,)),),
            (before / sentences,),
            (material.count(fact),),
        )

    def guess(self, rng: random.Random, question: Question) -> str:
        return words.number(rng, _DIGITS)


def _noise(sentences: int) -> str:
    """So many sentences, the five in turn."""
    rounds, rest = divmod(sentences, len(NOISE))
    return " ".join([*NOISE * rounds, *NOISE[:rest]])
