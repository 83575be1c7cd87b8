"""RULER's tasks as lm-eval has them, asked through stores (tier T1: the shipped model)."""

from __future__ import annotations

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
pytest.importorskip("wonderwords", reason="lm-eval's RULER is not installed")

from lm_eval import simple_evaluate

from offload_decode.prefill_jobs.lm_eval import model  # noqa: F401  # registers the model

TOKENS = 1024


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["dense", "topk,budget=64"])
def test_chains_and_coded_words_are_found(selector: str) -> None:
    """A model that answers nothing scores 0 in both; the three coded words count one by one."""
    found = simple_evaluate(
        "offload-decode",
        model_args=f"pretrained=demo,selector={selector}",
        tasks=["ruler_vt", "ruler_fwe"],
        metadata={"max_seq_lengths": [TOKENS]},
        limit=4,
    )
    assert found["results"]["ruler_vt"][f"{TOKENS},none"] >= 0.75
    assert found["results"]["ruler_fwe"][f"{TOKENS},none"] >= 0.5
