"""`benchmarks/step.py` from end to end, on tiny sizes."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import step


def rows(path: Path) -> dict[str, dict[str, Any]]:
    report = json.loads(path.read_text())
    return {row["way"]: row for row in report["rows"] if row["k"] == max(r["k"] for r in report["rows"])}


def test_every_way_is_timed_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "step.json"
    step.main(["--quick", "--json", str(saved), "--results", str(tmp_path)])
    found = rows(saved)
    errors = []
    for name in ("flat", "faiss flat per query head", "faiss flat per KV head"):
        assert found[name]["fidelity"]["ratio"] == pytest.approx(1, abs=1e-4)
        errors.append(found[name]["fidelity"]["error"])
    assert errors == pytest.approx([errors[0]] * 3, rel=1e-2), "all attend to the exact top-k"
    for name in (name for name in found if name.startswith("torch dense") or name == "all"):
        assert found[name]["fidelity"]["error"] < 0.01
    assert {"clusters", "faiss IVF per query head"} <= found.keys()
    assert found["clusters"]["allowed"] > 0
    assert all(row["seconds"] > 0 for row in found.values())
    assert "GB/s" in capsys.readouterr().out
    assert not list(tmp_path.glob("history*")), "a quick run is no measurement"


def test_questions_at_once_are_judged_as_one_by_one(tmp_path: Path) -> None:
    saved = tmp_path / "step.json"
    asked = ["--quick", "--ours", "flat", "--baselines", "", "--batch", "1,4"]
    step.main([*asked, "--json", str(saved)])
    report = json.loads(saved.read_text())
    judged = {(row["k"], row["batch"]): row["fidelity"] for row in report["rows"]}
    assert {batch for _, batch in judged} == {1, 4}
    assert all(judged[k, 1] == judged[k, batch] for k, batch in judged)
