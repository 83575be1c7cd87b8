"""The demo tells the truth: its facts are in the text, the control is not, and another process answers."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload_decode import Engine
from offload_decode.cli.demo import _trained
from offload_decode.common.errors import MissingBackend, OffloadDecodeError
from offload_decode.evals import demo as job
from offload_decode.evals.side_by_side import Opened, Way, WayAnswer
from offload_decode.prefill_jobs import indexing
from offload_decode.store.reader import KVStore
from tests.cli.conftest import json_of, refused, run
from tests.tiny import tiny_tokenizer

WAYS = [Way("top-k", "topk", {"budget": "5"}), Way("dense", "dense", {})]


def test_the_facts_are_hidden_and_the_control_is_not():
    hidden = job.hide_facts(tiny_tokenizer(), 20_000)
    assert [hidden.text.count(fact.sentence) for fact in hidden.facts] == [1] * 5
    for fact in hidden.facts:
        assert fact.depth == pytest.approx(hidden.text.index(fact.sentence) / len(hidden.text), abs=0.02)
        assert fact.told(f"It is {fact.answer}.")
        assert not fact.told(fact.answer + "1")
    assert hidden.control.answer not in hidden.text
    assert len({fact.question for fact in hidden.questions}) == 6
    assert len({fact.answer for fact in hidden.questions}) == 6
    assert not hidden.repeated


@pytest.mark.parametrize(("trained", "tokens"), [(8192, 7680), (131072, 32768), (None, 32768), (600, 300)])
def test_the_text_is_no_longer_than_the_model_was_trained_for(trained, tokens):
    config = SimpleNamespace(max_position_embeddings=trained)
    assert _trained(SimpleNamespace(model=SimpleNamespace(config=config))) == tokens


def test_a_new_process_answers_as_the_engine_does(store):
    questions = ["what is thing 3?", "and thing 4?"]
    opened, replies = job.ask_in_new_process(store, questions, WAYS, "cpu")
    given = list(replies)
    assert opened.process != os.getpid()
    manifest = KVStore.open(store).manifest
    assert opened.stored_tokens == manifest.n_tokens
    assert [(reply.question, reply.way) for reply in given] == [
        (question, way.name) for question in questions for way in WAYS
    ]
    for way in WAYS:
        engine = Engine.open(store, selector=way.selector, options=way.options)
        texts = [engine.answer(question, job.MAX_NEW_TOKENS).text for question in questions]
        assert [reply.text for reply in given if reply.way == way.name] == texts
        attended = {reply.attended for reply in given if reply.way == way.name}
        assert attended == {5 if way.selector == "topk" else opened.stored_tokens}
    # A decoding step of dense attention fetches all keys and values once: the question's pass is not in it.
    shape = manifest.shape
    everything = 2 * 4 * len(shape.full_layers) * shape.kv_heads * shape.head_dim * manifest.n_tokens
    assert {reply.bytes_moved for reply in given if reply.way == "dense"} == {everything}


def test_an_error_of_the_new_process_is_its_sentence(tmp_path):
    with pytest.raises(OffloadDecodeError, match="There is no store at"):
        job.ask_in_new_process(tmp_path / "none", ["?"], WAYS)


def test_a_crash_of_the_new_process_is_an_error(store, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(OffloadDecodeError, match="ended with code 1"):
        job.ask_in_new_process(store, ["?"], WAYS)


@pytest.mark.slow  # `.ci/dist` runs the demo, from the wheel
def test_the_story_of_a_model_that_finds_nothing(home, tmp_path):
    ran = run("demo", "--model", home / "model", "--tokens", "600", "--out", tmp_path / "demo", "-q")
    assert (ran.code, ran.err) == (1, "")
    assert [line[0] for line in ran.out.splitlines() if line[:1].isdigit()] == list("12345")
    text = (tmp_path / "demo" / "python-topics.txt").read_text()
    hidden = job.hide_facts(tiny_tokenizer(), 600)
    assert text == hidden.text
    for fact in hidden.questions:
        assert fact.question in ran.out
    shown = rows(ran.out)
    assert next(iter(shown)) == "top-k, clusters"
    assert list(shown)[-2:] == ["top-k, flat", "dense attention"]
    for row in shown.values():
        assert "0 of 5" in row
        assert "✓" in row, "the control was not answered"
    store = KVStore.open(tmp_path / "demo" / "store")
    assert f"{store.manifest.n_tokens:,} tokens in" in ran.out
    assert f"ask {store.path} " in ran.out


Reader = Callable[[str, job.Fact], bool]


@pytest.fixture
def answered(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Reader], tuple[int, str]]:
    """Run the demo with answers of which `Reader(way, fact)` says whether they hold the fact's answer."""

    def demo(knows: Reader) -> tuple[int, str]:
        facts = {fact.question: fact for fact in job.hide_facts(tiny_tokenizer(), 200).questions}

        def ask(
            store: Path, questions: Sequence[str], ways: Sequence[Way], device: str
        ) -> tuple[Opened, Iterator[WayAnswer]]:
            replies = [
                WayAnswer(fact.question, way.name, fact.answer if knows(way.name, fact) else "no", 5, 9, 1)
                for fact in [facts[question] for question in questions]
                for way in ways
            ]
            return Opened(1, 10), iter(replies)

        monkeypatch.setattr(job, "ask_in_new_process", ask)
        ran = run("demo", "--model", home / "model", "--tokens", "200", "--out", tmp_path / "demo", "-q")
        return ran.code, ran.out

    return demo


