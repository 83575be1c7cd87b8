"""Scores read the answer alone and as a whole: tricky answers, one table a kind of answer."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from offload_decode.evals import tasks
from offload_decode.evals.haystack import Haystack, Strand
from offload_decode.evals.tasks import Question, scoring, squad, words
from offload_decode.models.checkpoint import source_of
from tests.tiny import tiny_tokenizer

FILLER = " ".join(f"Sentence {'abcdefghij'[i % 10] * (1 + i % 7)} says nothing at all." for i in range(400))
UUID = "0b3c2b9e-5d1f-4f0a-9c63-1f0f8f6f2a11"
OTHER_UUID = "7d9e1c44-1a2b-4c3d-8e9f-0a1b2c3d4e5f"
ASKED = "What is the special magic number for brisk-lantern mentioned in the provided text?"
PREFIX = " The special magic number for brisk-lantern mentioned in the provided text is"
NUMBER = Question(ASKED, PREFIX, ("1234567",))
CODE = Question(ASKED.replace("number", "uuid"), PREFIX.replace("number", "uuid"), (UUID,))
FOUR = ("1111111", "2222222", "3333333", "4444444")
KEYS = ("brisk-lantern", "calm-river", "bold-acorn", "dark-otter")
NAMED = "brisk-lantern, calm-river, bold-acorn, and dark-otter"
ASK_ALL = "What are all the special magic numbers for {} mentioned in the provided text?"
ALL = Question(ASK_ALL.format("brisk-lantern"), "", FOUR)
QUERIES = Question(ASK_ALL.format(NAMED), f" The special magic numbers for {NAMED} are", FOUR, keys=KEYS)
VARIABLES = Question(
    "Question: Find all variables that are assigned the value 54321 in the text above.",
    " According to the chain(s) of variable assignment in the text above, 3 variables are assigned the value"
    " 54321, they are:",
    ("QWXYZ", "ABXCD", "MNOPX"),
)
STATUS = Question(
    "What is the status of this document?",
    " The status of this document is",
    ("Active",),
    statement="Status: Active",
)
REQUIRES = Question(
    "What does this document require?",
    " The requires of this document is",
    ("1234",),
    statement="Requires: 1234",
)
PERSON = Question(
    "Who wrote rfc-1234.txt?", " The author of rfc-1234.txt is", ("Ada Acornson <ada@mail.org>",)
)
PAIR = Question('What is the value of the key "brisk-lantern"?', "", ("calm-river",), '"')
COMMON = Question(
    "Question: What are the 3 most common words in the above list?",
    " The top 3 words that appear most often in the list are:",
    ("otter", "lemon", "quarry"),
)
CODED = Question(
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
    "frequently appeared words in the above coded text?",
    " According to the coded text above, the three most frequently appeared words are:",
    ("qzkfjw", "plmvxt", "hgtbdd"),
)

ONE_NUMBER = [
    ("1234567", 1),
    ("  1234567.\n", 1),
    ("1,234,567", 1),
    ("1 234 567", 1),
    ("1.234.567", 1),
    ("**1234567**", 1),
    ("`1234567`", 1),
    ('"1234567"', 1),
    ("\u201c1234567\u201d", 1),
    ("- 1234567", 1),
    ("1. 1234567", 1),
    ('{"brisk-lantern": 1234567}', 1),
    ("The special magic number for brisk-lantern is: 1234567.", 1),
    ("THE NUMBER IS 1234567!", 1),
    ("1234567. It is stated once, in the 3rd of 20 chapters.", 1),
    (f"{ASKED} 1234567", 1),
    ("It is not 7654321, it is 1234567.", 1),
    ("not 7654321 but 1234567", 1),
    ("7654321 is wrong; 1234567", 1),
    ("1234567, 1234567", 1),
    ("", 0),
    ("I do not know.", 0),
    ("12345678", 0),
    ("1234567.5", 0),
    ("51234567 or so", 0),
    ("123456", 0),
    ("7654321", 0),
    ("It is not 1234567, it is 7654321.", 0),
    ("It isn't 1234567.", 0),
    ("1234567 is not it", 0),
    ("either 1234567 or 7654321", 0),
    ("1234567, 7654321, 1111111", 0),
    ("1234567\nThe special magic number for calm-river is: 7654321.", 0),
    ("1234567 7654321", 0),
    (ASKED, 0),
    ("x1234567", 0),
    (": The special magic number for brisk-lantern is: 1234567.", 1),
    ("There is no doubt: 1234567", 1),
    ("without a doubt 1234567", 1),
    ("I am sure that it is 1234567.", 1),
    ("<answer>1234567</answer>", 1),
    ("-> 1234567", 1),
    ("maybe 1234567", 0),
    ("It might be 1234567.", 0),
    ("1234567, I guess", 0),
    ("I'm not sure, but 1234567", 0),
    ("1234567?", 0),
    ("about 1234567", 0),
    ("1234567 or so", 0),
    ("not really the number 1234567", 0),
]
ONE_CODE = [
    (UUID, 1),
    (UUID.upper(), 1),
    (f'It is "{UUID}".', 1),
    (f"{UUID[:-1]}", 0),
    (f"{UUID} {OTHER_UUID}", 0),
    (f"not {OTHER_UUID} but {UUID}", 1),
    (f"It is well-known: {UUID}", 1),
    (OTHER_UUID, 0),
]
ALL_FOUR = [
    ("1111111, 2222222, 3333333, 4444444", 1),
    ("4444444, 1111111, 3333333 and 2222222.", 1),
    ("1. 1111111\n2. 2222222\n3. 3333333\n4. 4444444", 1),
    ("[1111111, 2222222, 3333333, 4444444]", 1),
    ("There are 4 numbers: 1,111,111; 2,222,222; 3,333,333; 4,444,444.", 1),
    ("1111111, 2222222", 1 / 2),
    ("1111111, 1111111, 1111111, 1111111", 1 / 4),
    ("1111111, 2222222, 3333333, 9999999", 3 / 4),
    ("1111111, 2222222, 3333333, 4444444, 5555555, 6666666, 7777777, 8888888", 1 / 2),
    ("1111111, 2222222, 3333333, but not 4444444", 3 / 4),
    (": The special magic numbers for brisk-lantern are: 1111111, 2222222, 3333333, 4444444.", 1),
    ("perhaps 1111111, 2222222, 3333333, 4444444", 0),
    ("", 0),
]
BY_KEY = [
    ("1111111, 2222222, 3333333, 4444444", 1),
    ("brisk-lantern: 1111111, calm-river: 2222222, bold-acorn: 3333333, dark-otter: 4444444", 1),
    ("dark-otter is 4444444, calm-river 2222222, bold-acorn 3333333, Brisk-Lantern 1111111", 1),
    ('{"brisk-lantern": 1111111, "calm-river": "2222222", "bold-acorn": 3333333, "dark-otter": 4444444}', 1),
    ("1111111 for brisk-lantern, 2222222 for calm-river, 3333333 for bold-acorn, 4444444 for dark-otter", 1),
    (f"The numbers for {NAMED} are 1111111, 2222222, 3333333, and 4444444, respectively.", 1),
    (
        f"For {NAMED}: brisk-lantern: 1111111, calm-river: 2222222, bold-acorn: 3333333, dark-otter: 4444444",
        1,
    ),
    ("brisk lantern: 1111111, calm river: 2222222, bold acorn: 3333333, dark otter: 4444444", 1),
    ("2222222, 1111111, 3333333, 4444444", 1 / 2),
    ("4444444, 3333333, 2222222, 1111111", 0),
    ("brisk-lantern: 2222222, calm-river: 1111111, bold-acorn: 4444444, dark-otter: 3333333", 0),
    ("brisk-lantern: 1111111, calm-river: 3333333, bold-acorn: 2222222, dark-otter: 4444444", 1 / 2),
    (
        "2222222 for brisk-lantern, 1111111 for calm-river, 3333333 for bold-acorn, 4444444 for dark-otter",
        1 / 2,
    ),
    ("brisk-lantern: 1111111", 1 / 4),
    ("1111111, 2222222, 3333333, 4444444, 5555555", 4 / 5),
    (f"{NAMED}", 0),
    (
        ": "
        + " ".join(f"The special magic number for {k} is: {v}." for k, v in zip(KEYS, FOUR, strict=True)),
        1,
    ),
    ("maybe brisk-lantern: 1111111", 0),
]
CHAIN = [
    ("QWXYZ, ABXCD, MNOPX", 1),
    ("QWXYZ ABXCD MNOPX", 1),
    ("VAR MNOPX, VAR ABXCD, VAR QWXYZ", 1),
    ("qwxyz, abxcd, mnopx", 1),
    ("The variables that are assigned the value 54321 are QWXYZ, ABXCD and MNOPX.", 1),
    ('["QWXYZ", "ABXCD", "MNOPX"]', 1),
    ("QWXYZ, ABXCD", 2 / 3),
    ("QWXYZ, ABXCD, MNOPX, GGGHH", 3 / 4),
    ("QWXYZ, ABXCD, MNOP", 2 / 3),
    ("QWXYZ, ABXCD, not MNOPX", 2 / 3),
    ("VAR QWXYZ = 54321 VAR ABXCD = VAR QWXYZ VAR MNOPX = VAR ABXCD", 1),
    ("QWXYZ, ABXCD, MNOPX, ggghh", 3 / 4),
    ("QWXYZ, ABXCD, MNOPX, ggghh, iiijj, kkkll", 1 / 2),
    ("QWXYZ, ABXCD, MNOPX. These are the variables, no others would be named.", 1),
    ("They could be QWXYZ, ABXCD, MNOPX", 0),
    ("54321", 0),
    ("", 0),
]
HEADER = [
    ("Active", 1),
    ("active.", 1),
    ("Status: Active", 1),
    ('The status of this document is "Active".', 1),
    ("It is **Active**", 1),
    ('{"status": "Active"}', 1),
    ("Active or Draft", 0),
    ("Active, Draft, Final", 0),
    ("Active Final", 0),
    ("not Active", 0),
    ("Inactive", 0),
    ("Draft", 0),
    ("Title: Something\nStatus: Active\nType: Process", 0),
    ("", 0),
]
FIELD_NUMBER = [
    ("1234", 1),
    ("1,234.", 1),
    ("Requires: 1234", 1),
    ("It requires **1234**.", 1),
    ("1234 or Draft", 0),
    ("1234, Draft", 0),
    ("1234 5", 0),
    ("1234. Status: Active", 0),
    ("maybe 1234", 0),
]
AUTHOR = [
    ("Ada Acornson <ada@mail.org>", 1),
    ("The author of rfc-1234.txt is Ada Acornson <ada@mail.org>.", 1),
    ("Ada Acornson", 0),
    ("Ada Acornson <ada@mail.org>, Bob Lemonton", 0),
]
VALUE = [
    ('"calm-river"', 1),
    ('"brisk-lantern": "calm-river"', 1),
    ("Calm-River", 1),
    ("calm-river, bold-acorn", 0),
    ("brisk-lantern", 0),
]
THREE_WORDS = [
    ("otter, lemon, quarry", 1),
    ("1. quarry 2. otter 3. lemon", 1),
    ("1. Quarry\n2. Otter\n3. Lemon", 1),
    ("otter lemon quarry", 1),
    ("The three most common words are **otter**, *lemon* and quarry.", 1),
    ("otter (30 times), lemon (30 times), quarry (30 times)", 1),
    ('["otter", "lemon", "quarry"]', 1),
    ("otter, lemon, quarry. These words appear more often than the others, as they are counted here.", 1),
    ("otter, lemon", 2 / 3),
    ("otter, lemon, not quarry", 2 / 3),
    ("otter, lemon, quarry, acorn", 3 / 4),
    ("otter, lemon, quarry, blorgish", 3 / 4),
    ("otter, lemon, quarry. The word acorn is common too.", 3 / 4),
    ("1. otter 2. acorn 3. lemon 4. anvil 5. quarry 6. atlas", 1 / 2),
    ("otters, lemons, quarries", 0),
    ("The words are perhaps otter, lemon, quarry", 0),
    ("", 0),
]
THREE_CODED = [
    ("qzkfjw, plmvxt, hgtbdd", 1),
    ("1. QZKFJW 2. plmvxt 3. hgtbdd", 1),
    ("The words are qzkfjw, plmvxt and hgtbdd.", 1),
    ("... qzkfjw plmvxt hgtbdd", 1),
    ("qzkfjw, plmvxt, hgtbdd, aaabbb", 3 / 4),
    ("qzkfjw, plmvxt", 2 / 3),
    ("qzkfj, plmvxt, hgtbdd", 2 / 3),
    ("", 0),
]
TABLE = [
    *(("niah_single_2", NUMBER, *row) for row in ONE_NUMBER),
    *(("niah_single_3", CODE, *row) for row in ONE_CODE),
    *(("niah_multivalue", ALL, *row) for row in ALL_FOUR),
    *(("niah_multiquery", QUERIES, *row) for row in BY_KEY),
    *(("vt", VARIABLES, *row) for row in CHAIN),
    *(("header-one", STATUS, *row) for row in HEADER),
    *(("header-one", REQUIRES, *row) for row in FIELD_NUMBER),
    *(("header", PERSON, *row) for row in AUTHOR),
    *(("key-value-words", PAIR, *row) for row in VALUE),
    *(("cwe", COMMON, *row) for row in THREE_WORDS),
    *(("common-words", COMMON, *row) for row in THREE_WORDS),
    *(("fwe", CODED, *row) for row in THREE_CODED),
]
SCORERS = ("Task", "CommonWords", "FrequentWords", "_Header")
OURS = [name for name in tasks.names() if tasks.get(name).score.__qualname__.startswith(SCORERS)]


@pytest.mark.parametrize(("name", "question", "said", "score"), TABLE)
def test_tricky_answers(name: str, question: Question, said: str, score: float) -> None:
    assert tasks.get(name).score(question, said) == pytest.approx(score)


def drawn(name: str, seed: int = 3) -> tasks.Context:
    return tasks.get(name).context(
        random.Random(seed), Strand(Haystack("filler", FILLER), tiny_tokenizer(), 5000, 0.2)
    )


@pytest.mark.parametrize("name", OURS)
def test_the_right_answer_scores_in_each_of_its_forms(name: str) -> None:
    task = tasks.get(name)
    for question in drawn(name).questions:
        forms = [
            question.response,
            f" {question.response}\n",
            f"{question.answer_prefix} {question.response}.",
        ]
        forms += [question.statement] * bool(question.statement)
        forms += [f"{question.text} {question.response}", f"**{question.response}**"]
        for said in forms:
            assert task.score(question, said) == 1, said
        assert task.ruler_score(question, question.response) == 1


@pytest.mark.parametrize("name", [name for name in OURS if name != "cwe"])
def test_an_answer_that_says_its_prefix_again_is_not_cut_off(name: str) -> None:
    """In tokens of the demo model, which takes one for every digit."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source_of("demo"))
    for question in drawn(name).questions:
        said = f"{question.answer_prefix}: {question.response}."
        assert len(tokenizer(said)["input_ids"]) <= tasks.get(name).max_new_tokens


