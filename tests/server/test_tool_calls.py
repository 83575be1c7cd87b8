"""Calls of tools: read as they come, in each form that templates have, and forced by a grammar."""

import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_decode.models.loading import wrap
from offload_decode.server.answer_text import AnswerText
from offload_decode.server.grammar import grammar_of
from offload_decode.server.requests import Delta, Ended, Generation, Prompted, Usage, WrongField
from offload_decode.server.sampling import Picker
from offload_decode.server.tool_calls import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    CallParser,
    calls_apart,
    choice_of,
    form_of,
)
from tests.tiny import tiny_model, tiny_tokenizer

BODY = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}\n{% endfor %}"
)
TEMPLATES = {
    "hermes": "{% if tools %}Tools: {{ tools | tojson }} Call one as <tool_call>\n"
    '{"name": its name, "arguments": what it takes}\n</tool_call>\n{% endif %}' + BODY,
    "llama": '{% if tools %}Tools: {{ tools | tojson }} Call one as {"name": its name, "parameters": '
    "what it takes}\n{% endif %}" + BODY,
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% if false %}[TOOL_CALLS] [{}]{% endif %}" + BODY,
    "mistral named": "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if false %}[TOOL_CALLS]f[ARGS]{}{% endif %}" + BODY,
}
FORMS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "mistral named": MISTRAL_NAMED}
NAMES = frozenset({"look_up", "add"})
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Finds a word.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"$ref": "#/$defs/word"}, "most": {"type": "integer", "maximum": 9}},
                "required": ["word", "most"],
                "additionalProperties": False,
                "$defs": {"word": {"enum": ["fox", "dog"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "add"}},
]
ONE, OTHER = ("look_up", {"word": "fox"}), ("add", {"a": [1, {"b": "é } </tool_call"}]})
WRITTEN = {
    "hermes": (
        '<tool_call>\n{"name": "look_up", "arguments": {"word": "fox"}}\n</tool_call>\n'
        '<tool_call>{"name": "add", "arguments": {"a": [1, {"b": "é } </tool_call"}]}}</tool_call>'
    ),
    "llama": (
        '{"name": "look_up", "parameters": {"word": "fox"}}; '
        '{"name": "add", "parameters": {"a": [1, {"b": "é } </tool_call"}]}}'
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "look_up", "arguments": {"word": "fox"}}, '
        '{"name": "add", "arguments": {"a": [1, {"b": "é } </tool_call"}]}}]'
    ),
    "mistral named": (
        '[TOOL_CALLS]look_up[ARGS]{"word": "fox"}[TOOL_CALLS]add[ARGS] {"a": [1, {"b": "é } </tool_call"}]}'
    ),
}


def read(form, pieces):
    """The text and the calls of an answer that comes in pieces."""
    calls = CallParser(form, NAMES)
    told = [calls.push(piece) for piece in pieces]
    told.append(calls.rest())
    found = [(call.name, json.loads(call.arguments)) for _, calls in told for call in calls]
    return "".join(text for text, _ in told), found


def loaded_with(template, special=(), added=()):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATES.get(template, template)
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.add_tokens(list(added))
    return wrap(tiny_model(vocab_size=len(tokenizer)), tokenizer)


@pytest.mark.parametrize("kind", FORMS)
def test_the_form_is_that_of_the_template(kind):
    assert form_of(loaded_with(kind).tokenizer) == FORMS[kind]


@pytest.mark.parametrize("kind", FORMS)
def test_calls_are_read_whole(kind):
    assert read(FORMS[kind], [WRITTEN[kind]]) == ("", [ONE, OTHER])


