"""What a smaller store loses: python -m benchmarks.compact --model M --text FILE

Facts are planted in a text, which is prefilled. Questions for them, and two for the whole of the text, are
answered with dense attention; the tokens of these answers are then run

- behind stores in fewer bits, with dense attention and with the default selector (`--only bits`),
- behind keys in 4 and 2 bits, with dense attention and with an exact search (`--only keys`): with a scale and
  a zero for each key, for each key without the mean of all (SageAttention, arXiv 2410.02367), or for each
  channel of 32 keys (KIVI, arXiv 2402.02750),
- with attention to kept keys alone (`--only kept`), by the largest share of attention that they get from
  queries that repeat the text (KVzip, arXiv 2505.23416), or from the queries that the store has, or by
  chance: equally many of each KV head, or by one budget for all heads.

KL is of the next token's probabilities to the dense ones, in nats; top-1 is how often the likeliest token is
the same; `whole` is how many facts are the same to the last token.
"""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import option_parser, table
from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import tensor_view
from offload_decode.engine.citations import AnySelection
from offload_decode.engine.engine import Engine
from offload_decode.engine.step import StoredPrefix
from offload_decode.evals.fidelity import agreement, forced
from offload_decode.evals.recorded_queries import DenseRun, run_dense
from offload_decode.kv.host_cache import HostKV
from offload_decode.models.loading import LoadedModel, load
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import Settings, prefill
from offload_decode.store.memory import MemoryStore
from offload_decode.store.reader import KVStore
from offload_decode.types import AttentionState, Selection

PLACES = ["mill", "harbour", "chapel", "brewery", "orchard", "stable", "bakery", "lighthouse", "library"]
PLACES += ["market", "tannery", "forge"]
OTHERS = "What is this text about?", "Write down what happened on the first day in the text."
ASKED, FACT_TOKENS, OTHER_TOKENS = 8, 12, 32  # facts, and tokens of an answer
FIRST = "Repeat the previous context:"
FURTHER = "Repeat the part of the previous context that starts with:"
CHUNK, BEGINNING = 1024, 8  # tokens that are repeated at a time, and those that are told of them
BEGIN, END = 8, 16  # tokens that every head keeps
BITS = "auto", "int8", "int4-values"
TOGETHER = 32  # keys that share the scale of a channel
FEW_BITS = 4, 2
GROUPS = "key", "key, mean taken off", "channel"
TABLES = "bits", "keys", "kept"
HEADS = "KL, facts", "top-1", "whole", "KL, others", "top-1"
WAYS = [  # scores, ratio, one budget for all heads
    *(("chance", 2, False), ("stored queries", 2, False), ("stored queries", 4, False)),
    *(("repeated", 1.5, False), ("repeated", 2, False), ("repeated", 4, False)),
    *(("repeated", 2, True), ("repeated", 3, True), ("repeated", 4, True), ("repeated", 8, True)),
]


def planted(text: str) -> str:
    """The text with a fact for most of the places, spread over its lines."""
    lines, draw = text.split("\n"), random.Random(7)
    told: dict[int, list[str]] = {}
    for number, place in enumerate(PLACES):
        after = math.ceil((number + 0.5) * len(lines) / len(PLACES))
        told.setdefault(after, []).append(f"The code of the {place} is {draw.randint(10_000, 99_999)}.")
    return "\n".join(part for number, line in enumerate(lines) for part in (line, *told.get(number, ())))


class Received:
    """An `Observer` of the largest share of attention that any query pays to each key: `[layers, Hkv, N]`."""

    whole = True

    def __init__(self, host: HostKV):
        self.host, shape = host, host.store.manifest.shape
        self.shares = torch.zeros(len(shape.layers), shape.kv_heads, host.length)

    def see(
        self, layer: int, rows: Tensor, queries: Queries, selection: AnySelection, state: AttentionState
    ) -> None:
        for head, keys in enumerate(self.host.layer_keys(layer)):
            stored = keys.read(slice(None), torch.device("cpu"))
            logits = queries.logits(queries.vectors[head, rows] @ stored.T)
            shares, own = (logits - state.lse[head, rows, None]).exp(), self.shares[layer, head]
            torch.maximum(own, shares.amax(0), out=own)


