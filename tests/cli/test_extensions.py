"""Extensions on the command line: used, listed, completed, and refused where one is broken."""

import json
from pathlib import Path

import pytest

from offload_decode.cli import doctor, options
from tests.cli.conftest import done, json_of, refused, run
from tests.extensions.installing import install, install_example

QUESTION = ("What is the number of thing 3?", "--max-new-tokens", "2")


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example, installed, beside a distribution that cannot be imported."""
    groups = ("selectors", "indexes", "prefill_methods")
    torn = {group: {"torn": "torn_module:Torn"} for group in groups}
    install(tmp_path / "torn", monkeypatch, "torn", torn, {"torn_module": "import nowhere"})
    install_example(tmp_path / "example", monkeypatch)


@pytest.mark.usefixtures("example")
def test_it_selects_searches_and_prefills(home, copy, tmp_path):
    store = copy("docs.kv")
    done("ask", store, *QUESTION, "-s", "longest-keys", "-o", "budget=20", "-o", "skip=3", "--json")
    assert refused(2, "ask", store, *QUESTION, "-s", "longest-keys", "-o", "skip=-1").endswith("0 or more")
    assert json_of("index", store, "--kind", "sorted-keys")["kind"] == "sorted-keys"
    told = json_of("ask", store, *QUESTION, "-o", "index=sorted-keys", "-o", "budget=20")
    assert told["search"] == {"index": "sorted-keys"}
    flat = json_of("ask", store, *QUESTION, "-o", "index=flat", "-o", "budget=20")
    assert told["answer"] == flat["answer"], "both searches are exact"
    assert "the sorted-keys index" in " ".join(json_of("verify", store)["checked"])
    corpus, out = home / "corpus.txt", tmp_path / "evenly.kv"
    how = ("--method", "evenly", "-o", "budget=50%")
    done("prefill", corpus, "--model", home / "model", "--out", out, *how)
    (tmp_path / "more.txt").write_text("Fact 99: the colour of thing 99 is blue.\n")
    done("append", out, tmp_path / "more.txt")
    told = json_of("inspect", out)
    assert told["manifest"]["prefill"]["method"] == "evenly"


@pytest.mark.usefixtures("example")
def test_it_is_listed_by_the_distribution_that_brings_it():
    told = {one["name"]: one for one in json_of("selectors")["selectors"]}
    assert told["longest-keys"]["from"] == "key-lengths 0.1.0"
    assert told["longest-keys"]["method"] == "Select the longest keys."
    assert told["longest-keys"]["options"]["skip"] == 0
    assert "nowhere" in told["torn"]["problem"]
    assert told["topk"]["paper"].startswith("https://")
    shown = run("selectors").out
    assert "longest-keys: Select the longest keys.\n" in shown
    assert "torn: cannot be used\n  the selector 'torn' of torn 0.1 cannot be used" in shown
    version = run("--version").out
    assert (
        "key-lengths 0.1.0: selector longest-keys, index kind sorted-keys, prefill method evenly" in version
    )


@pytest.mark.usefixtures("example")
def test_the_shell_completes_its_names():
    assert {"loki", "longest-keys"} <= {*options.selector_names()}
    assert "sorted-keys" in options.index_kinds()
    assert options.prefill_methods() == ["dense", "quoka", "sample", "window", "evenly", "torn"]
    assert "index=sorted-keys" in options.selector_options()


@pytest.mark.usefixtures("example")
def test_a_broken_extension_is_refused_in_a_sentence(home, store, tmp_path):
    corpus, into = home / "corpus.txt", ("--model", home / "model", "--out", tmp_path / "s")
    for arguments in (
        ["ask", store, *QUESTION, "-s", "torn"],
        ["ask", store, *QUESTION, "-o", "index=torn"],
        ["index", store, "--kind", "torn"],
        ["prefill", corpus, *into, "--method", "torn"],
    ):
        said = refused(1, *arguments)
        assert "'torn' of torn 0.1 cannot be used" in said
        assert "No module named 'nowhere'" in said
    done("ask", store, *QUESTION)
    done("--help")


@pytest.mark.usefixtures("example")
def test_doctor_imports_each_and_names_what_is_wrong(monkeypatch):
    monkeypatch.setattr(doctor, "_CHECKS", [check for check in doctor._CHECKS if check[0] == "extensions"])
    (check,) = json_of("doctor")["checks"]
    assert check["state"] == "broken"
    assert check["found"].count("of torn 0.1 cannot be used") == 3
    assert "key-lengths" not in check["found"]


def test_doctor_says_what_is_installed_and_that_nothing_is(tmp_path, monkeypatch):
    assert doctor._checked("extensions", False, doctor._extensions).state == "absent"
    install_example(tmp_path, monkeypatch)
    check = doctor._checked("extensions", False, doctor._extensions)
    assert (check.state, check.found.partition(":")[0]) == ("ok", "key-lengths 0.1.0")


def test_what_an_extension_made_says_so_where_it_is_not_installed(home, copy, tmp_path):
    store, made = copy("docs.kv"), tmp_path / "evenly.kv"
    with pytest.MonkeyPatch.context() as patch:
        install_example(tmp_path / "example", patch)
        done("index", store, "--kind", "sorted-keys")
        arguments = ["--model", home / "model", "--out", made, "--method", "evenly"]
        done("prefill", home / "corpus.txt", *arguments)
    said = refused(2, "ask", store, *QUESTION, "-o", "index=sorted-keys")
    assert "built by an extension that is not installed here: install the package" in said
    done("ask", store, *QUESTION)
    assert "sorted-keys" in run("inspect", store).out
    (problem,) = json.loads(run("verify", store, "--json").out)["problems"]
    assert "not installed here" in problem
    assert run("ask", made, *QUESTION).code == 0, "how a store was prefilled is no matter to who asks it"
    assert "neither built in nor installed" in refused(2, "append", made, home / "corpus.txt")


@pytest.mark.usefixtures("example")
def test_plan_counts_an_index_that_is_an_extension(home):
    shown = run("plan", "--model", home / "model", "--tokens", "100K", "-o", "index=sorted-keys").out
    assert "ask: indexes (sorted-keys)" in shown
    (choice,) = (line for line in shown.splitlines() if line.startswith("indexes "))
    assert "sorted-keys" in choice
    assert "torn" not in choice
