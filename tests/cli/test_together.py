"""One answer from several stores, as users ask for it."""

import json
import re
import shutil
from pathlib import Path

import pytest

from offload_decode.cli.chat import JointTranscript
from offload_decode.cli.limits import AskOptions
from offload_decode.cli.together import Together, TogetherChoice
from offload_decode.collections.collection import Collection
from offload_decode.collections.together import weights
from offload_decode.engine import joint
from offload_decode.engine.conversation import Sampler
from offload_decode.engine.engine import Engine
from offload_decode.engine.joint import Joint
from offload_decode.engine.reading import Reading
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.job import prefill_texts
from offload_decode.prefill_jobs.joined import joined_store
from offload_decode.prefill_jobs.on_ray import asking
from offload_decode.store.reader import KVStore
from tests.cli.conftest import batch, by_one_worker, done, json_of, lines_of, refused, run, write_lines
from tests.tiny import let_models_write, saved_model

QUESTION, NEW = "Which word is beta?", ("--max-new-tokens", "4")
THREE = ("--together", "3", *NEW)


@pytest.fixture
def stores(collection):
    opened = Collection(collection)
    return [opened.store(entry) for entry in opened.entries]


def rounded(value):
    """Shares of other passes differ by float32's rounding."""
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 5))


def engines(stores):
    first = Engine.open(stores[0])
    return [first, *(Engine.open(store, first.loaded) for store in stores[1:])]


@pytest.mark.parametrize("way", ["mixture", "product", "pced"])
def test_stores_that_are_named_give_one_answer(stores, way):
    told = json_of("ask", *stores, QUESTION, *THREE, "--join", way, "--cite")
    expected = Joint(engines(stores), way, cites=True)
    assert told["answer"] == expected.answer(QUESTION, None, 4).text
    joined = told["joined"]
    assert [one["share"] for one in joined["documents"]] == pytest.approx(expected.shares(), abs=1e-5)
    assert joined["exact"] is False
    assert [len(one["shares"]) for one in joined["carried"]] == [3] * told["tokens"]
    assert sum(one["share"] for one in told["citations"]) <= 1 + 1e-6


def test_documents_of_a_collection_begin_with_weights_by_their_words(collection, stores):
    opened = Collection(collection)
    entries = [entry for entry, _ in opened.scored(QUESTION)[:3]]
    given = weights(opened, QUESTION, entries)
    assert entries[0].name == "beta.txt"
    assert given[0] > given[1]
    assert sum(given) == pytest.approx(1)
    told = json_of("ask", collection, QUESTION, *THREE)
    expected = Joint(engines([opened.store(entry) for entry in entries]))
    assert told["answer"] == expected.answer(QUESTION, given, 4).text
    shares = [one["share"] for one in told["joined"]["documents"]]
    assert shares == pytest.approx(expected.shares(), abs=1e-5)
    one = json_of("ask", collection, QUESTION, "--together", "1", *NEW)
    assert one["answer"] == json_of("ask", collection, QUESTION, "--top", "1", *NEW)["answers"][0]["answer"]
    assert one["joined"]["documents"][0]["share"] == 1


def test_it_is_printed_with_what_it_is(collection):
    ran = done("ask", collection, QUESTION, *THREE, "--cite", "--stats")
    note = r"Joined by mixture from 3 documents, none of which sees another: \w+.txt \d+%"
    assert re.search(note, ran.err)
    assert re.search(r"^ *\d+%  \w+.txt: ", ran.err, re.MULTILINE)
    attended, stored = re.search(r"([\d.]+) of (\d+) stored tokens in each step and head", ran.err).groups()
    assert float(attended) <= int(stored)
    assert ran.out == done("ask", collection, QUESTION, *THREE).out


def test_who_would_say_otherwise_is_named(stores, monkeypatch):
    assert json_of("ask", *stores, QUESTION, *THREE)["joined"]["dissents"] == []
    # Random documents are not sure of much.
    for limit, value in (("HEARD", 1e-9), ("SURE", 1e-9), ("DOUBTED", 1.0)):
        monkeypatch.setattr(joint, limit, value)
    told = json_of("ask", *stores, QUESTION, *THREE)["joined"]
    expected = Joint(engines(stores))
    expected.answer(QUESTION, None, 4)
    assert told["dissents"]
    for own, one in zip(told["dissents"], expected.dissents, strict=True):
        assert (own["document"], own["text"]) == (str(stores[one.document]), one.text)
    first = expected.dissents[0]
    line = f"{stores[first.document]} would say otherwise: “{' '.join(first.text.split())}…”"
    assert any(note.startswith(line) for note in told["notes"])
    assert line in run("ask", *stores, QUESTION, *THREE).err


