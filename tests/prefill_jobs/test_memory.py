"""The memory of a prefill does not grow with what it writes."""

from __future__ import annotations

import subprocess
import sys

import pytest

RUN = """
import sys
import numpy as np
from pathlib import Path
from offload_decode.models.loading import wrap
from offload_decode.types import Document
from offload_decode.prefill_jobs import chunks
from offload_decode.prefill_jobs.job import prefill_tokens
from tests.tiny import tiny_model
n = int(sys.argv[2])
chunks.BLOCK_TOKENS = 1024  # both runs hold whole blocks
model = tiny_model(num_key_value_heads=4, head_dim=128)
tokens = np.random.default_rng(0).integers(3, 131, n).astype(np.int32)
report = prefill_tokens(wrap(model), tokens, [Document("all", 0, n)], Path(sys.argv[1]))
print(report.peak_memory, report.bytes)
"""


def measured(folder, tokens):
    command = [sys.executable, "-c", RUN, str(folder / str(tokens)), str(tokens)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    return [int(number) for number in out.split()]


@pytest.mark.slow
def test_memory_stays_while_the_store_grows(tmp_path):
    (short, little), (long, much) = measured(tmp_path, 3_000), measured(tmp_path, 15_000)
    assert much - little > 140e6
    assert long - short < 0.25 * (much - little)