def repeated(engine: Engine, store: KVStore) -> Tensor:
    """Scores of the queries of a pass that repeats the text, chunk by chunk."""
    tokens, received = store.tokens.tolist(), Received(engine.prefix.host)
    for start in range(0, len(tokens), CHUNK):
        talk = engine.fork()
        talk.prefix.watches = (received,)
        told = engine.loaded.tokenizer.decode(tokens[start : start + BEGINNING])
        talk.ask(f"{FURTHER} {told}" if start else FIRST)
        with talk.step():
            talk.run(tokens[start : start + CHUNK])
    return received.shares


def of_stored(store: KVStore) -> Tensor:
    """Scores of the queries that the store has, of which each is put to all keys."""
    shape = store.manifest.shape
    scores = torch.zeros(len(shape.layers), shape.kv_heads, store.manifest.n_tokens)
    for layer in shape.full_layers:
        for head in range(shape.kv_heads):
            queries, keys = (tensor_view(part(layer, head)).float() for part in (store.queries, store.keys))
            scores[layer, head] = (queries @ keys.T * shape.head_dim**-0.5).softmax(-1).amax(0)
    return scores


def chosen(scores: Tensor, ratio: float, together: bool) -> Tensor:
    """Which keys are kept, bool as the scores."""
    scores = scores.clone()
    scores[..., :BEGIN] = scores[..., -END:] = torch.inf
    if together:
        return scores >= scores.flatten().topk(int(scores.numel() / ratio)).values[-1]
    best = scores.topk(int(scores.shape[-1] / ratio), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def rounded(keys: Tensor, bits: int, group: str) -> Tensor:
    """What `keys [N, D]` become in so many bits, with a scale and a zero for each of the `GROUPS`: none is
    off by more than half a step of its group.
    """
    mean = keys.mean(0) if group == GROUPS[1] else torch.zeros(keys.shape[1])
    parts, axis = (keys.split(TOGETHER), 0) if group == GROUPS[2] else ([keys - mean], 1)
    whole = []
    for part in parts:
        low, high = part.amin(axis, keepdim=True), part.amax(axis, keepdim=True)
        step = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(torch.float32).tiny)
        whole.append(low + ((part - low) / step).round() * step)
    return torch.cat(whole) + mean


def with_keys(store: KVStore, bits: int, group: str) -> MemoryStore:
    """The store's own values behind rounded keys, all in float32."""
    shape = store.manifest.shape
    places = [[(layer, head) for head in range(shape.kv_heads)] for layer in range(len(shape.layers))]

    def floats(rows: Any) -> Tensor:
        return tensor_view(rows).float()

    keys = [[rounded(floats(store.keys(*at)), bits, group).numpy() for at in own] for own in places]
    values = [[floats(store.values(*at)).numpy() for at in own] for own in places]
    return MemoryStore(shape, keys, values)


class KeptKV(HostKV):
    """A store in host memory of which the kept keys alone are attended to."""

    def __init__(self, store: KVStore, loaded: LoadedModel, kept: Tensor):
        super().__init__(store, loaded.device)
        self._ids = {layer: self._padded(kept[layer]) for layer in store.manifest.shape.full_layers}

    def attend(self, layer: int, queries: Queries, selection: Any, *more: Any) -> AttentionState:
        ids = self._ids[layer][:, None].expand(-1, queries.vectors.shape[1], -1)
        return super().attend(layer, queries, Selection(ids.contiguous()), *more)

    @staticmethod
    def _padded(kept: Tensor) -> Tensor:
        each = [own.nonzero()[:, 0] for own in kept]
        return torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=-1)


