"""Each selector against its contract and its definition; and that adding one takes one file."""

from __future__ import annotations

import importlib
import re
import sys
from typing import ClassVar

import pytest
import torch

from offload_decode import selectors
from offload_decode.attention.queries import Queries
from offload_decode.errors import ConfigError
from offload_decode.kv.host import HostKV
from offload_decode.selectors import registry
from prefill_jobs.build import build_indexes
from tests.contracts.selector_contract import LAYER, SelectorContract, floats, stored


class TestTopKFlat(SelectorContract):
    name = "topk"

    def test_the_selected_keys_are_the_highest_scored(self, store):
        queries = self.queries(store)
        selection = self.make(store, budget="5").select(LAYER, queries)
        for head in range(store.manifest.shape.kv_heads):
            scores = queries.rows[head] @ floats(store.keys(LAYER, head)).T
            best = scores.topk(min(5, scores.shape[1])).values.sort(-1).values
            chosen = scores.gather(1, selection.ids[head]).sort(-1).values
            torch.testing.assert_close(chosen, best, atol=1e-5, rtol=0)


class TestTopKFaissIvf(SelectorContract):
    name = "topk"
    options: ClassVar[dict[str, object]] = {"index": "faiss-ivf"}

    @pytest.fixture(scope="class", params=[(130, 4, 2), (130, 4, 2, "int8")], ids=str)
    @classmethod
    def store(cls, request, tmp_path_factory):
        pytest.importorskip("faiss")
        store = stored(tmp_path_factory.mktemp("store"), *request.param)
        build_indexes(store.path, "faiss-ivf", recall=1.0, k=130)
        return store


class TestDense(SelectorContract):
    name = "dense"


def test_a_new_selector_is_one_file(tmp_path, monkeypatch):
    """The registry and the strict options find a module that appears in the package's path."""
    (tmp_path / "first.py").write_text(
        "import torch\n"
        "from offload_decode.selection.selector import Selector\n"
        "from offload_decode.types import Selection\n"
        "class First(Selector):\n"
        "    '''The first k tokens.'''\n"
        "    name, paper, reads, holds = 'first', 'none', 'nothing', 'nothing'\n"
        "    def choose(self, layer, queries, k):\n"
        "        return Selection(torch.arange(k).expand(*queries.rows.shape[:2], k))\n"
    )
    monkeypatch.setattr(selectors, "__path__", [*selectors.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    assert "first" in registry.names()
    store = stored(tmp_path, 40, 4, 2)
    selector = registry.create(
        "first", {"budget": "3"}, HostKV(store, torch.device("cpu")), store.manifest.shape
    )
    assert selector.select(0, Queries(torch.randn(2, 4, 16), 0.3)).ids[1, 3].tolist() == [0, 1, 2]
    del sys.modules["offload_decode.selectors.first"]


def test_an_unknown_selector_names_the_known_ones():
    with pytest.raises(ConfigError, match=re.escape(f"known are: {', '.join(registry.names())}")):
        registry.get("nearest")
