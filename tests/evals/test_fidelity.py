"""The measures of fidelity are what their formulas say, on the queries that a model really asks."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import tensor_view
from offload_decode.common.errors import ConfigError
from offload_decode.common.rows import threads
from offload_decode.engine.engine import Engine
from offload_decode.engine.step import StoredPrefix
from offload_decode.evals import fidelity
from offload_decode.evals.closeness import MEASURES, Exact, summarize
from offload_decode.evals.contender import Contender
from offload_decode.evals.fidelity import FidelityPlan, FidelityReport, Source, forced, measure
from offload_decode.evals.recorded_queries import Call, DenseRun, replay, run_dense, sampled_calls
from offload_decode.kv.host_cache import HostKV
from offload_decode.models.few_rows import FEW_ROWS
from offload_decode.models.loading import LoadedModel, load
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import prefill_texts
from offload_decode.selectors.base import Attended, Memory, Selector
from offload_decode.selectors.budgeted import Budgeted
from offload_decode.selectors.one_pass import OnePass
from offload_decode.selectors.query_free import Dense
from offload_decode.selectors.registry import create
from offload_decode.selectors.topk import TopK
from offload_decode.store.reader import KVStore
from offload_decode.types import PageSelection, Selection
from tests.models import few_bits
from tests.tiny import random_ids, served_model, token_store

TEXT = "".join(f"Thing {number} weighs {number * number} grams.\n" for number in range(9))
QUESTION = "What weighs 25 grams?"
LAYERS = (0, 1, 2)
K = 12


@pytest.fixture(scope="module")
def store(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> KVStore:
    path = tmp_path_factory.mktemp("fidelity") / "store"
    prefill_texts(loaded, [TextDocument("text", TEXT)], path)
    return KVStore.open(path)


@pytest.fixture(scope="module")
def host(store: KVStore) -> HostKV:
    return HostKV(store, torch.device("cpu"))


def test_answers_beyond_the_context_are_refused_before_they_begin(
    loaded: LoadedModel, store: KVStore
) -> None:
    steps: list[None] = []
    with pytest.raises(ConfigError, match=r"the context of this model ends after [\d,]+: take fewer"):
        run_dense(loaded, store, QUESTION, 10**9, lambda: steps.append(None))
    assert not steps


@pytest.fixture(scope="module")
def run(loaded: LoadedModel, store: KVStore) -> DenseRun:
    return run_dense(loaded, store, QUESTION, 5, lambda: None)


@pytest.fixture(scope="module")
def report(loaded: LoadedModel, store: KVStore) -> FidelityReport:
    contenders = tuple(map(Contender, ("dense", "oracle", "topk", "random", "streaming")))
    return measure(loaded, store, FidelityPlan(contenders, ("4", "25%"), (QUESTION, "And 16?"), 5))


def test_one_compiled_call_is_measured_as_its_parts_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an indexed store, whose heads are searched, attended to and estimated at once."""
    path = tmp_path / "store"
    token_store(path, served_model("llama", num_hidden_layers=2), random_ids(3000))
    build_indexes(path, "clusters", k=16, recall=0.5)
    monkeypatch.setattr(threads, "THREADS", 2)
    host = HostKV(KVStore.open(path), torch.device("cpu"))
    shape = host.store.manifest.shape
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(1, shape.query_heads, 1, shape.head_dim, generator=generator)
    call = Call(shape.full_layers[-1], query, 0.3, None)
    prefix = StoredPrefix.over(host, shape, "topk", {"budget": "20"})
    at_once = []
    real = OnePass.attend

    def spied(self: OnePass, layer: int, queries: Queries) -> Attended | None:
        at_once.append(real(self, layer, queries))
        return at_once[-1]

    monkeypatch.setattr(OnePass, "attend", spied)
    ((_, ids, out, stats),) = replay(prefix, [call])
    assert at_once[0] is not None
    monkeypatch.setattr(OnePass, "attend", lambda self, layer, queries: None)
    ((_, parts, expected, cost),) = replay(prefix, [call])
    assert ids is not None
    assert parts is not None
    assert torch.equal(ids.sort().values, parts.sort().values)
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert (stats.selected, stats.bytes_moved) == (cost.selected, cost.bytes_moved)


