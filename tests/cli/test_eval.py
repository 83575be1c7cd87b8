"""`eval needle` and `fidelity` write a result and a picture, and refuse at once what they cannot measure."""

import json
import sys

import pytest

from offload_decode.common.errors import ConfigError
from offload_decode.evals import needle_grid
from offload_decode.evals.haystack import python_topics
from offload_decode.evals.tasks.ruler import Needle
from offload_decode.models import loading
from offload_decode.selectors.registry import names
from offload_decode.selectors.topk import TopK
from tests.cli.conftest import TEXT, done, json_of, refused, run
from tests.evals.made_up import write_run

pytest.importorskip("matplotlib")
FIDELITY = ("--tokens", "3", "--budgets", "5,10%")
SIZES = ("--lengths", "100,128", "--depths", "0,50%")


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needle_grid, "MAX_NEW_TOKENS", 2)


def test_a_table_a_picture_and_a_result(home, tmp_path):
    out = tmp_path / "made" / "here"
    ran = done("eval", "needle", "--model", home / "model", *SIZES, "--budget", "7", "--out", out)
    heading, *rows = ran.out.splitlines()
    assert heading.split("  ")[-3:] == ["0 %", "50 %", "mean"]
    assert [row.split("  ")[0] for row in rows] == [
        f"{length} tokens, {way}" for length in (100, 128) for way in ("dense", "topk", "control")
    ]
    assert ran.err.splitlines()[-1] == f"{out / 'needle.json'}, {out / 'needle.png'}"
    assert (out / "needle.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((out / "needle.json").read_text())
    assert len(result["cells"]) == 4
    assert result["configuration"]["options"] == {"budget": "7"}
    assert result["configuration"]["text_sha256"] == python_topics().sha256
    assert {path.name for path in out.iterdir()} == {"needle.json", "needle.png"}


def test_json_is_what_the_file_holds(home, tmp_path):
    (tmp_path / "text.md").write_text(TEXT)
    where = ("--text", tmp_path / "text.md", "--out", tmp_path)
    ran = run("eval", "needle", "--model", home / "model", *SIZES, *where, "--json", "-q")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out) == json.loads((tmp_path / "needle.json").read_text())
    assert json.loads(ran.out)["configuration"]["text"] == "text.md"


def test_the_selectors_index_is_built(home, tmp_path):
    pytest.importorskip("faiss")
    options = ("-o", "index=faiss-ivf", "-o", "budget=9", "--lengths", "100", "--depths", "50")
    done("eval", "needle", "--model", home / "model", *options, "--out", tmp_path)
    result = json.loads((tmp_path / "needle.json").read_text())
    assert result["configuration"]["options"] == {"budget": "9", "index": "faiss-ivf"}


def test_an_answered_control_and_a_repeated_text_are_said(home, tmp_path, monkeypatch):
    monkeypatch.setattr(Needle, "score", lambda *_: 1.0)
    (tmp_path / "text.txt").write_text("Too short. ")
    where = ("--text", tmp_path / "text.txt", "--out", tmp_path)
    ran = done("eval", "needle", "--model", home / "model", *SIZES, *where)
    assert "the control was answered in 100% of the cells" in ran.err
    assert "the text is shorter than 100, 128 tokens and was repeated there" in ran.err


@pytest.mark.parametrize(
    ("command", "options", "sentence"),
    [
        ("needle", ("--lengths", "2K,many"), "'many' is no number of tokens: write one like 2048, 32K or 1M"),
        ("needle", ("--lengths", "0"), "'0' is no number of tokens"),
        ("needle", ("--depths", "0,101"), "'101' is no depth"),
        ("needle", ("--depths", "half"), "'half' is no depth"),
        ("needle", ("--depths", "nan"), "'nan' is no depth"),
        ("needle", ("--budget", "5", "-o", "budget=6"), "the budget is given twice"),
        ("needle", ("-s", "magic"), "unknown selector 'magic'"),
        ("needle", ("-o", "recall=1"), "has no option 'recall'"),
        ("needle", ("-o", "index=magic"), "no index kind 'magic'"),
        ("fidelity", ("--budgets", "abc"), "budget 'abc' is neither a count like 1024 nor a share like 2%"),
        ("fidelity", ("--budgets", "64,"), "budget '' is neither"),
        ("fidelity", ("--budgets", "0"), "leaves nothing to measure"),
        ("fidelity", ("-o", "budget=6"), "give it as --budgets"),
        ("fidelity", ("-s", "topk:budget=6"), "give it as --budgets"),
        ("fidelity", ("-s", "magic"), "unknown selector 'magic'"),
        ("fidelity", ("-s", "topk:colour=green"), "has no option 'colour'"),
        ("fidelity", ("-s", "topk:green"), "option 'green' is not of the form key=value"),
        ("fidelity", ("-s", "topk:index=faiss-ivf"), "there is no 'faiss-ivf' index"),
        ("fidelity", ("-s", "topk", "-s", "topk"), "selector 'topk' is given twice"),
        ("fidelity", ("--question", " "), "the question is empty"),
    ],
)
def test_wrong_use_is_refused_before_a_model_is_loaded(
    command, options, sentence, store, tmp_path, monkeypatch
):
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("a model was loaded"))
    given = [store] if command == "fidelity" else []
    assert sentence in refused(2, "eval", command, *given, "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_a_budget_that_is_none_is_refused_before_the_first_prefill(home, tmp_path):
    arguments = ("--model", home / "model", "--budget", "few", "--out", tmp_path / "out")
    assert "budget 'few' is none of these" in refused(2, "eval", "needle", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_missing_text_is_refused(tmp_path):
    said = refused(1, "eval", "needle", "--text", tmp_path / "none.txt", "--out", tmp_path)
    assert "there is no corpus at" in said


def test_an_earlier_result_is_kept(store, tmp_path):
    for command in (["needle"], ["fidelity", store]):
        earlier = tmp_path / f"{command[0]}.json"
        earlier.write_text("mine")
        assert "choose another --out" in refused(2, "eval", *command, "--out", tmp_path)
        assert earlier.read_text() == "mine"


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("scipy.stats", "ruler"),
        ("statsmodels.stats.proportion", "perplexity"),
        ("scipy.stats", "needle"),
        ("matplotlib", "needle"),
        ("matplotlib", "fidelity"),
        ("jinja2", "report"),
    ],
)
def test_a_missing_library_is_named_before_the_work(store, tmp_path, monkeypatch, missing, command):
    monkeypatch.setitem(sys.modules, missing, None)
    runs = [write_run(tmp_path / "run.jsonl", 0.9, questions=1)]
    given = {"report": runs, "fidelity": [store]}.get(command, [])
    said = refused(2, "eval", command, *given, "--out", tmp_path / "out")
    assert f"this needs {missing.partition('.')[0]}," in said
    assert "pip install 'offload-decode[eval]'" in said
    assert not (tmp_path / "out").exists()


