"""Commands that ask questions, and those that report and compare their runs."""

import json

import pytest

from offload_decode.cli import output
from offload_decode.engine.step import StoredPrefix
from offload_decode.evals import tasks
from offload_decode.evals.runs import read
from tests.cli.conftest import done, json_of, refused, run
from tests.evals.made_up import write_run

pytestmark = pytest.mark.usefixtures("short")
ASK = ("--tasks", "niah_single_2", "--lengths", "300", "--limit", "1", "-q")


def test_ways_are_selectors_with_their_options_and_a_run_that_is_done_is_shown_again(home, out):
    ways = ("-s", "topk:tail=off", "-s", "topk:tail=sample", "--budgets", "8,16")
    ran = done("eval", "ruler", "--model", home / "model", *ASK, *ways, "--out", out)
    assert read(out).header.configuration["contenders"] == [
        "dense",
        "topk:tail=off,budget=8",
        "topk:tail=off,budget=16",
        "topk:tail=sample,budget=8",
        "topk:tail=sample,budget=16",
    ]
    again = run("eval", "ruler", "--model", home / "model", *ASK, *ways, "--out", out)
    assert (again.code, again.out) == (0, ran.out)


def test_another_run_does_not_write_over_results(home, out):
    done("eval", "ruler", "--model", home / "model", *ASK, "--out", out)
    before = out.read_bytes()
    message = refused(2, "eval", "ruler", "--model", home / "model", *ASK, "--seeds", "3", "--out", out)
    assert "differs in seeds: choose another --out" in message
    assert out.read_bytes() == before


def test_a_scaled_rope_is_part_of_what_is_measured(home, out):
    asked = ("eval", "ruler", "--model", home / "model", *ASK, "--out", out)
    done(*asked, "--rope", "yarn:2")
    assert read(out).header.made_with["rope"] == "yarn:2"
    assert "differs in rope: choose another --out" in refused(2, *asked)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rope", "yarn"), "rope 'yarn' is none"),
        (("--tasks", "nedle"), "there is no task 'nedle' here; choose from"),
        (("-o", "budgt=3"), "budgt"),
        (("-s", "none"), "unknown selector 'none'"),
        (("--seeds", "x"), "'x' are no seeds"),
        (("--lengths", "x"), "'x' is no number of tokens"),
        (("--prefill", "none"), "unknown prefill method 'none'"),
    ],
)
def test_mistakes_are_told_in_a_sentence(home, options, said):
    assert said in refused(2, "eval", "ruler", "--model", "no-such-model", *options)


def test_json_has_the_records(home, out):
    told = json_of("eval", "ruler", "--model", home / "model", *ASK, "--out", out)
    assert len(told["records"]) == len(read(out).records)


def test_how_much_is_measured_is_said_before_and_what_is_left_follows_the_mean(home, out, monkeypatch):
    """The time of a prefill grows with the square of its tokens, that of many texts does not."""
    grew = []

    class Noted(output._Pace):
        def __init__(self, first, grows, began):
            grew.append(grows)
            super().__init__(first, grows, began)

    monkeypatch.setattr(output, "_Pace", Noted)
    monkeypatch.setattr(output, "PLAIN_EVERY_S", 0.0)
    small = ("--tasks", "niah_single_2", "--lengths", "300", "--limit", "2", "--budgets", "8")
    told = done("eval", "ruler", "--model", home / "model", *small, "--out", out).err
    assert told.index("measuring 2 texts: a prefill of 900 tokens in all\n") < told.index("eval: ")
    assert " of 900 tokens" in told
    assert set(grew) == {False}


@pytest.mark.parametrize("suite", ["ruler", "aggregate"])
def test_a_suite_has_tasks_that_are_known(suite):
    module = __import__(f"offload_decode.evals.tasks.{suite}", fromlist=["SUITE"])
    assert set(module.SUITE) <= set(tasks.names())


def test_ruler_asks_what_is_named(home, out):
    small = ("--tasks", "niah_single_2", "--lengths", "600", "--limit", "1", "--budgets", "8,2%", "-q")
    ran = done("eval", "ruler", "--model", home / "model", *small, "--out", out)
    assert read(out).header.configuration["contenders"] == ["dense", "topk:budget=8", "topk:budget=2%"]
    assert read(out).header.configuration["prefill"]["indexes"] == ["clusters"]
    assert ran.out.splitlines()[1].startswith("niah_single_2")


@pytest.mark.parametrize(
    ("way", "index"),
    [("topk", "clusters"), ("topk:index=flat", "flat"), ("quest", None), ("quest+topk", None)],
)
def test_the_index_that_a_user_would_have_is_searched(home, out, monkeypatch, way, index):
    """Of each store but those that are opened once to see that all ways work."""
    searched = []
    real = StoredPrefix.begin

    def spied(self, *given):
        searched.append(getattr(getattr(self.selector, "indexes", None), "kind", None))
        return real(self, *given)

    monkeypatch.setattr(StoredPrefix, "begin", spied)
    small = ("--tasks", "niah_single_2", "--lengths", "600", "--limit", "1", "--budgets", "8", "-q")
    done("eval", "ruler", "--model", home / "model", *small, "-s", way, "--no-control", "--out", out)
    assert searched
    assert set(searched) <= {index, None}
    assert index in searched


def test_tasks_that_do_not_fit_are_left_out_unless_they_are_named(home, out, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks.ruler, "SUITE", ("niah_single_2", "vt", "qa_2"))
    small = ("--lengths", "400", "--limit", "1", "--budgets", "8", "--out", out)
    ran = done("eval", "ruler", "--model", home / "model", *small)
    assert "qa_2 is left out: 400 tokens do not hold the facts" in ran.err
    asked = read(out).header.configuration["tasks"]
    assert "niah_single_2" in asked
    assert "qa_2" not in asked
    named = ("eval", "ruler", "--model", home / "model", *small[:-1], tmp_path / "none", "--tasks", "vt,qa_2")
    assert "400 tokens do not hold the facts" in refused(2, *named)


