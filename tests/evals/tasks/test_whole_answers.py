"""What is said beside the right answer: sums, other keys, refusals, thoughts, pieces of the text."""

from __future__ import annotations

import json
import random

import pytest

from offload_decode.evals.tasks import Question, get
from offload_decode.evals.tasks.aggregate.spread import Choice
from offload_decode.evals.tasks.ruler import niah, tracking

KEY, VALUE = "brisk-lantern", "7654321"
ONE = Question(niah.ASK.format(key=KEY), niah.PREFIX.format(key=KEY), (VALUE,))
UUIDS = ("6f1c2d3e-4b5a-4c6d-8e7f-0a1b2c3d4e5f", "11112222-3333-4444-8555-666677778888")
BY_UUID = Question(niah.ASK.replace("number", "uuid").format(key=UUIDS[1]), "", UUIDS[:1])
FOUR = ("1111111", "2222222", "3333333", "4444444")
VALUES = Question(niah.ASK_ALL.format(key=KEY), "", FOUR)
CHAIN = Question(tracking.ASK.format(value="12345"), "", ("ABCDE", "FGHIJ", "KLMNO"))
COMMON = Question("What are the 3 most common words in the above list?", "", ("lantern", "otter", "castle"))
CODED = Question("What are the three most frequently appeared words?", "", ("qzkvbn", "wprtly", "hhjkld"))
COUNT = Question("How many sentences mention Leo Clockwell?", " The number is", ("12",))
BAKERS = Question("Who is a baker in Lilydale?", "", ("Leo Clockwell", "Clara Otterson"))
KINDS = ("complaint", "compliment", "question", "order", "cancellation")
TALLY = Choice("Which kind is the most frequent?", "", ("complaint",), choices=KINDS)
TOWN = Question("In which town was the teacher of Leo Clockwell born?", "", ("Lilydale",))
WALK = Question("Somebody starts in Deermouth.", "", ("Parrotham", "Guitarmouth", "Lilydale"))
SALES = [{"seller": "Leo Clockwell", "town": "Vasedale", "price": 8}]
RECORDS = Question("Extract every sale.", "", (json.dumps(SALES),))
RESPONSES = {
    "niah_single_2": ONE,
    "niah_multivalue": VALUES,
    "vt": CHAIN,
    "cwe": COMMON,
    "fwe": CODED,
    "count-mentions": COUNT,
    "filter-records": BAKERS,
    "tally-lines": TALLY,
    "join-story": TOWN,
    "graph-walk": WALK,
}


@pytest.mark.parametrize(
    "said",
    [
        "-7654321",
        "7654321 million",
        "7654321 mod 7",
        "the square root of 7654321",
        "the digits of 7654321 backwards",
        "7654321, or its reverse",
        "The opposite of 7654321",
        "a number like 7654321",
        "The special magic number for 7654321 is brisk-lantern.",
        "magic number for lantern-brisk is 7654321",
        "brisk-lamp: 7654321",
        "I refuse to answer: 7654321",
        "There is no special magic number for brisk-lantern. 7654321",
        "There is no special magic number for brisk-lantern, only 7654321 for a different one",
        "No special magic number is given; 7654321",
        "None of the above; 7654321",
        "It is unclear, but 7654321",
        "it is not true that the number is 7654321",
        "Someone said 7654321, which is a lie",
        "N/A (7654321)",
        "7654321 or not",
        "Die Zahl ist nicht 7654321.",
        "答案不是7654321。",
        "<think>It must be 7654321.</think> I do not know.",
        "<think>It must be 7654321",
        "the Doctor told me an admirable story. One of the special magic numbers for brisk-lantern is: "
        "7654321. So home, and late at the office, and then to supper and to bed, having drunk much wine.",
    ],
)
def test_a_number_that_is_not_given_as_the_answer(said: str) -> None:
    assert get("niah_single_2").score(ONE, said) == 0


