"""A pass key among sentences that repeat: Quest's protocol (arXiv 2406.10774, section 4.2.2)."""

import random
from typing import ClassVar

from offload_decode.common.errors import ConfigError
from offload_decode.evals.haystack import Material
from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import Context, Question, Task, noise

_TELL = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
_DIGITS = 5
_SAMPLE = 200  # sentences of noise whose tokens are counted


class Passkey(Task):
    """A number of five digits among five sentences that repeat, at a depth drawn evenly.

    The wording is that of Mohtashami and Jaggi (arXiv 2305.16300), which Quest has by way of YaRN. In the
    control the five sentences go on instead. Chance: 1 in 18,000, as many keys as there are.
    """

    name: ClassVar[str] = "passkey"
    max_new_tokens: ClassVar[int] = 16

    def context(self, rng: random.Random, material: Material) -> Context:
        key = words.number(rng, _DIGITS)
        fact = f"The pass key is {key}. Remember it. {key} is the pass key."
        size = material.count(_one_line(_SAMPLE)) / _SAMPLE
        sentences = int((material.tokens - material.count(f"{_TELL}\n\n{fact}\n\n")) / size)
        if sentences < 1:
            raise ConfigError(f"{material.tokens:,} tokens do not hold a pass key: take a longer text")
        before = round(rng.random() * sentences)
        instead = _one_line(round(material.count(fact) / size))
        text, control = (
            "\n".join([_TELL, _one_line(before), middle, _one_line(sentences - before)])
            for middle in (fact, instead)
        )
        question = Question("What is the pass key?", " The pass key is", (key,))
        return Context(text, control, (question,), (before / sentences,))

    def guess(self, rng: random.Random, question: Question) -> str:
        return words.number(rng, _DIGITS)


def _one_line(sentences: int) -> str:
    return noise(sentences).replace("\n", " ")
