"""Tasks that need much of a text: what is asked is so in the text, and nothing else is scored as right."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

import pytest

from offload_decode.errors import ConfigError
from offload_decode.evals import tasks
from offload_decode.evals.haystack import Haystack, Strand
from offload_decode.evals.tasks import passkey, words
from offload_decode.evals.tasks.aggregate import (
    every_record,
    filter_records,
    graph_walk,
    join_story,
    names,
    tally_lines,
)
from offload_decode.evals.tasks.aggregate.spread import Choice
from offload_decode.evals.tasks.base import Context, Question
from tests.tiny import text_model, tiny_tokenizer

AGGREGATE = ("count-mentions", "filter-records", "join-story", "every-record", "tally-lines", "graph-walk")
EVERY = (*AGGREGATE, "passkey")
FILLER = " ".join(f"Sentence {'abcdefghij'[i % 10] * (1 + i % 7)} says nothing at all." for i in range(2000))
PERSON = r"[A-Z]\w+ [A-Z][\w-]+"


@dataclass(frozen=True)
class Words:
    """A material whose tokens are words and marks, which are quickly counted."""

    tokens: int

    def filler(self, tokens: int) -> str:
        return " ".join(FILLER.split()[: tokens + 1])

    def count(self, text: str) -> int:
        return len(re.findall(r"\w+|[^\w\s]", text))


def drawn(name: str, seed: int = 0, tokens: int = 1500, split: words.Split = "eval") -> Context:
    return tasks.get(name).context(random.Random(seed), Words(tokens), split)


def asked_words(question: Question) -> set[str]:
    return set(re.findall(r"[\w-]+", question.text))


# Each answers a question from the text in another way than the task drew it.


def counted(text: str, question: Question) -> str:
    person = next(iter(re.findall(r"[A-Z]\w+ [A-Z]\w+", question.text.replace("Count the", ""))))
    return str(len(re.findall(rf"\b{person}\b", text)))


def filtered(text: str, question: Question) -> str:
    conditions = {word for word in asked_words(question) if names.TOWN.fullmatch(word)}
    conditions |= asked_words(question) & set(filter_records._TRADES)
    assert len(conditions) == 2
    lines = [line for line in text.split("\n") if all(re.search(rf"\b{c}\b", line) for c in conditions)]
    return ", ".join(match.group() for line in lines if (match := names.PERSON.search(line)))


def joined(text: str, question: Question) -> str:
    relations = {what: [_pattern(s) for s in said] for what, said in join_story._SENTENCES.items()}
    second, first = re.findall(r"the (\w+) of the (\w+) of", question.text)[0]
    person = re.findall(r"of ([A-Z]\w+ [A-Z]\w+)", question.text)[0]
    place = next(
        p
        for p in join_story._PLACES
        if question.text.startswith(p.split("{")[0][:16]) and p.split("{who}")[1].strip(" ?") in question.text
    )
    for step in (first, second, place):
        found = [m.group("b") for p in relations[step] for m in p.finditer(text) if m.group("a") == person]
        if len(found) != 1:
            return "nobody knows"
        person = found[0]
    return person


def extracted(text: str, question: Question) -> str:
    keys = tuple(re.findall(r'"(\w+)"', question.text))
    kind = next(k for k in every_record._KINDS if k.keys == keys)
    patterns = [_pattern(s) for s in kind.sentences]
    found = [m.groupdict() for line in text.split("\n") for p in patterns if (m := p.fullmatch(line))]
    return json.dumps(found)


def tallied(text: str, question: Question) -> str:
    kinds = {kind: [_pattern(s) for s in said] for kind, said in tally_lines._LETTERS.items()}
    letters = [line for line in text.split("\n") if re.search(r" writes: |etter |to the shop: ", line)]
    counts = {
        kind: sum(any(p.search(line) for p in patterns) for line in letters)
        for kind, patterns in kinds.items()
    }
    assert sum(counts.values()) == len(letters)
    best = max(counts.values())
    leading = [kind for kind, count in counts.items() if count == best]
    return leading[0] if len(leading) == 1 else "a tie"


def walked(text: str, question: Question) -> str:
    onward: dict[tuple[str, str], str] = {}
    for line in text.split("\n"):
        for pattern in map(_pattern, graph_walk._LINES):
            if match := pattern.fullmatch(line):
                onward[match["town"], match["one"]] = match["first"]
                onward[match["town"], match["two"]] = match["second"]
    town = names.TOWN.search(question.text).group()  # type: ignore[union-attr]
    means = next(word for word in graph_walk._MEANS if word in asked_words(question))
    path = []
    for _ in range(int(re.findall(r"\d+", question.text)[0])):
        town = onward.get((town, means), "nowhere")
        path.append(town)
    return ", ".join(path if len(question.answers) > 1 else path[-1:])


def found_key(text: str, question: Question) -> str:
    match = re.search(r"The pass key is (\d+)", text)
    return match.group(1) if match else "none"


def _pattern(sentence: str) -> re.Pattern[str]:
    """Matches what a sentence with fields in braces may have become."""
    values = {"thing": r"\w+ \w+", "item": r"\w+ \w+", "product": r"\w+ \w+", "town": r"[A-Z][\w-]+"}
    values |= {"b": r"[A-Z][\w-]+(?: [A-Z][\w-]+)?"}
    values |= dict.fromkeys(("first", "second"), r"[A-Z][\w-]+") | dict.fromkeys(("one", "two"), r"[a-z]+")
    values |= dict.fromkeys(("quantity", "nights", "days", "price"), r"\d+")
    parts = re.split(r"\{(\w+)\}", sentence)
    fields = [f"(?P<{field}>{values.get(field, PERSON)})" for field in parts[1::2]]
    return re.compile(
        "".join(p for pair in zip(map(re.escape, parts[::2]), [*fields, ""], strict=True) for p in pair)
    )


SOLVERS = {
    "count-mentions": counted,
    "filter-records": filtered,
    "join-story": joined,
    "every-record": extracted,
    "tally-lines": tallied,
    "graph-walk": walked,
    "passkey": found_key,
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", EVERY)
def test_the_answer_follows_from_the_text_and_not_from_the_control(name: str, seed: int) -> None:
    task = tasks.get(name)
    context = drawn(name, seed)
    assert len(context.questions) == len(context.depths) == len(context.needed) == task.per_context
    for question in context.questions:
        assert task.score(question, SOLVERS[name](context.text, question)) == 1
        assert task.score(question, SOLVERS[name](context.control, question)) == 0
        assert task.score(question, " " + question.response) == 1


NOTHING = {"count-mentions": "0", "filter-records": "", "every-record": "[]", "join-story": "nobody knows"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NOTHING)
def test_the_control_has_nothing_of_what_is_asked_for(name: str, seed: int) -> None:
    context = drawn(name, seed)
    assert {SOLVERS[name](context.control, question) for question in context.questions} == {NOTHING[name]}


@pytest.mark.parametrize("tokens", [1500, 8000])
@pytest.mark.parametrize("name", EVERY)
def test_text_and_control_are_as_long_as_asked_for(name: str, tokens: int) -> None:
    material = Strand(Haystack("filler", FILLER), tiny_tokenizer(), tokens, 0.1)
    context = tasks.get(name).context(random.Random(tokens), material)
    for text in (context.text, context.control):
        assert material.count(text) == pytest.approx(tokens, rel=0.01)


@pytest.mark.parametrize("name", [name for name in AGGREGATE if name != "join-story"])
def test_the_more_text_the_more_of_it_is_needed(name: str) -> None:
    def needed(tokens: int) -> float:
        return sum(sum(drawn(name, seed, tokens).needed) for seed in range(6))

    assert 1.5 * needed(500) < needed(2000) < needed(8000) / 1.5


def test_a_story_needs_three_facts_among_ever_more() -> None:
    short, long = (drawn("join-story", 1, tokens) for tokens in (500, 8000))
    assert all(15 < needed < 60 for context in (short, long) for needed in context.needed)
    assert len(names.PERSON.findall(long.text)) > 5 * len(names.PERSON.findall(short.text))


@pytest.mark.parametrize("name", EVERY)
def test_a_seed_decides_the_context(name: str) -> None:
    assert drawn(name, 4) == drawn(name, 4)
    assert drawn(name, 4).text != drawn(name, 5).text


@pytest.mark.parametrize("name", AGGREGATE)
def test_the_splits_share_no_name(name: str) -> None:
    def known(split: words.Split) -> set[str]:
        found = " ".join(drawn(name, seed, split=split).text for seed in range(3))
        return {m.group() for kind in (names.PERSON, names.TOWN) for m in kind.finditer(found)}

    assert len(known("train")) > 10
    assert not known("train") & known("eval")


@pytest.mark.parametrize("name", EVERY)
def test_a_text_too_short_for_the_facts_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="take a longer text"):
        drawn(name, tokens=40)


def test_the_guess_is_as_good_as_the_docstrings_say() -> None:
    """Counts and kinds are guessed as often as they are few; names and records never."""
    rng = random.Random(1)
    for name in EVERY:
        task = tasks.get(name)
        scores, chance = [], []
        for seed in range(30):
            for question in drawn(name, seed, 600).questions:
                many = 40 if isinstance(question, Choice) else 5
                scores += [task.score(question, task.guess(rng, question)) for _ in range(many)]
                chance.append(1 / len(question.choices) if isinstance(question, Choice) else 0.0)
        expected = sum(chance) / len(chance)
        assert sum(scores) / len(scores) == pytest.approx(expected, abs=0.04), name


def count(answer: str) -> Question:
    return Question("How many times is Clara Foxley mentioned?", "", (answer,))


ORDERS = [
    {"customer": "Clara Foxley", "product": "brisk lantern", "quantity": 12},
    {"customer": "Omar Bellson", "product": "idle kettle", "quantity": 3},
]
OTHER = {"customer": "Hugo Inkwell", "product": "mild drum", "quantity": 7}
RECORDS = Question("Extract every order.", "", (json.dumps(ORDERS),))
NAMES = Question("Who is a baker in Otterham?", "", ("Clara Foxley", "Omar Bellson"))
KIND = Question("Complaint, compliment, question, order or cancellation?", "", ("order",))
QUESTION = Question(KIND.text, "", ("question",))
END = Question("Somebody starts in Otterham and takes the bus, 3 times.", "", ("Lilywick",))
PATH = Question("Somebody starts in Otterham and takes the bus.", "", ("Drumdale", "Kitebury", "Lilywick"))
TOWN = Question("In which town was the teacher of Clara Foxley born?", "", ("Lilywick",))
KEY = Question("What is the pass key?", "", ("43481",))
TRICKY: list[tuple[str, Question, str, float]] = [
    *(
        ("count-mentions", count("12"), said, 1.0)
        for said in (
            "12",
            " 12.",
            "**12**",
            "twelve",
            "Twelve times.",
            "The number is 12.",
            "12 (twelve)",
            "She is mentioned 12 times in the text.",
            "There are twelve sentences about Clara Foxley.",
            "Answer: 12",
            "I found 12 of them.",
        )
    ),
    *(
        ("count-mentions", count("12"), said, 0.0)
        for said in (
            "",
            "112",
            "12.5",
            "12,5",
            "-12",
            "12th",
            "12%",
            "12?",
            "12+",
            "12 or 13",
            "11, 12, 13",
            "between 10 and 12",
            "about 12",
            "at least twelve times",
            "perhaps 12",
            "not 12",
            "Not 12 times.",
            "It isn't 12.",
            "twelve or so",
            "twelve hundred",
            "Chapter 12",
            "Clara Foxley is 12 years old.",
            "12 chapters mention her.",
            "In chapter 3 she is mentioned 12 times.",
            "1 2",
            "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12",
            "How many times is Clara Foxley mentioned?",
        )
    ),
    ("count-mentions", count("1234"), "1,234", 1.0),
    ("count-mentions", count("1234"), "one thousand two hundred and thirty-four", 1.0),
    ("count-mentions", count("1234"), "1, 234", 0.0),
    ("count-mentions", count("1"), "once", 1.0),
    ("count-mentions", count("1"), "Clara Foxley is mentioned only once.", 1.0),
    ("count-mentions", count("2"), "Twice.", 1.0),
    ("count-mentions", count("100"), "a hundred", 1.0),
    ("count-mentions", count("21"), "twenty-one", 1.0),
    ("count-mentions", count("21"), "twenty", 0.0),
    ("count-mentions", count("3"), "never", 0.0),
    ("filter-records", NAMES, "Clara Foxley, Omar Bellson", 1.0),
    ("filter-records", NAMES, "- Omar Bellson\n- Clara Foxley\n", 1.0),
    ("filter-records", NAMES, "The bakers there are clara foxley and omar bellson.", 1.0),
    ("filter-records", NAMES, "The only person besides Omar Bellson is Clara Foxley.", 1.0),
    ("filter-records", NAMES, "Clara Foxley", 0.5),
    ("filter-records", NAMES, "Clara Foxley, Clara Foxley", 0.5),
    ("filter-records", NAMES, "Clara Foxley, Hugo Inkwell", 0.5),
    ("filter-records", NAMES, "Clara Foxley, Omar Bellson, Hugo Inkwell, Ada Bushley", 0.5),
    ("filter-records", NAMES, "clara foxley, omar bellson, hugo inkwell, ada bushley", 0.5),
    ("filter-records", NAMES, "Clara Foxley, Omar Bellson, John Miller, Mary Jones", 0.5),
    ("filter-records", NAMES, "Clara Bellson, Omar Foxley", 0.0),
    ("filter-records", NAMES, "Clara Foxleys, Omar Bellsons", 0.0),
    ("filter-records", NAMES, "Clara Foxley-Bellson", 0.0),
    ("filter-records", NAMES, "Not Clara Foxley, and not Omar Bellson.", 0.0),
    ("filter-records", NAMES, "Clara, Omar", 0.0),
    ("filter-records", NAMES, NAMES.text, 0.0),
    ("every-record", RECORDS, json.dumps(ORDERS), 1.0),
    ("every-record", RECORDS, json.dumps(ORDERS[::-1], indent=2), 1.0),
    ("every-record", RECORDS, f"Here they are:\n\n```json\n{json.dumps(ORDERS)}\n```\n", 1.0),
    ("every-record", RECORDS, json.dumps(ORDERS).replace("12", '"12"').replace("Clara", "clara  "), 1.0),
    ("every-record", RECORDS, json.dumps(ORDERS[:1]), 0.5),
    ("every-record", RECORDS, json.dumps([ORDERS[0]] * 2), 0.5),
    ("every-record", RECORDS, json.dumps([*ORDERS, *ORDERS]), 0.5),
    ("every-record", RECORDS, json.dumps([*ORDERS, *[OTHER] * 6]), 0.25),
    ("every-record", RECORDS, json.dumps([*ORDERS, "Clara Foxley", 12]), 0.5),
    ("every-record", RECORDS, json.dumps([{**ORDERS[0], "town": "Otterham"}, ORDERS[1]]), 0.5),
    ("every-record", RECORDS, json.dumps([{"customer": "Clara Foxley"}, ORDERS[1]]), 0.5),
    ("every-record", RECORDS, json.dumps([ORDERS[0] | {"quantity": 3}, ORDERS[1] | {"quantity": 12}]), 0.0),
    ("every-record", RECORDS, json.dumps(ORDERS)[:-1], 0.0),
    ("every-record", RECORDS, json.dumps(ORDERS)[:-1] + ",]", 0.0),
    ("every-record", RECORDS, json.dumps(ORDERS).replace('"', "'"), 0.0),
    ("every-record", RECORDS, json.dumps(ORDERS).replace("3", "NaN"), 0.0),
    ("every-record", RECORDS, json.dumps({"orders": ORDERS}), 0.0),
    ("every-record", RECORDS, "[]", 0.0),
    ("every-record", RECORDS, "", 0.0),
    ("every-record", RECORDS, f"```json\n{json.dumps(ORDERS)}\n```\nor\n```json\n[]\n```", 0.0),
    ("every-record", RECORDS, "[" * 100_000, 0.0),
    ("tally-lines", KIND, "order", 1.0),
    ("tally-lines", KIND, "Orders.", 1.0),
    ("tally-lines", KIND, "The most frequent kind is **order**.", 1.0),
    ("tally-lines", KIND, "complaint", 0.0),
    ("tally-lines", KIND, "disorder", 0.0),
    ("tally-lines", KIND, "not order", 0.0),
    ("tally-lines", KIND, "It isn't the order.", 0.0),
    ("tally-lines", KIND, "Order is wrong.", 0.0),
    ("tally-lines", KIND, "`order`", 1.0),
    ("tally-lines", KIND, "order or complaint", 0.0),
    ("tally-lines", KIND, "complaint, compliment, question, order, cancellation", 0.0),
    ("tally-lines", KIND, KIND.text, 0.0),
    *(
        ("tally-lines", KIND, said, 1.0)
        for said in (
            "The order.",
            "order, as most letters ask for something to be sent",
            "The order kind is the most frequent.",
            "Most of the letters are orders.",
            "Answer: order",
        )
    ),
    *(
        ("tally-lines", KIND, said, 0.0)
        for said in (
            "In order to answer, the letters would have to be read.",
            "I am happy to help, in whatever order you like.",
            "Everything is in order.",
            "maybe order",
            "It could be order.",
            "order?",
            "Most are not really orders.",
        )
    ),
    ("tally-lines", QUESTION, "Thank you for your question!", 0.0),
    ("tally-lines", QUESTION, "What a good question. Let us see.", 0.0),
    ("tally-lines", QUESTION, "question", 1.0),
    ("tally-lines", KIND, "", 0.0),
    ("join-story", TOWN, "Lilywick", 1.0),
    ("join-story", TOWN, "The teacher of Clara Foxley was born in Lilywick.", 1.0),
    ("join-story", TOWN, "Lilywick, not far from it", 1.0),
    ("join-story", TOWN, "Lilywick-on-Drum", 0.0),
    ("join-story", TOWN, "Lilywick or Drumdale", 0.0),
    ("join-story", TOWN, "Otterham, Drumdale, Kitebury, Lilywick", 0.0),
    ("join-story", TOWN, "Not in Lilywick.", 0.0),
    ("join-story", TOWN, "Not in Drumdale, but in Lilywick.", 1.0),
    ("join-story", TOWN, "Lilywick is not the town.", 0.0),
    ("join-story", TOWN, "**Lilywick**", 1.0),
    ("join-story", TOWN, "Lily", 0.0),
    ("join-story", TOWN, "Perhaps Lilywick", 0.0),
    ("join-story", TOWN, "The teacher of Clara Foxley was not born in Lilywick.", 0.0),
    ("graph-walk", PATH, "Probably Drumdale, Kitebury, Lilywick", 0.0),
    ("filter-records", NAMES, "Maybe Clara Foxley, Omar Bellson", 0.0),
    ("join-story", TOWN, TOWN.text, 0.0),
    ("graph-walk", END, "Lilywick", 1.0),
    ("graph-walk", END, "From Otterham the journey ends in Lilywick.", 1.0),
    ("graph-walk", END, "Drumdale, Kitebury, Lilywick", 0.0),
    ("graph-walk", END, "Otterham", 0.0),
    ("graph-walk", PATH, "Drumdale, Kitebury, Lilywick", 1.0),
    ("graph-walk", PATH, "Otterham -> Drumdale -> Kitebury -> Lilywick", 1.0),
    ("graph-walk", PATH, "1. Drumdale\n2. Kitebury\n3. Lilywick", 1.0),
    ("graph-walk", PATH, "Drumdale, Kitebury", 2 / 3),
    ("graph-walk", PATH, "Drumdale, Lilywick, Kitebury", 1 / 3),
    ("graph-walk", PATH, "Lilywick, Kitebury, Drumdale", 0.0),
    ("graph-walk", PATH, "Drumdale, Drumdale, Kitebury, Lilywick", 1 / 4),
    ("graph-walk", PATH, "Drumdale, Kitebury, Lilywick, Camelham, Vasestead, Boatmouth", 3 / 6),
    ("graph-walk", PATH, PATH.text, 0.0),
    ("passkey", KEY, " 43481. Remember it. 43481 is the pass key.", 1.0),
    ("passkey", KEY, "43481", 1.0),
    ("passkey", KEY, "The pass key is 43481.", 1.0),
    ("passkey", KEY, "434812", 0.0),
    ("passkey", KEY, "43481 43482", 0.0),
    ("passkey", KEY, "4348", 0.0),
    ("passkey", KEY, "The pass key is not 43481.", 0.0),
    ("passkey", KEY, "The grass is green.", 0.0),
]


@pytest.mark.parametrize(("name", "question", "said", "score"), TRICKY)
def test_answers_are_read_as_a_whole(name: str, question: Question, said: str, score: float) -> None:
    assert tasks.get(name).score(question, said) == pytest.approx(score)


def test_the_records_of_all_kinds_together_score_low() -> None:
    context = drawn("every-record", 2)
    everything = [
        match.groupdict()
        for kind in every_record._KINDS
        for pattern in map(_pattern, kind.sentences)
        for line in context.text.split("\n")
        if (match := pattern.fullmatch(line))
    ]
    assert tasks.get("every-record").score(context.questions[0], json.dumps(everything)) < 0.4


def test_answers_may_grow_with_the_text_and_so_may_what_is_generated() -> None:
    for name in ("filter-records", "every-record", "graph-walk"):
        task = tasks.get(name)
        for question in drawn(name, 0, 8000).questions:
            assert task.most_tokens(question, Words(8000)) >= Words(0).count(question.response)


def test_a_pass_key_stands_at_every_depth_alike() -> None:
    depths = [drawn("passkey", seed, 1000).depths[0] for seed in range(200)]
    quarters = [sum(q / 4 <= (d or 0) < (q + 1) / 4 for d in depths) for q in range(4)]
    assert min(quarters) > 25
    assert passkey.LENGTHS == (10_000, 100_000)
    assert (passkey.BUDGETS[0], passkey.BUDGETS[-1]) == (64, 4096)


def test_a_pass_key_is_worded_as_published() -> None:
    context = drawn("passkey", 3, 500)
    key = context.questions[0].answers[0]
    assert re.fullmatch(r"\d{5}", key)
    assert context.text.startswith(
        "There is an important info hidden inside a lot of irrelevant text. Find it and"
    )
    assert f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n" in context.text
    assert key not in context.control


@pytest.fixture(scope="module")
def untrained() -> Any:
    return text_model()


@pytest.mark.parametrize("name", EVERY)
def test_a_model_with_random_weights_answers_nothing(name: str, untrained: Any) -> None:
    tokenizer = tiny_tokenizer()
    task = tasks.get(name)
    context = task.context(random.Random(1), Strand(Haystack("filler", FILLER), tokenizer, 800, 0.1))
    for question in context.questions:
        prompt = f"{context.text}\n\n{question.text}\nAnswer:{question.answer_prefix}"
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = untrained.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        said = tokenizer.decode(out[0, ids.shape[1] :])
        assert said
        assert task.score(question, said) == 0