def test_passkey_asks_at_the_lengths_that_are_given(home, out):
    small = ("--lengths", "700", "--limit", "1", "--budgets", "16", "-q")
    done("eval", "passkey", "--model", home / "model", *small, "--out", out)
    assert read(out).header.configuration["contenders"] == ["dense", "quest:budget=16", "topk:budget=16"]
    helps = (" ".join(run("eval", name, "--help").out.split()) for name in ("passkey", "ruler"))
    for shown, ways in zip(helps, ("quest and topk", "topk"), strict=True):
        assert f"repeatable. [default: {ways}]" in shown


def test_an_error_to_keep_to_takes_the_place_of_the_budgets(home, out):
    small = ("--tasks", "niah_single_2", "--lengths", "400", "--limit", "1", "--budgets", "16,32", "-q")
    ways = ("-s", "topk:error=0.05@0.95", "-s", "topk", "-s", "quest:budget=8")
    done("eval", "ruler", "--model", home / "model", *small, *ways, "--out", out)
    expected = ["dense", "topk:error=0.05@0.95", "topk:budget=16", "topk:budget=32", "quest:budget=8"]
    assert read(out).header.configuration["contenders"] == expected


def test_tasks_of_another_suite_are_refused():
    assert "there is no task 'vt' here" in refused(2, "eval", "aggregate", "--tasks", "vt")
    assert "--budgets" in refused(2, "eval", "ruler", "-o", "budget=3")


def test_outputs_that_cannot_be_written_are_refused_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    asked = ("eval", "ruler", "--tasks", "vt", "--out", tmp_path / "run.jsonl")
    assert "is too large" in refused(2, *asked, "--seeds", f"0,{2**70}")
    assert "is no folder" in refused(2, *asked, "--stores", tmp_path / "file")
    assert not (tmp_path / "run.jsonl").exists()
    for command in ("ruler", "perplexity"):
        said = refused(2, "eval", command, "--model", tmp_path / "none", "--out", tmp_path)
        assert f"is a folder: give --out a file, such as {tmp_path / command}.jsonl" in said


def test_questions_come_from_a_file_of_the_users(home, tmp_path):
    paragraph = {
        "context": "The harbour master of Velm is called Ansa Tiro. She came in May.",
        "qas": [
            {
                "question": "Who is harbour master of Velm?",
                "answers": [{"text": "Ansa Tiro", "answer_start": 34}],
            }
        ],
    }
    others = [{"context": f"In the year {year} nothing happened.", "qas": []} for year in range(1200, 1260)]
    squad = {"data": [{"title": "Velm", "paragraphs": [paragraph, *others]}]}
    (tmp_path / "squad.json").write_text(json.dumps(squad))
    small = ("--tasks", "qa_1", "--lengths", "500", "--limit", "1", "--budgets", "8", "-q")
    asked = ("eval", "ruler", "--model", home / "model", *small, "--qa", tmp_path / "squad.json")
    done(*asked, "--out", tmp_path / "run.jsonl")
    assert read(tmp_path / "run.jsonl").of("question")[0]["expected"] == ["Ansa Tiro"]
    assert "two files are for qa_1" in refused(2, *asked, "--qa", tmp_path / "squad.json")
    elsewhere = [*map(str, asked)]
    elsewhere[elsewhere.index("qa_1")] = "vt"
    assert "a file of --qa is for qa_1" in refused(2, *elsewhere, "--out", str(tmp_path / "other.jsonl"))


def test_a_page_is_written_and_not_written_over(tmp_path):
    runs = [write_run(tmp_path / f"{name}.jsonl", 0.9, questions=2) for name in ("one", "two")]
    out = tmp_path / "new" / "report.html"
    ran = run("eval", "report", *runs, "--out", out)
    assert (ran.code, ran.out, ran.err) == (0, "", f"{out}\n")
    text = out.read_text()
    assert text.startswith("<!doctype html>")
    assert "one.jsonl" in text
    assert "two.jsonl" in text
    assert "exists already" in refused(2, "eval", "report", runs[0], "--out", out)
    assert out.read_text() == text
    done("eval", "report", runs[0], "--out", out, "--force", "-q")
    assert "two.jsonl" not in out.read_text()


def test_a_file_that_is_no_run_is_refused(tmp_path):
    out = tmp_path / "report.html"
    assert "there are no results at" in refused(2, "eval", "report", tmp_path / "none", "--out", out)
    (tmp_path / "text").write_text("some text")
    assert "is no file of an evaluation" in refused(2, "eval", "report", tmp_path / "text", "--out", out)
    assert not out.exists()


def test_a_comparison_is_a_table_and_json(tmp_path):
    runs = [write_run(tmp_path / f"{share}.jsonl", share, questions=40) for share in (0.2, 0.9)]
    ran = done("eval", "compare", *runs)
    lines = ran.out.splitlines()
    assert lines[1].startswith("mean of 3 tasks")
    assert len(lines) == 1 + 10 + 30
    assert all(line.endswith("more than noise") for line in lines[1:])
    assert "bytes moved a token: 1 times as many" in ran.err
    told = run("eval", "compare", *runs, "--json", "-q")
    assert told.err == ""
    found = json.loads(told.out)
    assert (len(found["means"]), len(found["changes"])) == (10, 30)
    assert "there are no results at" in refused(2, "eval", "compare", runs[0], tmp_path / "none.jsonl")
