"""Answers held to a grammar: whatever a model would say, what it writes fits, and ends where it is whole."""

import json
import random
import re
from functools import cache
from itertools import pairwise

import pytest
import torch

from offload_decode.models.loading import wrap
from offload_decode.server import grammar
from offload_decode.server.answer_text import AnswerText
from offload_decode.server.grammar import MOST_BYTES, check_grammar
from offload_decode.server.requests import Generation, WrongField
from offload_decode.server.sampling import Picker, check_generation
from tests.models.tokenizers import KINDS, tokenizer_of
from tests.tiny import served_model, tiny_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["fox", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "kind", "legs"],
    "additionalProperties": False,
}
END = 2
FOLLOWED = [kind for kind in KINDS if not kind.startswith(("metaspace", "unigram"))]


@pytest.fixture(scope="module")
def loaded():
    return served_model()


@cache
def padded(kind):
    """A model with more logits than its tokenizer has tokens."""
    tokenizer = tokenizer_of(kind)
    return wrap(tiny_model(vocab_size=len(tokenizer) + 70), tokenizer)


def written(loaded, most=200, seed=0, ends=frozenset([END]), favour=None, **wanted):
    """The text of an answer to random logits, and how it ended."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = loaded.model.config.vocab_size
    generation = Generation(**{"temperature": 1.0, "seed": seed, **wanted})
    check_generation(loaded, generation)
    picker, text = Picker(loaded, (), ends, generation, most), AnswerText(loaded.tokenizer)
    shown = ""
    for _ in range(most):
        logits = torch.randn(vocabulary, generator=generator)
        if favour is not None:
            logits[favour] = 50.0
        token = picker.pick(logits).token
        if token in ends and not generation.ignore_end:
            return shown + text.rest(), "stop"
        shown += text.push(token)
        if picker.append(token):
            return shown + text.rest(), "stop"
    return shown + text.rest(), "length"


@pytest.mark.parametrize("kind", FOLLOWED)
@pytest.mark.parametrize("seed", range(3))
def test_random_logits_write_what_the_schema_says(kind, seed):
    text, finish = written(padded(kind), seed=seed, grammar={"json_schema": SCHEMA})
    found = json.loads(text)
    assert finish == "stop"
    assert set(found) == {"name", "kind", "legs"}
    assert len(found["name"]) <= 5
    assert found["kind"] in ("fox", "dog")
    assert 0 <= found["legs"] <= 9


@pytest.mark.parametrize("regex", ["[0-9]{3}-[a-f]+(x|yy)", "é🙂?", "(yes|no)"])
def test_random_logits_write_what_the_regex_says(loaded, regex):
    for seed in range(3):
        text, finish = written(loaded, seed=seed, grammar={"regex": regex}, most=3000)
        assert finish == "stop"
        assert re.fullmatch(regex, text)


def test_a_lark_grammar_and_any_object(loaded):
    lark = 'start: word (" and " word)*\nword: "fox" | "dog"\n'
    text, _ = written(loaded, grammar={"lark": lark}, most=2000)
    assert set(text.split(" and ")) <= {"fox", "dog"}
    text, finish = written(loaded, grammar={"json_object": True}, most=300)
    assert text.startswith("{")
    assert finish == "length" or isinstance(json.loads(text), dict)


def test_a_grammar_in_gbnf(loaded):
    """llama.cpp's form; one in Lark is taken as it is."""
    gbnf = 'root ::= word (" and " word)*\n\n\n# of two\nword ::= "fox" | "dog" [0-9]'
    for seed in range(3):
        text, _ = written(loaded, grammar={"gbnf": gbnf}, seed=seed, most=2000)
        assert all(re.fullmatch("fox|dog[0-9]", one) for one in text.split(" and "))
    assert written(loaded, grammar={"gbnf": 'start: "fox"'}) == ("fox", "stop")
    begins = 'root ::= start start-0 # from the start\nstart ::= "start" [start]\nstart-0 ::= "0"'
    text, _ = written(loaded, grammar={"gbnf": begins}, most=2000)
    assert re.fullmatch("start[start]0", text), "a rule may have the name that Lark's first one has"
    spelt = 'root ::= Start start start_0\nStart ::= "a"\nstart ::= "b"\nstart_0 ::= "c"'
    assert written(loaded, grammar={"gbnf": spelt})[0] == "abc"
    assert written(loaded, grammar={"gbnf": 'start: "a ::= b"'}) == ("a ::= b", "stop")


@pytest.mark.parametrize("endless", ["[" * 16_000, '"\\' * 7_000, '["' * 7_000])
def test_what_has_no_end_is_read_once(endless):
    """Else each beginning is read to the end of the text: seconds for 16 KiB."""
    assert grammar._START.sub("", endless) == ""


