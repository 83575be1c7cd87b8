"""Keys that hold a share of the attention, its entropy, and what they are said to predict."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from offload_decode.attention.queries import Queries
from offload_decode.cli.eval.run import PrefilledStores
from offload_decode.engine.engine import Engine
from offload_decode.evals import answering, runs, sparsity, tasks
from offload_decode.evals.answering import AnswerPlan
from offload_decode.evals.contender import Contender
from offload_decode.evals.haystack import Haystack
from offload_decode.evals.recorded_queries import run_dense
from offload_decode.evals.runs import Results
from offload_decode.evals.side_by_side import WayAnswer
from offload_decode.evals.sparsity import SHARES, predictions, questions
from offload_decode.evals.stats import FEWEST, block_mean, bootstrapped, pearson, spearman
from offload_decode.kv.host_cache import HostKV
from offload_decode.models.loading import LoadedModel
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.job import Settings, prefill_texts
from offload_decode.store.memory import MemoryStore
from offload_decode.store.reader import KVStore
from offload_decode.types import LayerKind, ModelShape
from tests.evals.made_up import looked_up
from tests.tiny import eager, text_model

N = 100
WORDS = Haystack("words", "".join(f"Sentence {number}. " for number in range(200)))
BUDGETS = (8, 32, 128)
PLAN = AnswerPlan(
    "sparsity",
    (400,),
    tuple(Contender("topk", {"budget": str(budget)}) for budget in BUDGETS),
    limit=1,
    seeds=(0, 1),
)


def constructed(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one query whose logits to the keys are these, by way of keys in a store."""
    keys = np.zeros((len(logits), 2), np.float32)
    keys[:, 0] = logits.numpy()
    shape = ModelShape.uniform((LayerKind.FULL,), 1, 1, 2)
    host = HostKV(MemoryStore(shape, [[keys]], [[keys]]), torch.device("cpu"))
    return sparsity.concentration(host, 0, Queries(torch.tensor([[[2.0, 0.0]]]), 0.5))


ONE_KEY = torch.zeros(N)
ONE_KEY[17] = 200.0
WEIGHTS = torch.tensor([0.04, 0.5, 0.01, 0.3, 0.15])


@pytest.mark.parametrize(
    ("logits", "entropy", "keys"),
    [
        (torch.full((N,), 3.0), math.log(N), [math.ceil(share * N) for share in SHARES]),
        (ONE_KEY, 0.0, [1] * len(SHARES)),
        (WEIGHTS.log(), -(WEIGHTS * WEIGHTS.log()).sum().item(), [2, 3, 3, 4]),
    ],
)
def test_keys_are_counted_from_the_heaviest_wherever_they_lie(
    logits: torch.Tensor, entropy: float, keys: list[int]
) -> None:
    found, counted = constructed(logits)
    assert found.item() == pytest.approx(entropy, abs=1e-6 if entropy else 1e-9)
    assert counted.flatten().tolist() == keys