def test_text_before_calls_is_shown_without_the_white_space_between():
    for kind in ("hermes", "mistral", "mistral named"):
        assert read(FORMS[kind], ["I look.\n\n" + WRITTEN[kind]]) == ("I look.", [ONE, OTHER])
    tagged = '<|python_tag|>{"name": "look_up", "parameters": {"word": "fox"}}'
    assert read(LLAMA, ["I look. " + tagged]) == ("I look.", [ONE])


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<tool", "[TOO"]
SCRAPS = ["\n", " ", "{", "}", "fox", *MARKS]


@pytest.mark.parametrize("kind", FORMS)
@given(parts=st.lists(st.sampled_from([*SCRAPS, *WRITTEN.values()]), max_size=6), data=st.data())
def test_any_split_gives_the_same_text_and_calls(kind, parts, data):
    whole = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert read(FORMS[kind], pieces) == read(FORMS[kind], [whole])


def test_a_call_of_hermes_comes_as_soon_as_it_is_whole():
    calls = CallParser(HERMES, NAMES)
    first, second = WRITTEN["hermes"].split("\n<tool_call", 1)
    assert [call.name for call in calls.push("So. " + first)[1]] == ["look_up"]
    assert [call.name for call in calls.push("\n<tool_call" + second)[1]] == ["add"]
    assert calls.rest() == ("", ())


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, '<tool_call>{"name": "look_up", "arguments": {</tool_call> so'),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        (HERMES, "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        (LLAMA, '{"name": "fox", "parameters": {}}'),
        (LLAMA, '{"legs": 4}'),
        (LLAMA, 'A fox. {"name": "look_up", "parameters": {}}'),
        (MISTRAL, "[TOOL_CALLS] no"),
        (MISTRAL_NAMED, "[TOOL_CALLS]look_up"),
        (HERMES, "one < two <tool"),
    ],
)
def test_text_that_is_no_call_is_shown(form, text):
    assert read(form, [text]) == (text, [])


def test_a_call_without_its_end_marker_is_read():
    assert read(HERMES, ['<tool_call>{"name": "add", "arguments": {}}\n']) == ("", [("add", {})])


def test_call_ids_are_nine_unique_letters_and_digits():
    calls = CallParser(HERMES, NAMES).push(WRITTEN["hermes"])[1]
    assert len({call.id for call in calls}) == 2
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)


def test_events_have_calls_in_place_of_their_text():
    told = []
    calling = calls_apart(told.append, HERMES, NAMES)
    usage = Prompted(Usage(3, 2))
    calling(usage)
    for index, text in ((0, "So. <tool_c"), (1, "No call."), (0, WRITTEN["hermes"][len("<tool_c") :])):
        calling(Delta(index, text, ()))
    for index in (0, 1):
        calling(Ended(index, "stop"))
    assert told[0] == usage
    assert "".join(delta.text for delta in told if isinstance(delta, Delta) and delta.index == 0) == "So."
    assert [call.name for delta in told if isinstance(delta, Delta) for call in delta.calls] == [
        "look_up",
        "add",
    ]
    assert told[-2:] == [Ended(0, "tool_calls"), Ended(1, "stop")]


@pytest.mark.parametrize("how", ["spelled", "special", "added"])
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
def test_an_answer_that_must_be_a_call_is_one(kind, how, choice):
    """However the tokenizer has the marks of calls: Qwen's are added tokens, and no special ones."""
    marks = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")
    loaded = loaded_with(kind, **({} if how == "spelled" else {how: marks}))
    chosen = choice_of(loaded, TOOLS, choice)
    generation = Generation(grammar=chosen.grammar, temperature=1.0, seed=3)
    picker = Picker(loaded, (), frozenset([2]), generation, 2000)
    text = AnswerText(loaded.tokenizer, (), False, chosen.shown)
    calls, written, found = CallParser(chosen.form, chosen.names), "", []
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        logits = torch.randn(len(loaded.tokenizer), generator=generator)
        logits[2] += 3  # so that it ends
        token = picker.pick(logits).token
        if token == 2:
            break
        told = calls.push(text.push(token))
        written, found = written + told[0], [*found, *told[1]]
        if picker.append(token):
            break
    for told in (calls.push(text.rest()), calls.rest()):
        written, found = written + told[0], [*found, *told[1]]
    assert written == ""
    assert found
    if choice != "required":
        assert [call.name for call in found] == ["look_up"]
    for call in found:
        arguments = json.loads(call.arguments)
        if call.name == "look_up":
            assert arguments["word"] in ("fox", "dog")
            assert arguments["most"] <= 9


