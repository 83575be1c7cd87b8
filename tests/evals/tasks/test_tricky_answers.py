"""Answers that hold what is right and mean something else, and right ones in the words of a polite model."""

from __future__ import annotations

import json

import pytest

from offload_decode.evals.tasks import Question, get
from offload_decode.evals.tasks.aggregate.spread import Choice
from offload_decode.evals.tasks.ruler import niah
from offload_decode.evals.tasks.ruler.qa import Either

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


_LISTED = Question("", "", ("1111111", "2222222", "3333333", "4444444"))
_FOUR_VALUES = "1111111, 2222222, 3333333, 4444444"
_SPAN = Question(niah.ASK.format(key="brisk-lantern").replace("number", "uuid"), "", ("6f1c2d3e-4b5a-8e7f",))
_CHAIN = Question("Find all variables.", "", ("ABCDE", "FGHIJ", "KLMNO"))
_OPERATOR = Either("Question: Which operator?", "", ("**",))


@pytest.mark.parametrize(
    ("task", "question", "said", "score"),
    [
        *(
            ("niah_single_2", _ONE, said, 0)
            for said in (
                "The special magic number for odd-boat is 7654321.",
                "The special magic number for Odd-Boat is 7654321.",
                "7654321 is the number for odd-boat",
                "The special magic number for quiet river is 7654321.",
                "Wrong answer: 7654321",
                "Incorrect: 7654321",
                "7654321 is the wrong answer",
                "I was told 7654321, but that is wrong.",
                "7654321 is almost certainly not it",
                "7654321 belongs to another key.",
                "I don't think it's 7654321",
                "I doubt it is 7654321.",
                "either 7654321 or another",
                "Ignore 7654321.",
                "all numbers besides 7654321",
                "everything apart from 7654321",
                "twice 7654321",
                "7654321 plus 1",
                "the reverse of 7654321",
                "for example 7654321",
                "hypothetically 7654321",
            )
        ),
        *(
            ("niah_single_2", _ONE, said, 1)
            for said in (
                "It is 7654321, no doubt that it is.",
                "There is no doubt that it is 7654321.",
                "The special magic number for brisk lantern is 7654321.",
                "For this question the number is 7654321.",
                "The well-known number is 7654321.",
                "2345678 is wrong; 7654321",
            )
        ),
        *(
            ("niah_multivalue", _LISTED, f"{before}{_FOUR_VALUES}", 0)
            for before in (
                "None of these: ",
                "none of ",
                "All but ",
                "The text does not say: ",
                "I can't answer this. ",
                "These are not right: ",
                "The wrong ones are ",
            )
        ),
        ("niah_multivalue", _LISTED, f"They are: {_FOUR_VALUES}. I found no others.", 1),
        ("niah_multivalue", _LISTED, "1111111 - 2222222 - 3333333 - 4444444", 1),
        ("niah_multiquery", _QUERY, "The text does not say: 1111111, 2222222, 3333333, 4444444", 0),
        ("niah_single_3", _SPAN, "6f1c2d3e\u20114b5a\u20118e7f", 1),
        ("niah_single_3", _SPAN, "The special magic uuid for odd-boat is 6f1c2d3e-4b5a-8e7f.", 0),
        ("vt", _CHAIN, "None: ABCDE, FGHIJ, KLMNO", 0),
        ("vt", _CHAIN, "The text does not say which; ABCDE, FGHIJ, KLMNO", 0),
        ("cwe", Question("", "", _WORDS), f"The least common words are {', '.join(_WORDS)}", 0),
        ("cwe", Question("", "", _WORDS), f"Words that appear only once: {', '.join(_WORDS)}", 0),
        ("cwe", Question("", "", _WORDS), f"All words except {', '.join(_WORDS)}", 0),
        ("fwe", Question("", "", ("qzkvbn", "wprtly")), "the rarest words are qzkvbn, wprtly", 0),
        ("fwe", Question("Do not provide any.", "", ("qzkvbn",)), "Do not provide any. qzkvbn", 1),
        ("qa_1", _OPERATOR, "**", 1),
        ("qa_1", _OPERATOR, "", 0),
        ("qa_1", _OPERATOR, "//", 0),
        ("qa_1", _OPERATOR, "the", 0),
        ("count-mentions", _COUNT, "Leo Hammer is mentioned 8 times", 0),
        ("count-mentions", _COUNT, "Leo Clockwell is mentioned 8 times", 1),
        ("count-mentions", _COUNT, "The Answer: 8", 1),
        ("count-mentions", _COUNT, "wrong: 8", 0),
        ("tally-lines", _TALLY, '{"kind": "order"}', 1),
        ("tally-lines", _TALLY, "wrong: order", 0),
        ("tally-lines", _TALLY, "the infrequent kind is order", 0),
        ("tally-lines", _TALLY, "orders are never the most frequent", 0),
        *(
            ("join-story", _TOWN, said, 0)
            for said in (
                "Lilydale?",
                "near Lilydale",
                "10 miles from Lilydale",
                "the village next to Lilydale",
                "anywhere but Lilydale",
                "wrong: Lilydale",
                "Lilydale or another town",
            )
        ),
        ("join-story", _TOWN, "He was born in Lilydale.", 1),
    ],
)
def test_other_keys_other_people_denials_of_lists_and_sums(
    task: str, question: Question, said: str, score: float
) -> None:
    assert get(task).score(question, said) == pytest.approx(score)


_BAKERS = Question("Who is a baker in Lilydale?", "", ("Leo Clockwell", "Ada Otterson"))


@pytest.mark.parametrize(
    "before",
    [
        "None of these: ",
        "Everyone except ",
        "All but ",
        "They are not these: ",
        "The text does not say: ",
        "I cannot tell. ",
    ],
)
@pytest.mark.parametrize(
    ("task", "question"),
    [("niah_multivalue", _LISTED), ("filter-records", _BAKERS), ("graph-walk", _WALK)],
)
def test_a_list_that_is_denied_or_refused_is_no_answer(task: str, question: Question, before: str) -> None:
    said = ", ".join(question.answers)
    assert get(task).score(question, said) == 1
    assert get(task).score(question, before + said) == 0


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("7654321-8", 0),
        ("8-7654321", 0),
        ("12/7654321", 0),
        ("7654321,890", 0),
        ("7654321-2345678", 0),
        ("no. 5: 7654321", 1),
        ("7654321 (3/5)", 1),
        ('{"1": 7654321}', 1),
    ],
)
def test_a_part_of_a_longer_number_is_not_that_number(said: str, score: float) -> None:
    assert get("niah_single_2").score(_ONE, said) == score


def test_lists_without_spaces_are_no_longer_numbers() -> None:
    task = get("niah_multivalue")
    assert task.score(_LISTED, "1111111,2222222-3333333/4444444") == 1
    assert task.score(_LISTED, "1111111,2222222,3333333,4444444-5") == 3 / 4


def test_a_field_that_is_given_twice_is_not_right() -> None:
    question = Question("", "", (json.dumps(_RECORDS),))
    said = json.dumps([{"Price": 9, **_RECORDS[0]}])
    assert get("every-record").score(question, said) == 0
