"""`benchmarks/step.py` from end to end, on tiny sizes."""

import pytest

from benchmarks import step


def test_every_way_is_timed_and_judged(capsys: pytest.CaptureFixture[str]) -> None:
    rows = step.main(["--quick"])
    found = {row.way: row for row in rows if row.k == max(row.k for row in rows)}
    errors = []
    for name in ("flat", "faiss flat per query head", "faiss flat per KV head"):
        assert found[name].fidelity.ratio == pytest.approx(1, abs=1e-4)
        errors.append(found[name].fidelity.error)
    assert errors == pytest.approx([errors[0]] * 3, rel=1e-2), "all attend to the exact top-k"
    for name in (name for name in found if name.startswith("torch dense") or name == "all"):
        assert found[name].fidelity.error < 0.01
    assert {"clusters", "faiss IVF per query head"} <= found.keys()
    assert (found["clusters"].allowed or 0) > 0
    assert all(row.seconds > 0 for row in found.values())
    assert "GB/s" in capsys.readouterr().out


def test_questions_at_once_are_judged_as_one_by_one() -> None:
    rows = step.main(["--quick", "--ours", "flat", "--baselines", "", "--batch", "1,4"])
    judged = {(row.k, row.batch): row.fidelity for row in rows}
    assert {batch for _, batch in judged} == {1, 4}
    assert all(judged[k, 1] == judged[k, batch] for k, batch in judged)