def row(name: str, engine: Engine, runs: Sequence[DenseRun]) -> list[str]:
    """What the answers behind another prefix lose."""
    pairs = [(run.logits, forced(engine.fork(), run, lambda: None)) for run in runs]
    facts, others = agreement(pairs[:ASKED]), agreement(pairs[ASKED:])
    whole = sum(bool((one.argmax(-1) == other.argmax(-1)).all()) for one, other in pairs[:ASKED])
    cells = [name, f"{facts.kl_mean:.3f}", f"{facts.top1:.1%}", f"{whole}/{ASKED}"]
    return [*cells, f"{others.kl_mean:.3f}", f"{others.top1:.1%}"]


def in_bits(folder: Path, source: Path, loaded: LoadedModel, runs: Sequence[DenseRun]) -> Iterator[list[str]]:
    """Behind the stores that can be prefilled."""
    for bits in BITS:
        smaller = folder / f"{bits}.kv"
        prefill(str(source), model=loaded.model_id, out=smaller, settings=Settings(kv=bits))
        build_indexes(smaller, "clusters")
        size = sum(KVStore.open(smaller).cost().values())
        for selector in ("dense", "topk"):
            engine = Engine.open(smaller, loaded, selector=selector)
            yield row(f"{bits}, {size >> 20} MB, {selector}", engine, runs)


def in_fewer_bits(store: KVStore, loaded: LoadedModel, runs: Sequence[DenseRun]) -> Iterator[list[str]]:
    """Behind keys that are rounded, which no store has."""
    for bits, group in product(FEW_BITS, GROUPS):
        host = HostKV(with_keys(store, bits, group), loaded.device)
        name = f"keys in {bits} bits, a scale a {group}"
        for selector in ("dense", "topk"):
            prefix = StoredPrefix.over(host, loaded.shape, selector, {})
            yield row(f"{name}, {selector}", Engine(loaded, store, prefix), runs)


def of_kept(store: KVStore, loaded: LoadedModel, runs: Sequence[DenseRun]) -> Iterator[list[str]]:
    """With attention to kept keys alone."""
    engine = Engine.open(store, loaded, selector="dense")
    scores = {"stored queries": of_stored(store), "repeated": repeated(engine, store)}
    scores["chance"] = torch.rand(scores["repeated"].shape, generator=torch.Generator().manual_seed(0))
    for way, ratio, together in WAYS:
        name = f"{way}, {ratio:g}x{', all heads' if together else ''}"
        kept = KeptKV(store, loaded, chosen(scores[way], ratio, together))
        prefix = StoredPrefix.over(kept, loaded.shape, "dense", {})
        yield row(name, Engine(loaded, store, prefix), runs)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--begin", type=int, default=200_000, help="character of the text to begin with")
    parser.add_argument("--characters", type=int, default=14_600)
    parser.add_argument("--only", choices=TABLES, help="one of the three tables  [default: all]")
    options = parser.parse_args()
    text = options.text.read_text()[options.begin : options.begin + options.characters]
    with TemporaryDirectory() as folder:
        source, path = Path(folder) / "text.txt", Path(folder) / "text.kv"
        source.write_text(planted(text))
        prefill(str(source), model=options.model, out=path)
        store = KVStore.open(path)
        own = store.manifest
        loaded = load(own.model_id, "cpu", own.dtype, own.weights, own.scaled)
        asked = [(f"What is the code of the {place}?", FACT_TOKENS) for place in PLACES[:ASKED]]
        asked += [(question, OTHER_TOKENS) for question in OTHERS]
        runs = [run_dense(loaded, store, question, tokens, lambda: None) for question, tokens in asked]
        for run in runs:
            print(run.question, repr(loaded.tokenizer.decode(run.tokens)), flush=True)
        print(f"\n{own.n_tokens:,} tokens")
        found = {
            "bits": in_bits(Path(folder), source, loaded, runs),
            "keys": in_fewer_bits(store, loaded, runs),
            "kept": of_kept(store, loaded, runs),
        }
        for name in (options.only,) if options.only else TABLES:
            print(f"\n{table([name, *HEADS], list(found[name]))}", flush=True)


if __name__ == "__main__":
    main()
