"""`models` and `selectors` list what there is, and `cache` what this user's programs keep."""

import dataclasses
import inspect
import json
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import pytest

from offload_decode.selectors import registry
from offload_decode.selectors.registry import declared
from tests.cli.conftest import done, imported, json_of, run
from tests.families import FAMILIES, SERVED, config_of


def test_the_list_is_of_the_families_that_the_suite_serves():
    known = json.loads(files("offload_decode.cli").joinpath("families.json").read_text())
    if version("transformers") not in known:
        pytest.skip("written for other releases: python -m benchmarks.families --checked")
    assert set(known[version("transformers")]) == {FAMILIES[name].model_type for name in SERVED}
    told = done("models").out
    assert f"checked with transformers {version('transformers')}" in told
    assert "llama" in told
    assert json_of("models")["families"]["gemma2"] == ["a window", "keys and values"]


def test_a_model_is_checked_from_its_config_alone(tmp_path):
    config_of("gemma2").save_pretrained(tmp_path)
    told = done("models", tmp_path).out
    assert "served      yes" in told
    assert "2 sliding   64 numbers of keys and values for each token, of the last 7" in told
    stated = json_of("models", tmp_path)
    assert stated["served"]
    assert 0 < stated["difference"] < 1e-4
    assert [one["numbers_per_token"] for one in stated["kept"]] == [0, 64]


def test_a_model_that_is_not_served_says_why_and_fails(tmp_path):
    config_of("bloom").save_pretrained(tmp_path)
    ran = run("models", tmp_path)
    assert ran.code == 1
    assert "served  no" in ran.out
    assert "code of its own" in ran.out
    config_of("diffllama").save_pretrained(tmp_path / "other")
    ran = run("models", tmp_path / "other", "--json")
    assert (ran.code, json.loads(ran.out)["served"]) == (1, False)
    assert json.loads(ran.out)["reason"]


def test_inspect_states_the_check_of_the_installed_release(home, store, monkeypatch, tmp_path):
    def line() -> str:
        return next(line for line in run("inspect", store).out.splitlines() if line.startswith("checked"))

    release = f"transformers {version('transformers')}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing was checked yet
    assert f"not run here with {release}: offload-decode models" in line()
    done("models", home / "model")
    assert "equal to plain generation" in line()
    assert release in line()


def test_recurrent_layers_are_called_so(tmp_path):
    config_of("lfm2").save_pretrained(tmp_path)
    assert "2 recurrent  a state of" in run("models", tmp_path).out


def test_every_selector_is_listed_with_paper_cost_and_memory():
    listed = json_of("selectors")["selectors"]
    assert [one["name"] for one in listed] == registry.names()
    for one in listed:
        assert one["paper"].startswith("https://") or one["name"] == "random", one["name"]
        assert all(one[fact].strip() for fact in ("method", "reads", "holds")), one["name"]
        assert one["options"].keys() >= {"budget", "schedule", "dense_layers"}


def test_the_text_has_a_block_for_each_selector():
    out = run("selectors").out
    for name in registry.names():
        kind = registry.get(name)
        assert f"\n{name}: " in "\n" + out
        assert kind.paper in out
        assert kind.reads in out


@pytest.mark.parametrize("name", registry.names())
def test_declarations_read_from_source_equal_the_class(name):
    """Class variables and the defaults of options are literals, so that a list needs no imports."""
    told, kind = declared(name), registry.get(name)
    assert (told.name, told.paper, told.reads) == (kind.name, kind.paper, kind.reads)
    assert (told.holds, told.remembers) == (kind.holds, kind.remembers)
    assert told.method == inspect.cleandoc(kind.__doc__).partition("\n\n")[0].replace("\n", " ")
    defaults = [(field.name, field.default) for field in dataclasses.fields(kind.options_type)]
    assert list(told.options.items()) == defaults


def test_listing_skips_slow_imports():
    _, modules = imported("selectors")
    assert "typer" in modules
    assert not {"torch", "transformers", "numba", "zarr", "numpy"} & modules


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "offload-decode"
    (folder / "gguf" / "0a").mkdir(parents=True)
    (folder / "gguf" / "0a" / "config.json").write_bytes(bytes(3_000_000))
    (folder / "served").mkdir()
    (folder / "served" / "running").write_text("now")
    return folder


def test_what_is_kept_is_shown_by_kind(folder: Path) -> None:
    told = json_of("cache")
    assert (told["folder"], told["cleared"]) == (str(folder), False)
    sizes = {one["kind"]: (one["files"], one["bytes"]) for one in told["kinds"]}
    none = dict.fromkeys(("fingerprints", "verified", "fetched", "joined"), (0, 0))
    assert sizes == {"gguf": (1, 3_000_000)} | none
    assert "1 files, 3.0 MB: configs and tokenizers of GGUF files" in run("cache").out
    assert (folder / "gguf" / "0a" / "config.json").exists()


def test_clearing_leaves_what_running_commands_have_there(folder: Path) -> None:
    assert run("cache", "--clear").out.startswith(f"{folder}: cleared")
    assert [path.name for path in folder.iterdir() if any(path.iterdir())] == ["served"]
    assert (folder / "served" / "running").exists()
    assert [one["files"] for one in json_of("cache")["kinds"]] == [0, 0, 0, 0, 0]


def test_a_kind_on_another_disk_is_cleared_there(folder: Path, tmp_path: Path) -> None:
    (folder / "gguf").rename(tmp_path / "large")
    (folder / "gguf").symlink_to(tmp_path / "large")
    assert run("cache", "--clear").code == 0
    assert (folder / "gguf").is_symlink()
    assert not list((tmp_path / "large").iterdir())
