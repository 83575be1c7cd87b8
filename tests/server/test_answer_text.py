"""The text of an answer as it comes: stop strings, characters, and white space at its ends."""

from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offload_decode.server.answer_text import AnswerText
from tests.models.tokenizers import KINDS, tokenizer_of

LETTERS = st.text("ab \n", max_size=12)
STOPS = st.lists(st.text("ab \n", min_size=1, max_size=4), max_size=3)


class Words:
    """A tokenizer whose tokens are these texts."""

    def __init__(self, texts):
        self.texts = texts

    def decode(self, tokens, **_):
        return "".join(self.texts[token] for token in tokens)


def read(tokenizer, tokens, *how):
    """What is shown with each token and at the end, and the stop string that came."""
    text = AnswerText(tokenizer, *how)
    shown = [text.push(token) for token in tokens]
    return [*shown, text.rest()], text.stopped


def ended(text, stops):
    """The text before the stop string that is complete first, by its definition."""
    for end in range(len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return text[:start], text[start:end]
    return text, None


@given(st.lists(LETTERS, max_size=8), STOPS, st.booleans())
@example(["aab b", "a"], ["abb", "b b", "ab ", "a"], True)
@example(["b a", "ab b a"], ["ab b", "b b", " b"], True)
@example(["b aab"], ["b", " aab"], False)
def test_any_split_gives_the_text_before_the_first_stop_string(pieces, stops, raw):
    shown, stopped = read(Words(pieces), range(len(pieces)), stops, raw)
    expected, ends = ended("".join(pieces), stops)
    assert "".join(shown) == (expected if raw else expected.strip())
    assert stopped == ends


@given(st.lists(LETTERS, max_size=8), STOPS)
@example(["ab", "", "ba", "b"], ["ba"])
def test_kept_are_the_tokens_that_begin_before_the_stop_string(pieces, stops):
    text = AnswerText(Words(pieces), stops)
    for token in range(len(pieces)):
        text.push(token)
    text.rest()
    before, ends = ended("".join(pieces), stops)
    starts = [0, *accumulate(map(len, pieces))][: len(pieces)]
    assert text.kept == (0 if ends is None else sum(start < len(before) for start in starts))


@given(st.lists(LETTERS, max_size=8), STOPS)
def test_no_more_is_held_back_than_may_begin_a_stop_string(pieces, stops):
    shown, _ = read(Words(pieces), range(len(pieces)), stops, True)
    for text, so_far in zip(accumulate(shown[:-1]), accumulate(pieces), strict=True):
        if ended(so_far, stops)[1]:
            break
        held = so_far[len(text) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_whole_characters_and_together_the_text(kind):
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer.encode("é字🙂 is 🙂🙂 calm .", add_special_tokens=False)
    shown, _ = read(tokenizer, tokens)
    assert "".join(shown) == tokenizer.decode(tokens, clean_up_tokenization_spaces=False).strip()
    assert not any("\ufffd" in piece for piece in shown)


def test_an_endless_run_of_broken_characters_is_shown_at_the_end():
    tokenizer = tokenizer_of("byte level")
    broken = tokenizer.encode("🙂", add_special_tokens=False)[:1]
    shown, _ = read(tokenizer, broken * 300)
    assert "".join(shown) == tokenizer.decode(broken * 300)
    tokens = broken * 300 + tokenizer.encode(" is calm" * 30, add_special_tokens=False)
    shown, _ = read(tokenizer, tokens)
    assert "".join(shown) == tokenizer.decode(tokens).strip()