def _random_rows(host: HostKV, rows: int = 6) -> Queries:
    shape = host.store.manifest.shape
    generator = torch.Generator().manual_seed(3)
    return Queries(torch.randn(shape.kv_heads, rows, shape.head_dim, generator=generator), 0.4, 3.0)


def test_the_measures_are_their_formulas(host: HostKV) -> None:
    queries = _random_rows(host)
    ids = torch.stack([torch.stack([torch.randperm(host.length)[:K] for _ in range(6)]) for _ in range(2)])
    ids[:, :, -2:] = -1
    out = torch.randn(2, 6, queries.vectors.shape[-1])
    judged = dict(zip(MEASURES, Exact(host, 1, queries, {K}).judge(slice(0, 6), ids, out, K), strict=True))
    for head in range(2):
        keys, values = (tensor_view(read(1, head)).float() for read in (host.store.keys, host.store.values))
        for row in range(6):
            scores = keys @ queries.vectors[head, row]
            logits = 3.0 * torch.tanh(0.4 * scores / 3.0)
            weights = torch.softmax(logits, 0)
            dense = weights @ values
            best = scores.topk(K).indices
            top = torch.softmax(logits[best], 0) @ values[best]
            mine = [i for i in ids[head, row].tolist() if i >= 0]
            expected = {
                "recall": torch.tensor(len(set(mine) & set(best.tolist())) / K),
                "mass": weights[mine].sum(),
                "error": (out[head, row] - dense).norm() / dense.norm(),
                "approximation": (top - dense).norm() / dense.norm(),
                "search": (out[head, row] - top).norm() / dense.norm(),
            }
            for name, value in expected.items():
                torch.testing.assert_close(judged[name][head, row], value, atol=1e-5, rtol=1e-4)


def test_equal_keys_are_equally_good_and_a_budget_of_nothing_misses_nothing(host: HostKV) -> None:
    queries = dataclasses.replace(_random_rows(host), vectors=torch.zeros(2, 1, 16))  # all scores are 0
    ids = torch.arange(host.length - K, host.length).expand(2, 1, K)
    exact = Exact(host, 1, queries, {0, K})
    assert exact.judge(slice(0, 1), ids, torch.zeros(2, 1, 16), K)[0].tolist() == [[1.0], [1.0]]
    nothing = exact.judge(slice(0, 1), ids[..., :0], torch.zeros(2, 1, 16), 0)
    assert nothing[:, 0, 0].tolist() == [1, 0, 1, 1, 0]


