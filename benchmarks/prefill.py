"""Dense against sparse prefill (tier T1, the shipped model): `python benchmarks/prefill.py --text FILE`.

For each length the text, with ten needles hidden in it, is prefilled with every method, first the dense one.
Times: the attention of the layers with full attention (choosing, fetching and attending, the chunk itself
included), and the first token (prefill, checksums, opening the store, a question's forward pass). Fidelity,
against the dense store, both asked with dense attention: relative rms error of the last full layer's values;
over the CONTINUED tokens that follow in the text, the mean KL divergence of the next-token distributions, in
nats, and the share of equal first choices; and the needles found with top-k attention to 64 tokens.
`--ablations` takes QuoKA's switches one at a time, and its two readings, at the first length.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from million import DEPTHS, drawn
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize
from transformers import AttentionInterface

from offload_decode.attention.queries import Queries
from offload_decode.config import split_pairs
from offload_decode.engine.engine import Engine
from offload_decode.evals.made_with import made_with
from offload_decode.evals.tasks.base import insert, string_match
from offload_decode.evals.tasks.ruler import ASK, FACT
from offload_decode.kernels.rows import Rows
from offload_decode.models.attention import NAME, prefix_attention
from offload_decode.models.cache import PrefixLayer
from offload_decode.models.loading import LoadedModel, load
from offload_decode.selectors.quoka import Scoring
from offload_decode.store.reader import KVStore
from offload_decode.types import Document
from prefill_jobs.job import Settings, prefill_tokens

CONTINUED = 256
METHODS = ("dense", "quoka:budget=2048", "quoka:budget=25%", "sample:budget=2048", "window:budget=2048")
QUOKA = "quoka:budget=2048"
ABLATIONS = (
    QUOKA,
    "per group:budget=2048",
    "quoka:budget=2048,similarity=dot",
    "quoka:budget=2048,reduce=mean",
    *(f"quoka:budget=2048,queries={n}" for n in (1, 4, 64, 512)),
    *(f"quoka:budget={b}" for b in (128, 512, 8192)),
    *(f"quoka:budget=2048,chunk={b}" for b in (128, 2048)),
    "sample:budget=2048",
    "window:budget=2048",
)


@dataclass(frozen=True)
class Result:
    """One prefill: seconds, and how far the store is from the dense one."""

    way: str
    tokens: int
    attention_s: float
    first_token_s: float
    value_error: float
    divergence: float
    agreement: float
    needles: int


@dataclass(frozen=True)
class Sample:
    """A text to prefill, the tokens that follow in it, and what is asked about it: questions and answers."""

    ids: list[int]
    following: list[int]
    asked: dict[str, str]


class Clock:
    """Seconds spent in the attention of layers with full attention."""

    def __init__(self) -> None:
        self.seconds = 0.0
        AttentionInterface.register(NAME, self)

    def __call__(self, module: torch.nn.Module, query: Tensor, key: Tensor, *rest: Any, **named: Any) -> Any:
        began = time.perf_counter()
        given = prefix_attention(module, query, key, *rest, **named)
        if isinstance(getattr(key, "offload_layer", None), PrefixLayer):
            self.seconds += time.perf_counter() - began
        return given


def per_group(scoring: Scoring, queries: Queries) -> Tensor:
    """QuoKA's other reading: tokens, not single queries, are ranked, by the mean likeness of their group."""
    chunk = queries.by_token()
    if queries.tokens > scoring.queries:
        likeness = cosine_similarity(chunk, chunk.mean(3, keepdim=True), dim=-1).mean(2)
        kept = likeness.topk(scoring.queries, largest=False).indices[:, :, None, :, None]
        chunk = chunk.gather(3, kept.expand(*chunk.shape[:3], -1, chunk.shape[-1]))
    return normalize(chunk, dim=-1).mean(2)


@contextmanager
def reading(way: str) -> Iterator[str]:
    """The method of a way, with QuoKA read the other way for `per group`."""
    name = way.partition(":")[0]
    usual = Scoring.representatives
    try:
        if name == "per group":
            Scoring.representatives = per_group  # type: ignore[method-assign]
        yield name.replace("per group", "quoka")
    finally:
        Scoring.representatives = usual  # type: ignore[method-assign]


def continued(engine: Engine, tokens: list[int]) -> Tensor:
    """Log-probabilities `[T, V]` of what follows each of `tokens`, behind the store."""
    logits = [engine.extend([token]) for token in tokens]
    return torch.stack(logits).log_softmax(-1)


