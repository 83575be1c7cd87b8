"""The scripts for a card run from end to end where there is none: on the host, and on the stand-in."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_model


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a script prints as JSON, given these arguments."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["script", *argv])
        assert gpu_model.main() == 0
        printed = capsys.readouterr().out
        found: dict[str, Any] = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
        return found

    return run


def test_a_tiny_model_is_decoded_on_the_host(run: Any) -> None:
    found = run("decode", "--tiny")
    assert found["ways"]["host"]["tokens"] == 1
    assert found["index"]["recall"] > 0.9


def test_every_way_of_decoding_runs_on_a_device(
    run: Any, card: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_model, "EIGHT_BILLION", gpu_model.TINY)
    sizes = ("--tokens", "2048", "--distinct", "1", "--decode", "2", "--budget", "32", "--weights", "auto")
    found = run("decode", *sizes, "--out", str(tmp_path / "out"))
    ways = found["ways"]
    assert set(ways) == set(gpu_model.WAYS)
    assert ways["host"]["graphs"] == {"passes": [[1, 1]], "refused": None}
    assert ways["device, 2 GiB cached"]["bus_bytes"] < ways["device"]["bus_bytes"]
    assert json.loads((tmp_path / "out" / "gpu_decode_auto.json").read_text()) == found


@pytest.mark.parametrize("weights", [pytest.param("auto", marks=pytest.mark.slow), "streamed"])
def test_a_tiny_model_is_prefilled_on_a_device(run: Any, card: Any, weights: str) -> None:
    asked = ("--tiny", "--tokens", "2048", "--gpu-memory", "16GiB", "--weights", weights)
    assert run("prefill", *asked)["card"] == "a stand-in"
