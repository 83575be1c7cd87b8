"""Where attention is led: what an answer can be copied from."""

from __future__ import annotations

import math

import pytest
import torch

from training.guidance import LONGER, agreed, beginning, copied, counting, sources

SINK = 32


def test_what_is_copied_stands_before_with_the_same_two_tokens_behind_it() -> None:
    eos = 1
    #                       0  1  2  3  4  5  6  7  8  9  10 11 12
    tokens = torch.tensor([[5, 6, 7, 8, 5, 6, 9, 3, 5, 6, 7, 4, eos]])
    picked = torch.tensor([[7, 9, 10, 3]])
    nothing = torch.full((1, 4, 2), -1)
    hints = torch.full((1, 4, 2), -1)
    alone = torch.zeros(1, 4, dtype=torch.bool)
    found = sources(tokens, tokens, torch.zeros_like(tokens), picked, nothing, hints, alone, eos)[0]
    # 5 6 7 is at 0 alone; 7 4 comes nowhere else; 4 ends the answer, but was not seen; 5 6 9 not either.
    assert [row.nonzero().flatten().tolist() for row in found] == [[0], [], [], []]
    ended = torch.tensor([[5, 6, 7, 8, 5, 4, 3, 5, eos, 6]])
    one = (hints[:, :1], alone[:, :1], eos)
    found = sources(ended, ended, torch.zeros_like(ended), torch.tensor([[6]]), nothing[:, :1], *one)[0]
    assert found[0].nonzero().flatten().tolist() == [0, 4]
    found = sources(
        ended, ended, torch.zeros_like(ended), torch.tensor([[6]]), torch.tensor([[[3, 9]]]), *one
    )[0]
    assert found[0].nonzero().flatten().tolist() == [0, 4, 6]
    # Where it is told elsewhere, it is found behind that alone.
    told = torch.tensor([[[2, 5]]])
    found = sources(
        ended, ended, torch.zeros_like(ended), torch.tensor([[6]]), nothing[:, :1], told, alone[:, :1], eos
    )[0]
    assert found[0].nonzero().flatten().tolist() == [2, 3, 5, 6]
    told[..., 1] = -1
    found = sources(
        ended, ended, torch.zeros_like(ended), torch.tensor([[6]]), nothing[:, :1], told, alone[:, :1], eos
    )[0]
    assert found[0].nonzero().flatten().tolist() == [2, 3]
    # A part of a list is the same whatever follows it: 5 6 9 has no like, 5 has two.
    found = sources(
        tokens,
        tokens,
        torch.zeros_like(tokens),
        torch.tensor([[7]]),
        nothing[:, :1],
        hints[:, :1],
        ~alone[:, :1],
        eos,
    )[0]
    assert found[0].nonzero().flatten().tolist() == [0, 4]
    # What stands in another branch is not seen.
    branches = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2]])
    found = sources(ended, ended, branches, torch.tensor([[8]]), nothing[:, :1], hints[:, :1], ~one[1], eos)[
        0
    ]
    assert found[0].nonzero().flatten().tolist() == [1]


def test_a_counted_word_is_copied_from_where_it_ends() -> None:
    eos = 1
    #                       0  1  2  3  4  5  6
    tokens = torch.tensor([[5, 6, 3, 5, 7, 4, 5, eos]])
    origins = torch.tensor([[-1, 5, 3, -1, 5, 4, 5, eos]])
    nothing = torch.full((1, 1, 2), -1)
    alone = torch.ones(1, 1, dtype=torch.bool)
    found = sources(
        tokens, origins, torch.zeros_like(tokens), torch.tensor([[5]]), nothing, nothing, alone, eos
    )
    assert found[0, 0].nonzero().flatten().tolist() == [1, 4]
    others = torch.tensor([[[3, -1]]])
    found = sources(
        tokens, origins, torch.zeros_like(tokens), torch.tensor([[5]]), others, nothing, alone, eos
    )
    assert found[0, 0].nonzero().flatten().tolist() == [1, 2, 4]


