"""Tools and grammars through the whole server, as the packages of OpenAI and Anthropic ask for them."""

import json
from contextlib import closing

import pytest
from anthropic import Anthropic
from openai import OpenAI

from offload_decode.config import EngineConfig
from offload_decode.server.catalog import Catalog
from offload_decode.server.http.app import create_app
from offload_decode.server.requests import Settings
from offload_decode.server.service import Service
from tests.server.conftest import prefilled
from tests.server.http.conftest import listening
from tests.server.test_tool_calls import TEMPLATES, TOOLS
from tests.tiny import text_model, tiny_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"word": {"enum": ["fox", "dog"]}, "legs": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["word", "legs"],
    "additionalProperties": False,
}
ASKED = [{"role": "user", "content": "Which word?"}]
NAMED = {"type": "function", "function": {"name": "look_up"}}
HOW = {"model": "book", "max_tokens": 400, "tools": TOOLS, "tool_choice": NAMED}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES["hermes"] + "{% if add_generation_prompt %}assistant: {% endif %}"
    model = text_model()
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    prefilled(folder, "book", "The quick brown fox jumps over the lazy dog. " * 5, folder / "model")
    settings = Settings(config=EngineConfig(selector="dense"))
    with closing(Service(Catalog([folder / "stores"]), settings)) as service:
        service.loaded_models.preload(service.catalog.entries()[0]).result(timeout=120)
        with listening(create_app(service)) as url:
            yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def test_an_answer_is_json_of_its_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model="book", messages=ASKED, max_tokens=400, response_format=form, n=2, temperature=1.0, seed=0
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content)["word"] in ("fox", "dog")


def test_a_call_comes_whole_and_in_a_stream_and_its_answer_goes_on(client):
    answer = client.chat.completions.create(messages=ASKED, **HOW)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert call.function.name == "look_up"
    assert json.loads(call.function.arguments)["word"] in ("fox", "dog")

    with client.chat.completions.stream(messages=ASKED, **HOW) as stream:
        last = stream.get_final_completion()
    (streamed,) = last.choices[0].message.tool_calls
    assert last.choices[0].finish_reason == "tool_calls"
    assert streamed.function.name == call.function.name
    assert streamed.function.arguments == call.function.arguments

    told = {"role": "tool", "tool_call_id": call.id, "content": "A fox has four legs."}
    messages = [*ASKED, choice.message.model_dump(exclude_none=True), told]
    again = client.chat.completions.create(
        messages=messages, model="book", max_tokens=5, tools=TOOLS, tool_choice="auto"
    )
    assert again.usage.prompt_tokens_details.cached_tokens > answer.usage.prompt_tokens_details.cached_tokens
    assert again.choices[0].finish_reason in ("stop", "length")


def test_anthropics_client_gets_the_same_call(client):
    ours = Anthropic(base_url=str(client.base_url).removesuffix("/v1/"), api_key="none", max_retries=0)
    (function,) = (one["function"] for one in TOOLS if "parameters" in one["function"])
    tools = [{"name": function["name"], "input_schema": function["parameters"]}]
    plain = [{"type": "function", "function": {**function, "description": None}}]
    how = {"model": "book", "max_tokens": 400, "messages": ASKED, "tools": tools}
    chosen = {"type": "tool", "name": "look_up"}
    whole = ours.messages.create(**how, tool_choice=chosen)
    with ours.messages.stream(**how, tool_choice=chosen) as stream:
        streamed = stream.get_final_message()
    asked = client.chat.completions.create(messages=ASKED, **{**HOW, "tools": plain})
    (call,) = asked.choices[0].message.tool_calls
    for answer in (whole, streamed):
        (used,) = answer.content
        assert (used.name, used.input) == ("look_up", json.loads(call.function.arguments))
        assert answer.stop_reason == "tool_use"
    counted = ours.messages.count_tokens(model="book", messages=ASKED, tools=tools).input_tokens
    assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens

    result = {"type": "tool_result", "tool_use_id": used.id, "content": "A fox has four legs."}
    said = [used.to_dict()]
    turns = [*ASKED, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    again = ours.messages.create(**{**how, "messages": turns, "max_tokens": 5})
    assert again.usage.cache_read_input_tokens > counted
