"""Tools that a model may call: the form in which its chat template writes calls, a grammar of answers that
must be calls, and calls read from the text of an answer as it comes.
"""

import json
import re
import secrets
import string
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload_decode.models.loading import LoadedModel
from offload_decode.server.grammar import JSON_OPTIONS, check_grammar
from offload_decode.server.requests import Delta, Emit, Ended, Event, ToolCall, WrongField

_BETWEEN = re.compile(r"^[\s;,]+")
_JSON = json.JSONDecoder()


@dataclass(frozen=True)
class Form:
    """How a model writes calls: `begin`, their JSON, `end` (None: the answer's end). arguments: their key in
    the JSON. bare: an answer that is an object from its first character is a call too. named: the name of a
    function stands before its arguments, with `[ARGS]` between them.
    """

    begin: str
    end: str | None
    arguments: str = "arguments"
    bare: bool = False
    named: bool = False


HERMES = Form("<tool_call>", "</tool_call>")
LLAMA = Form("<|python_tag|>", None, "parameters", bare=True)
MISTRAL = Form("[TOOL_CALLS]", None)
MISTRAL_NAMED = Form("[TOOL_CALLS]", None, named=True)


class CallParser:
    """Text in, text and calls out: text outside calls is unchanged, but for white space before one.

    The same text gives the same result, however it is cut into pieces.
    """

    def __init__(self, form: Form, names: frozenset[str]):
        self._form = form
        self._names = names
        self._pending = ""
        self.called = False
        self._inside = False  # of a call, which `_pending` begins with
        self._fresh = True  # nothing was shown, and nothing called

    def push(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """The text that can be shown now, and the calls that it completes."""
        self._pending += text
        shown, calls = "", list[ToolCall]()
        while True:
            if not self._inside:
                more = self._until_begin()
                shown, self._fresh = shown + more, self._fresh and not more
            if not self._inside or self._form.end is None:
                break
            body, end, rest = self._pending.partition(self._form.end)
            if not end:
                break
            found = self._read(body.removeprefix(self._form.begin))
            shown += "" if found else body + end
            calls, self.called = calls + found, self.called or bool(found)
            self._pending, self._inside, self._fresh = rest, False, False
        return shown, tuple(calls)

    def rest(self) -> tuple[str, tuple[ToolCall, ...]]:
        """The rest, when no more text comes."""
        found = self._read(self._pending.strip().removeprefix(self._form.begin)) if self._inside else []
        self.called = self.called or bool(found)
        shown, self._pending = "" if found else self._pending, ""
        return shown, tuple(found)

    def _until_begin(self) -> str:
        """Take the text that can be no part of a call."""
        begin, text = self._form.begin, self._pending
        start = text.find(begin)
        if self._form.bare and self._fresh and text.lstrip()[:1] == "{":
            start = 0
        self._inside = start >= 0
        if start < 0:
            last = range(max(0, len(text) - len(begin) + 1), len(text))
            start = next((place for place in last if begin.startswith(text[place:])), len(text))
        shown = text[:start].rstrip()
        self._pending = text[start:] if self._inside else text[len(shown) :]
        return shown

    def _read(self, body: str) -> list[ToolCall]:
        """The calls of a body; none where a part of it is no call."""
        try:
            calls = [self._call(value) for value in self._values(body)]
        except (ValueError, RecursionError):
            return []
        return [call for call in calls if call] if all(calls) else []

    def _values(self, body: str) -> Iterator[Any]:
        if self._form.named:
            for one in body.split(self._form.begin):
                name, _, arguments = one.partition("[ARGS]")
                yield {"name": name.strip(), self._form.arguments: json.loads(arguments)}
            return
        while body := _BETWEEN.sub("", body):
            value, end = _JSON.raw_decode(body)
            yield from value if isinstance(value, list) else [value]
            body = body[end:]

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        # An answer that is JSON may have a name too.
        if self._form.bare and value["name"] not in self._names:
            return None
        arguments = value.get(self._form.arguments, {})
        if not isinstance(arguments, dict):
            return None
        # Mistral's templates take an id of nine letters and digits, others any.
        id = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return ToolCall(id, value["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def calls_apart(emit: Emit, form: Form, names: frozenset[str]) -> Emit:
    """An `emit` that passes events on, with calls in place of the text that they are written in."""
    parsers: dict[int, CallParser] = defaultdict(lambda: CallParser(form, names))

    def pass_on(event: Event) -> None:
        if isinstance(event, Delta):
            text, calls = parsers[event.index].push(event.text)
            event = replace(event, text=text, calls=calls)
        elif isinstance(event, Ended):
            text, calls = parsers[event.index].rest()
            if text or calls:
                emit(Delta(event.index, text, (), calls))
            if parsers[event.index].called and event.finish == "stop":
                event = replace(event, finish="tool_calls")
        emit(event)

    return pass_on


@dataclass(frozen=True)
class Choice:
    """The calls that an answer may have. names: of the functions. shown: special tokens that calls are
    written with, and their texts. grammar: of an answer that must be calls, None where it may be text.
    """

    form: Form
    names: frozenset[str]
    shown: Mapping[int, str]
    grammar: Mapping[str, Any] | None


def choice_of(
    loaded: LoadedModel,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    text_grammar: Mapping[str, Any] | None = None,
    parallel: bool = True,
) -> Choice | None:
    """`tools` and `tool_choice` of OpenAI's API; None where no tool is to be called. `text_grammar`: the
    grammar of what is said where no call need be, so that an answer is either. `parallel`: an answer that
    must be calls may have several.

    Raises `WrongField` for a model whose template knows no tools or writes calls in a form that is not read,
    for a choice among tools that are not there, and for schemas that no grammar follows.
    """
    described = [tool["function"] for tool in tools or ()]
    functions = [
        {"name": one["name"], "parameters": one.get("parameters") or {"properties": {}}} for one in described
    ]
    names = frozenset(function["name"] for function in functions)
    if len(names) < len(functions):
        raise WrongField("two tools have the same name", "tools")
    chosen = _chosen(functions, choice)
    if choice == "none" or not functions:
        return None
    form = form_of(loaded.known_tokenizer)
    marks = _marks(loaded.known_tokenizer, form)
    shown = {token: text for token, (text, special) in marks.items() if special}
    grammar = schema = None
    if not chosen and text_grammar is not None:
        if not {"json_schema", "json_object"} & {*text_grammar}:
            raise WrongField(
                "beside tools an answer is held to JSON alone: leave tools or the format out", "tools"
            )
        schema = text_grammar.get("json_schema", {"type": "object"})
        check_grammar(loaded, {"json_schema": schema})
    if chosen or schema is not None:
        # What is one token is not spelled: no tokenizer gives a text's letters where a token stands for them.
        tokens = {text: f"<[{token}]>" for token, (text, _) in marks.items()}
        several = parallel and choice in ("required", "auto", None)
        grammar = {"lark": _lark(form, chosen or functions, tokens, several, schema)}
        check_grammar(loaded, grammar, "tools")
    return Choice(form, names, shown, grammar)


def form_of(tokenizer: Any) -> Form:
    """How this tokenizer's chat template has calls written. Raises `WrongField`."""
    template = str(tokenizer.get_chat_template(tools=[{}])) if tokenizer.chat_template else ""
    if "tools" not in template:
        raise WrongField("the chat template of this model knows no tools: ask without them", "tools")
    if HERMES.begin in template and "<function=" not in template:
        return HERMES
    if MISTRAL.begin in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if LLAMA.begin in template or ('"name"' in template and '"parameters"' in template):
        return LLAMA
    raise WrongField("this model's form of tool calls is not read here: ask without tools", "tools")


def _chosen(functions: list[dict[str, Any]], choice: str | Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The functions one of which must be called."""
    if choice is None or choice in ("none", "auto"):
        return []
    if not functions:
        raise WrongField("tool_choice asks for a call, and there are no tools", "tool_choice")
    if isinstance(choice, str):
        return functions
    name = choice["function"]["name"]
    found = [function for function in functions if function["name"] == name]
    if not found:
        raise WrongField(f"tool_choice names '{name}', which is none of the tools", "tool_choice")
    return found


def _marks(tokenizer: Any, form: Form) -> dict[int, tuple[str, bool]]:
    """The added tokens that calls are known by: their texts, and whether they are special ones, which a
    decoder leaves out.
    """
    marks = {form.begin, form.end, "[ARGS]" if form.named else None}
    known = tokenizer.added_tokens_decoder.items()
    return {token: (str(added), added.special) for token, added in known if str(added) in marks}


def _lark(
    form: Form,
    functions: list[dict[str, Any]],
    tokens: Mapping[str, str],
    several: bool,
    schema: Mapping[str, Any] | None,
) -> str:
    """A Lark grammar of calls, or of JSON of `schema`; `tokens` name added tokens by their texts."""

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
    if schema is not None:
        rules[0] += " | text"
        rules.append(f"text: %json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS}, ensure_ascii=False)}")
    for number, function in enumerate(functions):
        parameters = {"type": "object", **function["parameters"], "x-guidance": JSON_OPTIONS}
        rules.append(f"call_{number}: {call(number, function['name'])}")
        rules.append(f"arguments_{number}: %json {json.dumps(parameters, ensure_ascii=False)}")
    return "\n".join(rules)
