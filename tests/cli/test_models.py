"""`models` states the equivalence check: of the families that the suite serves, and of one model's config."""

from __future__ import annotations

import json
from importlib.metadata import version
from importlib.resources import files

import pytest
from typer.testing import CliRunner

from offload_decode.cli.main import app
from tests.families import FAMILIES, SERVED, config_of


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["models", *map(str, arguments)])
    return result.exit_code, result.stdout


def test_the_list_is_of_the_families_that_the_suite_serves():
    known = json.loads(files("offload_decode.cli").joinpath("families.json").read_text())
    if version("transformers") not in known:
        pytest.skip("written for other releases: python -m benchmarks.checked")
    assert set(known[version("transformers")]) == {FAMILIES[name].model_type for name in SERVED}
    code, told = run()
    assert code == 0
    assert f"checked with transformers {version('transformers')}" in told
    assert "llama" in told
    listed = json.loads(run("--json")[1])
    assert listed["families"]["gemma2"] == ["a window", "keys and values"]


def test_a_model_is_checked_from_its_config_alone(tmp_path):
    config_of("gemma2").save_pretrained(tmp_path)
    code, told = run(tmp_path)
    assert code == 0
    assert "served      yes" in told
    assert "2 sliding   64 numbers of keys and values for each token, of the last 7" in told
    stated = json.loads(run(tmp_path, "--json")[1])
    assert stated["served"]
    assert 0 < stated["difference"] < 1e-4
    assert [one["numbers_per_token"] for one in stated["kept"]] == [0, 64]


def test_a_model_that_is_not_served_says_why_and_fails(tmp_path):
    config_of("bloom").save_pretrained(tmp_path)
    code, told = run(tmp_path)
    assert code == 1
    assert "served  no" in told
    assert "code of its own" in told
    config_of("diffllama").save_pretrained(tmp_path / "other")
    code, told = run(tmp_path / "other", "--json")
    assert code == 1
    assert not json.loads(told)["served"]
    assert json.loads(told)["reason"]


def test_inspect_states_the_check_of_the_installed_release(home, store, monkeypatch, tmp_path):
    def line() -> str:
        told = CliRunner().invoke(app, ["inspect", str(store)]).stdout
        return next(line for line in told.splitlines() if line.startswith("checked"))

    release = f"transformers {version('transformers')}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing was checked yet
    assert f"not run here with {release}: offload-decode models" in line()
    assert run(home / "model")[0] == 0
    assert "equal to plain generation" in line()
    assert release in line()


def test_recurrent_layers_are_called_so(tmp_path):
    config_of("lfm2").save_pretrained(tmp_path)
    assert "2 recurrent  a state of" in run(tmp_path)[1]
