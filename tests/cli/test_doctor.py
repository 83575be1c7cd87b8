"""What is installed, what works on this machine, and what the shell completes."""

import json

import pytest

from offload_decode.cli import doctor, options
from offload_decode.cli.main import app
from offload_decode.indexes.registry import kinds
from offload_decode.selectors import registry
from tests.cli.conftest import done, run
from tests.processes import apart

# What names a third-party library's import by hand would drag in.
HEAVY = {"torch", "transformers", "zarr", "faiss", "numba"}


def test_the_version_comes_first_and_then_what_is_installed():
    ran = done("--version")
    lines = [line.split(maxsplit=1) for line in ran.out.splitlines()]
    assert lines[0] == ["offload-decode", doctor.version_of("offload-decode")]
    told = dict(lines)
    assert set(doctor.LIBRARIES) | {"python", "hnswlib", "gpu"} <= told.keys()
    assert any(name.startswith("faiss") for name in told)
    assert told["torch"] == doctor.version_of("torch")


def test_a_library_that_is_not_there_is_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: _missing(name))
    assert doctor.version_of("torch") is None
    assert doctor.faiss_packages() == []
    assert any(problem.startswith("torch>=") for problem in doctor.unmet())


def _missing(name: str) -> str:
    raise doctor.PackageNotFoundError(name)


def test_a_library_that_is_too_old_is_found(monkeypatch):
    assert doctor.unmet() == []
    monkeypatch.setattr(doctor, "version_of", lambda name: "0.1")
    assert len(doctor.unmet()) >= 10
    assert all("0.1 is installed" in problem for problem in doctor.unmet())


def test_a_library_that_only_an_extra_asks_for_is_not_needed(monkeypatch):
    real = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "ray" else real(name))
    assert doctor.unmet() == []


def test_a_sound_machine_passes(monkeypatch):
    left = [check for check in doctor._CHECKS if check[0] != "self-test"]
    monkeypatch.setattr(doctor, "_CHECKS", left)
    ran = run("doctor", "--json")
    told = json.loads(ran.out)
    assert told["ok"] == (ran.code == 0)
    found = {check["name"]: doctor.Check(**check) for check in told["checks"]}
    assert all(check.state == "ok" for check in found.values() if check.needed)
    assert {"versions", "processor", "memory", "disk", "cache", "compiler", "faiss", "gpu"} <= found.keys()


def test_a_broken_necessity_fails_after_all_checks(monkeypatch):
    def broken() -> str:
        raise OSError(28, "No space left on device", "/tmp")

    def absent() -> str:
        raise doctor.Absent("none here")

    rows = [("first", True, broken), ("second", False, absent), ("third", False, broken)]
    monkeypatch.setattr(doctor, "_CHECKS", rows)
    ran = run("doctor")
    assert ran.code == 1
    assert [line[0] for line in ran.out.splitlines()] == ["✗", "–", "✗"]
    assert "/tmp: No space left on device" in ran.out
    assert ran.err == "error: first: fix this first, then run doctor again\n"
    monkeypatch.setattr(doctor, "_CHECKS", rows[1:])
    done("doctor")


def test_two_packages_that_provide_faiss_are_reported(monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda name: "1.10")
    told = doctor._checked("faiss", False, doctor._faiss)
    assert told.state == "broken"
    assert "uninstall" in told.found


@pytest.mark.slow
def test_the_self_test_finds_its_fact():
    assert "a fact was found" in doctor._self_test()


def test_names_are_completed_without_heavy_imports():
    assert options.selector_names() == registry.names()
    assert options.index_kinds() == list(kinds())
    script = "import sys; from offload_decode.cli import options as c; c.selector_names();"
    loaded = set(apart(script + "c.selector_options(); print(*sys.modules)").stdout.split())
    assert "typer" in loaded
    assert not HEAVY & loaded


def test_stores_are_completed_and_folders_can_be_entered(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpora").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "corpora" / "a.kv").symlink_to(store)
    assert list(options.stores("")) == ["corpora/"]
    assert list(options.stores("corpora/")) == ["corpora/a.kv"]
    assert list(options.stores("corpora/b")) == []
    assert list(options.stores(f"{tmp_path}/co")) == [f"{tmp_path}/corpora/"]
    assert list(options.stores("nowhere/")) == []


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("offload-decode do", "doctor"),
        ("offload-decode ask s.kv why -s qu", "quest quest+topk quest-paper quoka"),
        ("offload-decode ask s.kv why -s top", "topk"),
        ("offload-decode ask s.kv why -o index=f", "index=flat index=faiss-ivf index=faiss-hnsw"),
        ("offload-decode index s.kv --kind h", "hnswlib"),
        ("offload-decode index s.kv --kind faiss-i", "faiss-ivf"),
    ],
)
def test_shell_completion(words, offered):
    from typer.testing import CliRunner

    count = len(words.split()) - 1
    env = {"_OFFLOAD_DECODE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    told = CliRunner().invoke(app, [], prog_name="offload-decode", env=env)
    assert told.stdout.split() == offered.split()
