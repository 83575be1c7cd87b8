"""`models` states the equivalence check: of the families that the suite serves, and of one model's config."""

import json
from importlib.metadata import version
from importlib.resources import files

import pytest

from tests.cli.conftest import done, json_of, run
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
