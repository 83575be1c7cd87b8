"""What an answer attended to: the attention mass of stored tokens equals a plain softmax over them."""

from __future__ import annotations

import pytest
import torch

from offload_decode.engine.engine import Engine
from prefill_jobs.job import Settings, prefill
from tests.tiny import text_model, tiny_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
SELECTORS = [
    ("dense", {}),
    ("topk", {"budget": "20"}),
    ("topk", {"budget": "20", "dense_layers": "1"}),
    ("quest", {"budget": "32", "page_size": "16", "dense_layers": ""}),
    ("quest", {"budget": "32", "page_size": "16", "dense_layers": "", "per_head": "true"}),
    ("streaming", {"budget": "20"}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("citations")
    text_model(0, "gemma2").save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "corpus.txt").write_text(TEXT)
    prefill(
        str(folder / "corpus.txt"),
        model=str(folder / "model"),
        out=folder / "store",
        settings=Settings(options={"chunk": 32}),
    )
    return folder


def _recorded(engine, monkeypatch):
    """The attention mass of the last token of every pass of `engine`, in plain torch."""
    plain = torch.zeros(engine.length, dtype=torch.float64)
    attend = type(engine.prefix)._attend_rows

    def recording(self, layer, queries, *rest):
        chosen = self.chosen.select(layer, queries)
        for head in range(len(queries.rows)):
            keys = engine.prefix.host.keys(layer, head).read(slice(None), torch.device("cpu"))
            for row in range(queries.tokens - 1, queries.rows.shape[1], queries.tokens):
                logits = queries.logits(queries.rows[head, row] @ keys.T)
                kept = _kept(chosen, queries, head, row, len(keys))
                plain[kept] += torch.softmax(logits[kept].double(), -1)
        return attend(self, layer, queries, *rest)

    monkeypatch.setattr(type(engine.prefix), "_attend_rows", recording)
    return plain


def _kept(chosen, queries, head, row, length):
    if hasattr(chosen, "pages"):
        listed = row if not chosen.shared else row % queries.tokens
        size, most = chosen.page_size, int(chosen.limit[head])
        pages = [page for page in chosen.pages[head, listed].tolist() if page >= 0]
        tokens = [page * size + place for page in pages for place in range(size)][:most]
        return [token for token in tokens if token < length]
    if chosen.ids is None:
        return list(range(length))
    return [token for token in chosen.ids[head, row].tolist() if token >= 0]


@pytest.mark.parametrize(("selector", "options"), SELECTORS)
def test_mass_is_that_of_a_plain_softmax_over_what_was_selected(folder, monkeypatch, selector, options):
    engine = Engine.open(folder / "store", selector=selector, options=options)
    with engine.watched() as watch:
        plain = _recorded(engine, monkeypatch)
        logits = engine.ask("Who jumps?")
        list(engine.generate(logits, 3))
    torch.testing.assert_close(torch.from_numpy(watch.mass).double(), plain, atol=1e-4, rtol=1e-4)
    assert watch.mass.sum() == pytest.approx(watch.rows, rel=1e-4)