@pytest.mark.parametrize("name", OURS)
def test_repeating_the_question_or_the_context_scores_nothing(name: str) -> None:
    task, context = tasks.get(name), drawn(name)
    for question in context.questions:
        assert task.score(question, question.text) == 0
        assert task.score(question, question.text + question.answer_prefix) == 0
        assert task.score(question, context.text) == 0
        assert task.score(question, "") == 0


@pytest.mark.parametrize("name", OURS)
def test_the_guess_is_at_chance(name: str) -> None:
    task = tasks.get(name)
    (question, *_), rng = drawn(name).questions, random.Random(0)
    scores = [task.score(question, task.guess(rng, question)) for _ in range(60)]
    chance = {"header": 0.2, "header-one": 0.2, "common-words": 0.01, "cwe": 0.01}
    assert sum(scores) / len(scores) <= chance.get(name, 0)


def test_listing_every_candidate_scores_no_more_than_the_share_of_right_ones() -> None:
    rng = random.Random(0)
    for question in (ALL, VARIABLES, COMMON, CODED):
        draw = {
            ALL: lambda: words.number(rng, "eval"),
            VARIABLES: lambda: words.variable(rng, "eval"),
            COMMON: lambda: rng.choice(words.EVERY["eval"]),
            CODED: lambda: words.coded(rng, "eval"),
        }[question]
        name = {ALL: "niah_multivalue", VARIABLES: "vt", COMMON: "cwe", CODED: "fwe"}[question]
        every = [*words.distinct(draw, 40), *question.answers]
        assert tasks.get(name).score(question, ", ".join(every)) <= len(question.answers) / len(set(every))


