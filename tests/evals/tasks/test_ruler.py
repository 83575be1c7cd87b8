"""RULER's tasks hold what its definitions say: so many needles, hops and words, and as long as asked for."""

import random
import re
from collections import Counter
from itertools import pairwise, product

import pytest

from offload_decode import demo_models
from offload_decode.evals import tasks
from offload_decode.evals.haystack import Material, python_topics
from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import Context
from offload_decode.evals.tasks.ruler import SUITE, VariableTracking
from tests.tiny import tiny_tokenizer

DRAWN = [name for name in SUITE if not name.startswith("qa")]
NEEDLE = re.compile(r"One of the special magic (?:number|uuid)s for (\S+) is: (\S+)\.(?=\s|$)")
VALUE = {"number": r"\d{7}", "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}


def drawn(name: str, tokens: int = 6000) -> Context:
    return tasks.get(name).context(random.Random(1), Material(python_topics(), tiny_tokenizer(), tokens, 0.3))


@pytest.mark.parametrize("name", DRAWN)
def test_a_text_is_as_long_as_asked_for(name: str) -> None:
    from transformers import AutoTokenizer

    demo = AutoTokenizer.from_pretrained(demo_models.path("demo"))
    for tokens, tokenizer in product((8192, 20000), (tiny_tokenizer(), demo)):
        material = Material(python_topics(), tokenizer, tokens, 0.3)
        context = tasks.get(name).context(random.Random(1), material)
        # A line of two UUIDs is long, byte by byte.
        largest_piece = 128 if "multikey_3" in name and tokenizer is not demo else 0
        assert 0.99 * tokens - largest_piece <= material.count(context.text) <= tokens
        assert 0.97 * tokens - largest_piece <= material.count(context.control) <= 1.02 * tokens


@pytest.mark.parametrize(
    ("name", "needles", "kind"),
    [
        ("niah_single_1", 1, "number"),
        ("niah_single_2", 1, "number"),
        ("niah_single_3", 1, "uuid"),
        ("niah_multikey_1", 4, "number"),
        ("niah_multivalue", 4, "number"),
        ("niah_multiquery", 4, "number"),
    ],
)
def test_needles(name: str, needles: int, kind: str) -> None:
    context = drawn(name)
    found = NEEDLE.findall(context.text)
    assert len(found) == needles
    assert len({key for key, _ in found}) == (1 if name == "niah_multivalue" else needles)
    assert len({value for _, value in found}) == needles
    for key, value in found:
        adjective, noun = key.split("-")
        assert adjective in words.ADJECTIVES
        assert noun in words.NOUNS
        assert re.fullmatch(VALUE[kind], value)
    assert len(context.questions) == (needles if name == "niah_multikey_1" else 1)
    for question in context.questions:
        assert [v for k, v in found if k in question.text] == sorted(question.answers, key=context.text.index)
    assert not NEEDLE.search(context.control)


def test_the_noise_of_single_1_is_the_five_sentences_and_the_needle_a_line_among_them() -> None:
    lines = drawn("niah_single_1").text.split("\n")[1:]
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    assert [bool(NEEDLE.fullmatch(line)) for line in lines].count(True) == 1
    assert all(noise.startswith(line) or NEEDLE.fullmatch(line) for line in lines)


@pytest.mark.parametrize(("name", "kind"), [("niah_multikey_2", "number"), ("niah_multikey_3", "uuid")])
def test_every_line_is_a_needle_of_another_key(name: str, kind: str) -> None:
    context = drawn(name)
    lines = context.text.split("\n")[1:]
    found = [NEEDLE.fullmatch(line) for line in lines]
    pairs = {match[1]: match[2] for match in found if match}
    assert len(pairs) == len(lines) == len(set(pairs.values()))
    assert all(re.fullmatch(VALUE[kind], value) for value in pairs.values())
    assert len(context.questions) == 4
    for question, depth in zip(context.questions, context.depths, strict=True):
        (key,) = [key for key in pairs if f" {key} " in question.text]
        assert (pairs[key],) == question.answers
        assert depth == context.text.index(f"One of the special magic {kind}s for {key}") / len(context.text)
    assert len(set(lines) - set(context.control.split("\n"))) == 4


def test_a_chain_of_four_hops_comes_in_order() -> None:
    strand = Material(python_topics(), tiny_tokenizer(), 8192, 0.3)
    context = VariableTracking().context(random.Random(3), strand)
    assigned = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w{5})", context.text)
    (question,) = context.questions
    assert tuple(to for to, _ in assigned) == question.answers
    assert len(assigned) == 5
    assert re.findall(r"\d{5}", question.text) == [assigned[0][1]]
    for (before, _), (_, source) in pairwise(assigned):
        assert source == before
    assert "VAR" not in context.control


@pytest.mark.parametrize(("tokens", "times", "others"), [(8192, 30, 3), (2000, 6, 1)])
def test_ten_words_come_thirty_times_and_the_others_three_times(tokens: int, times: int, others: int) -> None:
    context = drawn("cwe", tokens)
    listed = re.findall(r"(\d+)\. (\w+)", context.text)
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    counts = Counter(word for _, word in listed)
    assert {word for word, count in counts.items() if count == times} == set(context.questions[0].answers)
    assert sorted(set(counts.values())) == [others, times]
    assert len(context.questions[0].answers) == 10
    control = Counter(re.findall(r"\d+\. (\w+)", context.control))
    assert sum(count == times for count in control.values()) == 10


def test_coded_words_follow_zipf_with_an_exponent_of_two() -> None:
    context = drawn("fwe", 20000)
    counts = Counter(context.text.split("coded words. ")[1].split())
    (dots, noise), *coded = counts.most_common()
    assert dots == "..."
    assert all(re.fullmatch("[a-z]{6}", word) and word not in words.KNOWN for word, _ in coded)
    for rank, (_, count) in enumerate(coded[:6], 2):
        assert count == pytest.approx(noise * rank**-2.0, abs=1)
    assert tuple(word for word, _ in coded[:3]) == context.questions[0].answers
    assert coded[2][1] > coded[3][1]
    named = Counter(context.control.split("coded words. ")[1].split())
    assert sorted(named.values()) == sorted(counts.values())


def test_words_never_run_out() -> None:
    drawing = words.vocabulary(random.Random(0))
    many = [next(drawing) for _ in range(len(words.EVERY) + 500)]
    assert len(set(many)) == len(many)


def test_the_suite_are_thirteen_tasks_that_are_known() -> None:
    assert len(set(SUITE)) == 13
    assert set(DRAWN) <= set(tasks.names())