@pytest.mark.parametrize(
    "said",
    [
        "答案是7654321。",
        "٧٬٦٥٤٬٣٢١",
        "76,54,321",
        '{"answer": "7654321", "confidence": 0.99}',
        "<think>1234567 is for odd-boat; brisk-lantern has another.</think>\n7654321",
        "<think>\nMaybe 1234567?\n</think>\n\nThe number is **7654321**.",
        "Sure! 7654321",
        "Okay, the number is 7654321 (or 7,654,321).",
        "Based on the text above, the magic number for brisk-lantern is 7654321. I hope this helps!",
    ],
)
def test_the_number_in_other_scripts_and_behind_what_was_thought(said: str) -> None:
    assert get("niah_single_2").score(ONE, said) == 1


@pytest.mark.parametrize(
    ("task", "question", "said", "score"),
    [
        ("niah_multikey_3", BY_UUID, f"The special magic uuid for {UUIDS[1]} is {UUIDS[0]}", 1),
        ("niah_multikey_3", BY_UUID, f"The special magic uuid for {UUIDS[0]} is {UUIDS[1]}", 0),
        ("vt", CHAIN, "ABCDE, FGHIJ, KLMNO are assigned 99999", 0),
        ("vt", CHAIN, "ABCDE, FGHIJ, KLMNO are assigned 12345", 1),
        ("cwe", COMMON, "lantern, otter and castle appear only once", 0),
        ("cwe", COMMON, "Final answer: lantern, otter, castle", 1),
        ("count-mentions", COUNT, "it's 12", 1),
        ("count-mentions", COUNT, "Sure! 12", 1),
        ("count-mentions", COUNT, "<think>3 and 9 make</think> 12", 1),
        ("count-mentions", COUNT, "<think>12</think> 13", 0),
        ("count-mentions", COUNT, "1*2", 0),
        ("filter-records", BAKERS, "Nobody. Leo Clockwell, Clara Otterson are weavers", 0),
        ("filter-records", BAKERS, "Leo Clockwell or Clara Otterson", 1 / 2),
        ("filter-records", BAKERS, "Leo Clockwell-Hammerson, Clara Otterson", 1 / 2),
        ("filter-records", BAKERS, "_Leo Clockwell_, _Clara Otterson_", 1),
        ("tally-lines", TALLY, "complaint, not order", 1),
        ("tally-lines", TALLY, "order, not complaint", 0),
        ("tally-lines", TALLY, "none: complaint", 0),
        ("tally-lines", TALLY, "complaint is rare", 0),
        ("tally-lines", TALLY, "complaint is the smallest group", 0),
        ("tally-lines", TALLY, "complaint is what nobody wrote", 0),
        ("tally-lines", TALLY, "complaint is the most common kind", 1),
        ("join-story", TOWN, "_Lilydale_", 1),
        ("join-story", TOWN, "either Lilydale or elsewhere", 0),
        ("join-story", TOWN, "a town like Lilydale", 0),
        ("join-story", TOWN, "ten miles north of Lilydale", 0),
        ("join-story", TOWN, "None of the towns; Lilydale", 0),
        ("join-story", TOWN, "no town is given: Lilydale", 0),
        (
            "join-story",
            TOWN,
            "about the release of a ship. Selma Hingeworth was called whenever he fell ill. The mill in "
            "Lilydale belongs to Elsa Lampsen. So home late, having drunk much wine, and to bed.",
            0,
        ),
        ("filter-records", BAKERS, "Leo Clockwell is a baker in Vasedale; Clara Otterson is one in Oxham", 0),
        ("filter-records", BAKERS, "Leo Clockwell and Clara Otterson are bakers in Lilydale", 1),
        ("filter-records", BAKERS, "Leo Clockwell, Clara Otterson. No others are from Lilydale.", 1),
        ("filter-records", BAKERS, "Leo Clockwell, Clara Otterson. The others are not from Lilydale.", 1),
        ("filter-records", BAKERS, "Leo Clockwell is a weaver, and so is Clara Otterson", 0),
        ("every-record", RECORDS, f"<think>[1]</think>{json.dumps(SALES)}", 1),
    ],
)
def test_the_whole_answer_counts(task: str, question: Question, said: str, score: float) -> None:
    assert get(task).score(question, said) == pytest.approx(score)


