"""Texts that tasks draw from a filler which says nothing."""

import random

from offload_decode.evals import tasks
from offload_decode.evals.haystack import Haystack, Material
from offload_decode.evals.tasks.base import Context
from tests.tiny import tiny_tokenizer

FILLER = " ".join(f"Sentence {'abcdefghij'[i % 10] * (1 + i % 7)} says nothing at all." for i in range(2000))


def material(tokens: int) -> Material:
    return Material(Haystack("filler", FILLER), tiny_tokenizer(), tokens, 0.2)


def drawn(name: str, tokens: int = 5000, seed: int = 3) -> Context:
    return tasks.get(name).context(random.Random(seed), material(tokens))