def test_words_around_an_answer_are_never_one() -> None:
    assert not scoring.AROUND & words.KNOWN


def test_rulers_score_is_any_substring() -> None:
    task = tasks.get("niah_multivalue")
    assert task.ruler_score(ALL, "x1111111y or 2222222, or 5555555") == 1 / 2
    assert task.ruler_score(replace(ALL, answers=("Ab",)), "cAB") == 1


@pytest.mark.parametrize(
    ("said", "exact", "f1"),
    [
        ("the Statue of Liberty", 1, 1),
        ("Statue of Liberty.", 1, 1),
        ("Answer: **statue of liberty**", 1, 1),
        ("Liberty Statue", 1, 1),
        ("The answer is the Statue of Liberty", 1, 1),
        ("Statue", 0, 2 / 3),
        (
            "It is the Statue of Liberty, which stands in New York and was a gift from France.",
            0,
            0.3,
        ),
        ("Statue of Liberty or Eiffel Tower", 0, 0.7),
        ("not the Statue of Liberty", 0, 0.9),
        ("", 0, 0),
    ],
)
def test_squads_exact_match_and_f1(said: str, exact: float, f1: float) -> None:
    answers = ("Statue of Liberty", "Liberty Statue")
    assert squad.exact(answers, said) == exact
    assert squad.token_f1(answers, said) == pytest.approx(f1, abs=0.1)