@pytest.mark.parametrize("kind", FORMS)
def test_an_answer_may_be_a_call_or_json_of_the_format_that_is_asked_for(kind):
    loaded = loaded_with(kind)
    schema = {"type": "object", "properties": {"legs": {"enum": [2, 4]}}, "required": ["legs"]}
    chosen = choice_of(loaded, TOOLS, "auto", {"json_schema": {**schema, "additionalProperties": False}})
    call = {
        "hermes": '<tool_call>\n{"name": "look_up", "arguments": {"word": "fox", "most": 3}}\n</tool_call>',
        "llama": '{"name": "look_up", "parameters": {"word": "fox", "most": 3}}',
        "mistral": '[TOOL_CALLS] [{"name": "look_up", "arguments": {"word": "fox", "most": 3}}]',
        "mistral named": '[TOOL_CALLS]look_up[ARGS]{"word": "fox", "most": 3}',
    }[kind]
    for text, fits in ((call, True), ('{"legs": 4}', True), ('{"legs":2}', True), ('{"legs": 3}', False)):
        followed = grammar_of(loaded, chosen.grammar)
        tokens = loaded.tokenizer.encode(text, add_special_tokens=False)
        taken = 0
        for token in tokens:
            if not followed.allowed(len(loaded.tokenizer), frozenset())[token]:
                break
            followed.append(token)
            taken += 1
        assert (taken == len(tokens)) == fits, text[:taken]
        assert bool(followed.allowed(300, frozenset([2]))[2]) == fits


def test_special_tokens_of_calls_are_shown_and_no_others():
    loaded = loaded_with("mistral", ("[TOOL_CALLS]", "[INST]"))
    chosen = choice_of(loaded, TOOLS, "auto")
    tokens = loaded.tokenizer.encode("[INST]So.[TOOL_CALLS] [", add_special_tokens=False)
    text = AnswerText(loaded.tokenizer, (), False, chosen.shown)
    assert "".join([*map(text.push, tokens), text.rest()]) == "So.[TOOL_CALLS] ["
    assert chosen.grammar is None


def test_without_tools_nothing_is_chosen():
    loaded = loaded_with("hermes")
    assert choice_of(loaded, None, None) is None
    assert choice_of(loaded, [], "auto") is None
    assert choice_of(loaded, TOOLS, "none") is None


@pytest.mark.parametrize(
    ("template", "tools", "choice", "param", "reason"),
    [
        (BODY, TOOLS, "auto", "tools", "knows no tools"),
        (None, TOOLS, "auto", "tools", "knows no tools"),
        ("{{ tools }}" + BODY, TOOLS, "auto", "tools", "not read here"),
        ("{{ tools }}<tool_call><function=f>" + BODY, TOOLS, "auto", "tools", "not read here"),
        ("hermes", [*TOOLS, TOOLS[0]], "auto", "tools", "same name"),
        ("hermes", TOOLS, {"function": {"name": "fly"}}, "tool_choice", "'fly'"),
        ("hermes", [], "required", "tool_choice", "no tools"),
        ("hermes", [{"function": {"name": "f", "parameters": {"not": {}}}}], "required", "tools", "not"),
    ],
)
def test_invalid_tools_and_choices_are_refused(template, tools, choice, param, reason):
    with pytest.raises(WrongField, match=reason) as refused:
        choice_of(loaded_with(template), tools, choice)
    assert refused.value.param == param


def test_calls_that_are_not_parallel_are_one():
    loaded = loaded_with("hermes")
    named = choice_of(loaded, TOOLS[:1], {"type": "function", "function": {"name": "look_up"}})
    assert choice_of(loaded, TOOLS[:1], "required", parallel=False) == named
    assert choice_of(loaded, TOOLS[:1], "required") != named