def sample(loaded: LoadedModel, ids: list[int], tokens: int) -> Sample:
    """About `tokens` of the text, ten needles included."""
    numbers = drawn(1)
    facts = [FACT.format(key=key, value=number) for key, number in numbers.items()]
    asked = {ASK.format(key=key): number for key, number in numbers.items()}

    def encode(text: str) -> list[int]:
        return list(loaded.tokenizer.encode(text, add_special_tokens=False))

    end = tokens - len(encode(" ".join(facts)))
    return Sample(
        encode(insert(loaded.tokenizer.decode(ids[:end]), facts, DEPTHS)), ids[end : end + CONTINUED], asked
    )


def measured(
    loaded: LoadedModel, clock: Clock, way: str, text: Sample, folder: Path
) -> tuple[Result, np.ndarray[Any, Any], Tensor]:
    """A prefill of a text, with the last full layer's values `[Hkv, N, D]` and the log-probabilities of what
    follows.
    """
    tokens = len(text.ids)
    gc.collect()
    path = folder / way.replace(":", "-")
    with reading(way) as method:
        settings = Settings(method, split_pairs(way.partition(":")[2].split(",") if ":" in way else []))
        corpus = np.array(text.ids, np.int32)
        clock.seconds, began = 0.0, time.perf_counter()
        prefill_tokens(loaded, corpus, [Document("text", 0, tokens)], path, settings)
    attention = clock.seconds
    engine = Engine.open(path, loaded, selector="dense")
    engine.fork().extend(text.following[:16])
    first = time.perf_counter() - began
    store: KVStore = engine.store
    layer = store.manifest.shape.full_layers[-1]
    heads = range(store.manifest.shape.kv_heads)
    everything = slice(0, tokens)
    values = np.stack(
        [Rows(store.values(layer, h)).read(everything, torch.device("cpu")).numpy() for h in heads]
    )
    quick = Engine.open(path, loaded, options={"budget": "64"})
    needles = sum(
        string_match((number,), quick.answer(asked, 40).text) == 1 for asked, number in text.asked.items()
    )
    found = continued(engine, text.following)
    return Result(way, tokens, attention, first, 0.0, 0.0, 1.0, needles), values, found


def row(result: Result, dense: Result) -> str:
    return (
        f"| {result.tokens:,} | {result.way.replace(':', ', ').replace(',budget', ', budget')} "
        f"| {result.attention_s:.1f} s ({dense.attention_s / result.attention_s:.1f}x) "
        f"| {result.first_token_s:.1f} s ({dense.first_token_s / result.first_token_s:.1f}x) "
        f"| {result.value_error:.1%} | {result.divergence:.4f} | {result.agreement:.0%} "
        f"| {result.needles} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="a text of more tokens than the longest")
    parser.add_argument("--lengths", default="8192,16384,32768,50000", help="tokens, separated by commas")
    parser.add_argument("-m", "--method", action="append", help="NAME or NAME:KEY=VALUE,…; repeatable")
    parser.add_argument("--ablations", action="store_true", help="QuoKA's switches instead")
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    ways = list(arguments.method or METHODS)
    if arguments.ablations:
        lengths, ways = lengths[:1], list(ABLATIONS)

    loaded, clock = load("demo", "cpu"), Clock()
    beginning = arguments.text.read_text()[: 8 * (max(lengths) + CONTINUED)]
    ids = loaded.tokenizer.encode(beginning, add_special_tokens=False)
    if len(ids) < max(lengths) + CONTINUED:
        parser.error(f"{arguments.text} has only {len(ids):,} tokens: give a longer text")
    with TemporaryDirectory(prefix="offload-decode-prefill-") as folder:
        measured(
            loaded, clock, "dense", sample(loaded, ids, 1024), Path(folder)
        )  # compiles what is compiled once
    results: list[Result] = []
    print(
        "| tokens | method | attention | first token | values off by | KL | same next token | needles of 10 |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for tokens in lengths:
        with TemporaryDirectory(prefix="offload-decode-prefill-") as folder:
            text = sample(loaded, ids, tokens)
            dense, true_values, truth = measured(loaded, clock, "dense", text, Path(folder))
            results.append(dense)
            print(row(dense, dense), flush=True)
            for way in ways:
                if way == "dense":
                    continue
                result, values, found = measured(loaded, clock, way, text, Path(folder))
                result = replace(
                    result,
                    value_error=float(np.linalg.norm(values - true_values) / np.linalg.norm(true_values)),
                    divergence=float((truth.exp() * (truth - found)).sum(-1).mean()),
                    agreement=float((truth.argmax(-1) == found.argmax(-1)).float().mean()),
                )
                results.append(result)
                print(row(result, dense), flush=True)
    if arguments.out:
        report = {"made_with": made_with(loaded), "results": [asdict(result) for result in results]}
        report["threads"] = torch.get_num_threads()
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