@pytest.mark.parametrize("numbers", [1, 300])
def test_taking_the_rows_in_parts_changes_nothing(
    host: HostKV, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, ids, out = _random_rows(host), torch.arange(K).expand(2, 6, K), torch.zeros(2, 6, 16)
    whole = Exact(host, 1, queries, {3, K}).judge(slice(0, 6), ids, out, K)
    monkeypatch.setattr("offload_decode.evals.closeness._NUMBERS", numbers)
    monkeypatch.setattr("offload_decode.evals.closeness.BLOCK_TOKENS", 50)
    monkeypatch.setattr("offload_decode.selectors.scores.BLOCK_TOKENS", 50)
    torch.testing.assert_close(Exact(host, 1, queries, {3, K}).judge(slice(0, 6), ids, out, K), whole)


def test_dense_attention_has_no_error(report: FidelityReport) -> None:
    (dense,) = [entry for entry in report.entries if entry.label == "dense"]
    assert (dense.budget, dense.attended) == ("100%", report.configuration["stored_tokens"])
    for found in (dense.live, dense.stored):
        assert found is not None
        assert (found.recall, found.mass) == (1, 1)
        assert found.error.p99 < 1e-5
        assert found.approximation.p99 == 0
    assert dense.agreement.kl_max < 1e-9
    assert (dense.agreement.top1, dense.agreement.tokens) == (1, 10)


def test_how_a_pass_of_many_tokens_rounds_is_no_loss_of_a_selector(tmp_path: Path) -> None:
    """Of weights in blocks, one token's inputs are rounded to 8 bits and those of many are not."""
    loaded = load(str(few_bits.gguf(tmp_path / "made")), "cpu", "float32")
    path = tmp_path / "store"
    prefill_texts(loaded, [TextDocument("text", TEXT)], path)
    contenders = tuple(map(Contender, ("dense", "topk", "snapkv")))  # the last has its tokens one by one
    plan = FidelityPlan(contenders, ("100%",), (QUESTION,), FEW_ROWS + 8)
    dense, *others = measure(loaded, KVStore.open(path), plan).entries
    assert all(entry.agreement.kl_max < 2e-6 < dense.agreement.kl_max for entry in others)


@pytest.mark.parametrize("label", ["oracle", "topk"])
def test_an_exact_search_has_the_error_of_the_approximation_alone(report: FidelityReport, label: str) -> None:
    for entry in [entry for entry in report.entries if entry.label == label]:
        assert entry.attended == entry.budget_tokens
        for found in (entry.live, entry.stored):
            assert found is not None
            assert found.recall == 1
            assert found.search.p99 < 1e-4
            assert found.error.p50 == pytest.approx(found.approximation.p50, rel=1e-3) != 0
        assert entry.agreement.kl_mean > 1e-7


def test_controls_find_what_chance_gives_and_larger_budgets_more(report: FidelityReport) -> None:
    small, large = (entry for entry in report.entries if entry.label == "random")
    assert (small.budget, large.budget) == ("4", "25%")
    assert abs(large.live.recall - 0.25) < 0.1
    assert small.live.mass < large.live.mass < 0.6
    assert small.bytes_moved < large.bytes_moved


class _DropsTheBest(TopK):
    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        chosen = super().choose(layer, queries, k)
        assert chosen.ids is not None
        assert chosen.scores is not None
        return Selection(chosen.ids[..., 1:], chosen.scores[..., 1:])


def test_a_selector_that_drops_the_best_token_is_seen(host: HostKV, run: DenseRun) -> None:
    source, budgets = Source(host, [run.calls], {K}), dict.fromkeys(LAYERS, K)
    whole = StoredPrefix.over(host, host.store.manifest.shape, "topk", {"budget": str(K)})
    broken = _in_place_of(whole.selector, _DropsTheBest)
    right, wrong = (source.judge(one, budgets, lambda: None)[0] for one in (whole, broken))
    assert right is not None
    assert wrong is not None
    assert wrong.recall == pytest.approx((K - 1) / K)
    assert wrong.mass < right.mass - 0.01
    assert wrong.search.p50 > 0.01 > right.search.p99


def _in_place_of(selector: Selector, kind: type[Selector]) -> StoredPrefix:
    """A prefix whose tokens are chosen by `kind`, with the options and budgets of another selector."""
    chosen = kind(selector.options, selector.host, selector.shape, selector.budgets)
    return StoredPrefix(selector.host, Budgeted(chosen))


class _FirstPages(Dense):
    """For each token of a group, one page: its number is that of the token."""

    name = "first-pages"

    def choose(self, layer: int, queries: Queries, k: int) -> Selection | PageSelection:  # type: ignore[override]
        pages = torch.arange(queries.tokens)[None, :, None].expand(len(queries.vectors), -1, 1)
        return PageSelection(pages, 4, torch.full((len(queries.vectors),), 3), shared=True)


def test_pages_become_the_tokens_of_every_row(host: HostKV, run: DenseRun) -> None:
    dense = create("dense", {"budget": "3", "dense_layers": ""}, host, host.store.manifest.shape).selector
    (_, ids, _, _), *_ = replay(_in_place_of(dense, _FirstPages), run.calls)
    tokens = run.calls[0].query.shape[2]
    assert ids is not None
    rows = ids.reshape(dense.shape.kv_heads, dense.shape.group, tokens, -1)
    for token in range(tokens):
        mine = rows[:, :, token].flatten(0, 1).tolist()
        assert mine == [[4 * token, 4 * token + 1, 4 * token + 2, -1]] * dense.shape.query_heads


def test_live_queries_are_those_of_the_engine_in_its_order(
    loaded: LoadedModel, store: KVStore, run: DenseRun
) -> None:
    engine = Engine.open(store, loaded, selector="dense")
    asked = len(engine.question_tokens(QUESTION))
    assert [call.layer for call in run.calls] == list(LAYERS) * 5
    assert [call.query.shape[2] for call in run.calls] == [asked] * 3 + [1] * 12
    logits = forced(engine, run, lambda: None)
    torch.testing.assert_close(logits, run.logits)
    assert run.tokens == tuple(logits.argmax(-1).tolist())
    # The calls' own attention is what merges into these logits: exact attention of the same rows.
    first = run.calls[0]
    found = engine.prefix.attend(first.layer, first.query, first.scaling, first.softcap)
    dense = Exact(engine.prefix.host, first.layer, first.queries(2), ())
    torch.testing.assert_close(found.out.reshape(dense.out.shape), dense.out)


def test_the_sample_is_the_latest_queries_each_of_its_own_head(host: HostKV, run: DenseRun) -> None:
    store, shape = host.store, host.store.manifest.shape
    calls = sampled_calls(host, run.calls)
    tokens = len(calls) // len(LAYERS)
    assert [call.layer for call in calls] == list(LAYERS) * tokens
    assert {(call.scaling, call.softcap) for call in calls} == {(run.calls[0].scaling, None)}
    late = store.query_heads[store.query_positions >= 0.9 * host.length]
    assert tokens == max(1, np.bincount(late, minlength=shape.group).min())
    for call in calls[-len(LAYERS) :]:
        for head in range(shape.query_heads):
            kv_head, place = divmod(head, shape.group)
            sample = int(np.flatnonzero(store.query_heads == place)[-1])
            expected = tensor_view(store.queries(call.layer, kv_head))[sample].float()
            torch.testing.assert_close(call.query[0, head, 0], expected)


class _Counts(Memory[int]):
    name = "counts"

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        self.state[layer] = self.state.get(layer, 0) + queries.tokens
        return Selection(torch.full((*queries.vectors.shape[:2], 1), self.state[layer]))


def test_a_selector_that_remembers_meets_each_conversation_afresh(host: HostKV, run: DenseRun) -> None:
    dense = create("dense", {"budget": "1"}, host, host.store.manifest.shape).selector
    prefix = _in_place_of(dense, _Counts)
    asked = run.calls[0].query.shape[2]
    for _ in range(2):
        seen = [int(ids.max()) for _, ids, _, _ in replay(prefix, run.calls)]  # type: ignore[union-attr]
        assert seen == [asked + step for step in range(5) for _ in LAYERS]


def test_divergence_and_agreement() -> None:
    dense = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, -torch.inf]])
    other = torch.tensor([[2.0, 1.0, 0.0], [3.0, 0.5, 1.0]])
    p, q = torch.softmax(dense.double(), -1), torch.softmax(other.double(), -1)
    expected = [(p[0] * (p[0] / q[0]).log()).sum(), (p[1, :2] * (p[1, :2] / q[1, :2]).log()).sum()]
    torch.testing.assert_close(fidelity.divergence(dense, other), torch.stack(expected))
    found = fidelity.agreement([(dense[:1], other[:1]), (dense[1:], other[1:])])
    assert (found.tokens, found.top1) == (2, 0.5)
    assert found.kl_mean == pytest.approx(float(sum(expected) / 2))
    assert found.kl_max == pytest.approx(float(max(expected)))
    assert found.nats == pytest.approx(float((p[0, 2] / q[0, 2]).log() + (p[1, 0] / q[1, 0]).log()) / 2)