@pytest.mark.parametrize(
    ("gbnf", "says"),
    [
        ("root ::= missing", "not GBNF: Rule 'missing' not found"),
        ('word ::= "a"', "No 'root' rule"),
        ('root ::= ("a"', "not GBNF: Expected"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
        ("\n" * 200_000, "longer than"),
    ],
)
def test_what_is_no_gbnf_is_refused_with_the_reason(loaded, gbnf, says):
    with pytest.raises(WrongField, match=says):
        check_grammar(loaded, {"gbnf": gbnf}, "grammar")


def test_the_end_comes_only_where_the_answer_is_whole(loaded):
    held = {"regex": "ab{2,5}"}
    assert written(loaded, favour=END, grammar=held) == ("abb", "stop")
    assert written(loaded, favour=END, grammar=held, ignore_end=True) == ("abbbbb", "stop")
    assert written(loaded, favour=END, grammar=held, most=2) == ("ab", "length")
    # The tokenizer's own end token is none of this model's, and another is.
    b = loaded.tokenizer.encode("b", add_special_tokens=False)[0]
    assert written(loaded, favour=END, ends=frozenset([1]), grammar=held, logit_bias={b: 90})[0] == "abbbbb"
    assert written(loaded, favour=1, ends=frozenset([1, 500]), grammar=held) == ("abb", "stop")


def test_an_endless_grammar_is_cut_at_max_tokens(loaded):
    assert written(loaded, ends=frozenset(), grammar={"regex": "a*"}, most=7) == ("a" * 7, "length")


def test_a_grammar_goes_before_biases_and_the_models_own_settings(loaded, monkeypatch):
    a = loaded.tokenizer.encode("a", add_special_tokens=False)[0]
    assert written(loaded, grammar={"regex": "aa"}, logit_bias={a: -100}) == ("aa", "stop")
    monkeypatch.setattr(loaded.model.generation_config, "suppress_tokens", [a])
    assert written(loaded, grammar={"regex": "aa"}) == ("aa", "stop")


def test_answers_do_not_share_where_they_stand(loaded):
    wanted = Generation(grammar={"regex": "ab"})
    a, b = loaded.tokenizer.encode("ab", add_special_tokens=False)
    first, second = (Picker(loaded, (), frozenset(), wanted, 5) for _ in range(2))
    assert not first.append(a)
    assert second.pick(torch.zeros(259)).token == a
    assert first.pick(torch.zeros(259)).token == b


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"regex": "a("}, "unclosed group"),
        ({"lark": "start: foo"}, 'unknown name: "foo"'),
        ({"json_schema": {"type": "strin"}}, "Invalid type: strin"),
        ({"json_schema": {"not": {"type": "string"}}}, "not"),
        ({"json_schema": {"$ref": "https://example.com/schema"}}, "example.com"),
        ({"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text fits it"),
        ({"json_schema": {"enum": ["x" * MOST_BYTES]}}, "longer than 128 KiB"),
        ({"json_schema": {"const": float("nan")}}, "not JSON"),
        ({"json_schema": [SCHEMA]}, "must be a JSON schema"),
        ({"yaml": "a: b"}, "must be a JSON schema"),
        ({}, "must be a JSON schema"),
    ],
)
def test_invalid_grammars_are_refused(loaded, wrong, reason):
    with pytest.raises(WrongField) as refused:
        check_generation(loaded, Generation(grammar=wrong, grammar_field="guided_regex"))
    assert refused.value.param == "guided_regex"
    assert str(refused.value).startswith("guided_regex cannot be used: ")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_the_field_that_a_grammar_came_from_is_named(loaded):
    with pytest.raises(WrongField, match="tools") as refused:
        check_grammar(loaded, {"regex": "("}, "tools")
    assert refused.value.param == "tools"


def test_a_tokenizer_that_is_not_known_is_refused():
    with pytest.raises(WrongField, match="tokenizer"):
        check_generation(padded("unigram"), Generation(grammar={"json_object": True}))


def test_the_longest_chains_of_references_leave_the_process_alive(loaded):
    names = [f"a{number}" for number in range(7000)]
    rules = "\n".join(f"{one}: {other}" for one, other in pairwise(names))
    check_grammar(loaded, {"lark": f'start: a0\n{rules}\n{names[-1]}: "x"'})


def test_a_lexer_that_grows_beyond_its_limit_fails_the_answer(loaded, monkeypatch):
    monkeypatch.setattr(grammar, "_STATES", 60)
    picker = Picker(loaded, (), frozenset(), Generation(grammar={"regex": "(a|b)*a(a|b){12}c"}), 9)
    tokens = loaded.tokenizer.encode("ab", add_special_tokens=False)
    chance = random.Random(0)

    def answer():
        for _ in range(1000):
            picker.append(chance.choice(tokens))
            picker.pick(torch.zeros(259))

    with pytest.raises(WrongField, match="too many states"):
        answer()


def test_a_schema_that_is_nested_too_deeply_is_refused(loaded):
    schema = {}
    for _ in range(500):
        schema = {"not": schema}
    with pytest.raises(WrongField, match="nested too deeply"):
        check_grammar(loaded, {"json_schema": schema})
