"""Remembered turns: the longest beginning, bounded in bytes, and nothing that cannot be taken back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_decode.engine.engine import Engine
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.job import prefill_texts
from offload_decode.server.prefix_cache import PrefixCache, prefix_key
from tests.tiny import served_model

TEXT = "The lamp burns low. " * 12
KEY = prefix_key("book", "dense", {}, "digest")


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    made = {}

    def open_(family="llama", selector="dense", **options):
        if family not in made:
            made[family] = served_model(family), tmp_path_factory.mktemp(family) / "store"
            prefill_texts(made[family][0], [TextDocument("d", TEXT)], made[family][1])
        loaded, store = made[family]
        return Engine.open(store, loaded, selector=selector, options=options)

    return open_


def ran(engine, tokens):
    conversation = engine.fork()
    return conversation, conversation.extend(tokens)


class Said:
    """As much of a conversation as its tokens say."""

    nbytes, remembers = 8, False

    def __init__(self, tokens, length=0):
        self.tokens, self.length = list(tokens), length
        self.cache = self.selector = self.prefix = self

    def fork(self):
        return Said(self.tokens)

    def crop(self, length):
        del self.tokens[length:]

    def kept(self, tokens):
        return tokens

    def trim(self):
        pass

    reset = trim


tails_of = st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=8), max_size=6)


@given(kept=tails_of, asked=st.lists(st.integers(3, 5), min_size=1, max_size=9))
def test_the_longest_beginning_is_found(kept, asked):
    prefix_cache = PrefixCache(1 << 30)
    for tokens in kept:
        prefix_cache.keep(KEY, Said(tokens))
    longest = max((n for tokens in kept for n in range(len(asked)) if tokens[:n] == asked[:n]), default=0)
    found = prefix_cache.take(KEY, asked)
    assert ([] if found is None else found.tokens) == asked[:longest]
    replaced = [any(later[: len(t)] == t for later in kept[i + 1 :]) for i, t in enumerate(kept)]
    assert len(prefix_cache) == replaced.count(False)


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_a_conversation_that_was_found_goes_on_as_one_that_runs_it_all(opened, family):
    engine, prefix_cache = opened(family), PrefixCache(1 << 30)
    first, second = [10, 11, 12, 13, 14], [10, 11, 12, 20, 21]
    prefix_cache.keep(KEY, ran(engine, first)[0])
    for tokens in (second, [*first, 30], second):
        found = prefix_cache.take(KEY, tokens)
        logits = found.extend(tokens[len(found.tokens) :])
        torch.testing.assert_close(logits, ran(engine, tokens)[1], atol=1e-4, rtol=0)
        prefix_cache.keep(KEY, found)


def test_conversations_of_another_model_selector_options_or_store_are_not_taken():
    prefix_cache, options = PrefixCache(1 << 30), {"a": 1, "b": 2}
    prefix_cache.keep(prefix_key("book", "topk", options, "d"), Said([10, 11]))
    for other in (
        ("cook", "topk", options, "d"),
        ("book", "quest", options, "d"),
        ("book", "topk", {"a": 1}, "d"),
        ("book", "topk", options, "e"),
    ):
        assert prefix_cache.take(prefix_key(*other), [10, 11, 12]) is None
    same = prefix_key("book", "topk", {"b": 2, "a": 1}, "d")
    assert prefix_cache.take(same, [10, 11, 12]).tokens == [10, 11]


def test_the_bytes_are_those_of_the_tensors_and_bounded(opened):
    engine = opened()
    one = ran(engine, list(range(10, 30)))[0]
    shape = engine.loaded.shape
    row = sum(2 * shape.kv_heads * shape.head_dim * 4 for _ in shape.layers)
    prefix_cache = PrefixCache(1 << 30)
    prefix_cache.keep(KEY, one)
    own = prefix_cache.nbytes
    assert own == 20 * row + 20 * 8
    prefix_cache = PrefixCache(2 * own + own // 2)
    for start in (10, 11, 12):
        prefix_cache.keep(KEY, ran(engine, list(range(start, start + 20)))[0])
        prefix_cache.take(KEY, [10, 10])  # the first is used again and again
    assert (len(prefix_cache), prefix_cache.nbytes) == (2, 2 * own)
    assert prefix_cache.take(KEY, [10, 11, 12]).tokens == [10, 11]
    assert prefix_cache.take(KEY, [11, 12]) is None
    prefix_cache.keep(KEY, ran(engine, list(range(10, 100)))[0])
    assert len(prefix_cache) == 2, "one that is larger than the bound changes nothing"
    assert prefix_cache.take(KEY, list(range(10, 90))).tokens == list(range(10, 30))


def test_the_number_of_cached_conversations_is_bounded(monkeypatch):
    monkeypatch.setattr("offload_decode.server.prefix_cache.MOST_CONVERSATIONS", 2)
    prefix_cache = PrefixCache(1 << 30)
    for token in (3, 4, 5):
        prefix_cache.keep(KEY, Said([token]))
    assert [prefix_cache.take(KEY, [token, 9]) is None for token in (3, 4, 5)] == [True, False, False]


def test_a_cache_of_zero_bytes_keeps_nothing():
    prefix_cache, conversation = PrefixCache(0), Said([10, 11])
    conversation.trim = None  # nor is anything copied
    prefix_cache.keep(KEY, conversation)
    assert prefix_cache.take(KEY, [10, 11, 12]) is None


def test_conversations_of_a_model_or_a_key_are_dropped():
    prefix_cache = PrefixCache(1 << 30)
    keys = [prefix_key(*key, {}, "") for key in (("book", "dense"), ("cook", "dense"), ("cook", "topk"))]
    for key in keys:
        prefix_cache.keep(key, Said([10, 11]))
    prefix_cache.drop(model="book")
    prefix_cache.drop(key=keys[2])
    assert [prefix_cache.take(key, [10, 11, 12]) is None for key in keys] == [True, False, True]
    assert len(prefix_cache) == 1


def test_forks_share_generated_kv_until_they_append(opened):
    prefix_cache = PrefixCache(1 << 30)
    prefix_cache.keep(KEY, ran(opened(), [10, 11, 12])[0])
    one, two = prefix_cache.take(KEY, [10, 11, 99]), prefix_cache.take(KEY, [10, 11, 98])
    held = {
        conversation.cache.generated_layers[0].generated.view()[0].data_ptr() for conversation in (one, two)
    }
    assert len(held) == 1
    alone = ran(opened(), [10, 11, 99])[1]
    torch.testing.assert_close(one.extend([99]), alone, atol=1e-4, rtol=0)
    two.extend([98])
    fork = one.fork()
    one.crop(one.length - 2)
    one.extend([50, 51])  # in the place of what the fork still has
    torch.testing.assert_close(fork.extend([7]), ran(opened(), [10, 11, 99, 7])[1], atol=1e-4, rtol=0)
    again = prefix_cache.take(KEY, [10, 11, 12, 13])
    torch.testing.assert_close(again.extend([13]), ran(opened(), [10, 11, 12, 13])[1], atol=1e-4, rtol=0)


def test_a_stateful_selector_continues_only_from_the_end(opened):
    engine, prefix_cache = opened(selector="h2o", budget="40"), PrefixCache(1 << 30)
    engine.ask("Who?")
    for _ in engine.generate(engine.extend([50]), 5):
        pass
    kept = engine.fork()
    prefix_cache.keep(KEY, kept)
    told = list(engine.tokens)
    assert prefix_cache.take(KEY, told) is None, "one token would have to be taken back"
    assert prefix_cache.take(KEY, [*told[:-1], 99, 98]) is None
    question = [*engine.pending, 60, 61, 62]
    found = prefix_cache.take(KEY, told + question)
    engine.selector.reset()
    torch.testing.assert_close(found.extend(question), engine.extend([60, 61, 62]))


def test_recurrent_layers_go_on_from_where_a_turn_began(opened):
    engine, prefix_cache = opened("qwen3_next"), PrefixCache(1 << 30)
    conversation = ran(engine, [10, 11, 12])[0]
    conversation.extend([13])
    conversation.extend([20, 21, 22])
    prefix_cache.keep(KEY, conversation)
    assert prefix_cache.nbytes > conversation.cache.state_bytes > 0
    asked = [10, 11, 12, 13, 20, 99]
    found = prefix_cache.take(KEY, asked)
    assert found.tokens == [10, 11, 12, 13]
    torch.testing.assert_close(found.extend([20, 99]), ran(engine, asked)[1], atol=1e-4, rtol=0)
    assert prefix_cache.take(KEY, [10, 11, 99]) is None
    assert prefix_cache.take(KEY, [*asked[:5], 21, 22, 30]).tokens == [10, 11, 12, 13, 20, 21, 22]
