"""Where words of a list end, and which name a question asks for."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from offload_decode import demo_models
from training.items import Named
from training.marks import asked_for, listed_words


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_models.path("demo"), local_files_only=True)


def encoded(tokenizer: Any, text: str) -> Any:
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)


def test_a_question_asks_for_the_longest_name_that_it_has(tokenizer: Any) -> None:
    known = [Named(name, (5, len(name)), ()) for name in ("note-red", "note-red-fox", "note-hat")]
    text = "What is the status of note-red-fox?\nAnswer: The status of note-red-fox is"
    encoding = encoded(tokenizer, text)
    found = asked_for(encoding, text, known)
    assert found is not None
    assert encoding.offsets[found[0]][0] == text.rindex("red-fox")
    assert encoding.offsets[found[1]][1] == text.rindex("red-fox") + len("red-fox")
    assert asked_for(encoding, text, known[2:]) is None


def test_words_are_numbered_and_numbers_are_not_words(tokenizer: Any) -> None:
    text = "1. unsuitable 2. mound 3. unsuitable 4. mounds"
    encoding = encoded(tokenizer, text)
    ends, origins, so_far = listed_words(encoding, text)
    at = [int(i) for i in ends.nonzero()[0]]
    assert [int(ends[i]) for i in at] == [1, 2, 1, 3]
    assert [encoding.offsets[i][1] for i in at] == [
        text.index(" 2."),
        text.index(" 3."),
        text.index(" 4."),
        len(text),
    ]
    assert origins[at[0]] == origins[at[2]] == encoding.ids[encoded(tokenizer, "1.").ids.__len__()]
    assert (origins[ends == 0] == -1).all()
    # Each token of a word is numbered by all that was read of the word: alike where words are alike so far.
    spans = ((text.index("uns"), 10), (text.index("mound"), 5), (text.rindex("uns"), 10))
    read = []
    for start, size in (*spans, (text.rindex("mound"), 6)):
        inside = [i for i, (_, end) in enumerate(encoding.offsets) if start < end <= start + size]
        read.append({tuple(encoding.ids[inside[0] : i + 1]): int(so_far[i]) for i in inside})
        so_far[inside] = 0
    assert len(read[0]) > 1, "a word of several tokens"
    numbers = {beginning: number for word in read for beginning, number in word.items()}
    assert all(numbers[beginning] == number for word in read for beginning, number in word.items())
    assert len(set(numbers.values())) == len(numbers)
    assert min(numbers.values()) == 1
    assert not so_far.any(), "what is no word"
