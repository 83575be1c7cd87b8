"""How likely an answer stands in the text: what is counted, and that it is the same however one asks."""

import numpy as np
import pytest

from offload_decode.engine import grounded
from offload_decode.engine.engine import Engine, without_corpus
from offload_decode.engine.grounded import (
    AROUND,
    FIRST,
    WEIGHTS,
    Evidence,
    Signs,
    Weights,
    found,
    passage,
    telling,
)
from offload_decode.engine.text import Pieces
from offload_decode.prefill_jobs.job import prefill
from tests.tiny import saved_model

QUESTIONS = ["Who jumps over the dog?", "Why"]
TEXT = "One sentence stands here. The fox jumps over the dog. " * 4


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grounded")
    (folder / "a.txt").write_text(TEXT)
    prefill(str(folder / "a.txt"), model=str(saved_model(folder / "model", "llama")), out=folder / "store")
    return Engine.open(folder / "store")


@pytest.fixture
def engine(opened, monkeypatch):
    """As if its model had been measured."""
    config = opened.loaded.model.config
    key = config.model_type, config.num_hidden_layers, config.hidden_size
    monkeypatch.setitem(grounded.WEIGHTS, key, Weights(-1.0, 10.0, 1.0))
    return opened


@pytest.mark.parametrize("weights", WEIGHTS.values())
def test_the_number_is_a_share_that_grows_with_each_sign(weights):
    signs = Signs(attention=0.18, found=0.5)
    assert 0 < weights.of(signs) < weights.of(signs._replace(attention=0.19)) < 1
    assert 0 < weights.of(signs) < weights.of(signs._replace(found=0.6)) < 1
    assert 0 <= weights.of(Signs(0, 0)) < 0.1 < 0.9 < weights.of(Signs(1, 1)) <= 1


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (["The", " mayor", " is", " Ad", "a", "."], [False, False, False, True, True, False]),
        ([" Ad", "a", " May", "or"], [True, True, False, False]),
        (["Mayor", " of", " Z", "", "ürich"], [False, True, False, False, False]),
        (["Mayor", "."], [True, True]),
    ],
)
def test_words_that_the_question_has_tell_nothing(answer, told):
    assert telling(answer, "Who is the MAYOR in Zürich?") == told


@pytest.mark.parametrize(
    ("text", "share"),
    [("Solfe is old", 5 / 13), ("WHO rules here", 8 / 13), ("who rules: Solfe", 1.0), ("", 0.0)],
)
def test_words_are_found_by_their_tokens(text, share):
    def tokenizer(text, add_special_tokens):
        return {"input_ids": [*text.strip()]}  # a letter each

    assert found("Who rules Solfe?", text, tokenizer) == share
    assert found("?", text, tokenizer) == 0


def test_the_passage_is_the_window_that_holds_the_most():
    mass = np.zeros(1000, np.float32)
    mass[[3, 200, 500, 520]] = 9.0, 1.0, 0.6, 0.6
    assert passage(mass, opening=10) == (500 - AROUND, 521 + AROUND)
    assert passage(np.zeros(50, np.float32), opening=10) == (10, 10)


def test_signs_are_those_of_the_first_rows(engine):
    forked = engine.fork()
    logits, tokens = forked.ask(QUESTIONS[0]), []
    evidence, watch = forked.evidence, forked.evidence.watch
    sums = [(0, 0.0)]
    for token in forked.generate(logits, FIRST + 3):
        tokens.append(token)
        sums.append((watch.rows, float(watch.mass[evidence.opening :].sum())))
    pieces = Pieces(engine.tokenizer)
    tells = telling([pieces.push(token) for token in tokens], QUESTIONS[0])[:FIRST]
    rows = engine.loaded.shape.query_heads * len(engine.loaded.shape.full_layers)
    assert [each[0] for each in sums[1:]] == [rows * min(step, FIRST) for step in range(1, FIRST + 4)]
    shares = np.diff([mass for _, mass in sums])[:FIRST] / rows
    signs = evidence.signs(engine.store, engine.tokenizer)
    assert signs.attention == pytest.approx(shares[tells].mean(), abs=1e-6)
    assert 0 <= signs.found <= 1


def test_what_is_cited_beside_is_not_changed(engine):
    answer = engine.answer(QUESTIONS[0], FIRST + 3)
    cited = engine.answer(QUESTIONS[0], FIRST + 3, cites=True)
    assert 0 < answer.grounded < 1
    assert (answer.tokens, answer.grounded) == (cited.tokens, cited.grounded)
    forked = engine.fork()
    with forked.watched() as watch:
        list(forked.generate(forked.ask(QUESTIONS[0]), FIRST + 3))
    assert watch.rows == (FIRST + 3) * engine.loaded.shape.query_heads * len(engine.loaded.shape.full_layers)


def test_a_batch_is_as_grounded_as_one_by_one(engine):
    alone = [engine.answer(question, FIRST + 3).grounded for question in QUESTIONS]
    together = [one.grounded for one in engine.answer_many(QUESTIONS, FIRST + 3)]
    assert together == pytest.approx(alone, abs=1e-4)


def test_words_that_are_spelled_as_bytes_are_the_question_s_too(engine):
    evidence = engine.evidence_of("Was tat Jörg?")
    spelled = engine.tokenizer.encode("Jörg schlief", add_special_tokens=False)
    assert engine.tokenizer.convert_ids_to_tokens(spelled)[:3] == ["J", "Ã", "¶"]
    for place, token in enumerate(spelled):
        evidence.watch.rows += 1
        evidence.watch.mass[20] += place >= spelled.index(engine.tokenizer.convert_tokens_to_ids("s"))
        evidence.add(token)
    assert evidence.signs(engine.store, engine.tokenizer).attention == 1


def test_an_answer_of_no_tokens_attended_to_nothing(engine):
    """A batch with --only-grounded has such answers, too."""
    forked = engine.fork()
    assert not list(forked.generate(forked.ask(QUESTIONS[0]), 3, lambda _: min(engine.end_tokens)))
    assert forked.evidence.signs(engine.store, engine.tokenizer).attention == 0
    assert 0 < forked.grounded < 1


def test_it_is_not_known_of_a_model_that_was_not_measured(opened):
    answer = opened.answer(QUESTIONS[0], 3)
    assert answer.grounded is opened.answer_many(QUESTIONS, 3)[0].grounded is None
    assert opened.fork().evidence_of(QUESTIONS[0]).observers == ()


def test_it_is_not_known_of_what_was_not_asked_or_has_no_text(engine):
    forked = engine.fork()
    assert forked.grounded is None
    list(forked.generate(forked.extend([5, 6]), 3))
    assert forked.grounded is None
    alone = without_corpus(engine.loaded)
    list(alone.generate(alone.ask("Who?"), 3))
    assert alone.grounded is None
    assert Evidence("Who?").observers == ()
