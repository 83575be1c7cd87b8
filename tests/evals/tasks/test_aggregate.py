"""Tasks that need much of a text: what is asked is so in the text, and nothing else is scored as right."""

import json
import random
import re
from typing import Any

import pytest

from offload_decode.evals import tasks
from offload_decode.evals.haystack import Haystack, Material
from offload_decode.evals.tasks import aggregate
from offload_decode.evals.tasks.aggregate import SUITE
from offload_decode.evals.tasks.base import Context, Question
from tests.evals.tasks.drawn import FILLER, material
from tests.tiny import text_model, tiny_tokenizer

EVERY = (*SUITE, "passkey")
PERSON = r"[A-Z]\w+ [A-Z][\w-]+"
TOWN = r"[A-Z]\w+(?:ham|wick|bury|stead|mouth|dale)(?:-on(?:-\w+)+)?"


class Words(Material):
    """A material whose tokens are words and marks, which are quickly counted."""

    def filler(self, tokens: int) -> str:
        return " ".join(FILLER.split()[: tokens + 1])

    def count(self, text: str) -> int:
        return len(re.findall(r"\w+|[^\w\s]", text))


def counting_words(tokens: int) -> Words:
    return Words(Haystack("filler", FILLER), None, tokens, 0.0)


def drawn(name: str, seed: int = 0, tokens: int = 1500) -> Context:
    return tasks.get(name).context(random.Random(seed), counting_words(tokens))


# Each answers a question from the text in another way than the task drew it.


