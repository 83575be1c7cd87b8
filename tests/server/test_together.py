"""Stores that answer a request together say what `engine.joint` says of them, among other requests."""

import re
import shutil
import threading
from dataclasses import replace

import pytest

from offload_decode.collections.collection import Collection
from offload_decode.collections.together import weights
from offload_decode.common.errors import ConfigError
from offload_decode.config import EngineConfig
from offload_decode.engine import grounded, joint
from offload_decode.engine.conversation import Conversation
from offload_decode.engine.engine import Engine
from offload_decode.engine.grounded import Weights
from offload_decode.engine.joint import Joint
from offload_decode.engine.reading import Reading
from offload_decode.hf.rope_scaling import Trained
from offload_decode.planning.sizes import generated_bytes
from offload_decode.prefill_jobs import joined as joined_module
from offload_decode.prefill_jobs.collect import collect
from offload_decode.prefill_jobs.job import Maker, Settings
from offload_decode.prefill_jobs.joined import joined_store
from offload_decode.server import answer_text, together
from offload_decode.server.requests import (
    Busy,
    Delta,
    Done,
    Failed,
    Generation,
    Loading,
    NoSuchName,
    Prompted,
    ReadOnly,
    TooLarge,
    WrongField,
)
from offload_decode.server.service import ChatRequest, CompletionRequest, SearchRequest
from tests.server.conftest import Letters, Listener, ask
from tests.server.test_catalog import until

QUESTION, NEW = "What is the colour of thing 3?", 12
BUDGET = {"budget": "24"}
BOTH = ("book", "notes")


@pytest.fixture(scope="module")
def place(shelf, tmp_path_factory):
    """A folder with a collection of three documents."""
    folder = tmp_path_factory.mktemp("collected")
    (folder / "texts").mkdir()
    for name in ("red", "green", "blue"):
        (folder / "texts" / f"{name}.txt").write_text(f"The colour of this thing is {name}. " * 5)
    (folder / "served").mkdir()
    maker = Maker(str(shelf / "model"), Settings(options={"chunk": 64}))
    collect(str(folder / "texts"), folder / "served" / "colours.collection", maker)
    return folder / "served"


def engines(paths):
    config = EngineConfig(options=BUDGET)
    first = Engine.open(paths[0], config=config)
    return [first, *(Engine.open(path, first.loaded, config) for path in paths[1:])]


def of(shelf, *names):
    return engines([shelf / "stores" / f"{name}.kv" for name in names])


@pytest.mark.parametrize("way", ["mixture", "product", "pced"])
def test_stores_answer_as_joint_does(shelf, service, way):
    expected = Joint(of(shelf, *BOTH), way)
    answer = expected.answer(QUESTION, None, NEW)
    heard = ask(service, together=BOTH, join=way).all()
    assert heard.error is None
    assert heard.text == answer.text
    assert heard.tokens[0] == list(answer.tokens)
    joined = heard.done.joined
    assert (joined.join, joined.exact) == (way, False)
    assert [one.document for one in joined.documents] == list(BOTH)
    assert [one.share for one in joined.documents] == pytest.approx(expected.shares(), abs=1e-4)
    assert any("none of which sees another" in note for note in heard.done.notes)
    stored = sum(talk.prefix.length for talk in expected.talks)
    prompt = len(expected.talks[0].question_tokens(QUESTION))
    assert heard.usage.prompt == stored + 2 * prompt
    assert heard.usage.cached == stored
    assert heard.usage.completion == len(answer.tokens)


def test_documents_of_a_collection_are_chosen_and_weighed_by_their_words(place, serve):
    service = serve(place)
    collection = Collection(place / "colours.collection")
    entries = [one for one, _ in collection.scored("Is it green?")[:2]]
    assert entries[0].name == "green.txt"
    expected = Joint(engines([collection.store(one) for one in entries]))
    answer = expected.answer("Is it green?", weights(collection, "Is it green?", entries), NEW)
    heard = ask(service, "colours.collection", "Is it green?", together=2).all()
    assert heard.text == answer.text
    assert [one.document for one in heard.done.joined.documents] == [one.name for one in entries]
    assert len(ask(service, "colours.collection", "Is it green?").all().done.joined.documents) == 3
    assert service.scheduler.uses("colours.collection") is False


