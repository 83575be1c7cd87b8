"""Quest over a long conversation: its pages' bounds grow with it, and a step chooses among them."""

import pytest
import torch

from offload_decode.attention.pages_reference import page_scores, page_tokens
from offload_decode.attention.queries import Queries, attend
from offload_decode.engine.engine import Engine
from offload_decode.engine.step import StoredPrefix
from offload_decode.hf.compat import with_cache
from offload_decode.kv.generated import GeneratedKV
from offload_decode.kv.host_cache import HostKV
from offload_decode.kv.page_bounds import GrowingBounds
from offload_decode.models.loading import wrap
from offload_decode.selectors import quest
from offload_decode.selectors.registry import create
from offload_decode.store.reader import KVStore
from offload_decode.testing.selector_contract import LAYER
from offload_decode.testing.stores import stored
from tests.families import VOCAB
from tests.tiny import tiny_model

HEADS, KV_HEADS, DIM = 4, 2, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("store")
    stored(path, 40, HEADS, KV_HEADS)
    return path


def small_model():
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    return tiny_model("llama", hidden_size=32, num_hidden_layers=2, **heads)


def selector(folder, **options):
    store = KVStore.open(folder / "store")
    given = {"dense_layers": "", "page_size": 4, "per_head": False, **options}
    return create("quest-paper", given, HostKV(store, torch.device("cpu")), store.manifest.shape)


def written(*lengths):
    """A conversation that came in pieces."""
    tail, source = GeneratedKV(), torch.Generator().manual_seed(0)
    for length in lengths:
        tail.append(*torch.randn(2, 1, KV_HEADS, length, DIM, generator=source))
    return tail


