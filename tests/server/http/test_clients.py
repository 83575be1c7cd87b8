"""Requests as clients and other servers write them: each is honoured, or refused with the way out."""

import httpx
import pytest

from offload_decode.server.requests import ToolCall

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
ASKED = [{"role": "user", "content": "Who?"}]


def asked(service, url, route="chat/completions", **body):
    body = {"model": "book", **({"messages": ASKED} if route[0] == "c" else {"input": "Who?"}), **body}
    answer = httpx.post(f"{url}/v1/{route}", json=body)
    assert answer.status_code == 200, answer.text
    return service.tickets[-1].asked


def refused(url, route="chat/completions", **body):
    body = {"model": "book", **({"messages": ASKED} if route[0] == "c" else {"input": "Who?"}), **body}
    answer = httpx.post(f"{url}/v1/{route}", json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}},
        {"type": "json_schema", "json_schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "person", **SCHEMA}},
        {"type": "json_schema", "name": "person", "schema": SCHEMA},
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_object", "json_schema": {"schema": SCHEMA}},
    ],
)
def test_a_schema_is_kept_wherever_it_stands(form, service, url):
    assert asked(service, url, response_format=form).generation.grammar == {"json_schema": SCHEMA}
    assert asked(service, url, "responses", text={"format": form}).generation.grammar == {
        "json_schema": SCHEMA
    }


def test_a_format_without_its_schema_is_refused(url):
    for form in ({"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "person"}}):
        assert "give it as json_schema.schema" in refused(url, response_format=form)
    assert "needs the type 'json_schema'" in refused(url, response_format={"type": "text", "schema": SCHEMA})


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_what_vllm_holds_answers_to(route, service, url):
    more = {} if route[1] == "h" else {"prompt": "Who?"}
    held = {
        "json": (SCHEMA, {"json_schema": SCHEMA}),
        "regex": ("[ab]+", {"regex": "[ab]+"}),
        "choice": (["yes", 'no "never"'], {"lark": 'start: "yes" | "no \\"never\\""'}),
        "grammar": ('root ::= "a"', {"gbnf": 'root ::= "a"'}),
    }
    for name, (value, grammar) in held.items():
        assert asked(service, url, route, **more, **{f"guided_{name}": value}).generation.grammar == grammar
        assert (
            asked(service, url, route, **more, structured_outputs={name: value}).generation.grammar == grammar
        )
    assert "give one of them" in refused(url, route, **more, guided_regex="a", guided_choice=["a"])
    assert "tags are not taken" in refused(url, route, **more, structured_outputs={"structural_tag": "{}"})
    assert asked(service, url, route, **more, grammar='root ::= "a"').generation.grammar == held["grammar"][1]
    assert asked(service, url, route, **more, grammar="").generation.grammar is None


def test_history_as_clients_send_it(service, url):
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": ""}}
    history = [
        *ASKED,
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": None},
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}},
        {"role": "function", "name": "look", "content": "It is."},
        *ASKED,
    ]
    assert asked(service, url, messages=history).messages == history


def test_a_most_of_any_size_is_for_the_service_to_cut(service, url):
    for most in (-1, 1_000_000):
        assert asked(service, url, max_tokens=most).generation.max_tokens == most
        assert asked(service, url, max_completion_tokens=most).generation.max_tokens == most
        assert asked(service, url, "completions", prompt="a", max_tokens=most).generation.max_tokens == most
        assert asked(service, url, "responses", max_output_tokens=most).generation.max_tokens == most


def test_a_system_message_behind_a_corpus_is_warned_of(url):
    def warnings(model, messages, **more):
        body = {"model": model, "messages": messages, **more}
        return httpx.post(f"{url}/v1/chat/completions", json=body).json().get("warnings")

    system = [{"role": "system", "content": "Be brief."}, *ASKED]
    assert "stands behind the stored corpus" in warnings("book", system)[0]
    assert warnings("book", ASKED) is warnings("tiny", system) is None
    assert warnings("tiny", system, together=["book"]) == warnings("book", system)
    body = {"model": "book", "input": "Who?", "instructions": "Be brief."}
    response = httpx.post(f"{url}/v1/responses", json=body).json()
    assert response["warnings"] == warnings("book", system)