def test_percentiles_and_the_worst_head() -> None:
    measured = {layer: torch.zeros(5, 2, 101, dtype=torch.float64) for layer in (3, 7)}
    measured[7][2, 1] = torch.arange(101.0) / 100
    measured[3][0] = 0.5
    found = summarize(measured)
    assert (found.worst.layer, found.worst.head) == (7, 1)
    assert dataclasses.astuple(found.worst.error) == pytest.approx((0.5, 0.5, 0.95, 0.99))
    assert (found.rows, len(found.heads)) == (404, 4)
    assert found.recall == 0.25
    assert found.error.p99 == pytest.approx(np.percentile([0] * 303 + list(np.arange(101) / 100), 99))


def test_the_result_has_its_configuration_and_every_entry(report: FidelityReport, store: KVStore) -> None:
    result = json.loads(json.dumps(report.to_json()))
    given = result["configuration"]
    assert given["store_digest"] == store.store_digest
    assert given["weights_hash"] == store.manifest.weights_hash
    assert given["questions"] == [QUESTION, "And 16?"]
    assert given["budgets"] == ["4", "25%"]
    assert "torch" in given["versions"]
    assert [entry["budget"] for entry in result["entries"]] == ["100%"] + ["4"] * 4 + ["25%"] * 4
    assert [entry["live"]["recall"] for entry in result["entries"]] == [e.live.recall for e in report.entries]


