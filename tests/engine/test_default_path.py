"""What users get without an option, clusters that are pruned, through the engine: against flat and dense."""

import numpy as np
import pytest
import torch

from offload_decode.common.errors import OffloadDecodeWarning, VectorIndexError
from offload_decode.engine.engine import Engine
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.models.loading import wrap
from offload_decode.selectors.one_pass import OnePass
from tests.long_stores import FORMS, TOKENS, cells_read, long_store, rebuilt
from tests.store.jobs import flipped
from tests.store.test_bit_flips import verified
from tests.tiny import text_model, tiny_tokenizer

QUESTIONS = ["Who jumps?", "Over what does it jump, and how often?", "Why"]
BUDGET = 64


@pytest.fixture(scope="module", params=FORMS, ids="-".join)
def asked(request, tmp_path_factory):
    """A model and a store of made-up keys that takes itself for the model's."""
    dtype, kv = request.param
    model = text_model(num_hidden_layers=2, head_dim=64).to(getattr(torch, dtype))
    loaded = wrap(model, tiny_tokenizer())
    return loaded, long_store(tmp_path_factory.mktemp("engine") / "long.kv", dtype, kv, loaded)


def opened(asked, index="auto", budget=BUDGET, tail="auto"):
    loaded, store = asked
    return Engine.open(store, loaded, options={"budget": str(budget), "index": index, "tail": tail})


def logits(engine):
    return engine.fork().ask(QUESTIONS[1]).float()


def test_a_question_and_its_answer_search_clusters_and_leave_cells_out(asked, monkeypatch):
    engine = opened(asked)
    searched = []
    search, attend = ClusteredIndex.search_heads.__func__, OnePass.attend

    def spied(cls, heads, queries, k):
        searched.append((len(heads), queries.copy(), k))
        return search(cls, heads, queries, k)

    def spied_at_once(self, layer, queries):
        attended = attend(self, layer, queries)
        if attended is not None:
            searched.append((len(queries.vectors), queries.vectors.numpy(), attended.selection.ids.shape[2]))
        return attended

    monkeypatch.setattr(ClusteredIndex, "search_heads", classmethod(spied))
    monkeypatch.setattr(OnePass, "attend", spied_at_once)
    engine.answer(QUESTIONS[0], max_new_tokens=3)
    assert len(searched) == 2 * 3, "two layers, for the question and for each token but the last"
    assert {k for _, _, k in searched} == {BUDGET}
    index = rebuilt(engine.store, 0, 0)
    for _, queries, k in searched[::2]:  # of the first layer
        assert 0 < cells_read(index, queries[0, -1], k) < len(index.cells.counts)


def test_answers_are_those_of_flat_search_but_for_what_recall_allows(asked):
    clusters, flat = (logits(opened(asked, index, tail="off")) for index in ("clusters", "flat"))
    dense = logits(opened(asked, "flat", "100%"))
    assert not torch.equal(flat, dense)
    assert (clusters - flat).norm() < 0.25 * (flat - dense).norm(), "a budget costs far more than its search"


def test_what_is_not_selected_is_estimated(asked):
    dense, off = logits(opened(asked, "flat", "100%")), logits(opened(asked, tail="off"))
    default = logits(opened(asked))
    assert torch.equal(default, logits(opened(asked, tail="clusters")))
    assert torch.equal(off, logits(opened(asked, tail="off")))
    assert (default - dense).norm() < 0.5 * (off - dense).norm()
    assert torch.equal(logits(opened(asked, "flat")), logits(opened(asked, "flat", tail="off"))), (
        "no clusters"
    )


def test_an_old_index_is_searched_with_a_warning_and_no_estimate(asked, monkeypatch):
    off = logits(opened(asked, tail="off"))
    monkeypatch.setattr(ClusteredIndex, "summarized", False)
    engine = opened(asked)
    with pytest.warns(OffloadDecodeWarning, match=r"is not estimated: .* `offload-decode index "):
        found = logits(engine)
    assert torch.equal(found, off)


def test_a_budget_of_everything_is_dense(asked):
    loaded, store = asked
    dense = logits(Engine.open(store, loaded, selector="dense"))
    torch.testing.assert_close(logits(opened(asked, budget="100%")), dense, atol=1e-5, rtol=0)
    assert torch.equal(logits(opened(asked, budget=TOKENS)), logits(opened(asked, "flat", TOKENS)))


def test_it_answers_the_same_every_time(asked):
    first, again = opened(asked), opened(asked)
    assert torch.equal(logits(first), logits(again))
    assert torch.equal(logits(first), logits(first))


def test_a_batch_answers_as_each_question_alone(asked):
    if asked[0].dtype != "float32":
        pytest.skip("a model in half precision rounds a batch as it likes")
    engine = opened(asked)
    alone = [engine.answer(question, max_new_tokens=6).tokens for question in QUESTIONS]
    assert [answer.tokens for answer in engine.answer_many(QUESTIONS, max_new_tokens=6)] == alone


def test_forks_and_crops_go_on_from_where_they_stand(asked):
    engine = opened(asked)
    engine.extend([5, 6, 7])
    length, forked = engine.length, engine.fork()
    expected = forked.extend([8, 9])
    engine.extend([11, 12])
    engine.crop(length)
    assert torch.equal(engine.extend([8, 9]), expected)


def test_rows_that_are_searched_together_find_what_each_finds_alone(asked):
    _, store = asked
    index = opened(asked).selector.indexes.get(1, 1)
    queries = np.random.default_rng(3).standard_normal((70, 64)).astype(np.float32)
    together = index.search(queries, BUDGET)
    for row in (0, 33, 69):
        np.testing.assert_array_equal(index.search(queries[row : row + 1], BUDGET).ids[0], together.ids[row])
    built = rebuilt(store, 1, 1).search(queries, BUDGET)
    np.testing.assert_array_equal(together.ids, built.ids)


def test_a_bit_flipped_in_the_cells_is_named_by_verify_and_searched_by_nobody(tmp_path):
    """By default all keys are searched then, and it is said; who asks for the clusters is refused."""
    loaded = wrap(text_model(num_hidden_layers=2, head_dim=64), tiny_tokenizer())
    store = long_store(tmp_path / "store.kv", "float32", "auto", loaded)
    file = tmp_path / "store.kv.indexes/clusters/layer-000-head-000.cells"
    flat = logits(opened((loaded, store), "flat"))
    bits = 8 * file.stat().st_size
    for bit in [3, 70, 200, *np.random.default_rng(0).integers(0, bits, 7).tolist()]:
        with flipped(file, bit):
            assert [problem for problem in verified(tmp_path) if str(file) in problem], bit
            with pytest.warns(OffloadDecodeWarning, match="All keys are searched"):
                assert torch.equal(logits(opened((loaded, store))), flat), bit
            with pytest.raises(VectorIndexError, match="not those that were written"):
                logits(opened((loaded, store), "clusters"))
    assert verified(tmp_path) == []
