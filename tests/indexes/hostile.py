"""Saved indexes whose numbers someone has changed, checksums and all: `python -m tests.indexes.hostile KIND`.

A process of its own, because what is tested is that it survives: every changed index is refused in a
sentence, or answers with keys that there are and with their scores.
"""

import json
import random
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from offload_decode.common.errors import VectorIndexError
from offload_decode.indexes import VectorIndex, files, get
from offload_decode.indexes.approximate import ApproximateIndex
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.testing.index_contract import (
    assert_truthful,
    assert_well_formed,
    clustered_keys,
    foreign_queries,
    near_queries,
)

KEYS, K = 3000, 8
SMALL = (0, 1, -1, 2, 15, 16, 255, KEYS - 1, KEYS, KEYS + 1)
WORDS = (*SMALL, 2**31 - 1, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))
FLOATS = (np.nan, np.inf, -np.inf, 1e38, -1.0)


def changed(raw: bytes, rng: random.Random) -> bytes:
    """The file with some of its numbers changed, cut short or lengthened; half of the time near an end."""
    data = bytearray(raw)
    if rng.random() < 0.05:
        del data[rng.randrange(len(data)) :]
        return bytes(data) + bytes(rng.choice([0, 64, 1 << 12]))
    for _ in range(rng.choice([1, 1, 2, 8])):
        size = rng.choice([1, 4, 4, 8])
        last = len(data) // size
        place = rng.choice(
            [rng.randrange(last), rng.randrange(min(128, len(data)) // size), last - 1 - rng.randrange(16)]
        )
        if rng.random() < 0.1:
            word = np.float32(rng.choice(FLOATS)).tobytes()[:size].ljust(size, b"\0")
        else:
            value = rng.choice([*WORDS, rng.getrandbits(8 * size), rng.randrange(KEYS)])
            word = (value % 2 ** (8 * size)).to_bytes(size, "little")
        data[size * place : size * (place + 1)] = word
    return bytes(data)


def write(path: Path, suffix: str, raw: bytes) -> None:
    """Put another native file in its place, and the checksums right."""
    body = {
        name: value
        for name, value in files.metadata(path).items()
        if name not in ("native", "format_version")
    }
    files.save(path, body, suffix, lambda name: Path(name).write_bytes(raw))  # type: ignore[arg-type, return-value]


def outcome(cls: type[VectorIndex], path: Path, keys: Any, queries: Any) -> str:
    """How an index is taken that is refused, or that must answer truthfully."""
    try:
        index = cls.load(path, keys, digest="d")
        hits = index.search(queries, K)
        if isinstance(index, ClusteredIndex) and index.summarized:
            ClusteredIndex.estimate([index], queries[None], hits.ids[None], None, index.dim, 0.3)
    except VectorIndexError:
        return "refused"
    assert_well_formed(hits, len(queries), K, KEYS)
    assert_truthful(hits, queries, keys)
    return "answered"


def main(kind: str, trials: int, seed: int) -> None:
    rng, outcomes = random.Random(seed), Counter[str]()
    keys, queries = clustered_keys(KEYS), foreign_queries(3)
    cls = get(kind)
    assert issubclass(cls, ApproximateIndex)
    index = cls.build(keys, near_queries(64), digest="d", k=K, target_recall=0.8)
    index.summarize(clustered_keys(KEYS))
    assert index.recall is not None
    assert not index.recall.full_scan, "what is scanned does not use the file"
    with TemporaryDirectory() as folder:
        path = Path(folder, "index")
        index.save(path)
        raw = Path(f"{path}{cls.suffix}").read_bytes()
        for trial in range(trials):
            print(trial, file=sys.stderr, flush=True)  # the last of them is the one that did harm
            write(path, cls.suffix, changed(raw, rng))
            outcomes[outcome(cls, path, keys, queries)] += 1
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
