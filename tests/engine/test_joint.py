"""Joint answers are what their formulas say of the distributions that each conversation has by itself."""

from dataclasses import replace

import pytest
import torch

from offload_decode.common.errors import ConfigError
from offload_decode.engine import grounded, joint
from offload_decode.engine import reading as reading_module
from offload_decode.engine.conversation import Conversation, Sampler
from offload_decode.engine.engine import Engine
from offload_decode.engine.grounded import Weights, kind_of
from offload_decode.engine.joint import Joint
from offload_decode.engine.opinion_pools import BETA, GAMMA, WAYS
from offload_decode.engine.reading import Reading, text_of
from offload_decode.types import CitedDocument, CitedSpan
from tests.card import stand_in
from tests.tiny import let_models_write, random_ids, served_model, token_store

QUESTION, NEW = "Who keeps the lamp?", 6
WEIGHTS = [0.6, 0.3, 0.1]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder, loaded = tmp_path_factory.mktemp("stores"), served_model("llama")
    stores = [token_store(folder / str(own), loaded, random_ids(40 + own, own)) for own in range(3)]
    return [Engine.open(store, loaded) for store in stores]


def logs_of(engine, tokens):
    """The log-probabilities `[V]` of what follows a question and some tokens of an answer."""
    talk = engine.fork()
    logits = talk.ask(QUESTION)
    return (talk.extend(tokens) if tokens else logits).log_softmax(-1)


