"""`/v1/completions` as `openai` and `lm-eval` ask it, `/v1/models`, and the routes that count tokens."""

import json

import httpx
import openai
import pytest

from offload_decode.server.requests import Busy, Loading
from tests.server.fakes import STORED


@pytest.mark.parametrize("prompt", ["abc", ["abc"], [97, 98, 99], [[97, 98, 99]]])
def test_a_prompt_is_a_text_or_tokens_alone_or_in_a_list(client, prompt):
    answer = client.completions.create(model="book", prompt=prompt)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("cba", "stop", None)


@pytest.mark.parametrize("stream", [False, True])
def test_the_choices_of_the_first_prompt_come_first(client, stream):
    answer = client.completions.create(model="book", prompt=["ab", "xyz"], n=2, stream=stream)
    texts: dict[int, str] = {}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {0: "ba", 1: "ba", 2: "zyx", 3: "zyx"}


def test_usage_is_that_of_all_prompts(client):
    answer = client.completions.create(model="book", prompt=["ab", "xyz"])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2 * STORED + 5, 5)
    assert answer.usage.prompt_tokens_details.cached_tokens == 2 * STORED
    (*_, last) = client.completions.create(
        model="book", prompt=["ab", "xyz"], stream=True, stream_options={"include_usage": True}
    )
    assert last.usage == answer.usage


@pytest.mark.parametrize("stream", [False, True])
def test_echo_gives_the_prompt_back_with_its_log_probabilities(client, stream):
    asked = {"model": "book", "prompt": "abc", "echo": True, "logprobs": 2, "max_tokens": 1}
    answer = client.completions.create(**asked, stream=stream)
    parts = [part.choices[0] for part in (answer if stream else [answer])]
    assert "".join(part.text for part in parts) == "abcc"
    known = [part.logprobs for part in parts if part.logprobs is not None]
    assert [token for one in known for token in one.tokens] == ["a", "b", "c", "c"]
    assert [at for one in known for at in one.text_offset] == [0, 1, 2, 3]
    assert [logprob for one in known for logprob in one.token_logprobs] == [None, -0.5, -0.5, -0.5]
    top = [one for each in known for one in each.top_logprobs]
    assert top == [None, {"b": -0.5, "c": -1.5}, {"c": -0.5, "d": -1.5}, {"c": -0.5, "d": -1.5}]


def test_a_prompt_alone_can_be_scored(client):
    answer = client.completions.create(model="book", prompt="abc", echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("abc", "length")
    assert choice.logprobs.top_logprobs == [None, {"b": -0.5}, {"c": -0.5}]


def test_max_tokens_defaults_to_sixteen(client, service):
    client.completions.create(model="book", prompt="abc")
    assert service.tickets[0].asked.generation.max_tokens == 16


def test_one_refused_prompt_cancels_the_others(client, service):
    taken = service.complete

    def one_only(asked, emit):
        if service.tickets:
            raise Busy("256 requests wait")
        return taken(asked, emit)

    service.pace_s = 0.5
    service.complete = one_only
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="book", prompt=["abc", "def"])
    assert service.tickets[0].cancelled.wait(1)


def test_chunks_have_openais_fields(url):
    body = {"model": "book", "prompt": "ab", "stream": True}
    events = httpx.post(f"{url}/v1/completions", json=body).text.split("\n\n")
    first = json.loads(events[0].removeprefix("data: "))
    assert first["object"] == "text_completion"
    assert first["choices"] == [{"index": 0, "text": "b", "finish_reason": None, "logprobs": None}]
    assert events[-2] == "data: [DONE]"


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        *(({"prompt": wrong}, "prompt") for wrong in ([], [[]], [-1], ["a", 1], ["a"] * 129)),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        *(({"max_tokens": wrong}, "max_tokens") for wrong in (0, -2)),
        *(({"logprobs": wrong}, "logprobs") for wrong in (21, -1)),
        ({"prompt": ["a", "b"], "citations": True}, "citations"),
        ({"prompt": ["a", "b"], "check": True}, "check"),
    ],
)
def test_a_field_that_cannot_be_is_named(url, changed, param):
    answer = httpx.post(f"{url}/v1/completions", json={"model": "book", "prompt": "a"} | changed)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


def test_every_store_is_a_model_and_so_is_its_model(client, url):
    book, tiny = client.models.list().data
    assert (book.id, book.root, book.parent, book.owned_by) == ("book", "tiny", "tiny", "offload-decode")
    assert (book.tokens, book.created) == (STORED, 1_700_000_000)
    assert (tiny.id, tiny.root, tiny.parent) == ("tiny", "tiny", None)
    assert "/srv" not in httpx.get(f"{url}/v1/models").text, "no folder of the server's is told"


def test_a_model_is_found_by_its_name(client):
    assert client.models.retrieve("book").id == "book"
    with pytest.raises(openai.NotFoundError, match="there are book, tiny") as caught:
        client.models.retrieve("no/such")
    assert caught.value.code == "model_not_found"


def test_texts_and_messages_become_tokens_and_tokens_a_text(url):
    said = httpx.post(f"{url}/tokenize", json={"model": "book", "prompt": "ab", "return_token_strs": True})
    assert said.json()["tokens"] == [0, 97, 98]
    assert said.json()["token_strs"] == ["\0", "a", "b"]
    assert said.json()["count"] == 3
    bare = httpx.post(f"{url}/tokenize", json={"prompt": "ab", "add_special_tokens": False}).json()
    assert bare["tokens"] == [97, 98]
    messages = [{"role": "user", "content": "ab"}]
    assert httpx.post(f"{url}/tokenize", json={"messages": messages}).json()["tokens"] == [0, 97, 98]
    neither = httpx.post(f"{url}/tokenize", json={"model": "book"})
    assert (neither.status_code, neither.json()["error"]["param"]) == (400, "prompt")
    assert httpx.post(f"{url}/detokenize", json={"tokens": [97, 98]}).json() == {"prompt": "ab"}


def test_tokenizer_info(url):
    told = httpx.get(f"{url}/tokenizer_info").json()
    assert (told["bos_token"], told["eos_token"], told["vocab_size"]) == ("<s>", "</s>", 259)
    assert httpx.get(f"{url}/tokenizer_info", params={"model": "nope"}).status_code == 404


def test_a_request_for_a_loading_model_is_answered_with_retry_after(url, service):
    service.fault = Loading("the model is being loaded", 2)
    answer = httpx.get(f"{url}/tokenizer_info")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
