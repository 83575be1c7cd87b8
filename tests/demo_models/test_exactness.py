"""What the engine says with a shipped model is what transformers generates with its files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from offload_decode import demo_models
from offload_decode.engine.engine import Engine
from offload_decode.models.loading import load
from offload_decode.prefill_jobs.job import Settings, prefill_tokens
from offload_decode.types import Document

STORED, NEW = 300, 6  # more than a sliding window of a shipped model
CLOSE = {"atol": 1e-3, "rtol": 0}


@pytest.mark.parametrize("name", demo_models.NAMES)
def test_the_logits_of_every_generated_token(name: str, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(demo_models.path(name), dtype="auto").eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(300, 2000, STORED + 9))
    said = plain.generate(
        ids[None], max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    loaded = load(name, "cpu")
    stored, asked = ids[:STORED].numpy().astype(np.int32), ids[STORED:].tolist()
    whole = [Document("text", 0, STORED)]
    prefill_tokens(loaded, stored, whole, tmp_path / "text.kv", Settings(options={"chunk": 64}))
    engine = Engine.open(tmp_path / "text.kv", loaded, options={"budget": str(STORED)})
    steps = [asked, *([token] for token in said.sequences[0, len(ids) : -1].tolist())]
    for tokens, expected in zip(steps, said.logits, strict=True):
        torch.testing.assert_close(engine.extend(tokens), expected[0], **CLOSE)
    with torch.inference_mode():
        without = plain(ids[None, STORED:]).logits[0, -1]
    assert (without - said.logits[0][0]).abs().max() > 0.01, "the control"
