"""What is asked for several times over is what was told, and every order of it is accepted."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from training.several import Page, several

WORDS = np.arange(20_000)
BOS = 30_000
COMMON = np.arange(50)
RARE = np.arange(50, 20_000)


def page(seed: int) -> Page:
    return Page(np.random.default_rng(seed), RARE, COMMON)


def answers(page: Page) -> list[tuple[list[int], list[list[int]]]]:
    """All that stands before each answer, and its parts."""
    found, before = [], []
    for tokens, weights, *_ in page.parts:
        if weights.any():
            cuts = np.flatnonzero(tokens < 50)
            found.append((list(before), [p[p >= 50].tolist() for p in np.split(tokens, cuts)][: len(cuts)]))
        before += tokens.tolist()
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_words_that_come_most_often_are_the_answer(seed: int) -> None:
    made = page(seed)
    made.counts(400)
    ((before, said),) = answers(made)
    firsts = [part[0] for part in said]
    least = min(before.count(first) for first in firsts)
    assert least > 2
    often = {t for t in before if t >= 50 and before.count(t) >= least}
    assert len(set(firsts)) == len(firsts)
    # All that comes so often and is not the first token of a part goes on with one.
    assert often - set(firsts) <= {t for part in said for t in part[1:]}


@pytest.mark.parametrize("seed", range(8))
def test_all_values_of_a_key_are_the_answer(seed: int) -> None:
    made = page(seed)
    made.values(0)
    told = made.size
    for before, said in answers(made):
        told = min(told, len(before))
        text = " ".join(map(str, before))
        assert all(" ".join(map(str, part)) in text for part in said)
    values = [tuple(part) for _, said in answers(made) for part in said]
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("seed", range(8))
def test_links_of_a_chain_come_in_their_order_and_nothing_else_is_right(seed: int) -> None:
    made = page(seed)
    made.chains(0)
    assert all((part.others == -1).all() for part in made.parts)
    for before, said in answers(made):
        for old, new in pairwise(said):
            # The text tells the newer of two neighbours before the older: `a NEW b OLD c`.
            where = [i for i in range(len(before)) if before[i : i + len(new)] == new]
            assert any(
                old == [t for t in before[i + len(new) : i + len(new) + 5] if t >= 50][: len(old)]
                for i in where
            )


@pytest.mark.parametrize("seed", range(8))
def test_a_link_is_hinted_at_where_the_text_has_told_it_by_the_one_before(seed: int) -> None:
    made = page(seed)
    made.chains(0)
    tokens, hints = (np.concatenate(parts) for parts in list(zip(*made.parts, strict=True))[::4])
    links = sum(len(said) for _, said in answers(made))
    assert (hints >= 0).sum() == links
    hints = hints[:, 0]
    for at in np.flatnonzero(hints >= 0):
        # `let NEW = OLD`: the answer says NEW at this place; the hint is at the end of OLD.
        before = tokens[: hints[at] + 1].tolist()
        start = max(i for i, token in enumerate(before) if token == made.let[0]) + 1
        assert before[start] == tokens[at]
        assert before[-1] in tokens[hints[at] + 1 : at], "OLD is what the question or the answer said before"


@pytest.mark.parametrize("seed", range(8))
def test_keys_are_answered_in_the_order_of_the_question_each_with_its_value(seed: int) -> None:
    made = page(seed)
    made.queries(0)
    tokens, hints = (np.concatenate(parts) for parts in list(zip(*made.parts, strict=True))[::4])
    ((before, _),) = answers(made)
    question = before[len(before) - 1 - before[::-1].index(made.ask[0]) :]
    hinted = np.flatnonzero(hints[:, 0] >= 0)
    keys, values = hinted[::2], hinted[1::2]
    order = [question.index(tokens[at]) for at in keys]
    assert order == sorted(order)
    assert len(order) > 1
    for key, value in zip(keys, values, strict=True):
        assert tokens[hints[key, 0] + 1] == tokens[key]
        told = tokens[: hints[value, 0] + 2].tolist()
        assert told[-1] == tokens[value]
        # `K b = c V`: this key is the last that was told before its value.
        assert max(range(len(told)), key=lambda i: (told[i] in tokens[keys]) * (i + 1)) == max(
            i for i in range(len(told)) if told[i] == tokens[key]
        )


def test_what_is_left_to_say_is_as_right_as_what_is_said() -> None:
    (tokens, weights, others, *_), *_ = several(np.random.default_rng(0), 2048, WORDS, COMMON, BOS)
    assert len(tokens) == len(weights) == len(others) == 2048
    accepted = np.argwhere(others >= 0)
    assert len(accepted) > 10
    for at, other in accepted:
        assert weights[at] == 1
        assert others[at, other] != tokens[at]
    asked = np.flatnonzero(weights == 1)
    assert len(asked) > 50


def test_rows_are_the_same_for_the_same_seed() -> None:
    one, two = (several(np.random.default_rng(7), 128, WORDS, COMMON, BOS)[0] for _ in range(2))
    assert all((a == b).all() for a, b in zip(one, two, strict=True))


def test_a_field_is_told_where_the_record_of_the_name_has_it() -> None:
    """What is said, what tells it and the question's name: all of one record."""
    found = 0
    for seed in range(60):
        row, belongs, _ = several(np.random.default_rng(seed), 256, WORDS, COMMON, BOS)
        name = {int(at): int(last) for at, _, last in belongs}
        for at in np.flatnonzero(row.hints[:, 0] >= 0):
            told = int(row.hints[at, 0]) + 1
            if at - 1 in name and told in name and row.weights[told] == 0:
                assert row.tokens[told] == row.tokens[at]
                assert row.tokens[name[told]] == row.tokens[name[at - 1]]
                assert name[told] < told < name[at - 1] < at
                found += 1
    assert found > 100


def test_values_belong_to_a_name_before_them() -> None:
    for seed in range(10):
        _, belongs, _ = several(np.random.default_rng(seed), 256, WORDS, COMMON, BOS)
        assert (belongs[:, 0] > belongs[:, 1]).all()
        assert (belongs < 256).all()
