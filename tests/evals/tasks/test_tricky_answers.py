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
_KINDS = ("order", "question", "complaint")
_COMPLAINT = Choice("Which kind is the most frequent?", "", ("complaint",), choices=_KINDS)
_TOWN = Question("In which town was the teacher of Leo Clockwell born?", "", ("Lilydale",))
_WALK = Question("Somebody starts in Deermouth.", "", ("Parrotham", "Guitarmouth", "Lilydale"))
_FOUR = ("brisk-lantern", "odd-boat", "calm-river", "bold-acorn")
_QUERY = Question(
    niah.ASK_ALL.format(key=niah.several([*_FOUR])),
    "",
    ("1111111", "2222222", "3333333", "4444444"),
    keys=_FOUR,
)
_LIST = "brisk-lantern: 1111111; odd-boat: 2222222; calm-river: 3333333; bold-acorn: "
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
        ("niah_single_2", _ONE, "\u0667\u0666\u0665\u0664\u0663\u0662\u0661", 1),
        ("niah_single_2", _ONE, "\u096d\u096c\u096b\u096a\u0969\u0968\u096a", 0),
        ("niah_single_2", _ONE, "The text does not mention brisk-lantern; the only number is 7654321.", 0),
        ("niah_single_2", _ONE, "I can't answer that. 7654321", 0),
        ("niah_single_2", _ONE, "It is 7654321. The text does not mention any other.", 1),
        ("niah_multiquery", _QUERY, _LIST + "not mentioned", 3 / 4),
        ("niah_multiquery", _QUERY, _LIST + "the text does not say", 3 / 4),
        ("niah_multivalue", Question("", "", _VALUES), "7654321, 2345678. They add up to 9999999.", 2 / 3),
        ("count-mentions", _COUNT, "The text does say that: 8", 1),
        ("count-mentions", _COUNT, "I am unable to tell: 8", 0),
        ("join-story", _TOWN, "The text does not say; Lilydale is a town.", 0),
        ("join-story", _TOWN, "Lilydale, not Guitarmouth", 1),
        ("join-story", _TOWN, "Guitarmouth, not Lilydale", 0),
        ("tally-lines", _COMPLAINT, "complaint (12 of 40)", 1),
        ("tally-lines", _COMPLAINT, "Complaints: 12. Total: 40", 1),
        ("tally-lines", _COMPLAINT, "complaint: 12, order: 10", 0),
        ("tally-lines", _COMPLAINT, "Complaints come most often.", 1),
        ("tally-lines", _COMPLAINT, "There are more complaints than any other kind.", 1),
        ("tally-lines", _COMPLAINT, "There are no more complaints than any other kind.", 0),
        ("tally-lines", _COMPLAINT, "Mostly complaints", 1),
        ("tally-lines", _COMPLAINT, "I have a complaint (about this).", 0),
        (
            "graph-walk",
            _WALK,
            "From Deermouth to Parrotham, from Parrotham to Guitarmouth, from Guitarmouth to Lilydale.",
            1,
        ),
        ("graph-walk", _WALK, "Parrotham, Guitarmouth, Lilydale. The journey ends in Lilydale.", 1),
        ("graph-walk", _WALK, "Parrotham, Guitarmouth, Lilydale. The journey ends in Pepperham.", 3 / 4),
        ("graph-walk", _WALK, "The text does not say: Parrotham, Guitarmouth, Lilydale", 0),
        ("every-record", Question("", "", (json.dumps(_RECORDS),)), f"```json {json.dumps(_RECORDS)} ```", 1),
    ],
)
def test_what_is_meant_counts(task: str, question: Question, said: str, score: float) -> None:
    assert get(task).score(question, said) == pytest.approx(score)
