"""Do chunk boundaries change what a recurrent layer computes? `python -m benchmarks.chunk_boundaries`.

One recurrent layer of each family (tiny, random weights) runs over the same random inputs in one pass, and in
chunks of several lengths, its state carried from one to the next as a prefill does. Printed: the largest
difference of the outputs and of the last states, relative to the largest number of the pass that is whole.
Zero: bit for bit the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import __version__
from transformers.utils import logging

from benchmarks import tables
from offload_decode.errors import OffloadDecodeError
from offload_decode.models.rows_apart import Probe, is_mixer, run_rows_apart
from tests.tiny import tiny_model

FAMILIES = (
    "qwen3_next", "olmo_hybrid", "kimi_linear", "granitemoehybrid", "nemotron_h", "falcon_h1", "bamba",
    "zamba2", "jamba", "lfm2",
)  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pass_of(mixer: Any, inputs: Tensor, chunk: int) -> tuple[Tensor, list[Tensor]]:
    """Outputs `[1, T, D]` and the last states, in chunks."""
    probe = Probe(mixer.layer_idx)
    out = torch.cat([mixer(part, probe) for part in inputs.split(chunk, dim=1)], dim=1)
    return out, probe.states(mixer.layer_idx)


def difference(ours: Tensor, whole: Tensor) -> float:
    """Largest, relative to the largest number."""
    return float((ours.float() - whole.float()).abs().max() / whole.float().abs().max())


def row(family: str, dtype: str, tokens: int, chunks: Sequence[int]) -> list[str]:
    """A line of the table."""
    model = tiny_model(family).to(DTYPES[dtype])
    mixer = next(module for module in model.base_model.modules() if is_mixer(module))
    run_rows_apart(model.base_model)
    inputs = torch.randn(1, tokens, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(
        DTYPES[dtype]
    )
    cells = []
    with torch.inference_mode():
        whole, states = pass_of(mixer, inputs, tokens)
        for chunk in chunks:
            ours, ended = pass_of(mixer, inputs, chunk)
            of_states = max(map(difference, ended, states))
            cells.append(f"{difference(ours, whole):.0e} / {of_states:.0e}")
    return [family, type(mixer).__name__, dtype, *cells]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=320)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 63, 64, 65, 128])
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    print(f"transformers {__version__}, torch {torch.__version__}, {arguments.tokens} tokens on the CPU")
    rows = []
    for family in FAMILIES:
        for dtype in DTYPES:
            try:
                rows.append(row(family, dtype, arguments.tokens, arguments.chunks))
            except OffloadDecodeError as error:
                rows.append([family, str(error), dtype, *[""] * len(arguments.chunks)])
    heads = ["family", "layer", "dtype", *(f"chunks of {chunk}: out / state" for chunk in arguments.chunks)]
    print(tables.table(heads, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
