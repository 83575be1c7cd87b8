"""A text is cut to tokens of a tokenizer, wherever it starts and however short it is."""

import sys

import pytest

from offload_decode.common.errors import CorpusError
from offload_decode.evals.contender import label
from offload_decode.evals.haystack import Haystack, python_topics
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SHORT = Haystack("short", "0123456789")


@pytest.mark.parametrize("tokens", [1, 100, 5000])
def test_a_cut_has_the_tokens_that_were_asked_for(tokens: int) -> None:
    topics = python_topics()
    cut = topics.cut(TOKENIZER, tokens)
    assert len(TOKENIZER.encode(cut, add_special_tokens=False)) == tokens
    assert topics.text.startswith(cut)


def test_it_starts_where_it_is_told_and_goes_on_round_the_end() -> None:
    assert SHORT.cut(TOKENIZER, 4, start=0.3) == "3456"
    assert SHORT.cut(TOKENIZER, 12, start=0.5) == "56789\n\n01234"


def test_a_short_text_is_repeated() -> None:
    assert SHORT.cut(TOKENIZER, 30) == "0123456789\n\n0123456789\n\n012345"


def test_long_tokens_take_more_text() -> None:
    class Tens:
        def encode(self, text: str, **_: bool) -> list[str]:
            return [text[at : at + 10] for at in range(0, len(text), 10)]

        def decode(self, pieces: list[str], **_: bool) -> str:
            return "".join(pieces)

    text = "".join(f"{number:04}" for number in range(50))
    assert Haystack("digits", text).cut(Tens(), 7) == text[:70]


def test_no_half_character_is_left() -> None:
    assert Haystack("accents", "aé").cut(TOKENIZER, 2) == "a"


def test_the_digest_is_of_the_text() -> None:
    assert SHORT.sha256 == "84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882"


def test_a_python_without_topics_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(CorpusError, match="complete installation"):
        python_topics()


def test_lengths_are_labelled_by_the_unit_that_divides_them() -> None:
    assert [label(n) for n in (300, 2048, 3000, 1 << 20)] == ["300", "2K", "3,000", "1M"]