def test_a_top_p_of_0_takes_the_likeliest_token(service, url):
    generation = asked(service, url, top_p=0, temperature=1).generation
    assert (generation.temperature, generation.top_p) == (0.0, 1.0)


def test_variables_of_the_template_reach_the_service(service, url):
    given = asked(service, url, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert given.template_options == {"enable_thinking": False, "reasoning_effort": "low"}
    assert asked(service, url, reasoning_effort="none").template_options["enable_thinking"] is False
    assert asked(service, url, "responses", reasoning={"effort": "high"}).template_options == {
        "reasoning_effort": "high"
    }


def test_reasoning_has_a_field_of_its_own(service, client):
    service.reasoning = "It was Ada."
    whole = client.chat.completions.create(model="book", messages=ASKED).choices[0].message
    assert (whole.reasoning_content, whole.content) == ("It was Ada.", "Who?")
    parts = [
        part.choices[0].delta
        for part in client.chat.completions.create(model="book", messages=ASKED, stream=True)
    ]
    assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts) == "It was Ada."
    assert "".join(part.content or "" for part in parts) == "Who?"
    assert service.tickets[-1].asked.separate_reasoning
    response = client.responses.create(model="book", input="Who?")
    assert response.output_text == "Who?"
    assert [one.type for one in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "It was Ada."
    events = list(client.responses.create(model="book", input="Who?", stream=True))
    told = [one.delta for one in events if one.type == "response.reasoning_text.delta"]
    assert "".join(told) == "It was Ada."
    assert [one.output_index for one in events if one.type == "response.output_item.done"] == [0, 1]


@pytest.mark.parametrize("parallel", [None, True, False])
def test_a_client_may_ask_for_one_call_at_a_time(service, url, parallel):
    for route in ("chat/completions", "responses"):
        given = asked(service, url, route, parallel_tool_calls=parallel, stream=None)
        assert given.parallel_calls is (parallel is not False)


def test_structured_outputs_are_kept_or_refused(service, url):
    given = asked(service, url, structured_outputs={"json_object": True})
    assert given.generation.grammar == {"json_object": True}
    assert "structural tags are not taken" in refused(url, structured_outputs={"structural_tag": "{}"})


def test_responses_pass_over_what_only_openai_has_and_name_it_once(service, url, caplog, monkeypatch):
    monkeypatch.setattr("offload_decode.server.http.answers._logged", set())
    caplog.set_level("INFO", logger="offload_decode.server")
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Who?"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "AAAA"},
        {"type": "local_shell_call", "call_id": "b", "action": {"command": ["ls"]}, "status": "completed"},
        {"type": "function_call", "call_id": "a", "name": "shell", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Ada."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
    ]
    tools = [
        {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}},
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
    ]
    codex = {"store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k"}
    for _ in range(2):
        given = asked(service, url, "responses", input=items, tools=tools, tool_choice="auto", **codex)
    assert [one["role"] for one in given.messages] == [
        "developer",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert [tool["function"]["name"] for tool in given.tools] == ["shell"]
    for type in ("reasoning", "local_shell_call", "local_shell", "web_search", "custom"):
        assert sum(f"of the type '{type}'" in line for line in caplog.messages) == 1


def test_embeddings_and_unknown_addresses_say_what_is_served(url):
    answer = httpx.post(f"{url}/v1/embeddings", json={"model": "book", "input": "a"})
    assert answer.status_code == 404
    assert "embeddings are not made here" in answer.json()["error"]["message"]
    assert "/v1/chat/completions" in httpx.get(f"{url}/v1/no/such").json()["error"]["message"]


FUNCTION = {"name": "look_up", "description": "Look.", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": {**FUNCTION, "name": name}} for name in ("look_up", "count")]
NAMED = {"type": "function", "function": {"name": "look_up"}}
ONE = {"type": "function", "name": "look_up"}


@pytest.mark.parametrize(
    ("choice", "names", "chosen"),
    [
        ("any", ["look_up", "count"], "required"),
        (ONE, ["look_up", "count"], NAMED),
        (NAMED, ["look_up", "count"], NAMED),
        ({"type": "allowed_tools", "mode": "required", "tools": [ONE]}, ["look_up"], "required"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}, ["look_up"], "auto"),
    ],
)
def test_a_choice_of_tools_in_each_of_its_forms(choice, names, chosen, service, url):
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    for given in (
        asked(service, url, tools=TOOLS, tool_choice=choice),
        asked(service, url, "responses", tools=flat, tool_choice=choice),
    ):
        assert [tool["function"]["name"] for tool in given.tools] == names
        assert given.tool_choice == chosen


def test_a_choice_of_no_tool_is_refused(url):
    strange = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "sing"}]}
    assert "'sing', which is none of the tools" in refused(url, tools=TOOLS, tool_choice=strange)
    assert "names no tool" in refused(url, tools=TOOLS, tool_choice={"type": "function"})


