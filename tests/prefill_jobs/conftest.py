"""Processes that can be killed, and a small job for them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.prefill_jobs.killing import Runner
from tests.tiny import text_model, tiny_tokenizer

LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


@pytest.fixture(scope="session")
def runner() -> Iterator[Runner]:
    with closing(Runner()) as started:
        yield started


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/`, of sliding and full attention, and `corpus.txt`, of about 340 tokens."""
    folder = tmp_path_factory.mktemp("inputs")
    text_model(family="gemma2", num_hidden_layers=4, layer_types=LAYERS).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    words = random.Random(0)
    text = " ".join(words.choice(["corpus", "key", "value"]) for _ in range(60))
    (folder / "corpus.txt").write_text(text)
    return folder