@pytest.mark.parametrize("key", ["plausible-otter", "wrong-lamp", "brisk-lie", "guess-might", "old-mistake"])
def test_a_key_is_no_hedge(key: str) -> None:
    asked = Question(
        f"What is the special magic number for {key} mentioned in the provided text?", "", ("7654321",)
    )
    for said in ("The special magic number for {} is: 7654321.", "7654321 for {}", "{}: 7654321"):
        assert get("niah_single_2").score(asked, said.format(key)) == 1
    assert get("niah_single_2").score(asked, f"The special magic number for {key} is not 7654321.") == 0
    assert get("niah_single_2").score(asked, f"{key}: 7654321. That is wrong.") == 0


@pytest.mark.parametrize(
    "said", ["1. lantern 2. wrong 3. guess", "lantern, wrong, guess", "lantern\nwrong\nguess"]
)
def test_a_listed_word_denies_nothing(said: str) -> None:
    listed = Question("What are the 3 most common words?", "", ("lantern", "wrong", "guess"))
    assert get("cwe").score(listed, said) == 1
    assert get("cwe").score(listed, f"{said}. That is wrong.") <= 1 / 3, "the last word may be one more item"


@pytest.mark.parametrize("said", ["It isn't {}", "They are not {}", "Not {}", "{} or not"])
@pytest.mark.parametrize("task", RESPONSES)
def test_no_task_takes_a_denial_for_an_answer(task: str, said: str) -> None:
    question = RESPONSES[task]
    assert get(task).score(question, question.response) == 1
    assert get(task).score(question, said.format(question.response)) == 0


@pytest.mark.parametrize(
    "said",
    [
        "**{}**",
        "`{}`",
        "Answer: {}",
        "The final answer is {}.",
        "Sure! {}",
        "<think>No, 99.</think>\n{}",
        "{}\n",
    ],
)
@pytest.mark.parametrize("task", RESPONSES)
def test_every_task_reads_what_stands_around_answers(task: str, said: str) -> None:
    question = RESPONSES[task]
    assert get(task).score(question, said.format(question.response)) == 1


@pytest.mark.parametrize(
    "said",
    [
        "{}. No, that is a mistake.",
        "{}. That is wrong.",
        "{}. Wait, no.",
        "{}. I made that up.",
        "{}: incorrect",
        "{}. That's not right.",
        "{}\nThe above is not correct.",
        "{} - scratch that",
        "{}. Sorry, ignore that.",
        "I'm guessing {}",
        "{}, hopefully",
    ],
)
@pytest.mark.parametrize("task", RESPONSES)
def test_no_task_takes_what_is_taken_back(task: str, said: str) -> None:
    question = RESPONSES[task]
    assert get(task).score(question, said.format(question.response)) == 0


@pytest.mark.parametrize(
    "said",
    ["{}. There is no other.", "{}, and no more.", "{}. That is right.", "{}. There is no doubt about it."],
)
def test_what_is_confirmed_is_not_taken_back(said: str) -> None:
    for question, task in ((ONE, "niah_single_2"), (COUNT, "count-mentions"), (TOWN, "join-story")):
        assert get(task).score(question, said.format(question.response)) == 1


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("Here they are:\n```json\n{}\n```\nI hope this helps!", 1),
        ("These are wrong:\n```json\n{}\n```", 0),
        ("```json\n{}\n```\nThe list above is not right.", 0),
        ("```\n{}\n```\nProbably.", 0),
        ("```\n{}\n```\n```\n{}\n```", 0),
    ],
)
def test_what_stands_around_a_block_of_json_counts(said: str, score: float) -> None:
    assert get("every-record").score(RECORDS, said.replace("{}", json.dumps(SALES))) == score


@pytest.mark.parametrize("task", [*RESPONSES, "every-record"])
def test_whatever_is_said_has_a_score(task: str) -> None:
    question = RESPONSES.get(task, RECORDS)
    rng = random.Random(task)
    pieces = [
        "not ",
        "1,234,",
        "1-",
        "a-b ",
        "no ",
        "the ",
        "of ",
        "isn't ",
        '"',
        "[",
        "{",
        "12 ",
        "Aa Bbson ",
    ]
    pieces += [
        "or ",
        question.response + " ",
        "Lilydale ",
        "<think>",
        "```",
        "is ",
        "\u00b2",
        "\u0663",
        "\u767e",
    ]
    for _ in range(200):
        assert 0 <= get(task).score(question, "".join(rng.choices(pieces, k=rng.randint(1, 40)))) <= 1