@pytest.mark.parametrize(
    ("call", "chosen"), [("auto", "auto"), ("none", "none"), ({"name": "look_up"}, NAMED), (None, None)]
)
def test_functions_are_tools_and_one_call_is_told_in_their_form(call, chosen, service, client):
    service.calls = (ToolCall("c1", "look_up", '{"a": 1}'), ToolCall("c2", "look_up", "{}"))
    how = {"model": "book", "messages": ASKED, "functions": [FUNCTION], "function_call": call}
    choice = client.chat.completions.create(**how).choices[0]
    given = service.tickets[-1].asked
    assert (given.tools, given.tool_choice) == (TOOLS[:1], chosen)
    assert not given.parallel_calls
    assert (choice.finish_reason, choice.message.tool_calls) == ("function_call", None)
    assert (choice.message.function_call.name, choice.message.function_call.arguments) == (
        "look_up",
        '{"a": 1}',
    )
    parts = [part.choices[0] for part in client.chat.completions.create(**how, stream=True)]
    (told,) = [part.delta.function_call for part in parts if part.delta.function_call]
    assert (told.name, told.arguments, parts[-1].finish_reason) == ("look_up", '{"a": 1}', "function_call")


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_formats_of_vllm_and_llama_cpp(route, service, url):
    more = {} if route[1] == "h" else {"prompt": "Who?"}
    for given, field, grammar in (
        ({"guided_decoding": {"regex": "[ab]+"}}, "guided_decoding.regex", {"regex": "[ab]+"}),
        ({"guided_regex": "[ab]+"}, "guided_regex", {"regex": "[ab]+"}),
        ({"json_schema": SCHEMA}, "json_schema", {"json_schema": SCHEMA}),
    ):
        generation = asked(service, url, route, **more, **given).generation
        assert (generation.grammar_field, generation.grammar) == (field, grammar)


def test_options_may_be_null(service, url):
    assert asked(service, url, options=None).options == {}


def test_open_webui_lists_chats_and_asks_for_titles_tags_and_follow_ups(service, url):
    """The requests that its routers `openai.py` and `tasks.py` make."""
    headers = {"Authorization": "Bearer none", "X-OpenWebUI-User-Name": "Ada", "X-OpenWebUI-Chat-Id": "c1"}
    listed = httpx.get(f"{url}/v1/models", headers=headers).json()["data"]
    assert "book" in [model["id"] for model in listed]
    turns = [*ASKED, {"role": "assistant", "content": "Ada."}, {"role": "user", "content": "And when?"}]
    chat = {"model": "book", "messages": turns, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=chat, headers=headers) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200
    assert lines[-1] == "data: [DONE]"
    assert '"usage":{' in lines[-2].replace(" ", "")
    assert [one["content"] for one in service.tickets[-1].asked.messages] == ["Who?", "Ada.", "And when?"]
    task = [{"role": "user", "content": "### Task:\nGenerate a concise, 3-5 word title with an emoji."}]
    for most in ({"max_completion_tokens": 1000}, {"max_tokens": 1000}, {}):
        metadata = {"task": "title_generation", "task_body": {"messages": turns}, "chat_id": None}
        body = {"model": "book", "messages": task, "stream": False, **most, "metadata": metadata}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "together: list should have at least 1 item"),
        (["book"] * 65, "together: list should have at most 64 items"),
        (["book", 3], "together[1]: input should be a valid string"),
        (0, "together: input should be greater than or equal to 1"),
        ("book", "together: input should be a valid integer"),
    ],
)
def test_stores_that_answer_together_are_a_number_or_a_list_of_names(url, given, told):
    body = {"model": "book", "messages": ASKED, "together": given}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(told)