def query():
    return torch.randn(1, HEADS, 1, DIM, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("metadata", ["fp16", "int8"])
def test_bounds_grow_with_the_conversation_and_forget_what_is_taken_back(metadata):
    def expected(tail):
        whole = GrowingBounds(4, metadata)
        whole.append(tail.view()[0][0])
        return whole.bounds

    def same(one, other):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True) if a is not None)

    tail = written(9, 1, 1)
    same(tail.page_bounds(4, metadata), expected(tail))
    tail.append(*torch.randn(2, 1, KV_HEADS, 6, DIM))
    same(tail.page_bounds(4, metadata), expected(tail))
    fork = tail.fork()
    tail.crop(7)
    tail.append(*torch.randn(2, 1, KV_HEADS, 12, DIM))
    same(tail.page_bounds(4, metadata), expected(tail))
    same(fork.page_bounds(4, metadata), expected(fork))
    assert tail.page_bounds(8, metadata).lower.shape[1] == -(-tail.length // 8)


@pytest.mark.parametrize(
    ("options", "tokens", "length", "chosen"),
    [
        ({"budget": "8"}, 1, 100, True),
        ({"budget": "8"}, 1, 8, False),
        ({"budget": "8"}, 3, 100, False),  # a question
        ({"budget": "8", "dense_layers": "1"}, 1, 100, False),
        ({"budget": "100%"}, 1, 100, False),
        ({"budget": "mass=0.9"}, 1, 100, False),
        ({"budget": "8", "page_size": 30}, 1, 59, False),  # the page being filled is all that is wanted
        ({"budget": "8", "page_size": 30}, 1, 65, True),
    ],
)
def test_pages_of_a_long_conversation_are_chosen_for_a_step(
    folder, monkeypatch, options, tokens, length, chosen
):
    held = selector(folder, **options).selector
    queries = Queries(torch.randn(KV_HEADS, 2 * tokens, DIM), 0.3, group=2, tokens=tokens)
    assert held.select_generated(LAYER, queries, written(length)) is None, "it is short"
    monkeypatch.setattr(quest, "WHOLE_GENERATED", 8)
    assert (held.select_generated(LAYER, queries, written(length)) is not None) == chosen


@pytest.mark.parametrize("length", [24, 27])
def test_a_step_attends_to_the_best_pages_and_the_one_being_filled(folder, monkeypatch, length):
    monkeypatch.setattr(quest, "WHOLE_GENERATED", 8)
    chosen, tail = selector(folder, budget="3"), written(length)
    rows = Queries(query().reshape(KV_HEADS, -1, DIM), 0.3, group=2)
    selection = chosen.selector.select_generated(LAYER, rows, tail)
    ids = page_tokens(selection.pages, 4, length, selection.limit)
    assert ((ids >= 0).sum(-1) == 8).all()  # the larger of the budget and WHOLE_GENERATED
    filled = (length - 1) // 4  # the last page, whether it is full or not: the query's own token is there
    scores = page_scores(rows.by_list(), tail.page_bounds(4, "fp16"))[:, 0, :filled]
    for head in range(KV_HEADS):
        pages = selection.pages[head, 0].tolist()
        assert pages.pop(0) == filled
        best = scores[head].topk(len(pages)).indices.tolist()
        assert pages == best

    state = StoredPrefix(chosen.selector.host, chosen).attend_generated(LAYER, query(), tail, 0.3, None)
    keys, values = tail.view()
    seen = torch.zeros(1, HEADS, 1, length, dtype=torch.bool)
    for head in range(HEADS):
        seen[0, head, 0, ids[head // 2, 0][ids[head // 2, 0] >= 0]] = True
    repeated = (part.repeat_interleave(2, dim=1) for part in (keys, values))
    expected = attend(query(), *repeated, 0.3, mask=seen)
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=0)


def test_the_engine_takes_long_conversations_through_their_pages(folder, monkeypatch):
    model = small_model()
    tokens = torch.randint(3, VOCAB, (30,), generator=torch.Generator().manual_seed(2))

    def last_logits(whole, budget, asked):
        monkeypatch.setattr(quest, "WHOLE_GENERATED", whole)
        options = {"budget": budget, "dense_layers": "", "page_size": 1}
        engine = Engine.open(folder / "store", wrap(model), selector="quest", options=options)
        engine.extend(asked)
        return engine.extend([7])

    longer = torch.cat([tokens, tokens])
    exact = last_logits(4096, "39", longer)
    assert torch.equal(last_logits(61, "39", longer), exact)
    # With 39 of 61 tokens some are left out; a budget of everything leaves out none.
    assert not torch.allclose(last_logits(1, "39", longer), exact, atol=1e-4)
    assert torch.equal(last_logits(1, "100%", longer), last_logits(4096, "100%", longer))


def test_padding_in_a_long_conversation_is_not_attended(folder, monkeypatch):
    monkeypatch.setattr(quest, "WHOLE_GENERATED", 8)
    model = small_model()
    options = {"budget": "8", "dense_layers": ""}

    def last_logits(padding):
        engine = Engine.open(folder / "store", wrap(model), selector="quest", options=options)
        stored, cache = engine.prefix.length, engine.new_cache()
        ids = torch.tensor([[5] * padding + [7, 8, 9]])
        mask = torch.ones(1, stored + ids.shape[1], dtype=torch.bool)
        mask[:, stored : stored + padding] = False
        position = (stored + mask[:, stored:].cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask, **with_cache(model, cache), position_ids=position)
            mask = torch.cat([mask, mask[:, -1:]], dim=1)
            given = {"attention_mask": mask, "position_ids": position[:, -1:] + 1}
            given |= with_cache(model, cache)
            return model(input_ids=torch.tensor([[6]]), **given).logits[0, -1]

    torch.testing.assert_close(last_logits(20), last_logits(0), atol=1e-5, rtol=0)


def test_heads_with_small_budgets_fetch_few_pages(folder):
    rows = Queries(torch.randn(KV_HEADS, 2, DIM), 0.3, group=2)
    pages = selector(folder, budget="1/30").select(LAYER, rows).pages
    assert (pages[0, :, 1:] == -1).all()
    assert (pages[1] >= 0).sum() == 8
