"""An index from elsewhere: it is refused in a sentence, or finds keys that there are, with their scores; so
does what an append makes of it.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from offload_decode.indexes import VectorIndex, files, get
from offload_decode.testing.index_contract import (
    assert_truthful,
    assert_well_formed,
    clustered_keys,
    foreign_queries,
    near_queries,
)
from tests.fuzz.edits import Edit, Files, plain

KINDS = ["flat", "clusters", "faiss-ivf", "faiss-hnsw", "hnswlib"]
KEYS, MORE, K = 3000, 40, 8


class Saved(Files):
    """The one or two files of an index of a kind; the checksums fit the native file and the metadata."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind: type[VectorIndex] = get(kind)
        self.keys, self.queries = clustered_keys(KEYS + MORE), foreign_queries(3)
        index = self.kind.build(self.keys[:KEYS], near_queries(64), digest="d", k=K, target_recall=0.8)
        assert index.recall is None or not index.recall.full_scan, "what is scanned does not use the file"
        index.save(folder / "i")
        names = sorted(file.name for file in folder.iterdir())
        super().__init__(folder, names, often=[name for name in names if name != "i.json"])

    def fit(self, case: Sequence[Edit]) -> None:
        metadata, native = self.root / "i.json", self.root / f"i{self.kind.suffix}"
        if not plain(metadata) or any(edit.action in ("raw", "twice") for edit in case):
            return
        try:
            body = json.loads(metadata.read_bytes())
            if plain(native) and all(edit.name != metadata.name for edit in case):
                data = native.read_bytes()
                body["native"] |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            body.pop("sha256", None)
            metadata.write_text(files._rendered(body | {"sha256": files._body_sha256(body)}))
        except (ValueError, AttributeError, TypeError, RecursionError):
            pass

    def restore(self, case: Sequence[Edit]) -> None:
        super().restore([*case, Edit("i.json", "", ())])

    def use(self) -> None:
        index = self.kind.load(self.root / "i", self.keys[:KEYS], digest="d")
        for k in (K, 1, 500):
            hits = index.search(self.queries, k)
            assert_well_formed(hits, len(self.queries), k, KEYS)
            assert_truthful(hits, self.queries, self.keys[:KEYS])
        self.kind.search_heads([index], self.queries[None], K)
        _ = index.nbytes
        longer = index.extended(self.keys, near_queries(64), digest="e")
        hits = longer.search(self.queries, K)
        assert_well_formed(hits, len(self.queries), K, KEYS + MORE)
        assert_truthful(hits, self.queries, self.keys)


TARGETS: dict[str, Any] = {kind: partial(Saved, kind) for kind in KINDS}
