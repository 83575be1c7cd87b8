"""Groups of contexts hold all of them, and store only what all members begin with."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_decode.prefill_jobs.lm_eval.answers import Group, groups


def tokens(*runs):
    """A context of runs of one token each: (token, how many)."""
    return np.concatenate([np.full(count, token, np.int32) for token, count in runs])


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=8),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_every_context_is_in_one_group_that_stores_its_prefix(contexts, least, question):
    arrays = [np.array(context, np.int32) for context in contexts]
    found = groups(arrays, least, question)
    assert sorted(place for group in found for place in group.members) == list(range(len(contexts)))
    for group in found:
        assert len({tuple(contexts[place][: group.stored]) for place in group.members}) == 1
        for place in group.members:
            room = len(contexts[place]) - question
            assert group.stored == 0 if room < least else least <= group.stored <= room


def test_contexts_that_differ_in_their_question_share_all_that_comes_before():
    document = (7, 100)
    contexts = [tokens(document, (number, 10 + number)) for number in range(3)]
    assert groups(contexts, least=50, question=4) == [Group(100, [0, 1, 2])]


def test_equal_contexts_share_all_but_the_question():
    assert groups([tokens((7, 100))] * 3, least=50, question=8) == [Group(92, [0, 1, 2])]


def test_a_short_preamble_is_no_reason_to_leave_long_documents_unstored():
    preamble = (1, 60)
    contexts = [tokens(preamble, (2, 500)), tokens(preamble, (3, 500)), tokens(preamble, (3, 500), (4, 9))]
    found = groups(contexts, least=50, question=5)
    assert found == [Group(555, [0]), Group(555, [1, 2])]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]])
def test_the_order_of_requests_makes_no_other_groups(order):
    contexts = [tokens((1, 80)), tokens((1, 80), (2, 5)), tokens((3, 90)), tokens((3, 2))]
    found = groups([contexts[place] for place in order], least=50, question=5)
    named = {(group.stored, frozenset(order[member] for member in group.members)) for group in found}
    assert named == {(0, frozenset({3})), (75, frozenset({0, 1})), (85, frozenset({2}))}
