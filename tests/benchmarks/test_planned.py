"""The benchmarks of what is stated run: what a search reads, and what the planner expects."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import planned, scanned
from indexes.clusters import ClusteredIndex, share_read


@pytest.mark.parametrize("of", [[], ["--model", "tiny"]])
def test_the_planners_expectation_stands_beside_what_was_measured(of, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planned.main(["--quick", *of])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == list(planned.WAYS)
    for line in lines[2:]:
        told, took, apart = (float(cell.strip(" x")) for cell in line.split("|")[2:5])
        assert min(told, took) > 0
        assert apart >= 1


def test_the_share_of_codes_that_is_read_stands_beside_what_is_stated(capsys):
    scanned.main(["--quick"])
    for line in capsys.readouterr().out.splitlines()[2:]:
        share, stated = (float(cell) for cell in line.split("|")[3:5])
        assert 0 < share <= 1
        assert 0 < stated <= 1


def test_what_is_said_to_be_read_grows_with_what_is_asked_for():
    shares = [share_read(1_000_000, k) for k in (1, 64, 1024, 100_000, 1_000_000)]
    assert shares == sorted(shares)
    assert share_read(1024, 1024) == 1
    few, many = (ClusteredIndex.costs(1_000_000, 128, np.dtype(np.float16), k).read for k in (64, 1024))
    assert few < many