def test_a_copy_of_a_document_does_not_count_twice(shelf, serve, tmp_path):
    (tmp_path / "texts").mkdir()
    for name, colour in (("green", "green"), ("leaf", "green"), ("red", "red")):
        (tmp_path / "texts" / f"{name}.txt").write_text(f"The colour of this thing is {colour}. " * 5)
    maker = Maker(str(shelf / "model"), Settings(options={"chunk": 64}))
    collect(str(tmp_path / "texts"), tmp_path / "served" / "colours.collection", maker)
    service = serve(tmp_path / "served")
    heard = ask(service, "colours.collection", "Is it a green leaf?", together=2).all()
    names = [one.document for one in heard.done.joined.documents]
    assert len(names) == 2
    assert "red.txt" in names


def test_a_conversation_keeps_the_documents_of_its_first_question_and_what_was_run(place, serve):
    service = serve(place)
    name, first = "colours.collection", {"role": "user", "content": "Is it green?"}
    one = ask(service, name, messages=[first], together=1).all()
    turns = [first, {"role": "assistant", "content": one.text}, {"role": "user", "content": "Or blue?"}]
    again = ask(service, name, messages=turns, together=1).all()
    assert again.done.joined.documents[0].document == "green.txt"
    turns += [{"role": "assistant", "content": again.text}, {"role": "user", "content": "Or red?"}]
    last = ask(service, name, messages=turns, together=1).all()
    cached = [each.usage.cached for each in (one, again, last)]
    assert cached[0] < cached[1] < cached[2], "earlier turns are not run again"
    collection = Collection(place / "colours.collection")
    green = next(entry for entry in collection.entries if entry.name == "green.txt")
    expected = Joint(engines([collection.store(green)]))
    said = [expected.answer(question, None, NEW).text for question in ("Is it green?", "Or blue?")]
    assert [one.text, again.text] == said


def test_answers_are_grounded_and_name_who_would_say_otherwise(shelf, service, monkeypatch):
    monkeypatch.setattr(grounded, "kind_of", lambda config: "any")
    monkeypatch.setitem(grounded.WEIGHTS, "any", Weights(-0.5, 3.0, 1.0))
    for limit, value in (("HEARD", 1e-9), ("SURE", 1e-9), ("DOUBTED", 1.0)):
        monkeypatch.setattr(joint, limit, value)
    expected = Joint(of(shelf, *BOTH))
    expected.answer(QUESTION, None, NEW)
    heard = ask(service, "book", QUESTION, together=BOTH).all()
    assert heard.answers[0].grounded == pytest.approx(expected.grounded, abs=1e-5)
    said = [note for note in heard.done.notes if "would say otherwise" in note]
    assert len(said) == len(expected.dissents) > 0
    assert said[0].startswith(BOTH[expected.dissents[0].document])
    named = [(one.document, one.text, one.probability) for one in heard.done.joined.dissents]
    assert named == [(BOTH[place], text, pytest.approx(p, abs=1e-5)) for place, text, p in expected.dissents]


def test_what_is_told_of_a_joint_answer_leaves_out_its_stop_string(shelf, service, monkeypatch):
    monkeypatch.setattr(grounded, "kind_of", lambda config: "any")
    monkeypatch.setitem(grounded.WEIGHTS, "any", Weights(-0.5, 3.0, 1.0))
    monkeypatch.setattr(answer_text, "Pieces", Letters)
    stop = ask(service, question=QUESTION, tokens=4, together=BOTH).all().text[1:]
    expected = Joint(of(shelf, *BOTH))
    expected.answer(QUESTION, None, 4)
    whole = expected.shares()
    expected.cut(1)
    stopping = Generation(max_tokens=NEW, stop=(stop,))
    heard = ask(service, question=QUESTION, generation=stopping, together=BOTH).all()
    shares = [one.share for one in heard.done.joined.documents]
    assert shares == pytest.approx(expected.shares(), abs=1e-4)
    assert shares != pytest.approx(whole, abs=1e-4)
    assert heard.answers[0].grounded == pytest.approx(expected.grounded, abs=1e-4)


