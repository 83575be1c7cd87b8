"""A second pass says how far dense attention agrees with an answer that was written with less."""

import pytest
import torch

from offload_decode.common.errors import ConfigError
from offload_decode.engine import second_pass
from offload_decode.engine.conversation import Sampler
from offload_decode.engine.engine import Engine
from offload_decode.engine.grounded import Record
from offload_decode.engine.second_pass import checked
from offload_decode.prefill_jobs.job import prefill
from offload_decode.types import Checked
from tests.tiny import saved_model

QUESTIONS, NEW = ["Who jumps over the dog?", "Why"], 9
TEXT = "One sentence stands here. The fox jumps over the dog. " * 6


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checked")
    (folder / "a.txt").write_text(TEXT)
    prefill(str(folder / "a.txt"), model=str(saved_model(folder / "model", "llama")), out=folder / "store")
    return folder / "store"


@pytest.fixture(scope="module")
def dense(store):
    return Engine.open(store, selector="dense")


@pytest.fixture(scope="module")
def sparse(store, dense):
    return Engine.open(store, dense.loaded, selector="topk", options={"budget": "3"})


def forced(engine, before, tokens):
    """The log-probabilities `[T, V]` of each token's place, one pass a token."""
    forked = engine.fork()
    rows = [forked.extend(before), *(forked.extend([token]) for token in tokens[:-1])]
    return torch.stack(rows).log_softmax(-1)


def expected(sparse, dense, before, tokens):
    own, all_of_it = forced(sparse, before, tokens), forced(dense, before, tokens)
    places, ids = torch.arange(len(tokens)), torch.tensor(tokens)
    same = int((own.argmax(-1) == all_of_it.argmax(-1)).sum())
    return same, float((own[places, ids] - all_of_it[places, ids]).abs().mean())


@pytest.mark.parametrize("sampler", [None, Sampler(1.0, seed=3)])
@pytest.mark.parametrize("logits", [second_pass.LOGITS, 1])
def test_it_is_as_running_each_token_with_dense_attention(sparse, dense, sampler, logits, monkeypatch):
    monkeypatch.setattr(second_pass, "LOGITS", logits)
    answer = sparse.answer(QUESTIONS[0], NEW, sampler, check=True)
    same, difference = expected(sparse, dense, sparse.question_tokens(QUESTIONS[0]), answer.tokens)
    assert (answer.checked.tokens, answer.checked.same) == (len(answer.tokens), same)
    assert answer.checked.difference == pytest.approx(difference, abs=1e-4)
    assert difference > 0.01, "three stored tokens are not all of them"


def test_of_another_likeliest_token_fewer_stay(dense):
    talk = dense.fork()
    talk.records = True
    list(talk.generate(talk.ask(QUESTIONS[0]), NEW))
    talk.record.likeliest[2] += 1
    assert checked(talk, talk.record).same == NEW - 1
    talk.record.likeliest = [-1] * NEW
    assert checked(talk, talk.record).same == 0


def test_dense_attention_agrees_with_itself(dense):
    answer = dense.answer(QUESTIONS[0], NEW, check=True)
    assert answer.checked.same == answer.checked.tokens == len(answer.tokens) > 0
    assert answer.checked.difference < 1e-4


def test_a_batch_is_checked_as_one_by_one(sparse):
    alone = [sparse.answer(question, NEW, check=True) for question in QUESTIONS]
    for one, other in zip(alone, sparse.answer_many(QUESTIONS, NEW, check=True), strict=True):
        assert other.tokens == one.tokens
        assert (other.checked.tokens, other.checked.same) == (one.checked.tokens, one.checked.same)
        assert other.checked.difference == pytest.approx(one.checked.difference, abs=1e-4)


def test_a_later_answer_is_checked_behind_the_turns_before_it(sparse, dense):
    talk = sparse.fork()
    talk.records = True
    list(talk.generate(talk.ask(QUESTIONS[0]), NEW))
    logits = talk.ask(QUESTIONS[1])
    before = list(talk.tokens)
    tokens = list(talk.generate(logits, NEW))
    assert talk.record.before == before
    assert talk.record.tokens == tokens
    found, stays = checked(talk, talk.record), list(talk.tokens)
    dense_rows = forced(dense, before, tokens)
    difference = (torch.tensor(talk.record.logs) - dense_rows[range(len(tokens)), tokens]).abs().mean()
    assert found.difference == pytest.approx(float(difference), abs=1e-4)
    assert talk.tokens == stays, "the conversation goes on from where it was"


def test_who_does_not_ask_for_it_gets_none(sparse):
    forked = sparse.fork()
    list(forked.generate(forked.ask(QUESTIONS[0]), NEW))
    assert (forked.record.tokens, forked.record.before) == ([], [])
    assert sparse.answer(QUESTIONS[0], 2).checked is None
    assert sparse.answer_many(QUESTIONS, 2)[0].checked is None


def test_an_answer_of_no_tokens_differs_in_nothing(sparse):
    assert checked(sparse, Record([1, 2])) == Checked(0, 0, 0.0)


def test_tokens_that_are_taken_back_do_not_count():
    record = Record(())
    for token in range(4):
        record.add(token, torch.zeros(8))
    record.cut(2)
    assert (record.tokens, len(record.likeliest), len(record.logs)) == ([0, 1], 2, 2)


def test_a_store_in_parts_is_refused(sparse, monkeypatch):
    monkeypatch.setattr(type(sparse.prefix), "watchable", False)
    with pytest.raises(ConfigError, match="not checked"):
        checked(sparse, Record(()))