@pytest.fixture(scope="module")
def store(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> KVStore:
    path = tmp_path_factory.mktemp("sparsity") / "store"
    prefill_texts(loaded, [TextDocument("text", WORDS.text[:300])], path)
    return KVStore.open(path)


def test_the_attention_demand_is_that_of_a_dense_answer(loaded: LoadedModel, store: KVStore) -> None:
    run = run_dense(loaded, store, "What?", 4, lambda: None)
    heard = sparsity.listen(Engine.open(store, loaded, selector="dense"), "What?", 4)
    assert [layer.call.layer for layer in heard] == list(loaded.shape.full_layers)
    for layer in heard:
        asked = [call.query for call in run.calls if call.layer == layer.call.layer]
        torch.testing.assert_close(layer.call.query, torch.cat(asked, dim=2))
        # The last token of the question and all of the answer but its last.
        assert layer.call.query.shape[2] - layer.answers == 4


def test_the_stores_share_is_that_of_the_plain_models_attention(loaded: LoadedModel, store: KVStore) -> None:
    engine = Engine.open(store, loaded, selector="dense")
    heard = sparsity.listen(engine, "What?", 4)
    tokens = [*store.tokens.tolist(), *engine.question_tokens("What?")]
    tokens += engine.answer("What?", 4).tokens[:3]
    model = eager(text_model())
    with torch.inference_mode():
        found = model(torch.tensor([tokens]), output_attentions=True).attentions
    for layer in heard:
        rows = found[layer.call.layer][0, :, len(store.tokens) :]
        share = rows[..., : len(store.tokens)].sum(-1)
        torch.testing.assert_close(layer.stored_share.float(), share, atol=1e-5, rtol=0)


def test_rows_in_parts_and_each_head_are_those_of_plain_softmax(
    loaded: LoadedModel, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostKV(store, torch.device("cpu"))
    shape = loaded.shape
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(shape.kv_heads, 5, shape.head_dim, generator=generator)
    monkeypatch.setattr(sparsity, "_NUMBERS", 2 * host.length)
    entropies, keys_of = sparsity.concentration(host, 1, Queries(rows, 0.7, softcap=5.0))
    for head in range(shape.kv_heads):
        keys = torch.from_numpy(np.array(store.keys(1, head))).float()
        weights = torch.softmax(5.0 * torch.tanh(rows[head] @ keys.T * 0.7 / 5.0), -1).double()
        entropy = -(weights * weights.log()).sum(-1)
        torch.testing.assert_close(entropies[head], entropy, atol=1e-5, rtol=0)
        held = weights.sort(-1, descending=True).values.cumsum(-1)
        for share, counted in zip(SHARES, keys_of[:, head], strict=True):
            assert counted.tolist() == ((held < share).sum(-1) + 1).tolist()


def reader(engine: Engine, way: str, question: str, most: int, begun: str = "") -> WayAnswer:
    """Right about UUIDs with 32 tokens and more, and about numbers with 128."""
    right = way == "dense" or int(way.rsplit("=", 1)[1]) >= (32 if "uuid" in question else 128)
    answer = looked_up(engine, way, question, most)
    return answer if right else replace(answer, text="nothing")


@pytest.fixture(scope="module")
def results(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("results")
    asked = [tasks.get(name) for name in ("niah_single_2", "niah_single_3")]
    stores = PrefilledStores(loaded, "text", Settings())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "reply", reader)
        for task in asked:
            patch.setattr(type(task), "max_new_tokens", 2)
        return runs.run(sparsity.Sparsity(PLAN, asked, loaded, WORDS, stores), loaded, folder / "run.jsonl")


def test_every_question_has_a_record_for_each_layer_and_part(results: Results, loaded: LoadedModel) -> None:
    records = results.of(sparsity.SPARSITY)
    assert len(records) == 2 * 2 * 2 * len(loaded.shape.full_layers)
    for record in records:
        shares = [record["keys"][name]["mean"] for name in ("75", "90", "95", "99")]
        assert all(len(share) == loaded.shape.query_heads for share in [*shares, record["stored_share"]])
        assert (np.diff(np.array(shares), axis=0) >= 0).all()
        assert max(record["entropy"]["p95"]) <= math.log(record["stored_tokens"])
        assert record["rows"] == 2 if record["part"] == "answer" else record["rows"] > 2
    by_layer = sparsity.sparse_by(results, lambda record: record.layer)
    assert list(by_layer) == list(loaded.shape.full_layers)


def test_a_question_needs_the_fewest_tokens_that_do_as_well(results: Results) -> None:
    found = questions(results)
    assert {one.asked.task: one.needed for one in found} == {"niah_single_2": 128, "niah_single_3": 32}
    assert {line.over for line in predictions(found)} == {"questions", "tasks"}
    assert predictions(found)[-1].predictor == sparsity.LENGTH
    longer = [replace(one, asked=replace(one.asked, length=2 * one.asked.length)) for one in found]
    both = predictions([*found, *longer])
    assert {(line.over, line.count) for line in both} == {("questions", 8), ("tasks by length", 4)}


def test_smallest_budgets_ignore_lucky_answers_and_wrong_dense_ones(
    results: Results,
) -> None:
    def changed(scores: dict[str, float]) -> Results:
        records = [
            {**record, "score": scores.get(record["way"], 1.0)} if record["record"] == "answer" else record
            for record in results.records
        ]
        return Results(results.path, results.header, tuple(records), results.finished, results.size)

    chance = questions(changed({"topk:budget=32": 0.0}))
    assert {one.needed for one in chance} == {128}
    never = questions(changed({"topk:budget=128": 0.5}))
    assert {(one.needed == one.asked.stored_tokens, one.beyond) for one in never} == {(True, True)}
    assert {one.needed for one in questions(changed({"dense": 0.0}))} == {None}
    assert predictions(questions(changed({"dense": 0.0}))) == []


def test_correlations() -> None:
    one, other = np.array([1.0, 2.0, 2.0, 4.0, 9.0]), np.array([2.0, 1.0, 3.0, 3.0, 30.0])
    assert spearman(one, other) == pytest.approx(0.763158, abs=1e-6)
    assert pearson(one, other) == pytest.approx(0.949457, abs=1e-6)
    assert math.isnan(spearman(one, np.ones(5)))
    # Table 3 of paper 002: its own Pearson correlation over five kinds of tasks.
    entropy, needed = np.array([1.93, 2.11, 2.27, 2.33, 2.68]), np.array([0.001, 0.11, 0.23, 0.27, 8.87])
    assert pearson(entropy, needed) == pytest.approx(0.847, abs=0.01)
    assert spearman(entropy, needed) == pytest.approx(1)


def test_an_interval_is_wider_where_neighbours_are_alike() -> None:
    rng = np.random.default_rng(1)
    alone = rng.standard_normal(640)
    alike = np.repeat(alone[:20], 32)
    narrow, wide = block_mean([alone], 32), block_mean([alike], 32)
    assert None not in (narrow.low, narrow.high, wide.low, wide.high)
    assert narrow.value == pytest.approx(alone.mean())
    assert narrow.low < narrow.value < narrow.high
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)
    # 1.96 standard errors of independent values, and of the 20 that there are.
    assert narrow.high - narrow.low == pytest.approx(2 * 1.96 * alone.std() / 640**0.5, rel=0.4)
    assert wide.high - wide.low == pytest.approx(2 * 1.96 * alone[:20].std() / 20**0.5, rel=0.4)


def test_too_little_has_no_interval() -> None:
    assert block_mean([np.arange(32.0 * (FEWEST - 1))], 32).low is None
    assert bootstrapped(np.mean, np.arange(FEWEST - 1.0)).low is None
    # A single row makes all the difference, and a third of the draws is without it.
    one = np.arange(14.0), (np.arange(14) == 13).astype(np.float64)
    alone = bootstrapped(spearman, *one)
    assert alone.value > 0
    assert alone.low is None
    same = bootstrapped(spearman, np.ones(20), np.ones(20))
    assert math.isnan(same.value)
    assert same.low is None
