"""A real model behind the server, asked by the `openai` package for calls of tools and for JSON."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
from openai import OpenAI

from offload_decode.models.loading import load
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.job import prefill_texts
from offload_decode.server.catalog import Catalog
from offload_decode.server.http.app import create_app
from offload_decode.server.requests import Settings
from offload_decode.server.service import Service
from tests.real.test_smollm2 import FACT, FILE, LICENCE
from tests.server.http.conftest import listening

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FILE.exists(), reason=f"{FILE} is not there: make real fetches it"),
]

# The model's own template, and what Qwen's says of tools: the model was never shown any.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nCall a tool: {{ tools | tojson }}\nwithin <tool_call></tool_call>, as "
    '{"name": its name, "arguments": what it takes}<|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CLOSES = {
    "type": "object",
    "properties": {"keeper": {"type": "string"}, "hour": {"type": "integer", "minimum": 1, "maximum": 12}},
    "required": ["keeper", "hour"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "write_down", "parameters": CLOSES}},
    {"type": "function", "function": {"name": "ring", "parameters": {"type": "object", "properties": {}}}},
]
ASKED = [{"role": "user", "content": "Who is the keeper of the harbour office, and when does it close?"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = tmp_path_factory.mktemp("clients")
    file, stores = folder / "with-tools.gguf", folder / "stores"
    change = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", str(FILE), str(file)]
    subprocess.run([*change, "--chat-template", TEMPLATE], check=True, capture_output=True)
    stores.mkdir()
    text = f"{LICENCE[700:2500]} {FACT} {LICENCE[2500:3500]}"
    prefill_texts(load(str(file), "cpu"), [TextDocument("a", text)], stores / "book.kv")
    with closing(Service(Catalog([stores]), Settings())) as service, listening(create_app(service)) as url:
        service.loaded_models.preload(service.catalog.entries()[0]).result(timeout=120)
        yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "write_down"}}])
def test_a_call_that_is_forced_comes_with_its_arguments(client: OpenAI, choice: object) -> None:
    how = {"model": "book", "messages": ASKED, "max_tokens": 160, "temperature": 0.0}
    answer = client.chat.completions.create(**how, tools=TOOLS, tool_choice=choice)  # type: ignore[call-overload]
    calls = answer.choices[0].message.tool_calls
    assert calls
    for call in calls:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "write_down":
            assert set(arguments) == {"keeper", "hour"}
            assert 1 <= arguments["hour"] <= 12
    if choice != "required":
        (call,) = calls
        assert call.function.name == "write_down"
        assert answer.choices[0].finish_reason == "tool_calls"


def test_an_answer_is_json_of_its_schema(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": CLOSES, "strict": True}}
    answer = client.chat.completions.create(  # type: ignore[call-overload]
        model="book", messages=ASKED, max_tokens=80, temperature=0.0, response_format=form
    )
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"keeper", "hour"}
    assert 1 <= found["hour"] <= 12
