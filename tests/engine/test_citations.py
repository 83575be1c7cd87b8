"""What an answer attended to: the attention mass of stored tokens equals a plain softmax over them."""

import itertools
import shutil

import numpy as np
import pytest
import torch

from offload_decode.attention.queries import Queries
from offload_decode.common.errors import ConfigError, StoreDamaged
from offload_decode.engine.citations import (
    OPENING,
    PLAIN_QUESTION,
    REACH,
    Watch,
    cite,
    passages,
    template_length,
)
from offload_decode.engine.conversation import Conversation
from offload_decode.engine.engine import Engine
from offload_decode.hf import user_cache
from offload_decode.prefill_jobs.job import Settings, prefill
from offload_decode.store.reader import KVStore
from offload_decode.types import AttentionState, Selection
from tests.store.test_refusals import reseal
from tests.tiny import saved_model

QUESTIONS = ["Who jumps?", "Over what does it jump, and how often?", "Why"]
SELECTORS = [
    ("dense", {}),
    ("topk", {"budget": "20"}),
    ("topk", {"budget": "20", "dense_layers": "1"}),
    ("quest", {"budget": "32", "page_size": "16", "dense_layers": ""}),
    ("quest", {"budget": "32", "page_size": "16", "dense_layers": "", "per_head": "true"}),
    ("streaming", {"budget": "20"}),
]