def test_progress_ends_where_it_said(loaded: LoadedModel, store: KVStore) -> None:
    seen: list[tuple[int, int]] = []
    plan = FidelityPlan((Contender("dense"), Contender("streaming")), ("4", "8"), (QUESTION,), 3)
    measure(loaded, store, plan, lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert {total for _, total in seen} == {len(seen)}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"budgets": ("abc",)}, "budget 'abc' is neither"),
        ({"budgets": ("mass=0.9",)}, "budget 'mass=0.9' is neither"),
        ({"budgets": ("0",)}, "leaves nothing to measure"),
        ({"common": {"dense_layers": "0,1,2"}}, "leaves nothing to measure"),
        ({"common": {"budget": "5"}}, "give it as --budgets"),
        ({"common": {"index": "flat"}}, "has no option 'index'"),
        ({"contenders": (Contender("topk", {"dense_layers": "0"}),)}, "the same dense_layers"),
        ({"contenders": (Contender("topk", {"index": "faiss-ivf"}),)}, "there is no 'faiss-ivf' index"),
        ({"contenders": (Contender("magic"),)}, "unknown selector 'magic'"),
    ],
)
def test_what_cannot_be_measured_is_refused(store: KVStore, changes: dict, sentence: str) -> None:
    plan = FidelityPlan((Contender("dense"),), ("4",), (QUESTION,), 3)
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        fidelity.check(store, dataclasses.replace(plan, **changes))


def test_a_dense_layer_is_dense_for_all_and_not_measured(loaded: LoadedModel, store: KVStore) -> None:
    plan = FidelityPlan((Contender("topk"),), ("4",), (QUESTION,), 3, {"dense_layers": "0"})
    (entry,) = measure(loaded, store, plan).entries
    assert {head.layer for head in entry.live.heads} == {1, 2}
    assert entry.attended == 4


def test_one_that_keeps_to_an_error_has_no_budget(loaded: LoadedModel, store: KVStore) -> None:
    plan = FidelityPlan((Contender("topk", {"error": "0.05@0.95"}),), ("4", "8"), (QUESTION,), 3)
    (entry,) = measure(loaded, store, plan).entries
    assert entry.budget == "100%"
    assert entry.live.error.p99 < 1e-5, "so few tokens are all attended to"


def test_one_that_fails_leaves_the_others(
    loaded: LoadedModel, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(self: TopK, layer: int, queries: Queries, k: int) -> Selection:
        raise ConfigError("the index was eaten")

    monkeypatch.setattr(TopK, "choose", choose)
    plan = FidelityPlan((Contender("topk"), Contender("streaming")), ("4",), (QUESTION,), 3)
    report = measure(loaded, store, plan)
    assert [entry.label for entry in report.entries] == ["streaming"]
    assert [(failure.label, failure.error) for failure in report.failures] == [
        ("topk", "the index was eaten")
    ]