def rows(out: str) -> dict[str, str]:
    """The lines of the table by the way they are about."""
    lines = [line.strip() for line in out.splitlines()]
    return {line.split("  ")[0]: line for line in lines if line.startswith(("top-k, ", "dense attention "))}


def test_indexes_without_their_library_are_left_out_with_a_note(answered, monkeypatch):
    real = indexing.build_indexes

    def missing(store: Path, kind: str, **options: Any) -> indexing.BuildReport:
        if kind == "clusters":
            return real(store, kind, **options)
        raise MissingBackend(f"{kind}: pip install 'offload-decode[{kind}]'")

    monkeypatch.setattr(indexing, "build_indexes", missing)
    code, out = answered(lambda way, fact: fact.depth is not None)
    assert code == 0
    for kind in ("faiss-ivf", "hnswlib"):
        line = next(line for line in out.splitlines() if line.startswith(f"   {kind} "))
        assert f"left out: {kind}: pip install 'offload-decode[{kind}]'" in line
    assert list(rows(out)) == ["top-k, clusters", "top-k, flat", "dense attention"]


@pytest.mark.parametrize(
    ("missing", "row", "code"),
    [
        (None, "top-k, clusters", 0),
        ("clusters", "top-k, clusters", 1),
        ("dense", "dense attention", 0),
        ("flat", "top-k, flat", 0),
    ],
)
def test_a_fact_that_the_default_misses_is_a_failure_and_others_are_shown(answered, missing, row, code):
    told, out = answered(lambda way, fact: fact.depth is not None and (way, fact.depth) != (missing, 0.5))
    assert (told, out.count("✗")) == (code, int(missing is not None))
    assert (f"✗ no  ({missing})" in out) == (missing is not None)
    for name, line in rows(out).items():
        assert ("4 of 5" if missing and name == row else "5 of 5") in line


def test_a_control_that_is_answered_is_a_failure(answered):
    code, out = answered(lambda way, fact: True)
    assert code == 1
    assert "✗" in rows(out)["top-k, clusters"]


def test_a_store_that_is_there_is_kept(home, store, tmp_path):
    shutil.copytree(store, tmp_path / "store")
    ran = run("demo", "--model", home / "model", "--tokens", "200", "--out", tmp_path)
    assert ran.code == 1
    assert "exists already" in ran.err
    KVStore.open(tmp_path / "store").verify()
    assert not (tmp_path / "python-topics.txt").exists()


def test_bad_tokens_are_refused():
    assert "'lots' is no number of tokens" in refused(2, "demo", "--tokens", "lots")


@pytest.mark.slow
def test_the_shipped_model_finds_the_facts(tmp_path):
    told = json_of("demo", "--out", tmp_path / "demo", "-q")
    assert told["found"]["clusters"] == told["found"]["flat"] == 5
    assert told["indexes"]["clusters"]["recall"] > 0.97
    assert told["seconds"] < 180
    assert told["prefill"]["store"] == str(tmp_path / "demo" / "store")
    assert told["process"]["process"] != os.getpid()
    assert list(told["found"]) == [*told["indexes"], "flat", "dense"]
    assert (next(iter(told["indexes"])), len(told["replies"])) == ("clusters", 6 * len(told["found"]))
    for reply in told["replies"]:
        if reply["way"] != "dense":
            assert reply["attended"] <= 64