DOCUMENTS = {
    "a.txt": "One sentence stands here. The fox jumps over the dog. It is version 3.12 yet.\nA line\nof more",
    "b.txt": "Nothing of the kind. " * 8,
    "c.txt": "x" * 200,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("citations")
    (folder / "corpus").mkdir()
    for name, text in DOCUMENTS.items():
        (folder / "corpus" / name).write_text(text)
    model, settings = str(saved_model(folder / "model", "gemma2")), Settings(options={"chunk": 64})
    prefill(str(folder / "corpus"), model=model, out=folder / "store", settings=settings)
    return folder


def _recorded(engine, monkeypatch):
    """The attention mass of the last token of every pass of `engine`, in plain torch."""
    plain, rows = torch.zeros(engine.length, dtype=torch.float64), []
    attend = type(engine.prefix)._attend_part

    def recording(self, layer, queries, *rest):
        chosen = self.chosen.select(layer, queries)
        for head in range(len(queries.vectors)):
            keys = engine.prefix.host.keys(layer, head).read(slice(None), torch.device("cpu"))
            for row in range(queries.tokens - 1, queries.vectors.shape[1], queries.tokens):
                logits = queries.logits(queries.vectors[head, row] @ keys.T)
                kept = _kept(chosen, queries, head, row, len(keys))
                rows.append(row)
                plain[kept] += torch.softmax(logits[kept].double(), -1)
        return attend(self, layer, queries, *rest)

    monkeypatch.setattr(type(engine.prefix), "_attend_part", recording)
    return plain, rows


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
    watch = Watch(engine.prefix.host, least=0.0)
    engine.prefix.watches = (watch,)
    plain, rows = _recorded(engine, monkeypatch)
    list(engine.generate(engine.ask(QUESTIONS[0]), 3))
    torch.testing.assert_close(torch.from_numpy(watch.mass).double(), plain, atol=1e-4, rtol=1e-4)
    assert watch.mass.sum() == pytest.approx(len(rows), rel=1e-4)


def test_a_question_in_parts_is_seen_as_a_whole_one(folder, monkeypatch):
    def mass(at_once):
        engine = Engine.open(folder / "store", options={"budget": "20"})
        monkeypatch.setattr(engine.prefix.chosen, "queries_at_once", lambda *_: at_once)
        with engine.watched() as watch:
            engine.ask(QUESTIONS[1])
        return torch.from_numpy(watch.mass)

    torch.testing.assert_close(mass(3), mass(10_000))


def test_a_whole_question_is_what_its_tokens_attend_to_one_by_one(folder):
    engine, alone = (Engine.open(folder / "store", options={"budget": "20"}) for _ in range(2))
    with engine.watched(whole=True) as watch:
        engine.ask(QUESTIONS[1])
    with alone.watched() as each:
        for token in alone.question_tokens(QUESTIONS[1]):
            alone.extend([token])
    assert watch.rows == each.rows
    torch.testing.assert_close(torch.from_numpy(watch.mass), torch.from_numpy(each.mass))


def test_what_holds_little_of_a_row_does_not_count(folder):
    host = Engine.open(folder / "store").prefix.host
    queries = Queries(torch.zeros(2, 1, 4), scaling=1.0)
    ids = torch.tensor([[[3, 7, 9, -1]], [[3, 8, -1, -1]]])
    shares = torch.tensor([[[0.9, 0.07, 0.03, 0.0]], [[0.96, 0.04, 0.0, 0.0]]])
    state = AttentionState(torch.zeros(2, 1, 1), torch.zeros(2, 1))
    watch = Watch(host)
    watch.see(0, torch.tensor([0]), queries, Selection(ids, shares.log()), state)
    found = {token: round(float(watch.mass[token]), 3) for token in watch.mass.nonzero()[0]}
    assert found == {3: 1.86, 7: 0.07}


def test_forks_are_not_watched(folder):
    engine = Engine.open(folder / "store")
    with engine.watched() as watch:
        engine.fork().ask(QUESTIONS[0])
        assert not watch.mass.any()
    engine.ask(QUESTIONS[0])
    assert not watch.mass.any()


def test_a_batch_cites_as_one_by_one(folder):
    engine = Engine.open(folder / "store", options={"budget": "20"})
    first = engine.answer(QUESTIONS[0], 6).tokens
    assert first[2] not in first[:2] + engine.answer(QUESTIONS[1], 6).tokens, "another seed is needed"
    engine.loaded.model.generation_config.eos_token_id = first[2]  # it leaves the batch, the others go on
    alone = [engine.answer(question, 6, cites=True).citations for question in QUESTIONS]
    together = engine.answer_many(QUESTIONS, 6, cites=True)
    assert alone[0] != alone[1]
    for one, other in zip(alone, together, strict=True):
        assert [cited.name for cited in one] == [cited.name for cited in other.citations]
        shares = [cited.share for cited in other.citations]
        assert [cited.share for cited in one] == pytest.approx(shares, abs=1e-4)
    assert engine.answer_many(QUESTIONS, 2)[0].citations is None
    assert engine.answer(QUESTIONS[0], 2).citations is None


def _cited(folder, mass, **most):
    engine = Engine.open(folder / "store")
    watch = Watch(engine.prefix.host)
    documents = {one.name: one for one in engine.store.documents}
    for (name, piece), share in mass.items():
        one = documents[name]
        text = engine.decode(engine.store.tokens[one.start : one.end])
        watch.mass[one.start + text.index(piece)] += share  # a byte a token
    return cite(watch, engine.store, engine.tokenizer, **most), engine


def test_passages_are_whole_sentences_and_lines(folder):
    cited, engine = _cited(folder, {("a.txt", "fox"): 3, ("b.txt", "kind"): 1})
    assert [(one.name, one.share) for one in cited] == [("a.txt", 0.75), ("b.txt", 0.25)]
    (span,) = cited[0].spans
    assert (span.text, span.share) == ("The fox jumps over the dog.", 0.75)
    assert engine.decode(engine.store.tokens[span.start : span.end]).strip() == span.text
    (numbered,) = _cited(folder, {("a.txt", "3.12"): 1})[0][0].spans
    assert numbered.text == "It is version 3.12 yet."  # a full stop within a number ends nothing
    (unbroken,) = _cited(folder, {("c.txt", "x" * 120): 1})[0][0].spans
    assert 0 < len(unbroken.text) <= 2 * REACH + 1


def test_passages_do_not_overlap_and_are_counted_once(folder):
    mass = {("a.txt", word): 1 for word in ("sentence", "fox", "version", "line")}
    mass |= {("b.txt", "kind"): 1, ("c.txt", "xxx"): 0.001}
    cited, _ = _cited(folder, mass)
    assert [one.name for one in cited] == ["a.txt", "b.txt"]  # less than 1 % is left out
    assert sum(one.share for one in cited) <= 1
    for one in cited:
        spans = sorted(one.spans, key=lambda span: span.start)
        assert all(first.end <= second.start for first, second in itertools.pairwise(spans))
        assert sum(span.share for span in spans) == pytest.approx(one.share)
        assert list(one.spans) == sorted(one.spans, key=lambda span: -span.share)
    (only,) = _cited(folder, mass, most_documents=1, most_spans=1)[0]
    assert (only.name, len(only.spans)) == ("a.txt", 1)


def test_the_opening_of_a_store_is_cited_of_no_document(folder):
    engine = Engine.open(folder / "store")
    watch = Watch(engine.prefix.host)
    watch.mass[:OPENING] = 5
    assert cite(watch, engine.store, engine.tokenizer) == () == engine.cited(watch)
    watch.mass[4] = 1
    assert cite(watch, engine.store, engine.tokenizer)[0].share == 1
    watch.mass[12] = 1
    (span,) = cite(watch, engine.store, engine.tokenizer, opening=11)[0].spans
    assert span.start == 11, "no passage reaches into it"


def test_what_a_question_without_content_attends_to_is_taken_off(folder):
    engine = Engine.open(folder / "store")
    watch, plain = Watch(engine.prefix.host), Watch(engine.prefix.host)
    for one in engine.store.documents[:2]:
        watch.mass[one.start + 50], plain.mass[one.start + 50] = 6, 2
    plain.mass[engine.store.documents[1].start + 50] = 9
    watch.rows, plain.rows = 4, 3  # per row 1.5 less 0.67, and 1.5 less 3
    (cited,) = cite(watch, engine.store, engine.tokenizer, plain=plain.shares())
    assert (cited.name, cited.share) == (engine.store.documents[0].name, 1)
    assert cite(watch, engine.store, engine.tokenizer, plain=watch.shares()) == ()


def test_passages_are_those_of_all_documents_by_their_score(folder):
    engine = Engine.open(folder / "store", options={"budget": "20"})
    found = engine.passages(QUESTIONS[1], most=4)
    assert engine.tokens == [], "the conversation stays"
    documents = {one.name: one for one in engine.store.documents}
    for one in found:
        assert documents[one.document].start <= one.start < one.end <= documents[one.document].end
        assert one.text == engine.decode(engine.store.tokens[one.start : one.end]).strip()
    scores = [one.score for one in found]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] > 0
    assert sum(scores) <= 1
    assert engine.passages(QUESTIONS[1], most=1) == found[:1]
    assert engine.passages(PLAIN_QUESTION) == (), "it attends to nothing beyond itself"


