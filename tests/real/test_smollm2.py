"""SmolLM2-135M-Instruct in Q4_1, which `make real` fetches: what tiny random models cannot show."""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from offload_decode import Engine
from offload_decode.engine.step import StoredPrefix
from offload_decode.evals.recorded_queries import run_dense
from offload_decode.indexes import registry
from offload_decode.kv.host_cache import HostKV
from offload_decode.kv.indexes import heads_of, index_path, kind_folder
from offload_decode.models.loading import load
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import prefill_texts
from offload_decode.store.reader import KVStore
from tests.cli.conftest import imported
from tests.cli.test_startup import NEVER

FILE = Path(os.environ.get("OFFLOAD_DECODE_MODELS", ".models")) / "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FILE.exists(), reason=f"{FILE} is not there: make real fetches it"),
]

WHOLE = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
LICENCE = re.sub(r"[ \n]+", " ", WHOLE)
FACT = "The harbour office closes at seven in the evening. Its keeper is Maria Dantelo."
# The likeliest token is ahead by a whole nat everywhere: no processor's rounding makes another answer.
ASKED = {
    "Who is the keeper of the harbour office? Answer in one short sentence.": "Maria Dantelo",
    "When does the harbour office close?": "seven",
}


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load(str(FILE), "cpu")


@pytest.fixture(scope="module")
def whole() -> Any:
    """Its weights unpacked."""
    return load(str(FILE), "cpu", "float32", "full")


@pytest.fixture(scope="module")
def store(loaded: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three parts of the licence as documents, a fact in the midst of the second, with the default index."""
    parts = (WHOLE[start : start + 1800] for start in (700, 3700, 6700))
    first, second, third = (re.sub(r"[ \n]+", " ", part) for part in parts)
    middle = second.index(". ", 900) + 1
    second = f"{second[:middle]} {FACT}{second[middle:]}"
    texts = [TextDocument(name, text) for name, text in (("a", first), ("b", second), ("c", third))]
    path = tmp_path_factory.mktemp("real") / "licence.kv"
    prefill_texts(loaded, texts, path)
    build_indexes(path, "clusters")
    return path


def test_a_question_imports_nothing_slow(store: Path) -> None:
    printed, modules = imported(
        "ask", store, "Who is the keeper of the harbour office?", "--max-new-tokens", "1"
    )
    assert printed
    assert not NEVER & modules


def test_behind_a_stored_prefix_it_equals_transformers(whole: Any, tmp_path: Path) -> None:
    path = tmp_path / "one.kv"
    prefill_texts(whole, [TextDocument("licence", LICENCE[:2000])], path)
    plain = AutoModelForCausalLM.from_pretrained(FILE.parent, gguf_file=FILE.name, dtype=torch.float32)
    for selector, options in (("dense", {}), ("topk", {"budget": "100%", "index": "flat"})):
        engine = Engine.open(path, whole, selector=selector, options=options)
        asked = torch.tensor([engine.question_tokens("What may You do?")])
        stored = torch.from_numpy(engine.store.tokens.astype("int64"))[None]
        with torch.inference_mode():
            expected = plain(torch.cat([stored, asked], 1)).logits[0, -1]
        assert (engine.ask("What may You do?") - expected).abs().max() < 1e-3


@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_weights_in_blocks_are_near_those_unpacked(whole: Any, weights: str) -> None:
    """The file's, and those that whole weights are quantized to: of this file, `int4` are its own again."""
    loaded = load(str(FILE), "cpu", weights=weights)
    ids = torch.tensor([loaded.tokenizer.encode(LICENCE[700:1500])])
    with torch.inference_mode():
        for tokens in (12, 150):  # in the blocks, and by tiles
            given, wanted = (one.model(ids[:, :tokens]).logits[0].float() for one in (loaded, whole))
            likely, own = wanted.log_softmax(-1), given.log_softmax(-1)
            assert (likely.exp() * (likely - own)).sum(-1).mean() < 0.02


def test_the_default_index_finds_the_sink(store: Path, loaded: Any) -> None:
    """Token 0 is what most queries want most. Every head whose exact search has it finds it."""
    engine = Engine.open(store, loaded)
    kept, missed, asked = engine.store, 0, 0
    for layer, head in heads_of(kept):
        keys, queries = (np.asarray(own(layer, head)).astype(np.float32) for own in (kept.keys, kept.queries))
        best = (queries @ keys.T).argmax(1)
        path = index_path(kind_folder(store, "clusters"), layer, head)
        index = registry.get("clusters").load(path, kept.keys(layer, head), digest=kept.digest(layer, head))
        found = index.search(queries, 64).ids
        missed += sum(one not in ids for one, ids in zip(best, found, strict=True))
        asked += len(queries)
    assert missed <= 0.003 * asked


@pytest.mark.parametrize("budget", ["64", "1024"])
def test_an_answer_ends_with_its_turn_and_cites_where_it_stands(
    store: Path, loaded: Any, budget: str
) -> None:
    engine = Engine.open(store, loaded, options={"budget": budget})
    for question, right in ASKED.items():
        answer = engine.answer(question, 48, cites=True)
        assert right in answer.text
        assert answer.finish == "stop"
        assert "<|im_" not in answer.text
        assert answer.citations[0].name == "b"
        assert right in answer.citations[0].spans[0].text


def test_the_file_is_the_one_that_was_tried() -> None:
    with FILE.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_a_bound_on_the_error_is_kept_to(loaded: Any, tmp_path: Path) -> None:
    """Of the queries of a dense answer, behind a text that is long enough to draw from."""
    path = tmp_path / "whole.kv"
    prefill_texts(loaded, [TextDocument("licence", (2 * LICENCE)[:14_000])], path)
    build_indexes(path, "clusters")
    store = KVStore.open(path)
    assert store.manifest.n_tokens > 2560
    run = run_dense(loaded, store, "What may a licensee do?", 8, lambda: None)
    host, shape = HostKV(store, torch.device("cpu")), loaded.shape
    exact = StoredPrefix.over(host, shape, "dense", {})
    bounded = StoredPrefix.over(host, shape, "topk", {"error": "0.05@0.95"})
    kept = []
    for call in run.calls:
        asked = call.layer, call.query, call.scaling, call.softcap
        out, dense = bounded.attend(*asked).out, exact.attend(*asked).out
        kept.append(((out - dense).norm(dim=-1) <= 0.05 * dense.norm(dim=-1)).flatten())
    assert torch.cat(kept).double().mean() >= 0.95
    stats = bounded.take_stats()
    assert stats.whole_rows < stats.rows / 2