def joined(text: str, question: Question) -> str:
    relations = {what: [_pattern(s) for s in said] for what, said in aggregate._RELATED.items()}
    second, first = re.findall(r"the (\w+) of the (\w+) of", question.text)[0]
    person = re.findall(r"of ([A-Z]\w+ [A-Z]\w+)", question.text)[0]
    place = next(
        p
        for p in aggregate._PLACES
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
    kind = next(kind for kind, fields in aggregate._FIELDS.items() if tuple(fields) == keys)
    patterns = [_pattern(s) for s in aggregate._RECORDS[kind]]
    found = [m.groupdict() for line in text.split("\n") for p in patterns if (m := p.fullmatch(line))]
    records = [{k: int(v) if v.isdigit() else v for k, v in record.items()} for record in found]
    return json.dumps(records)


def tallied(text: str, question: Question) -> str:
    kinds = {kind: [_pattern(s) for s in said] for kind, said in aggregate._LETTERS.items()}
    letters = [line for line in text.split("\n") if re.search(r" writes: |etter |to the shop: ", line)]
    counts = {
        kind: sum(any(p.search(line) for p in patterns) for line in letters)
        for kind, patterns in kinds.items()
    }
    assert sum(counts.values()) == len(letters)
    best = max(counts.values())
    leading = [kind for kind, count in counts.items() if count == best]
    return leading[0] if len(leading) == 1 else "a tie"


def found_key(text: str, question: Question) -> str:
    match = re.search(r"The pass key is (\d+)", text)
    return match.group(1) if match else "none"


def _pattern(sentence: str) -> re.Pattern[str]:
    """Matches what a sentence with fields in braces may have become."""
    values = {"thing": r"\w+ \w+", "item": r"\w+ \w+", "product": r"\w+ \w+", "town": r"[A-Z][\w-]+"}
    values |= {"b": r"[A-Z][\w-]+(?: [A-Z][\w-]+)?"}
    values |= dict.fromkeys(("quantity", "nights", "days", "price"), r"\d+")
    parts = re.split(r"\{(\w+)\}", sentence)
    fields = [f"(?P<{field}>{values.get(field, PERSON)})" for field in parts[1::2]]
    return re.compile(
        "".join(p for pair in zip(map(re.escape, parts[::2]), [*fields, ""], strict=True) for p in pair)
    )


SOLVERS = {
    "join-story": joined,
    "every-record": extracted,
    "tally-lines": tallied,
    "passkey": found_key,
}
NOTHING = {"every-record": "[]", "join-story": "nobody knows"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", EVERY)
def test_the_answer_follows_from_the_text_and_not_from_the_control(name: str, seed: int) -> None:
    task = tasks.get(name)
    context = drawn(name, seed)
    assert len(context.questions) == len(context.depths) == task.per_context
    for question in context.questions:
        assert task.score(question, SOLVERS[name](context.text, question)) == 1
        without = SOLVERS[name](context.control, question)
        assert task.score(question, without) == 0
        assert without == NOTHING.get(name, without)
        assert task.score(question, " " + question.response) == 1
        assert task.score(question, "") == task.score(question, question.text) == 0


@pytest.mark.parametrize("tokens", [1500, 8000])
@pytest.mark.parametrize("name", EVERY)
def test_text_and_control_are_as_long_as_asked_for(name: str, tokens: int) -> None:
    context = tasks.get(name).context(random.Random(tokens), material(tokens))
    for text in (context.text, context.control):
        assert material(0).count(text) == pytest.approx(tokens, rel=0.01)


def test_the_more_text_the_more_facts_are_needed() -> None:
    """Records of the kind that is asked for, and all letters; a story needs three facts always."""

    def records(tokens: int) -> float:
        drawn_ones = [drawn("every-record", seed, tokens).questions[0] for seed in range(6)]
        return sum(len(json.loads(question.response)) for question in drawn_ones)

    def letters(tokens: int) -> float:
        begun = re.compile(r"^(?:Letter from |.* writes: |.* to the shop: )", re.MULTILINE)
        return sum(len(begun.findall(drawn("tally-lines", seed, tokens).text)) for seed in range(6))

    for needed in (records, letters):
        assert 1.5 * needed(500) < needed(2000) < needed(8000) / 1.5


def test_a_story_is_told_among_ever_more_others() -> None:
    short, long = (drawn("join-story", 1, tokens) for tokens in (500, 8000))
    assert len(re.findall(TOWN, long.text)) > 5 * len(re.findall(TOWN, short.text))


def test_the_guess_is_as_good_as_the_docstrings_say() -> None:
    """Counts and kinds are guessed as often as they are few; names and records never."""
    rng = random.Random(1)
    for name in EVERY:
        task = tasks.get(name)
        scores, chance = [], []
        for seed in range(30):
            for question in drawn(name, seed, 600).questions:
                many = 40 if question.choices else 5
                scores += [task.score(question, task.guess(rng, question)) for _ in range(many)]
                chance.append(1 / len(question.choices) if question.choices else 0.0)
        expected = sum(chance) / len(chance)
        assert sum(scores) / len(scores) == pytest.approx(expected, abs=0.04), name


RECORDS = [
    {"customer": "Clara Foxley", "product": "brisk lantern", "quantity": 12},
    {"customer": "Omar Bellson", "product": "idle kettle", "quantity": 3},
]
OTHER = {"customer": "Hugo Inkwell", "product": "mild drum", "quantity": 7}
WRITTEN = json.dumps(RECORDS)


@pytest.mark.parametrize(
    ("said", "score"),
    [
        (WRITTEN, 1.0),
        (json.dumps(RECORDS[::-1], indent=2), 1.0),
        (json.dumps([dict(reversed(record.items())) for record in RECORDS]), 1.0),
        (f"Here they are:\n\n```json\n{WRITTEN}\n```\n", 1.0),
        (WRITTEN.replace("12", "12.0"), 1.0),
        (WRITTEN.replace("12", '"12"'), 0.5),
        (WRITTEN.replace("Clara", "clara"), 0.5),
        (json.dumps(RECORDS[:1]), 0.5),
        (json.dumps([RECORDS[0]] * 2), 0.5),
        (json.dumps([*RECORDS, *RECORDS]), 0.5),
        (json.dumps([*RECORDS, *[OTHER] * 6]), 0.25),
        (json.dumps([*RECORDS, "Clara Foxley", 12]), 0.5),
        (json.dumps([{**RECORDS[0], "town": "Otterham"}, RECORDS[1]]), 0.5),
        (json.dumps([{"customer": "Clara Foxley"}, RECORDS[1]]), 0.5),
        (WRITTEN[:-1], 0.0),
        (WRITTEN.replace('"', "'"), 0.0),
        (WRITTEN.replace("3", "NaN"), 0.0),
        (json.dumps({"orders": RECORDS}), 0.0),
        ("[]", 0.0),
        ("", 0.0),
        (f"```json\n{WRITTEN}\n```\nor\n```json\n[]\n```", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_records_are_compared_as_json(said: str, score: float) -> None:
    question = Question("Extract every order.", "", (WRITTEN,))
    assert tasks.get("every-record").score(question, said) == pytest.approx(score)


def test_the_records_of_all_kinds_together_score_low() -> None:
    context = drawn("every-record", 2)
    everything = [
        match.groupdict()
        for sentences in aggregate._RECORDS.values()
        for pattern in map(_pattern, sentences)
        for line in context.text.split("\n")
        if (match := pattern.fullmatch(line))
    ]
    assert tasks.get("every-record").score(context.questions[0], json.dumps(everything)) < 0.4


def test_answers_may_grow_with_the_text_and_so_may_what_is_generated() -> None:
    task = tasks.get("every-record")
    for question in drawn("every-record", 0, 8000).questions:
        assert task.most_tokens(question, counting_words(8000)) >= counting_words(0).count(question.response)


def test_a_pass_key_stands_at_every_depth_alike() -> None:
    depths = [drawn("passkey", seed, 1000).depths[0] for seed in range(200)]
    quarters = [sum(q / 4 <= (d or 0) < (q + 1) / 4 for d in depths) for q in range(4)]
    assert min(quarters) > 25


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
    context = task.context(random.Random(1), material(800))
    for question in context.questions:
        prompt = f"{context.text}\n\n{question.text}\nAnswer:{question.answer_prefix}"
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = untrained.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        said = tokenizer.decode(out[0, ids.shape[1] :])
        assert said
        assert task.score(question, said) == 0