def stopped(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("way", ["mixture", "product"])
@pytest.mark.parametrize("sampler", [None, (1.0, 0.9, 3)])
def test_one_store_answers_as_by_itself(engines, way, sampler):
    made = [None if sampler is None else Sampler(*sampler) for _ in range(2)]
    alone = engines[0].answer(QUESTION, NEW, made[0])
    together = Joint(engines[:1], way)
    assert together.answer(QUESTION, None, NEW, made[1]).tokens == alone.tokens
    assert together.finish == alone.finish
    assert together.shares() == [1.0]


@pytest.mark.parametrize("way", ["mixture", "product"])
def test_the_same_store_several_times_answers_as_once(engines, way):
    alone = engines[0].answer(QUESTION, NEW)
    together = Joint([engines[0]] * 3, way)
    assert together.answer(QUESTION, WEIGHTS, NEW).tokens == alone.tokens
    assert together.shares() == pytest.approx(WEIGHTS, abs=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_each_token_is_the_likeliest_of_the_formula(engines, way):
    together = Joint(engines, way)
    tokens = together.answer(QUESTION, WEIGHTS, NEW).tokens
    weights = torch.tensor(WEIGHTS, dtype=torch.double)
    for place, token in enumerate(tokens):
        logs = torch.stack([logs_of(engine, tokens[:place]) for engine in engines]).double()
        chance = weights[:, None] * logs.exp()
        if way == "mixture":
            scores = chance.sum(0)
        elif way == "product":
            scores = (weights[:, None] * logs).sum(0)
        else:
            text = engines[0].prompt.document(engines[0].tokenizer, "", first=True)
            alone = joint.without_corpus(engines[0].loaded)
            asked = [*text, *engines[0].question_tokens(QUESTION), *tokens[:place]]
            own = alone.extend(asked).log_softmax(-1).double()
            each = (1 + BETA) * logs - BETA * own + GAMMA * weights[:, None].log()
            scores = each.max(0).values
        best = scores.topk(2).values
        assert scores[token] == best[0] > best[1] + 1e-6  # no tie that rounding decides
        shares = chance[:, token] / chance[:, token].sum()
        assert together.carried[place].shares == pytest.approx(shares.tolist(), abs=1e-4)
        weights = shares


def test_a_device_weighs_as_a_host(engines):
    logs = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)

    def weighed(place):
        together, given = Joint(engines), logs.to(place)
        together._weigh(torch.tensor(WEIGHTS).log().to(place))
        joined = together.joined(given).tolist()
        together._weigh_by(7, given)
        return joined, together.weights.tolist(), together.shares()

    with stand_in():
        assert weighed("cuda") == weighed("cpu")


def test_a_document_without_weight_is_not_asked(engines):
    together = Joint(engines)
    assert together.answer(QUESTION, [1.0, 0.0, 0.0], NEW).tokens == engines[0].answer(QUESTION, NEW).tokens
    assert together.shares() == [1.0, 0.0, 0.0]


def test_what_drops_out_changes_no_distribution_by_more_than_its_weight(engines, monkeypatch):
    monkeypatch.setattr(joint, "LIGHTEST", 1e-9)
    every = Joint(engines)
    logits = every.ask(QUESTION, WEIGHTS)
    every.prepare(NEW)
    every.scores(logits)
    some = every.fork()
    monkeypatch.setattr(joint, "LIGHTEST", 0.2)
    some._weigh(some.weights)
    assert some.working == [0, 1]
    logs = logits.log_softmax(-1)
    left, whole = some.joined(logs[:2]).softmax(-1), every.joined(logs).softmax(-1)
    assert 0 < (left - whole).abs().sum() / 2 <= WEIGHTS[2]


def test_who_has_any_weight_is_asked_before_it_may_drop_out(engines):
    together = Joint(engines)
    assert len(together.ask(QUESTION, [1.0, 1e-6, 0.0])) == 2
    together.weights = torch.tensor([0.0, -1.0])
    together.prepare(NEW)
    logs = torch.full((2, len(engines[0].tokenizer)), -9.0)
    logs[:, 7] = torch.tensor([-30.0, 30.0])
    together.scores(logs)
    together.take(7)
    assert together.working == [1], "what it says may carry it, and the first one loses"


def test_who_dropped_out_hears_what_was_said_before_the_next_question(engines, monkeypatch):
    together = Joint(engines)
    monkeypatch.setattr(joint, "LIGHTEST", 0.9)
    first = together.answer(QUESTION, [1.0, 0.01, 0.01], NEW).tokens
    assert together.working == [0]
    logits = together.ask("And then?", [1.0, 1.0, 1.0])
    for engine, own in zip(engines, logits, strict=True):
        talk = engine.fork()
        talk.ask(QUESTION)
        talk.extend(first)
        assert (own - talk.ask("And then?")).abs().max() < 1e-3


def test_an_answer_ends_before_the_next_question(engines, monkeypatch):
    monkeypatch.setattr(joint, "LIGHTEST", 0.2)
    let_models_write(monkeypatch, "the keeper\nQuestion: who")
    together = Joint(engines)
    answer = together.answer(QUESTION, WEIGHTS, 40)
    tokens = answer.tokens
    assert (answer.text, answer.finish) == ("the keeper", "stop")
    assert len(together.carried) == len(tokens)
    said = [*engines[0].question_tokens(QUESTION), *tokens]
    assert [talk.tokens + talk.pending for talk in together.talks] == [said] * 3


def test_citations_name_documents_by_what_they_gave(engines):
    together = Joint(engines, cites=True)
    cited = together.answer(QUESTION, WEIGHTS, NEW).citations
    assert [one.share for one in cited] == sorted((one.share for one in cited), reverse=True)
    assert sum(one.share for one in cited) <= 1 + 1e-6
    assert {one.name for one in cited} == {"all"}


def test_reading_answers_from_the_passages_as_from_their_text(engines):
    reading = Reading(engines)
    answer = reading.answer(QUESTION, None, NEW)
    shown = answer.citations
    text = "\n\n".join(f"{one.name}: {span.text}" for one in shown for span in one.spans[:2])
    assert len(shown) == len(engines)
    assert 0 < sum(one.share for one in shown) <= 1 + 1e-6
    prompt, tokenizer = engines[0].prompt, engines[0].tokenizer
    talk = joint.without_corpus(engines[0].loaded)
    logits = talk.extend([*prompt.document(tokenizer, text, first=True), *prompt.first(tokenizer, QUESTION)])
    assert answer.tokens == tuple(talk.generate(logits, NEW))
    draft = Joint(engines, cites=True)
    drafted = draft.answer(QUESTION, None, reading_module.DRAFT_TOKENS)
    assert answer.stats.selected == drafted.stats.selected > 0
    assert answer.stats.tokens == drafted.stats.tokens + talk.prefix.take_stats().tokens
    again = list(reading.answer("And then?", None, NEW).tokens)
    assert reading.talks[0].pending[-len(again) :] == again
    asked = engines[0].question_tokens(QUESTION)
    assert reading.talks[0].pending[: len(asked)] == asked


def test_where_no_passage_is_found_the_leading_document_answers_alone(engines, monkeypatch):
    monkeypatch.setattr(Conversation, "cited", lambda *_: ())
    reading = Reading(engines)
    answer = reading.answer(QUESTION, [0.1, 1.0, 0.1], NEW)
    assert (reading.alone, reading.passages) == (1, [])
    assert answer.tokens == engines[1].answer(QUESTION, NEW).tokens


def test_costs_are_told_beside_the_tokens_that_were_there_to_attend_to(engines):
    together = Joint(engines)
    stats = together.answer(QUESTION, WEIGHTS, NEW).stats
    assert stats.selected / stats.rows <= together.stored
    assert 40 <= together.stored <= 42


def test_a_question_that_is_stopped_before_it_was_run_is_not_read_again(engines, monkeypatch):
    reading = Reading(engines)
    monkeypatch.setattr(Conversation, "extend", stopped)
    with pytest.raises(KeyboardInterrupt):
        reading.answer(QUESTION, None, NEW)
    assert [talk.pending for talk in reading.talks] == [[]] * 3
    assert reading.question_tokens(QUESTION, engines[0]) == engines[0].question_tokens(QUESTION)


def test_stores_of_two_models_are_refused(engines, tmp_path):
    other = served_model("llama", seed=1)
    store = token_store(tmp_path / "other", other, random_ids(20))
    with pytest.raises(ConfigError, match="several models"):
        Joint([engines[0], Engine.open(store, other)])


def test_one_model_that_is_loaded_in_two_ways_is_named_as_that(engines):
    twice = Engine(replace(engines[1].loaded, weights="int8"), engines[1].store, engines[1].prefix.fork())
    with pytest.raises(ConfigError, match=r"one model, loaded in two ways .*int8"):
        Joint([engines[0], twice])


@pytest.mark.parametrize("weights", [[1.0], [0.0, 0.0, 0.0], [1.0, -1.0, 1.0], [1.0, float("nan"), 1.0]])
def test_weights_are_numbers_from_zero_on_one_for_each_document_and_not_all_zero(engines, weights):
    with pytest.raises(ConfigError, match="weight"):
        Joint(engines).ask(QUESTION, weights)


def test_an_unknown_way_is_refused(engines):
    with pytest.raises(ConfigError, match="mixture, product, pced"):
        Joint(engines, "vote")


def test_passages_of_those_that_gave_most_are_read_in_the_order_of_the_documents():
    spans = tuple(CitedSpan(0, 1, text, 0.1) for text in ("first", "second", "third"))
    cited = [CitedDocument(f"{place}.txt", share, spans) for place, share in enumerate([0.1, 0.3, 0.2] * 8)]
    read = text_of(cited).split("\n\n")
    kept = [place for place in range(24) if place % 3]
    assert read == [f"{place}.txt: {text}" for place in kept for text in ("first", "second")]
    assert text_of([]) == text_of([CitedDocument("a.txt", 1.0, ())]) == ""


def test_it_is_grounded_in_the_document_that_gave_most(engines, monkeypatch):
    known = {kind_of(engines[0].loaded.model.config): Weights(-1.0, 3.0, 2.0)}
    monkeypatch.setattr(grounded, "WEIGHTS", known)
    alone = engines[1].answer(QUESTION, NEW)
    assert alone.grounded not in (None, 0.0, 1.0)
    one = Joint([engines[1]], cites=True)
    assert one.answer(QUESTION, None, NEW).grounded == pytest.approx(alone.grounded, abs=1e-6)
    cited = Joint(engines, cites=True)
    logits = cited.ask(QUESTION, [0.2, 0.6, 0.2])
    forked = cited.fork()
    tokens = list(cited.generate(logits, NEW))
    assert list(forked.generate(logits, NEW)) == tokens
    leading = cited.leading()
    own = cited.talks[leading].grounds(cited.evidences[leading])
    assert forked.grounded == pytest.approx(cited.grounded, abs=1e-6)
    assert cited.grounded == own
    assert forked.citations() == cited.citations()
    assert cited.evidences[leading].tokens == tokens


def test_who_would_say_otherwise_is_named_where_it_first_would(engines):
    together, size = Joint(engines), len(engines[0].tokenizer)
    together.ask(QUESTION)
    together.prepare(NEW)

    def row(**chances):
        """The logits of who finds some tokens so likely, `t7` the seventh."""
        logs = torch.full((size,), (1 - sum(chances.values())) / (size - len(chances)))
        for name, chance in chances.items():
            logs[int(name[1:])] = chance
        return logs.log()

    def said(*rows, drawn=None):
        together.working, together.weights = [0, 1, 2], torch.tensor([0.55, 0.41, 0.04]).log()
        likeliest = int(together.scores(torch.stack(rows)).argmax())
        together.take(likeliest if drawn is None else drawn)

    seven, other, end = row(t7=0.9), row(t7=0.02, t9=0.5), min(engines[0].end_tokens)
    said(seven, row(t7=0.2, t9=0.5), other)  # one doubts too little, one has too little weight
    said(seven, row(t7=0.02, **{f"t{end}": 0.5}), seven)  # one has said all
    assert together.dissents == []
    said(seven, other, other)
    said(seven, row(t11=0.9), seven)
    [one] = together.dissents
    assert (one.document, one.text) == (1, engines[0].decode([7, 7, 9]))
    assert one.probability == pytest.approx(0.5)
    together.prepare(NEW)
    assert together.dissents == []
    half = engines[0].tokenizer.encode("é", add_special_tokens=False)[0]  # is no character by itself
    said(seven, row(t7=0.02, **{f"t{half}": 0.5}), seven)
    assert [one.text for one in together.dissents] == [""]
    together.prepare(NEW)
    said(seven, other, seven, drawn=9)  # what the second one would say: it is the first that would not
    assert [(one.document, one.text) for one in together.dissents] == [(0, engines[0].decode([7]))]
    together.prepare(NEW)
    said(seven, seven, seven, drawn=9)  # by chance
    said(seven, other, seven, drawn=5)
    assert together.dissents == []


def test_a_token_that_nobody_may_say_tells_of_no_document(engines):
    together = Joint(engines)
    logits = together.ask(QUESTION, [3, 2, 1])
    together.prepare(NEW)
    logits[:, 5] = -torch.inf
    together.scores(logits)
    together.take(5)
    assert together.carried[0].shares == pytest.approx([1 / 2, 1 / 3, 1 / 6])
    assert together.weights.isfinite().all()


def test_pced_raises_no_token_that_only_the_model_alone_may_not_say(engines, monkeypatch):
    together = Joint(engines, "pced")
    logits = together.ask(QUESTION)
    logits[-1, 5] = -torch.inf
    scores = together.joined(logits.log_softmax(-1))
    assert scores[5] < torch.inf
    documents = torch.cat([logits[:-1], logits[:1]]).log_softmax(-1)
    documents[-1, 5] = 0  # which is sure of it, so that nothing is added
    assert scores[5] == pytest.approx(float(together.joined(documents)[5]))


def test_processors_of_the_model_alone_see_the_conversation_and_not_the_opening(engines, monkeypatch):
    seen = []
    monkeypatch.setattr(joint, "Processors", lambda model, tokenizer, tokens, *_: seen.append(list(tokens)))
    together = Joint(engines, "pced")
    together.ask(QUESTION)
    together.prepare(NEW)
    assert seen[-1] == seen[0] == together.talks[0].tokens
    assert len(together.rows[-1].tokens) > len(seen[0])
