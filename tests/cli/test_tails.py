"""`ask` with an estimate of the unselected tail: its error is stated, and a wrong option is a sentence."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import refused, run

ASK = ("what is the colour of thing 3?", "--max-new-tokens", "4", "-o", "budget=5")


def test_a_sampled_tail_states_its_error(store: Path) -> None:
    ran = run("ask", store, *ASK, "-o", "tail=sample:32")
    assert (ran.code, ran.err.count("\n")) == (0, 1)
    assert "uncertain by" in ran.err
    assert "% (standard error, mean)" in ran.err
    told = json.loads(run("ask", store, *ASK, "-o", "tail=sample:32", "--json").out)
    assert told["options"]["tail"] == "sample:32"
    assert 0 < told["stats"]["tail_error"] < 1
    assert f"{told['stats']['tail_error']:.2%}" in ran.err  # the draws are the same


def test_clusters_state_none(store: Path) -> None:
    assert run("ask", store, *ASK, "-o", "tail=clusters").err == ""


def test_a_wrong_estimate_is_refused(store: Path) -> None:
    assert "off, clusters or sample" in refused(2, "ask", store, *ASK, "-o", "tail=mean")
    for size in ("70000", "1" + 30 * "0"):
        assert "from 2 to 65536" in refused(2, "ask", store, *ASK, "-o", f"tail=sample:{size}")