def test_passages_are_read_together(stores):
    told = json_of("ask", *stores, QUESTION, *THREE, "--join", "read")
    assert told["answer"] == Reading(engines(stores)).answer(QUESTION, None, 4).text
    assert "share" not in told["joined"]["documents"][0]
    ran = done("ask", *stores, QUESTION, *THREE, "--join", "read")
    assert re.search("passages? of 3 documents", ran.err, re.IGNORECASE)
    cited = json_of("ask", *stores, QUESTION, *THREE, "--join", "read", "--cite")["citations"]
    assert sum(one["share"] for one in cited) <= 1 + 1e-6


def test_documents_are_prefilled_as_one_and_found_again(collection, stores, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = json_of("ask", collection, QUESTION, *THREE, "--join", "exact", "--cite")
    assert first["joined"]["exact"] is True
    kept = list((tmp_path / "offload-decode" / "joined").glob("*/content"))
    loaded = Engine.open(stores[0]).loaded
    whole = [TextDocument(file.name, file.read_text()) for file in sorted(texts.iterdir())]
    prefill_texts(loaded, whole, tmp_path / "whole")
    engine = Engine.open(tmp_path / "whole", loaded)
    assert Engine.open(kept[0], loaded).store.tokens.tolist() == engine.store.tokens.tolist()
    assert first["answer"] == engine.answer(QUESTION, 4).text
    made = kept[0].stat().st_ctime_ns
    ran = done("ask", collection, "And gamma, which word is it?", *THREE, "--join", "exact")
    told = "Answered from 3 documents, prefilled as one text with exact attention"
    assert f"{told}, of which each step attends to what 'topk' chooses." in ran.err
    dense = "Who knows?", *THREE, "--join", "exact", "--selector", "dense"
    assert f"{told}." in done("ask", *stores, *dense).err
    assert [path.stat().st_ctime_ns for path in kept[0].parent.parent.glob("*/content")] == [made]
    assert "joined" in done("cache").out


def test_a_store_of_several_documents_is_joined_without_its_headings(stores, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = sorted(texts.iterdir())
    loaded = Engine.open(stores[0]).loaded
    every = [TextDocument(file.name, file.read_text()) for file in files]
    for name, documents in (("two", every[:2]), ("third", every[2:]), ("whole", every)):
        prefill_texts(loaded, documents, tmp_path / name)
    with joined_store([tmp_path / "two", tmp_path / "third"], loaded) as path:
        assert KVStore.open(path).tokens.tolist() == KVStore.open(tmp_path / "whole").tokens.tolist()


def test_a_batch_answers_each_question_once(collection, out, tmp_path):
    asked = [{"question": QUESTION, "id": 1}, {"question": "Which is gamma?", "id": 2, "by": "me"}]
    questions = write_lines(tmp_path / "asked.jsonl", *asked)
    assert batch(questions, out, collection, "--together", "2").code == 0
    lines = lines_of(out)
    assert [line["id"] for line in lines] == [1, 2]
    assert lines[1]["by"] == "me"
    asked = [one["store"] for one in lines[0]["joined"]["documents"]]
    assert lines[0]["store"] == " + ".join(asked)
    assert (lines[0]["together"], lines[0]["join"]) == (2, "mixture")
    told = json_of("ask", collection, QUESTION, "--together", "2", *NEW)
    assert (lines[0]["answer"], lines[0]["joined"]) == (told["answer"], told["joined"])
    assert "2 there already" in batch(questions, out, collection, "--together", "2").err
    assert "choose another --out" in batch(questions, out, collection, "--together", "3").err


def test_a_batch_names_what_nobody_speaks_of(collection, out, tmp_path):
    questions = write_lines(tmp_path / "asked.jsonl", {"question": "xyzzy"}, {"question": QUESTION})
    ran = batch(questions, out, collection, "--together", "2")
    assert ran.code == 1
    assert "no document contains a word of line 1 of the questions: rephrase it" in ran.err
    assert [line["question"] for line in lines_of(out)] == [QUESTION]


@pytest.mark.parametrize("way", ["mixture", "read", "exact"])
def test_questions_are_spread_over_workers_and_not_documents(collection, stores, tmp_path, monkeypatch, way):
    monkeypatch.setattr(asking, "answer_on_ray", by_one_worker)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = {"question": QUESTION, "id": 1}, {"question": "Which is gamma?", "id": 2}, {"question": "xyzzy"}
    questions = write_lines(tmp_path / "asked.jsonl", *asked)
    for given, code in ((stores, 0), ([collection], 1)):
        how = *given, "--together", "3", "--join", way, "--cite"
        here, there = tmp_path / f"here{code}", tmp_path / f"there{code}"
        assert batch(questions, here, *how).code == code
        assert batch(questions, there, *how, "--workers", "ray").code == code
        expected, found = lines_of(here), lines_of(there)[::-1]
        assert [line["id"] for line in found] == [line["id"] for line in expected]
        assert rounded(found) == rounded(expected)
        assert found[0]["joined"]["documents"]


def test_a_worker_fetches_all_stores_of_a_question(collection, tmp_path, monkeypatch):
    monkeypatch.setattr(asking, "answer_on_ray", by_one_worker)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done("push", collection, f"file://{tmp_path}/bucket/texts")
    questions = write_lines(tmp_path / "asked.jsonl", {"question": QUESTION})
    given = f"file://{tmp_path}/bucket/texts", "--together", "3", "--workers", "ray"
    assert batch(questions, tmp_path / "there", *given).code == 0
    assert batch(questions, tmp_path / "here", collection, "--together", "3").code == 0
    assert lines_of(tmp_path / "there")[0]["answer"] == lines_of(tmp_path / "here")[0]["answer"]


def test_a_batch_is_asked_again_where_other_documents_would_answer(collection, out, tmp_path, home):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "beta.txt").write_text("The word of this document is beta. ")
    made = "collect", texts, "--model", home / "model", "--out", tmp_path / "own"
    done(*made)
    asked = {"question": QUESTION}, {"question": "Which is delta?"}
    questions = write_lines(tmp_path / "asked.jsonl", *asked)
    given = questions, out, tmp_path / "own", "--together", "2"
    assert batch(*given).code == 0
    assert "2 there already" in batch(*given).err
    (texts / "delta.txt").write_text("It is delta. ")  # one document speaks to one question
    done(*made)
    assert "2 answers" in batch(*given).err
    (texts / "other.txt").write_text("Unlike them. ")
    done(*made)
    assert "2 there already" in batch(*given).err
    names = [[one["document"] for one in line["joined"]["documents"]] for line in lines_of(out)]
    assert names[:2] == [["beta.txt"], ["beta.txt"]]
    assert sorted(names[2]) == ["beta.txt", "delta.txt"]


def test_a_copy_of_a_document_does_not_count_twice(texts, tmp_path, home, out):
    shutil.copytree(texts, own := tmp_path / "texts")
    shutil.copy(own / "beta.txt", own / "a copy.txt")
    ran = done("collect", own, "--model", home / "model", "--out", tmp_path / "own")
    assert "copies: beta.txt (of a copy.txt); --together asks one document of the same bytes" in ran.err
    told = json_of("ask", tmp_path / "own", QUESTION, *THREE)
    names = {one["document"] for one in told["joined"]["documents"]}
    assert len(names) == 3
    assert len(names & {"a copy.txt", "beta.txt"}) == 1
    for question, named in (("copy", "a copy.txt"), ("beta beta", "beta.txt")):  # by its name
        joined = json_of("ask", tmp_path / "own", question, "--together", "1", *NEW)["joined"]
        assert [one["document"] for one in joined["documents"]] == [named]
    questions = write_lines(tmp_path / "asked.jsonl", {"question": QUESTION})
    assert batch(questions, out, tmp_path / "own", *THREE).code == 0
    assert {one["document"] for one in lines_of(out)[0]["joined"]["documents"]} == names


def test_tokens_that_are_no_character_by_themselves_are_told_with_the_next(stores, monkeypatch):
    let_models_write(monkeypatch, "né " * 20)
    told = json_of("ask", *stores, QUESTION, "--together", "3", "--max-new-tokens", "7", "--cite")
    texts = [one["token"] for one in told["joined"]["carried"]]
    assert "\ufffd" not in "".join(texts)
    assert "".join(texts).strip() == told["answer"]


def test_stores_are_measured_together(stores, monkeypatch):
    from offload_decode.planning import opening

    planned = []
    monkeypatch.setattr(
        opening, "check_ask", lambda asked, *what: planned.append((asked.request.tokens, what)) or []
    )
    json_of("ask", *stores, QUESTION, *THREE)
    assert planned[0][0] == sum(one[0] for one in planned[1:])
    assert planned[0][1][1] == "asking 3 stores together"


def test_approximate_stores_are_named(home, texts, tmp_path):
    made = "--model", home / "model", "--method", "window", "--out", tmp_path / "window.kv"
    done("prefill", texts / "beta.txt", *made)
    done("prefill", texts / "alpha.txt", "--model", home / "model", "--out", tmp_path / "exact.kv")
    given = tmp_path / "window.kv", tmp_path / "exact.kv", QUESTION, "--together", "2", *NEW
    assert "Stores are approximate: prefilled with window" in done("ask", *given).err
    notes = json_of("ask", *given)["joined"]["notes"]
    assert any("prefilled with window" in one for one in notes)


def test_a_chat_goes_on_with_the_documents_of_its_first_question(collection, stores):
    ran = run("chat", *stores, *THREE, stdin=f"{QUESTION}\nAnd then?\n/reset\nAnd then?\n")
    talk = Joint(engines(stores))
    expected = [talk.answer(question, None, 4).text for question in (QUESTION, "And then?")]
    expected.append(Joint(engines(stores)).answer("And then?", None, 4).text)
    assert ran.out.splitlines() == expected
    assert (
        run("chat", collection, *THREE, stdin=f"{QUESTION}\nAnd then?\n").err.count("by mixture from 3 doc")
        == 2
    )
    assert "nothing is saved" in run("chat", *stores, *THREE, stdin="/save x.json\n").err
    cited = run("chat", *stores, *THREE, "--cite", stdin=f"{QUESTION}\n").err.splitlines()
    assert cited == run("ask", *stores, QUESTION, *THREE, "--cite").err.splitlines()
    assert any(line.startswith("       ") and "%  " in line for line in cited)  # a passage


def test_a_question_that_is_stopped_before_it_was_run_is_no_turn_of_a_chat(stores, monkeypatch):
    talk = JointTranscript(Together(stores, None, TogetherChoice(3), AskOptions()), 4, Sampler())

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(joint, "run_turns", stopped)
        with pytest.raises(KeyboardInterrupt):
            list(talk.answer(QUESTION))
    assert len(talk.turns) == 0
    assert "".join(talk.answer(QUESTION)).strip() == Joint(engines(stores)).answer(QUESTION, None, 4).text
    assert len(talk.turns) == 1
    talk.reset()
    assert len(talk.turns) == 0


def test_wrong_use_is_a_sentence(home, collection, stores, store, tmp_path):
    two, three = stores[:2], stores
    assert "give --together 2 for one answer" in refused(2, "ask", *two, QUESTION)
    assert "give --together 2 for one answer" in refused(2, "chat", *two)
    assert "give --together 3, or a collection" in refused(2, "ask", *three, QUESTION, "--together", "2")
    assert "is given twice" in refused(2, "ask", stores[0], stores[0], QUESTION, "--together", "2")
    assert "--join says how" in refused(2, "ask", store, QUESTION, "--join", "read")
    assert "there is no --join vote" in refused(2, "ask", *two, QUESTION, "--together", "2", "--join", "vote")
    assert "leave the others out" in refused(2, "ask", collection, QUESTION, "--together", "2", "--all")
    for given in (("--workers", "ray"), ("--server", "http://localhost:1")):
        assert "--together and --" in refused(2, "ask", *two, QUESTION, "--together", "2", *given)
    assert "no document contains a word" in refused(2, "ask", collection, "xyzzy", "--together", "2")
    asked = write_lines(tmp_path / "asked.jsonl", {"question": QUESTION, "document": "beta.txt"})
    ran = batch(asked, tmp_path / "out", collection, "--together", "2")
    assert "--together asks several" in ran.err


def test_a_store_of_another_model_or_one_that_is_gone_is_refused(home, collection, stores, tmp_path):
    model = saved_model(tmp_path / "model", seed=1)
    done("prefill", home / "corpus.txt", "--model", model, "--out", tmp_path / "other.kv")
    given = [stores[0], tmp_path / "other.kv", QUESTION, "--together", "2"]
    assert "give stores of one model" in refused(2, "ask", *given)
    made = home / "corpus.txt", "--model", home / "model", "--weights", "int8", "--out", tmp_path / "int8.kv"
    done("prefill", *made)
    told = refused(2, "ask", stores[0], tmp_path / "int8.kv", QUESTION, "--together", "2")
    assert re.search("asked with another form of the model .*weights int8.* prefilled alike", told)
    shutil.copytree(collection, tmp_path / "copy")
    entry = Collection(tmp_path / "copy").entries[0]
    shutil.rmtree(Path(tmp_path / "copy", entry.store))
    assert entry.store in refused(1, "ask", tmp_path / "copy", QUESTION, "--together", "3")
