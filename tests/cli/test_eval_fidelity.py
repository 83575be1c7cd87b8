"""`eval fidelity` writes its result and its picture, and refuses what it cannot measure before it begins."""

from __future__ import annotations

import json

import pytest

from offload_decode.common.errors import ConfigError
from offload_decode.models import loading
from offload_decode.selectors.registry import names
from offload_decode.selectors.topk import TopK
from tests.cli.conftest import refused, run

pytest.importorskip("matplotlib")
SMALL = ("--tokens", "3", "--budgets", "5,10%")


def test_a_table_a_picture_and_a_result(store, tmp_path):
    out = tmp_path / "made" / "here"
    chosen = ("-s", "topk", "-s", "lessismore")
    ran = run("eval", "fidelity", store, *chosen, *SMALL, "--question", "Thing 3?", "--out", out)
    assert ran.code == 0, ran.err
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
    ran = run("eval", "fidelity", store, *chosen, *SMALL, "--out", tmp_path, "--json", "-q")
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    options = {entry["label"]: entry["options"] for entry in result["entries"]}
    assert options["lessismore:select_layers=0,1,tail=off"] == {"select_layers": "0,1", "tail": "off"}
    assert options["quest:page_size=4,tail=sample:8"] == {"page_size": "4", "tail": "sample:8"}
    assert result["configuration"]["common"] == {"dense_layers": "0"}


def test_one_that_fails_is_named_and_the_others_are_kept(store, tmp_path, monkeypatch):
    def choose(*_: object) -> None:
        raise ConfigError("the index was eaten")

    monkeypatch.setattr(TopK, "choose", choose)
    ran = run("eval", "fidelity", store, "-s", "topk", *SMALL, "--out", tmp_path, "-q")
    assert ran.code == 1
    assert ran.err.splitlines() == [
        f"error: topk at budget {budget} was not measured: the index was eaten" for budget in ("5", "10%")
    ]
    assert "streaming" in ran.out
    assert len(json.loads((tmp_path / "fidelity.json").read_text())["failures"]) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--budgets", "abc"), "budget 'abc' is neither a count like 1024 nor a share like 2%"),
        (("--budgets", "64,"), "budget '' is neither"),
        (("--budgets", "0"), "leaves nothing to measure"),
        (("-o", "budget=6"), "give it as --budgets"),
        (("-s", "topk:budget=6"), "give it as --budgets"),
        (("-s", "magic"), "unknown selector 'magic'"),
        (("-s", "topk:colour=green"), "has no option 'colour'"),
        (("-s", "topk:green"), "option 'green' is not of the form key=value"),
        (("-s", "topk:index=faiss-ivf"), "there is no 'faiss-ivf' index"),
        (("-s", "topk", "-s", "topk"), "selector 'topk' is given twice"),
        (("--question", " "), "the question is empty"),
    ],
)
def test_wrong_use_is_refused_before_a_model_is_loaded(options, sentence, store, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("a model was loaded"))
    assert sentence in refused(2, "eval", "fidelity", store, "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_an_empty_folder_is_no_store(tmp_path):
    (tmp_path / "empty").mkdir()
    said = refused(1, "eval", "fidelity", tmp_path / "empty", "--out", tmp_path / "out")
    assert "is not a KV store" in said
    assert "There is no store" in refused(1, "eval", "fidelity", tmp_path / "none", "--out", tmp_path / "out")


def test_an_earlier_result_is_kept(store, tmp_path):
    (tmp_path / "fidelity.json").write_text("mine")
    assert "choose another --out" in refused(2, "eval", "fidelity", store, "--out", tmp_path)
    assert (tmp_path / "fidelity.json").read_text() == "mine"