def test_passages_are_read(shelf, service):
    expected = Reading(of(shelf, *BOTH))
    answer = expected.answer(QUESTION, None, NEW)
    heard = ask(service, together=BOTH, join="read", cite=True).all()
    assert heard.error is None
    assert heard.tokens[0] == list(answer.tokens)
    assert [one.name for one in heard.citations] == [one.name for one in answer.citations]
    assert heard.done.joined.join == "read"
    assert heard.done.stats.tokens >= answer.stats.tokens
    assert b"passages" not in service.metrics.text(), "metrics are of names of the catalog"


def test_a_request_that_is_joined_is_cancelled_between_tokens(service):
    for join in ("mixture", "read"):
        listener = ask(service, tokens=400, together=BOTH, join=join)
        if join == "mixture":
            listener.until(Prompted)
            listener.until(Delta)
        listener.ticket.cancel()
        assert ask(service).all().error is None
        assert not service.scheduler.uses("notes")


def test_others_end_while_documents_are_cited(service, monkeypatch):
    begun, goes_on, cite = threading.Event(), threading.Event(), Conversation.cited

    def cited(self, watch):
        begun.set()
        assert goes_on.wait(60)
        return cite(self, watch)

    monkeypatch.setattr(Conversation, "cited", cited)
    citing = ask(service, together=BOTH, cite=True)
    assert begun.wait(60)
    assert ask(service).all().error is None
    assert service.scheduler._answers("notes") is False, "it has left: only its end is on its way"
    goes_on.set()
    assert len(citing.all().citations) == 2


def test_who_has_gone_is_cited_no_further(service, monkeypatch):
    cited = []

    def cite(self, watch):
        cited.append(watch)
        listener.ticket.cancel()
        return ()

    monkeypatch.setattr(Conversation, "cited", cite)
    for join in ("product", "read"):
        cited.clear()
        listener = ask(service, together=BOTH, join=join, cite=True)
        until(lambda: cited)
        assert not service.scheduler.uses("notes")
        assert len(cited) == 1, "the second document is left out"
        assert not {Done, Failed} & {type(event) for event in listener.events.queue}
    cited.clear()
    listener = ask(service, together=BOTH, tokens=400, cite=True)
    listener.until(Delta)
    listener.ticket.cancel()
    until(lambda: not service.scheduler.uses("notes"))
    assert not cited, "half an answer is not cited"
    assert re.search(r"abort.*} 3\.0", service.metrics.text().decode())