def test_heads_together_find_what_is_copied_and_each_by_itself_what_is_counted() -> None:
    """Two heads, of which the second goes elsewhere: nothing is missed, or half."""
    eos = 1
    tokens = torch.tensor([[5, 6, 3, 5, 7, 4, 5, eos]])
    nothing, none = torch.full((1, 1, 2), -1), torch.zeros_like(tokens)
    opens = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 0]])
    paid = torch.zeros(1, 2, 1, 8)
    paid[0, 0, 0, 0] = paid[0, 0, 0, 1] = 0.5
    paid[0, 1, 0, 2] = 1.0

    def missed(origins: torch.Tensor) -> float:
        at, weights = torch.tensor([[5]]), torch.ones(1, 1)
        return float(copied(paid, tokens, at, nothing, nothing, opens, origins, none, weights, eos))

    # Copied from the 5 at 0, which is as much as the first head pays; then from any 5 or word that begins so.
    assert missed(tokens) == pytest.approx(-math.log(0.5))
    assert missed(torch.tensor([[5, 5, 3, -1, 5, 4, 5, eos]])) == pytest.approx(-math.log(0.5))
    paid[0, 0, 0, 0] = 1.0
    assert missed(tokens) == pytest.approx(0)
    assert missed(torch.tensor([[5, 6, 3, -1, 5, 4, 5, eos]])) == pytest.approx(-math.log(0.5))


def test_heads_are_led_to_one_of_the_words_that_would_be_right() -> None:
    """Two words are as right: what counts is the one that all heads pay most, before the place alone."""
    #                       0  1  2  3  4  5  6  7
    tokens = torch.tensor([[9, 5, 9, 6, 9, 5, 4, 5]])
    origins = torch.tensor([[-1, 5, -1, 6, -1, 5, 4, 5]])
    picked, others = torch.tensor([[6]]), torch.tensor([[[6, -1]]])

    def found(*heads: dict[int, float]) -> float:
        paid = torch.zeros(1, len(heads), 1, 8)
        for head, pays in enumerate(heads):
            for at, share in pays.items():
                paid[0, head, 0, at] = share
        return float(agreed(paid, tokens, origins, picked, others))

    assert found({1: 0.5, 5: 0.5}, {1: 1.0}) == pytest.approx(1), "wherever that word stands"
    assert found({3: 1.0}, {3: 1.0}) == pytest.approx(1), "or the other"
    assert found({1: 0.5, 3: 0.5}, {1: 0.5, 3: 0.5}) == pytest.approx(0.5), "not half of each"
    assert found({1: 1.0}, {3: 1.0}) == pytest.approx(0.5), "and the same for every head"
    assert found({7: 1.0}, {2: 1.0}) == 0, "not what comes later, nor where nothing is told"
    assert found({1: 1.0}, {0: 1.0}) == pytest.approx(1), "the second head may pay the first token of all"
    assert found({0: 1.0}, {1: 1.0}) == pytest.approx(0.5), "the first may not"


def test_a_word_is_led_from_its_end_to_its_first_token() -> None:
    #                       0  1  2  3  4  5  6  7
    tokens = torch.tensor([[9, 5, 7, 8, 5, 6, 4, 4]])
    origins = torch.tensor([[-1, -1, -1, 5, -1, 5, -1, 4]])
    ends = torch.tensor([[0, 0, 0, 1, 0, 2, 0, 3]])

    def found(at: int, *heads: dict[int, float]) -> float:
        paid = torch.zeros(1, len(heads), 1, 8)
        for head, pays in enumerate(heads):
            for place, share in pays.items():
                paid[0, head, 0, place] = share
        return float(beginning(paid, tokens, origins, torch.tensor([[at]]), ends))

    assert found(3, {1: 0.25, 3: 0.75}, {2: 1.0}) == pytest.approx(-math.log(0.25)), "heads together"
    assert found(5, {4: 1.0}) == pytest.approx(0)
    assert found(7, {7: 1.0}) == pytest.approx(0), "a word of one token begins where it ends"
    assert found(3, {4: 1.0}) > 10, "not what comes later"
    assert found(2, {0: 1.0}) == 0, "no word ends there"


def counted(paid: list[float]) -> float:
    """What a head misses that pays so much to (first, word 1, word 2, word 1, word 1), at the last."""
    return float(counting(torch.tensor([[paid]]), torch.tensor([[4]]), torch.tensor([[0, 1, 2, 1, 1]]), SINK))


def test_a_head_that_counts_pays_a_word_its_share_and_the_first_token_the_rest() -> None:
    share = 3 / (3 + SINK)
    right = counted([1 - share, share / 3, 0, share / 3, share / 3])
    assert abs(right) < 1e-5
    assert counted([1 - share, share, 0, 0, 0]) < 1e-5, "how it is spread over like words is all the same"
    for more in (0.7, 1.4):
        assert counted([1 - more * share, more * share, 0, 0, 0]) > 1e-3


def test_what_goes_to_other_words_counts_as_in_a_longer_list() -> None:
    share, little = 3 / (3 + SINK), 0.01
    first = 1 - share - little
    seen = share / (share + first + LONGER * little)  # among so many times as many other words
    strayed = counted([first, share, little, 0, 0])
    assert strayed == pytest.approx(counted([1 - seen, seen, 0, 0, 0]), rel=1e-3)
    assert strayed > 1e-4
