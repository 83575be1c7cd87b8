"""Answers that hold what is right and mean something else, and right ones in the words of a polite model."""

from __future__ import annotations

import json

import pytest

from offload_decode.evals.tasks import Question, get
from offload_decode.evals.tasks.aggregate.spread import Choice
from offload_decode.evals.tasks.ruler import niah

_KEYS, _VALUES = ("brisk-lantern", "odd-boat"), ("7654321", "2345678")
_ONE = Question(niah.ASK.format(key=_KEYS[0]), niah.PREFIX.format(key=_KEYS[0]), _VALUES[:1])
_BOTH = Question(niah.ASK_ALL.format(key=niah.several([*_KEYS])), "", _VALUES, keys=_KEYS)
_WORDS = ("lantern", "otter", "castle")
_COUNT = Question("How many sentences mention Leo Clockwell?", "", ("8",))
_TALLY = Choice("Which kind is the most frequent?", "", ("order",), choices=("order", "question"))
_RECORDS = [{"seller": "Leo Clockwell", "town": "Vasedale", "price": 8}]


@pytest.mark.parametrize(
    ("task", "question", "said", "score"),
    [
        ("niah_single_2", _ONE, "The special magic number for quiet-river is 7654321.", 0),
        ("niah_single_2", _ONE, "brisk-lantern has none; 7654321 is for quiet-river.", 0),
        ("niah_single_2", _ONE, "Anything but 7654321", 0),
        ("niah_single_2", _ONE, "The seven-digit number for brisk-lantern is 7654321.", 1),
        ("niah_multiquery", _BOTH, "brisk-lantern: 7654321, quiet-river: 2345678", 0.5),
        ("niah_multiquery", _BOTH, "quiet-river: 7654321, red-barn: 2345678", 0),
        ("niah_multiquery", _BOTH, "brisk-lantern: 7654321, odd-boat: 2345678", 1),
        ("cwe", Question("", "", _WORDS), str([*_WORDS]), 1),
        ("cwe", Question("", "", _WORDS), f"{', '.join(_WORDS)}\n\nLet me know if you need more words.", 1),
        ("cwe", Question("", "", _WORDS), f"Let me know if you need {', '.join(_WORDS)}", 0),
        ("count-mentions", _COUNT, r"\boxed{8}", 1),
        ("count-mentions", _COUNT, "<answer>8</answer>", 1),
        ("count-mentions", _COUNT, "I think it might be 8", 0),
        ("tally-lines", _TALLY, "anything but order", 0),
        ("tally-lines", _TALLY, "Least frequent: order", 0),
        ("tally-lines", _TALLY, "order is the second most frequent", 0),
        ("every-record", Question("", "", (json.dumps(_RECORDS),)), f"```json {json.dumps(_RECORDS)} ```", 1),
    ],
)
def test_what_is_meant_counts(task: str, question: Question, said: str, score: float) -> None:
    assert get(task).score(question, said) == pytest.approx(score)
