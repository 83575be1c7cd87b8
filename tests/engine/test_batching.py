"""Turns of several conversations in one pass equal turns apart, whoever else is in the pass."""

import random

import numpy as np
import pytest
import torch

from offload_decode.common.errors import ConfigError, StoreDamaged
from offload_decode.engine import batching, step
from offload_decode.engine.batching import Turn, packing_key, run_turns
from offload_decode.engine.conversation import Conversation
from offload_decode.engine.engine import Engine
from offload_decode.engine.step import StoredPrefix
from offload_decode.selectors import registry
from tests.tiny import random_ids, served_model, token_store

STORED = (45, 70)
PACKED = {"dense", "keydiff", "lessismore", "loki", "oracle"}
PACKED |= {"quest", "quest-paper", "quest+topk", "sparq", "streaming", "topk"}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Opens one of two stores of a model with windows, sinks and full layers; both share its weights."""
    folder, loaded = tmp_path_factory.mktemp("joint"), served_model("gpt-oss")
    stores = [token_store(folder / str(own), loaded, random_ids(own, own), chunk=16) for own in STORED]

    def opened(which=0, selector="topk", **options):
        if selector == "topk":
            options = {"budget": "20"} | options
        return Engine.open(stores[which], loaded, selector=selector, options=options)

    return opened


def made(count, seed=0):
    return random_ids(count, seed).tolist()


def check_equal(turns, alone):
    """Runs the turns together and, of forks that stood where they stood, each on its own."""
    expected = [own.extend(turn.tokens) for turn, own in zip(turns, alone, strict=True)]
    found = run_turns(turns)
    for one, other, turn, own in zip(found, expected, turns, alone, strict=True):
        last = one[-1] if turn.every else one
        assert (last - other).abs().max() < 1e-4 * other.std()
        assert turn.conversation.tokens == own.tokens
        assert turn.conversation.length == own.length
        assert turn.conversation.pending == own.pending == []
    return found


@pytest.fixture
def passes(monkeypatch):
    """How many conversations ran in each pass of several."""
    counted = []
    run = batching._run_pass
    monkeypatch.setattr(batching, "_run_pass", lambda parts: (counted.append(len(parts)), run(parts)))
    return counted


def test_questions_and_steps_on_two_stores_share_a_pass(opened, passes):
    first, second = opened(0), opened(1)
    talks = [engine.fork() for engine in (first, second, first, first, second)]
    alone = [talk.fork() for talk in talks]
    for turn, lengths in enumerate([(1, 9, 3, 12, 1), (1, 1, 1, 1, 1), (4, 1, 30, 1, 2)]):
        asked = [made(length, 10 * turn + place) for place, length in enumerate(lengths)]
        check_equal([Turn(*both) for both in zip(talks, asked, strict=True)], alone)
    assert passes == [5, 5, 5]


def test_a_store_is_searched_once_for_all_that_see_it_alike(opened, monkeypatch):
    engines = opened(0), opened(1), opened(0, budget="7")
    talks = [engine.fork() for engine in (*engines, *engines)]
    searched = []
    attend = StoredPrefix._attend_part

    def spied(self, layer, queries, watched):
        searched.append(queries.tokens)
        return attend(self, layer, queries, watched)

    monkeypatch.setattr(StoredPrefix, "_attend_part", spied)
    run_turns([Turn(talk, made(2 + place)) for place, talk in enumerate(talks)])
    layers = engines[0].loaded.shape.full_layers
    assert searched == [2 + 5, 3 + 6, 4 + 7] * len(layers)


@pytest.mark.parametrize("selector", [name for name in registry.names() if name != "own"])
def test_every_selector_chooses_as_for_one_conversation(opened, passes, selector):
    options = {} if selector in ("dense", "random") else {"budget": "16"}
    engine = opened(1, selector, **options)
    talks = [engine.fork() for _ in range(3)]
    alone = [talk.fork() for talk in talks]
    for tokens in (5, 1, 1, 3):
        check_equal([Turn(talk, made(tokens + place, place)) for place, talk in enumerate(talks)], alone)
    packed = selector in PACKED
    assert (packing_key(engine) is not None) == packed
    assert passes == ([3] * 4 if packed else [])


def test_other_options_on_one_host_are_searched_apart(opened):
    host, loaded = opened(1).prefix.host, opened(1).loaded
    prefixes = [StoredPrefix.over(host, loaded.shape, "topk", {"budget": budget}) for budget in ("4", "40")]
    talks = [Conversation(loaded, host.store, prefix) for prefix in prefixes]
    check_equal([Turn(talk, made(3)) for talk in talks], [talk.fork() for talk in talks])


def test_selectors_and_budgets_meet_in_one_pass(opened, passes):
    kinds = (
        opened(1, budget="9"),
        opened(1, "dense"),
        opened(1, "quest", budget="16"),
        opened(1, tail="sample"),
    )
    talks = [engine.fork() for engine in kinds for _ in range(2)]
    check_equal([Turn(talk, made(3)) for talk in talks], [talk.fork() for talk in talks])
    assert passes == [8]


@pytest.mark.parametrize(
    ("selector", "options"), [("topk", {"budget": "mass=0.9"}), ("snapkv", {})], ids=["a mass", "a vote"]
)
def test_what_looks_at_a_whole_question_runs_alone(opened, passes, selector, options):
    engine = opened(0, selector, **options)
    assert packing_key(engine) is None
    talks = [engine.fork(), engine.fork(), opened(0), opened(1)]
    check_equal([Turn(talk, made(4)) for talk in talks], [talk.fork() for talk in talks])
    assert passes == [2]


def test_a_conversation_of_which_quest_chooses_pages_runs_alone(opened, monkeypatch):
    monkeypatch.setattr("offload_decode.selectors.quest.WHOLE_GENERATED", 20)
    engine = opened(0, "quest", budget="16", page_size=4)
    talk = engine.fork()
    talk.extend(made(30))
    assert packing_key(engine) is not None
    assert packing_key(talk) is None
    talks = [engine.fork(), talk, engine.fork()]
    for _ in range(2):  # the second of them would choose in its question's own tokens
        check_equal([Turn(own, made(12)) for own in talks], [own.fork() for own in talks])


def test_logits_of_every_token(opened, monkeypatch):
    engine, long = opened(0), made(40)
    expected = torch.stack([engine.extend(long[:1]), *(engine.extend([token]) for token in long[1:])])
    engine.crop(engine.prefix.length)
    monkeypatch.setattr(batching, "LOGITS", 12 * 259)  # of a few tokens a pass
    for others in (0, 2):
        talks = [engine.fork() for _ in range(1 + others)]
        found = check_equal([Turn(talk, long, every=True) for talk in talks], [talk.fork() for talk in talks])
        for one in found:
            torch.testing.assert_close(one, expected, atol=1e-4, rtol=0)
    talks[0].crop(engine.prefix.length)
    list(talks[0].generate(talks[0].extend(long[:3]), 1))
    twin = talks[0].fork()
    assert len(twin.pending) == 1
    after = torch.stack([twin.extend(tokens) for tokens in ([], long[:1], long[1:2])])
    for turns in ([Turn(talks[0].fork(), long[:2], True)], [Turn(t.fork(), long[:2], True) for t in talks]):
        found = run_turns(turns)[0]
        assert len(found) == 2, "the pending token is run, and none of them"
        torch.testing.assert_close(found, after[1:], atol=1e-4, rtol=0)


def test_a_long_question_is_run_in_passes(opened, passes):
    talks = [opened(0) for _ in range(3)]
    for talk in talks:
        talk.pass_tokens = 16
    check_equal([Turn(talk, made(21 + place)) for place, talk in enumerate(talks)], [t.fork() for t in talks])
    assert passes == [1, 2, 2, 1, 1]  # 16, 5 + 11, 11 + 5, 16 and 2 tokens


def test_forks_and_crops_between_passes(opened):
    engine = opened(1)
    engine.extend(made(6))
    branches = [engine.fork() for _ in range(3)]
    run_turns([Turn(branch, made(15, place)) for place, branch in enumerate(branches)])
    for branch in branches:
        branch.crop(engine.length - 2)
    alone = engine.fork()
    alone.crop(engine.length - 2)
    check_equal([Turn(branch, made(3)) for branch in branches], [alone.fork() for _ in branches])


def test_continuous_batching_equals_answers(opened):
    """Questions join and leave between the steps of others."""
    engines = [opened(0), opened(1), opened(1, "quest", budget="32")]
    rng = random.Random(0)
    questions = [f"Question {i}, " * rng.randint(1, 4) for i in range(12)]
    asked = [(rng.choice(engines), question, rng.randint(2, 12)) for question in questions]
    expected = [engine.answer(question, most).tokens for engine, question, most in asked]
    found = [[] for _ in asked]
    waiting, running = list(range(len(asked))), {}
    while waiting or running:
        for _ in range(rng.randint(0, min(4, len(waiting)))):
            engine, question, _ = asked[number := waiting.pop()]
            running[number] = engine.fork(), engine.question_tokens(question)
        logits = run_turns([Turn(*turn) for turn in running.values()])
        for (number, (talk, _)), own in zip(list(running.items()), logits, strict=True):
            found[number].append(int(own.argmax()))
            running[number] = talk, found[number][-1:]
            if len(found[number]) == asked[number][2]:
                del running[number]
    assert [tuple(own) for own in found] == expected


def test_what_fails_is_taken_back_for_all(opened, monkeypatch):
    first, second = opened(0), opened(1)
    talks = [first.fork(), second.fork(), opened(0, "snapkv"), first.fork()]
    for place, talk in enumerate(talks):
        list(talk.generate(talk.extend(made(5, place)), 2))  # leaves a pending token
    before = [(talk.length, list(talk.tokens), list(talk.pending)) for talk in talks]
    twins = [talk.fork() for talk in talks]

    def damaged(layer):
        if layer == first.loaded.shape.full_layers[-1]:
            raise StoreDamaged("a file has become shorter")

    with monkeypatch.context() as patched:
        patched.setattr(second.store, "check_mapped", damaged)
        with pytest.raises(StoreDamaged):
            run_turns([Turn(talks[place], made(3)) for place in (2, 0, 1, 3)])  # the first alone, and well
    assert [(talk.length, talk.tokens, talk.pending) for talk in talks] == before
    check_equal([Turn(talk, made(3)) for talk in talks], twins)


def test_what_a_pass_costs_is_shared_out_whole(opened):
    engine = opened(0)
    talks = [engine.fork() for _ in range(3)]
    run_turns([Turn(talk, made(tokens)) for talk, tokens in zip(talks, (1, 2, 5), strict=True)])
    stats = [talk.prefix.take_stats() for talk in talks]
    shape = engine.loaded.shape
    each = shape.query_heads * len(shape.full_layers)
    assert [own.tokens for own in stats] == [1, 2, 5]
    assert [own.rows for own in stats] == [each, 2 * each, 5 * each]
    assert [own.selected for own in stats] == [20 * own.rows for own in stats]
    assert stats[2].total_s > stats[0].total_s > 0
    alone = engine.fork()
    alone.extend(made(5))
    assert alone.prefix.take_stats().by_layer == stats[2].by_layer
    assert all(own.bytes_moved > 0 for own in stats)


@pytest.mark.parametrize("selector", ["topk", "quest", "dense"])
def test_each_watch_sees_its_own_conversation(opened, selector, monkeypatch):
    engine = opened(0, selector)
    talks = [engine.fork() for _ in range(3)]
    turns = [Turn(talk, made(tokens, tokens)) for talk, tokens in zip(talks, (1, 2, 5), strict=True)]
    expected = []
    for talk, turn in zip(talks, turns, strict=True):
        alone = talk.fork()
        with alone.watched() as watch:
            alone.extend(turn.tokens)
        expected.append(watch)
    for at_once in (step.SELECTED_IDS, 100):
        monkeypatch.setattr(step, "SELECTED_IDS", at_once)
        forks = [Turn(talk.fork(), *turn[1:]) for talk, turn in zip(talks, turns, strict=True)]
        with forks[0].conversation.watched() as first, forks[2].conversation.watched() as third:
            run_turns(forks)
        for found, own in ((first, expected[0]), (third, expected[2])):
            np.testing.assert_allclose(found.mass, own.mass, atol=1e-4)


def test_wrong_turns_are_refused(opened):
    engine = opened(0)
    talk = engine.fork()
    with pytest.raises(ConfigError, match="one turn at a time"):
        run_turns([Turn(talk, [5]), Turn(talk, [6])])
    with pytest.raises(ConfigError, match="no tokens"):
        run_turns([Turn(talk, [5]), Turn(engine.fork(), [])])
    with pytest.raises(ConfigError, match="not in the vocabulary"):
        run_turns([Turn(talk, [5]), Turn(engine.fork(), [259])])
    with talk.step(), pytest.raises(ConfigError, match="another thread"):
        run_turns([Turn(engine.fork(), [5]), Turn(talk, [5])])
    assert talk.length == engine.length
    assert run_turns([]) == []
