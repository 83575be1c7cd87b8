"""Prefill of an 8B-shaped model with random weights: `python benchmarks/gpu_prefill.py`.

The model is built from a config, on the device or, with `--weights streamed`, on the host; random tokens are
prefilled for `--minutes`, dense and in chunks that fit unless said otherwise, with the GPU memory capped as
by `--gpu-memory`. Prints tokens, tokens/s, the peak of the GPU memory and the bytes written, and saves them
with the card and the versions. `--tiny` runs the same steps with a small model anywhere.
"""

import argparse
import json
import sys
import time
from contextlib import suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offload_decode.cli.options import byte_count
from offload_decode.common.memory import own_memory
from offload_decode.config import STREAMED, split_pairs
from offload_decode.models.layer_streaming import stream
from offload_decode.models.loading import wrap
from offload_decode.models.made_with import made_with
from offload_decode.planning.caps import Caps, apply_caps
from offload_decode.prefill_jobs.job import Settings, prefill_tokens
from offload_decode.types import Document

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


def option_parser(about: str | None) -> argparse.ArgumentParser:
    """With the options that both scripts of an 8B-shaped model have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU where there is no GPU")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the figures")
    return parser


def no_device(arguments: argparse.Namespace, script: str) -> bool:
    """Whether a device is needed, and torch sees none: then stderr says so."""
    missing = not (torch.cuda.is_available() or arguments.tiny)
    if missing:
        print(f"{script} needs a CUDA device, and torch sees none here.", file=sys.stderr)
    return missing


def save(arguments: argparse.Namespace, figures: dict[str, Any], name: str) -> None:
    """Print what was measured, and keep it, unless the model was a tiny one."""
    text = json.dumps(figures, indent=1)
    print(text)
    if not arguments.tiny:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / name).write_text(text + "\n")


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="of prefill, at most")
    parser.add_argument("--tokens", type=int, default=131_072, help="at most: 128 KiB a token go to the disk")
    parser.add_argument("--gpu-memory", help="cap, as of `offload-decode prefill`")
    parser.add_argument("--method", default="dense", help="prefill method")
    parser.add_argument("-o", "--option", action="append", help="its options", default=[])
    parser.add_argument(
        "--weights", choices=("auto", STREAMED), default="auto", help="on the GPU, or streamed"
    )
    parser.add_argument("--kv", default="auto", help="auto, int8 or int4-values")
    arguments = parser.parse_args()
    if no_device(arguments, "gpu_prefill.py"):
        return 2

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and arguments.gpu_memory:
        apply_caps(Caps(byte_count(arguments.gpu_memory), None), device)
    torch.set_default_dtype(torch.bfloat16)
    streamed = arguments.weights == STREAMED
    with torch.device("cpu" if streamed else device):
        model = LlamaForCausalLM(LlamaConfig(**(TINY if arguments.tiny else EIGHT_BILLION)))
    torch.set_default_dtype(torch.float32)
    if streamed:
        stream(model, torch.device(device))
    loaded = replace(wrap(model, model_id="random weights"), streamed=streamed)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, arguments.tokens).astype(np.int32)
    options = split_pairs(arguments.option)
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
        "settings": {"method": arguments.method, **options, "kv": arguments.kv, "weights": arguments.weights},
        "tokens": done,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(done / max(seconds, 1e-9), 1),
        "peak_gpu_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else 0,
        "peak_host_bytes": memory,
        "written_bytes": written,
    }
    way = "" if arguments.weights == "auto" else f"_{arguments.weights}"
    save(arguments, figures, f"gpu_prefill_{arguments.method}_{arguments.gpu_memory or 'whole'}{way}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