def test_the_row_without_a_document_is_counted(place, shelf, serve):
    """That of pced: in the memory that an answer may take, and in how many answers there may be."""
    [engine] = engines([shelf / "stores" / "book.kv"])
    prompt = len(engine.question_tokens(QUESTION))
    row = generated_bytes(engine.loaded.shape, prompt + 512, engine.loaded.dtype)
    heard = ask(serve(running_bytes=5 * row // 2), together=BOTH, join="pced", tokens=512).all()
    assert heard.error is None
    assert heard.usage.completion <= 256
    few = ask(serve(place, max_running=3), "colours.collection", "Is it green?", join="pced").all()
    assert len(few.done.joined.documents) == 2


def test_others_are_answered_alike_while_stores_answer_together(service):
    alone = ask(service).all().text
    joint = ask(service, together=BOTH).all().text
    heard = [ask(service, together=BOTH, tokens=NEW), ask(service), ask(service, "notes"), ask(service)]
    texts = [one.all().text for one in heard]
    assert texts[0] == joint
    assert texts[1] == texts[3] == alone


def test_sampling_stops_and_log_probabilities_are_of_what_was_joined(service):
    def heard(**more):
        return ask(service, together=BOTH, generation=Generation(max_tokens=NEW, **more)).all()

    whole = heard()
    assert heard(temperature=1.0, seed=5).text == heard(temperature=1.0, seed=5).text
    stop = whole.text[3:5]
    assert stop not in heard(stop=(stop,)).text
    scored = heard(top_logprobs=2).answers[0].tokens
    assert all(one.top[0] == (one.token, one.logprob) and one.logprob <= 0 for one in scored)
    banned = whole.tokens[0][0]
    assert banned not in heard(logit_bias={banned: -100.0}).tokens[0][:1]


def test_documents_are_prefilled_as_one(shelf, service, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Loading, match="2 documents are being prefilled as one"):
        ask(service, together=BOTH, join="exact")
    [whole] = service.together._wholes.values()
    path = whole.made.result(timeout=60)
    monkeypatch.setattr(Trained, "note", lambda own, tokens: f"{tokens} tokens are many")
    monkeypatch.setattr(Trained, "tell", lambda own, tokens: None)
    heard = ask(service, together=BOTH, join="exact", n=1).all()
    assert heard.text == engines([path])[0].answer(QUESTION, NEW).text
    assert heard.done.joined.exact is True
    monkeypatch.setattr(together, "HELD", 0)
    with pytest.raises(Busy, match="wait to be prefilled as one"):
        ask(service, together=BOTH[::-1], join="exact")
    assert "prefilled as one text" in heard.done.notes[0]
    assert heard.done.notes[1] == f"{heard.done.usage.cached} tokens are many"


def test_documents_are_prefilled_as_one_again_where_the_cache_was_cleared(service, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    answers = []
    for _ in range(2):
        with pytest.raises(Loading, match="2 documents are being prefilled as one"):
            ask(service, together=BOTH, join="exact")
        [whole] = service.together._wholes.values()
        path = whole.made.result(timeout=60)
        answers.append(ask(service, together=BOTH, join="exact").all().text)
        shutil.rmtree(path.parent)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("way", ["mixture", "product", "pced"])
def test_a_format_goes_before_the_generation_config(service, monkeypatch, way):
    loaded = service.loaded_models.get(service.catalog.entry("book")).loaded
    digits = [loaded.tokenizer.encode(digit, add_special_tokens=False)[0] for digit in "0123456789"]
    monkeypatch.setattr(loaded.model.generation_config, "suppress_tokens", digits)
    generation = Generation(max_tokens=8, grammar={"regex": "[0-9]{4}"}, grammar_field="guided_regex")
    heard = ask(service, together=BOTH, join=way, generation=generation).all()
    assert re.fullmatch("[0-9]{4}", heard.text)
    assert sum(one.share for one in heard.done.joined.documents) == pytest.approx(1)


def test_documents_of_a_collection_that_changed_are_closed(place, shelf, serve, tmp_path):
    shutil.copytree(place.parent / "texts", tmp_path / "texts")
    shutil.copytree(place, tmp_path / "served")
    service, name = serve(tmp_path / "served"), "colours.collection"
    ask(service, name, "Is it green or blue or red?").all()
    there = {key.model for key in service.loaded_models._open if key.model.startswith(name)}
    assert len(there) == 3
    (tmp_path / "texts" / "green.txt").write_text("The colour of this thing is green, or so they say. " * 5)
    maker = Maker(str(shelf / "model"), Settings(options={"chunk": 64}))
    collect(str(tmp_path / "texts"), tmp_path / "served" / name, maker)
    service.catalog.refresh()
    assert not there.intersection(key.model for key in service.loaded_models._open)
    assert not any(entry.key.model in there for entry in service.prefix_cache._entries.values())
    assert len(ask(service, name, "Is it green or blue or red?").all().done.joined.documents) == 3


def test_tokens_are_counted_as_they_are_used(place, serve):
    service, name, question = serve(place), "colours.collection", "Is it green?"
    for most in (1, None, 3):
        messages = [{"role": "user", "content": question}]
        asked = ChatRequest("id", name, Generation(max_tokens=1), messages=messages, together=most)
        stored = service.stored_tokens(asked)
        prompt = len(service.tokenize(name, messages=messages))
        used = ask(service, name, question, tokens=1, together=most).all().usage.prompt
        assert sum(stored) + len(stored) * prompt == used


def test_the_oldest_joined_store_makes_room_for_another(service, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tried = []

    def joined(paths, loaded, progress):
        tried.append(paths)
        return joined_store(paths, loaded, progress, 3 << 20)

    monkeypatch.setattr(together, "joined_store", joined)
    monkeypatch.setattr(joined_module, "store_bytes", lambda *_: 2 << 20)
    for names in (BOTH, BOTH[::-1], BOTH):
        with pytest.raises(Loading):
            ask(service, together=names, join="exact")
        whole = next(reversed(service.together._wholes.values()))
        assert whole.made.result(timeout=60).exists()
        assert ask(service, together=names, join="exact").all().error is None
    assert len(tried) == 5, "each but the first was tried again when there was room"


def test_a_draft_takes_its_time_from_the_answer(service, monkeypatch):
    put, given = service.scheduler.submit, []

    def submit(request, target, emit):
        given.append(request.deadline_s)
        return put(request, target, emit)

    monkeypatch.setattr(service.scheduler, "submit", submit)
    assert ask(service, together=BOTH, join="read", deadline_s=30).all().error is None
    first, second = given
    assert first == 30
    assert 0 < second < 30


def test_passages_are_read_by_the_model_of_their_stores(service):
    first = ask(service, together=BOTH, join="read").all()
    [(key, target)] = [
        one for one in service.loaded_models._open.items() if one[0].model.endswith("/passages")
    ]
    other = replace(target, loaded=replace(target.loaded))
    service.loaded_models._open[key] = other
    again = ask(service, together=BOTH, join="read").all()
    assert service.loaded_models._open[key].loaded is target.loaded
    assert again.text == first.text


def test_stores_that_answer_together_are_in_use(service, monkeypatch):
    used = []
    monkeypatch.setattr(service.jobs.kept, "use", lambda entry: used.append(entry.name))
    ask(service, together=BOTH).all()
    assert used == [*BOTH]


def test_what_cannot_be_is_refused_by_its_name(shelf, place, serve):
    service, listener = serve(shelf / "stores", place / "colours.collection", max_running=2), Listener()
    model = next(one.name for one in service.catalog.entries() if one.path is None)
    for more, param in (
        ({"join": "read"}, "join"),
        ({"together": BOTH, "n": 2}, "n"),
        ({"together": 2}, "together"),
        ({"together": ("book", "book")}, "together"),
        ({"together": ("book", model)}, "together"),
        ({"together": ("notes",)}, "model"),
        ({"model": "colours.collection", "question": "xyzzy"}, "messages"),
    ):
        with pytest.raises(WrongField) as raised:
            ask(service, **more)
        assert raised.value.param == param
    with pytest.raises(NoSuchName):
        ask(service, together=("book", "nobody"))
    with pytest.raises(TooLarge):
        ask(service, together=BOTH, join="pced")
    for request, put in (
        (CompletionRequest("id", "colours.collection", prompt="It is"), service.complete),
        (CompletionRequest("id", "book", prompt="It is", together=BOTH), service.complete),
        (SearchRequest("id", "colours.collection", question="Is it?"), service.search),
    ):
        with pytest.raises(ConfigError, match="answer a chat together"):
            put(request, listener)
    with pytest.raises(NoSuchName, match="a collection, and no store"):
        service.jobs.store("colours.collection")
    closed = serve(read_only=True)
    with pytest.raises(ReadOnly, match="exact"):
        ask(closed, together=BOTH, join="exact")


def test_many_requests_at_once_are_each_answered_as_by_themselves(place, serve):
    service, found = serve(place), {}
    asked = {"Is it green?": "mixture", "Is it blue?": "read", "Is it red?": "pced"}
    alone = {text: ask(service, "colours.collection", text, join=join).all() for text, join in asked.items()}

    def run(text, join):
        found[text] = ask(service, "colours.collection", text, join=join).all()

    threads = [threading.Thread(target=run, args=one) for one in asked.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {text: one.text for text, one in found.items()} == {text: one.text for text, one in alone.items()}