def test_scores_are_shares_of_all_attention_and_not_of_what_is_found(folder):
    engine = Engine.open(folder / "store")
    watch = Watch(engine.prefix.host, whole=True)
    watch.rows, (first, second, _) = 10, engine.store.documents
    watch.mass[first.start + 50], watch.mass[second.start + 50] = 3, 1
    found = passages(watch, engine.store, engine.tokenizer, 5, opening=4, plain={second.start + 50: 0.05})
    assert [(one.document, round(one.score, 4)) for one in found] == [("a.txt", 0.3), ("b.txt", 0.05)]


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Every question that is asked, with a cache and a process that know nothing."""
    asked, ask = [], Conversation.ask
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(user_cache, "_known", {})
    monkeypatch.setattr(Conversation, "ask", lambda own, text, begun="": asked.append(text) or ask(own, text))
    return asked


def test_it_is_asked_once_for_all_that_choose_alike(folder, asked):
    engine = Engine.open(folder / "store", options={"budget": "20"})
    for question in QUESTIONS:
        engine.answer(question, 2, cites=True)
    assert sorted(asked) == sorted([*QUESTIONS, PLAIN_QUESTION])
    Engine.open(folder / "store", options={"budget": "30"}).answer(QUESTIONS[0], 2, cites=True)
    assert asked.count(PLAIN_QUESTION) == 2, "another budget chooses others"
    dense = Engine.open(folder / "store", options={"budget": "30"})
    dense.selector.largest_k = 0
    dense.answer(QUESTIONS[0], 2, cites=True)
    assert asked.count(PLAIN_QUESTION) == 3, "and so does attention to everything, where that is faster"


@pytest.mark.parametrize("damage", [None, "[[0, 1", "[[-1, 0.5]]", "[[0, NaN]]", "[[0, 7]]"])
def test_another_process_does_not_ask_again_unless_what_was_kept_is_damaged(
    folder, asked, monkeypatch, tmp_path, damage
):
    cited = Engine.open(folder / "store").answer(QUESTIONS[0], 2, cites=True).citations
    monkeypatch.setattr(user_cache, "_known", {})
    kept = list((tmp_path / "offload-decode" / "fingerprints").iterdir())
    for path in kept if damage else ():
        path.write_text(damage)
    assert Engine.open(folder / "store").answer(QUESTIONS[0], 2, cites=True).citations == cited
    assert asked.count(PLAIN_QUESTION) == (2 if damage else 1)


def test_a_chat_template_is_no_document(folder):
    store = KVStore.open(folder / "store")
    tokens = store.tokens[:30].tolist()
    assert template_length(store, [*tokens[:20], -1]) == 20
    assert template_length(store, tokens) == 30
    assert template_length(store, []) == template_length(store, [-1]) == 0


def test_a_passage_may_begin_with_the_text_though_its_first_tokens_do_not_count(folder):
    (span,) = _cited(folder, {("a.txt", "stands"): 1})[0][0].spans
    assert span.text == "One sentence stands here."


@pytest.mark.gpu
@pytest.mark.parametrize("attend", ["host", "device", "pinned"])
@pytest.mark.parametrize(("selector", "options"), SELECTORS)
def test_a_device_is_watched_as_a_host(folder, selector, options, attend):
    def mass(**where):
        engine = Engine.open(folder / "store", selector=selector, options=options, **where)
        watch = Watch(engine.prefix.host, least=0.0)
        engine.prefix.watches = (watch,)
        engine.ask(QUESTIONS[0])
        return torch.from_numpy(watch.mass)

    torch.testing.assert_close(mass(device="cuda", attend=attend), mass(device="cpu"), atol=1e-2, rtol=1e-2)


def test_a_store_in_memory_cannot_be_cited(folder):
    host = Engine.open(folder / "store").prefix.host
    with pytest.raises(ConfigError, match="no documents to cite"):
        cite(Watch(host), object(), None)
    with pytest.raises(ConfigError, match="no documents to cite"):
        passages(Watch(host), object(), None, 5, opening=4, plain={})


@pytest.mark.parametrize("token", [-1, -(2**31), 5000, 2**31 - 1])
def test_tokens_of_no_vocabulary_are_a_damaged_store(folder, tmp_path, token):
    """A stranger may write any number there, with checksums that fit."""
    store = shutil.copytree(folder / "store", tmp_path / "store")
    (file,) = store.glob("tokens/c.0")
    file.write_bytes(np.full(file.stat().st_size // 4, token, "<i4").tobytes())
    reseal(store)
    engine = Engine.open(store, options={"budget": "20"})
    with pytest.raises(StoreDamaged, match="tokens that its model does not have"):
        engine.answer(QUESTIONS[0], 2, cites=True)
