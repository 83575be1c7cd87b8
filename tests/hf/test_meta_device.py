"""Models without weights are made as they are without `Unfilled`."""

import subprocess
import sys

import torch

from offload_decode.hf.meta_device import Unfilled
from tests.tiny import tiny_model

MADE = """
import sys, torch
from offload_decode.hf.meta_device import Unfilled
with Unfilled(), torch.device("meta"):
    torch.nn.Embedding(4, 2)
    made = 1.0 / (10000.0 ** (torch.arange(0, 8, 2, dtype=torch.int64).float() / 8))
    assert torch.empty_like(made, device="cpu").shape == (4,)
assert "sympy" not in sys.modules
"""


def test_the_names_sizes_and_places_are_the_same() -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_model().config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config).state_dict()
    with Unfilled(), torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config).state_dict()
    assert {name: (t.shape, t.dtype, t.device) for name, t in made.items()} == {
        name: (t.shape, t.dtype, t.device) for name, t in plain.items()
    }


def test_elsewhere_numbers_are_drawn_and_counted() -> None:
    with Unfilled():
        drawn = torch.nn.init.normal_(torch.zeros(64))
        counted = torch.arange(3)
    assert drawn.std() > 0.1
    assert counted.tolist() == [0, 1, 2]


def test_no_compiler_is_imported_for_it() -> None:
    subprocess.run([sys.executable, "-c", MADE], check=True)
