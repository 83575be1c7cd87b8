"""`benchmarks/decode.py` and `first_token.py` from end to end, on a tiny store of the shipped model."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import decode
from offload_decode.engine.engine import Engine
from offload_decode.hf.compat import with_cache
from offload_decode.models.loading import LoadedModel, load
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import prefill_tokens
from offload_decode.store.reader import KVStore
from offload_decode.types import Document

TOKENS = 400  # more than a window of the shipped model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("demo", "cpu")


@pytest.fixture(scope="module")
def path(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("decode") / "text.kv"
    tokens = np.random.default_rng(0).integers(300, 2000, TOKENS, dtype=np.int32)
    prefill_tokens(loaded, tokens, [Document("text", 0, TOKENS)], path)
    build_indexes(path, "faiss-ivf")
    return path


def test_the_baseline_attends_to_all_that_is_stored(loaded: LoadedModel, path: Path) -> None:
    ours = Engine.open(path, loaded, selector="dense")
    plain = load("demo", "cpu").model
    cache = decode.full_cache(KVStore.open(path), plain.config, 2)
    question = torch.arange(500, 509)[None].expand(2, -1)
    with torch.inference_mode():
        expected = plain(question, **with_cache(plain, cache)).logits[:, -1]
    for row in expected:
        torch.testing.assert_close(ours.fork().extend(question[0]), row, atol=1e-3, rtol=0)


def test_every_way_answers_and_its_time_is_told_apart(path: Path) -> None:
    rows = {(row.way, row.questions): row for row in decode.main(["--quick", "--store", str(path)])}
    ways = {decode.BASELINE, "dense", "topk, flat", "topk, faiss-ivf", "quest"}
    assert set(rows) == {(way, questions) for way in ways for questions in (1, 2)}
    for (way, _), row in rows.items():
        assert row.stages["model"] > 0
        assert sum(row.stages.values()) <= 3 * row.seconds, "medians of parts of a step"
        assert (row.stages["search"] > 0) == (way != decode.BASELINE)
    assert all(rows[way, 2].same == 1 for way in ("dense", decode.BASELINE)), "both are exact"


def test_agreement_ends_at_the_first_difference() -> None:
    assert decode.agreement((1, 2, 3, 4), (1, 2, 5, 4)) == 0.5
    assert decode.agreement((1, 2), (1, 2, 3)) == 1


@pytest.mark.slow
def test_a_first_token_is_timed(path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.first_token", str(path), "topk", "index=faiss-ivf", "--cold"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert all(json.loads(ran.stdout)[part] > 0 for part in ("imports", "open", "question"))