def test_fidelity_writes_a_table_a_picture_and_a_result(store, tmp_path):
    out = tmp_path / "made" / "here"
    chosen = ("-s", "topk", "-s", "lessismore")
    ran = done("eval", "fidelity", store, *chosen, *FIDELITY, "--question", "Thing 3?", "--out", out)
    heading, *rows = (line.split() for line in ran.out.splitlines())
    assert heading[:4] == ["selector", "budget", "tokens", "moved"]
    measured = ["topk", "lessismore", "random", "streaming"]
    assert [tuple(row[:2]) for row in rows] == [
        ("dense", "100%"),
        *((name, "5") for name in measured),
        *((name, "10%") for name in measured),
    ]
    assert rows[0][5:11] == ["100.0%", "100.0%", "0.0%", "0.0%", "0.0%", "0.0%"]
    assert ran.err.splitlines()[-1] == f"{out / 'fidelity.json'}, {out / 'fidelity.png'}"
    assert (out / "fidelity.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((out / "fidelity.json").read_text())
    assert result["configuration"]["questions"] == ["Thing 3?"]
    assert {path.name for path in out.iterdir()} == {"fidelity.json", "fidelity.png"}


def test_every_selector_is_measured_and_json_is_what_the_file_holds(store, tmp_path):
    few = ("--tokens", "2", "--budgets", "20")
    ran = run("eval", "fidelity", store, *few, "--out", tmp_path, "--json", "-q")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out) == json.loads((tmp_path / "fidelity.json").read_text())
    assert {entry["label"] for entry in json.loads(ran.out)["entries"]} == set(names())


def test_a_selector_can_have_options_of_its_own(store, tmp_path):
    chosen = ("-s", "quest:page_size=4", "-s", "quest:page_size=4,tail=sample:8", "-o", "dense_layers=0")
    chosen += ("-s", "lessismore:select_layers=0,1,tail=off")
    result = json_of("eval", "fidelity", store, *chosen, *FIDELITY, "--out", tmp_path, "-q")
    options = {entry["label"]: entry["options"] for entry in result["entries"]}
    assert options["lessismore:select_layers=0,1,tail=off"] == {"select_layers": "0,1", "tail": "off"}
    assert options["quest:page_size=4,tail=sample:8"] == {"page_size": "4", "tail": "sample:8"}
    assert result["configuration"]["common"] == {"dense_layers": "0"}


def test_one_that_fails_is_named_and_the_others_are_kept(store, tmp_path, monkeypatch):
    def choose(*_: object) -> None:
        raise ConfigError("the index was eaten")

    monkeypatch.setattr(TopK, "choose", choose)
    ran = run("eval", "fidelity", store, "-s", "topk", *FIDELITY, "--out", tmp_path, "-q")
    assert ran.code == 1
    assert ran.err.splitlines() == [
        f"error: topk at budget {budget} was not measured: the index was eaten" for budget in ("5", "10%")
    ]
    assert "streaming" in ran.out
    assert len(json.loads((tmp_path / "fidelity.json").read_text())["failures"]) == 2


def test_an_empty_folder_is_no_store(tmp_path):
    (tmp_path / "empty").mkdir()
    said = refused(1, "eval", "fidelity", tmp_path / "empty", "--out", tmp_path / "out")
    assert "is not a KV store" in said
    assert "There is no store" in refused(1, "eval", "fidelity", tmp_path / "none", "--out", tmp_path / "out")
