"""Prefill of an 8B-shaped model with random weights under a cap: `python benchmarks/gpu_prefill.py`.

The model is built from a config, on the device; random tokens are prefilled for `--minutes`, with the GPU
memory capped as by `--gpu-memory`. Prints tokens, tokens/s, the peak of the GPU memory and the bytes written,
and saves them with the card and the versions. `--tiny` runs the same steps with a small model anywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import suppress
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cli.counts import byte_count
from offload_decode.config import split_pairs
from offload_decode.evals.made_with import made_with
from offload_decode.memory import own_memory
from offload_decode.models.loading import wrap
from offload_decode.planning.caps import Caps, apply_caps
from offload_decode.types import Document
from prefill_jobs.job import Settings, prefill_tokens

EIGHT_BILLION = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 1 << 24,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1 << 24,
}


class Enough(Exception):
    """The time is up."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10, help="of prefill, at most")
    parser.add_argument("--tokens", type=int, default=350_000, help="at most: 128 KiB a token go to the disk")
    parser.add_argument("--gpu-memory", default="16GiB", help="cap, as of `offload-decode prefill`")
    parser.add_argument("--method", default="quoka", help="prefill method")
    parser.add_argument(
        "-o", "--option", action="append", help="its options; default: budget=2048, chunk=512"
    )
    parser.add_argument("--kv", default="auto", help="auto, int8 or int4-values")
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU where there is no GPU")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the figures")
    arguments = parser.parse_args()
    if not (torch.cuda.is_available() or arguments.tiny):
        print("gpu_prefill.py needs a CUDA device, and torch sees none here.", file=sys.stderr)
        return 2

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        apply_caps(Caps(byte_count(arguments.gpu_memory), None), device)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**(TINY if arguments.tiny else EIGHT_BILLION)))
    torch.set_default_dtype(torch.float32)
    loaded = wrap(model, model_id="random weights")
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, arguments.tokens).astype(np.int32)
    options = split_pairs(arguments.option or ["budget=1024", "chunk=256"])
    settings = Settings(arguments.method, options, kv=arguments.kv)
    done, seconds, memory, began = 0, 0.0, 0, 0.0

    def watch(stage: str, now: int, total: int) -> None:
        nonlocal done, seconds, memory, began
        if stage != "prefill":
            return
        began = began or time.perf_counter()
        done, seconds, memory = now, time.perf_counter() - began, max(memory, own_memory())
        if seconds > 60 * arguments.minutes:
            raise Enough

    with TemporaryDirectory(prefix="offload-decode-gpu-", dir=".") as folder:
        corpus = [Document("random", 0, len(tokens))]
        with suppress(Enough):
            prefill_tokens(loaded, tokens, corpus, Path(folder) / "s", settings, progress=watch)
        written = sum(file.stat().st_blocks * 512 for file in Path(folder).rglob("*") if file.is_file())
    figures = {
        "date": date.today().isoformat(),
        "card": torch.cuda.get_device_name() if device == "cuda" else "none",
        "made_with": made_with(loaded),
        "cap": arguments.gpu_memory,
        "settings": {"method": arguments.method, **options, "kv": arguments.kv},
        "tokens": done,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(done / max(seconds, 1e-9), 1),
        "peak_gpu_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else 0,
        "peak_host_bytes": memory,
        "written_bytes": written,
    }
    print(json.dumps(figures, indent=1))
    if not arguments.tiny:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "gpu_prefill.json").write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
