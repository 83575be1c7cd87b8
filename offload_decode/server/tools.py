"""Tools that a model may call: how its chat template has calls written, and answers that must be calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload_decode.models.loading import LoadedModel
from offload_decode.server.calls import Form
from offload_decode.server.errors import WrongField
from offload_decode.server.grammar import JSON_OPTIONS, check_grammar

HERMES = Form("<tool_call>", "</tool_call>")
LLAMA = Form("<|python_tag|>", None, "parameters", bare=True)
MISTRAL = Form("[TOOL_CALLS]", None)
MISTRAL_NAMED = Form("[TOOL_CALLS]", None, named=True)

Tool = Mapping[str, Any]


@dataclass(frozen=True)
class Choice:
    """Which calls an answer may have. names: of the functions. shown: special tokens that calls are written
    with, and their texts. grammar: what holds an answer to calls, None where it may be text.
    """

    form: Form
    names: frozenset[str]
    shown: Mapping[int, str]
    grammar: Mapping[str, Any] | None


def choice_of(
    loaded: LoadedModel,
    tools: Sequence[Tool] | None,
    choice: str | Mapping[str, Any] | None,
    text_grammar: Mapping[str, Any] | None = None,
) -> Choice | None:
    """`tools` and `tool_choice` of OpenAI's API; None where no tool is to be called. `text_grammar`: the
    grammar of what is said where no call need be, so that an answer is either.

    Raises `WrongField` for a model whose template knows no tools or writes calls in a form that is not read,
    for a choice among tools that are not there, and for schemas that no grammar follows.
    """
    functions = [_function(tool) for tool in tools or ()]
    names = frozenset(function["name"] for function in functions)
    if len(names) < len(functions):
        raise WrongField("two tools have the same name", "tools")
    chosen = _chosen(functions, choice)
    if choice == "none" or not functions:
        return None
    form = form_of(loaded.known_tokenizer)
    shown = _shown(loaded.known_tokenizer, form)
    grammar = None
    said = None if chosen else _schema(text_grammar)
    if said is not None:
        check_grammar(loaded, {"json_schema": said})
    if chosen or said is not None:
        tokens = {text: f"<[{token}]>" for token, text in shown.items()}
        several = choice in ("required", "auto", None)
        grammar = {"lark": _lark(form, chosen or functions, tokens, several, said)}
        check_grammar(loaded, grammar, "tools")
    return Choice(form, names, shown, grammar)


def form_of(tokenizer: Any) -> Form:
    """How this tokenizer's chat template has calls written. Raises `WrongField`."""
    template = ""
    if tokenizer.chat_template:
        template = str(tokenizer.get_chat_template(tools=[{}]))
    if "tools" not in template:
        raise WrongField("the chat template of this model knows no tools: ask without them", "tools")
    if HERMES.begin in template and "<function=" not in template:
        return HERMES
    if MISTRAL.begin in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if LLAMA.begin in template or ('"name"' in template and '"parameters"' in template):
        return LLAMA
    raise WrongField(
        "this model's chat template writes tool calls in a form that is not read here: ask without tools",
        "tools",
    )


def _function(tool: Tool) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise WrongField("each tool must have a function with a name", "tools")
    return {"name": function["name"], "parameters": function.get("parameters") or {"properties": {}}}


def _chosen(functions: list[dict[str, Any]], choice: str | Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The functions one of which must be called; none where none must."""
    if choice in (None, "none", "auto"):
        return []
    if not functions:
        raise WrongField("tool_choice asks for a call, and there are no tools", "tool_choice")
    if choice == "required":
        return functions
    named = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(named, Mapping) or not isinstance(named.get("name"), str):
        raise WrongField("tool_choice must be none, auto, required or a function by its name", "tool_choice")
    found = [function for function in functions if function["name"] == named["name"]]
    if not found:
        raise WrongField(f"tool_choice names '{named['name']}', which is none of the tools", "tool_choice")
    return found


def _schema(grammar: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if grammar is None:
        return None
    schema: Mapping[str, Any] = grammar.get("json_schema", {"type": "object"})
    return schema


def _shown(tokenizer: Any, form: Form) -> dict[int, str]:
    """The tokens that a decoder leaves out, and that calls are known by."""
    marks = {form.begin, form.end, "[ARGS]" if form.named else None}
    known = tokenizer.added_tokens_decoder.items()
    return {token: str(added) for token, added in known if added.special and str(added) in marks}


def _lark(
    form: Form,
    functions: list[dict[str, Any]],
    tokens: Mapping[str, str],
    several: bool,
    said: Mapping[str, Any] | None,
) -> str:
    """A Lark grammar of calls as the form has them, or of JSON of the schema `said`; `tokens` are how it
    spells special ones.
    """

    def text(written: str) -> str:
        return tokens.get(written) or json.dumps(written, ensure_ascii=False)

    def call(number: int, name: str) -> str:
        if form.named:
            return f"{text(form.begin)} {text(name)} {text('[ARGS]')} arguments_{number}"
        rest = f': {json.dumps(name, ensure_ascii=False)}, "{form.arguments}": '
        # Cut as JSON is, so that both may be gone on with where other JSON may stand here.
        return f"{text('{')} {text(json.dumps('name'))} {text(rest)} arguments_{number} {text('}')}"

    one = " | ".join(f"call_{number}" for number in range(len(functions)))
    each, between = "call", ""
    if form.end is not None:
        each, between = f'{text(form.begin)} "\\n" call "\\n" {text(form.end)}', '"\\n"'
    elif not form.named:
        between = text("; " if form.bare else ", ")
    start = f"{each} ({between} {each})*" if several else each
    if form == MISTRAL:
        start = f'{text(form.begin)} " "? "[" {start} "]"'
    rules = [f"start: {start}", f"call: {one}"]
    if said is not None:
        rules[0] += " | said"
        rules.append(f"said: %json {json.dumps({**said, 'x-guidance': JSON_OPTIONS}, ensure_ascii=False)}")
    for number, function in enumerate(functions):
        schema = {"type": "object", **function["parameters"], "x-guidance": JSON_OPTIONS}
        rules.append(f"call_{number}: {call(number, function['name'])}")
        rules.append(f"arguments_{number}: %json {json.dumps(schema, ensure_ascii=False)}")
    return "\n".join(rules)
