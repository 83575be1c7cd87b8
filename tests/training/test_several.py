"""What is asked for several times over is what was told, and every order of it is accepted."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from training.several import Page, several

WORDS = np.arange(20_000)
COMMON = np.arange(50)
RARE = np.arange(50, 20_000)


def page(seed: int) -> Page:
    return Page(np.random.default_rng(seed), RARE, COMMON)


def answers(page: Page) -> list[tuple[list[int], list[list[int]]]]:
    """All that stands before each answer, and its parts."""
    found, before = [], []
    for tokens, weights, _, _ in page.parts:
        if weights.any():
            cuts = np.flatnonzero(weights < 1)
            found.append((list(before), [p[p >= 50].tolist() for p in np.split(tokens, cuts)][: len(cuts)]))
        before += tokens.tolist()
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_words_that_come_most_often_are_the_answer(seed: int) -> None:
    made = page(seed)
    made.counts(400)
    ((before, said),) = answers(made)
    firsts = [part[0] for part in said]
    often = {t for t in before if t >= 50 and before.count(t) > 2}
    assert set(firsts) <= often
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
    assert all((part.others == -1).all() and not part.guided.any() for part in made.parts)
    for before, said in answers(made):
        for old, new in pairwise(said):
            # The text tells the newer of two neighbours before the older: `a NEW b OLD c`.
            where = [i for i in range(len(before)) if before[i : i + len(new)] == new]
            assert any(
                old == [t for t in before[i + len(new) : i + len(new) + 5] if t >= 50][: len(old)]
                for i in where
            )


def test_what_is_left_to_say_is_as_right_as_what_is_said() -> None:
    (tokens, weights, others, _), _ = several(np.random.default_rng(0), 1024, WORDS, COMMON)
    assert len(tokens) == len(weights) == len(others) == 1024
    accepted = np.argwhere(others >= 0)
    assert len(accepted) > 10
    for at, other in accepted:
        assert weights[at] == 1
        assert others[at, other] != tokens[at]
    asked = np.flatnonzero(weights == 1)
    assert len(asked) > 50


def test_rows_are_the_same_for_the_same_seed() -> None:
    one, two = (several(np.random.default_rng(7), 128, WORDS, COMMON)[0] for _ in range(2))
    assert all((a == b).all() for a, b in zip(one, two, strict=True))
