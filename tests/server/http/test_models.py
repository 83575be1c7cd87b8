"""`/v1/models`, and the routes that count tokens."""

from __future__ import annotations

import httpx
import openai
import pytest

from offload_decode.server.requests import Loading
from tests.server.fakes import STORED


def test_every_store_is_a_model_and_so_is_its_model(client):
    book, tiny = client.models.list().data
    assert (book.id, book.root, book.parent, book.owned_by) == ("book", "tiny", "tiny", "offload-decode")
    assert (book.tokens, book.created) == (STORED, 1_700_000_000)
    assert (tiny.id, tiny.root, tiny.parent) == ("tiny", "tiny", None)


def test_one_of_them_by_its_name(client):
    assert client.models.retrieve("book").id == "book"
    with pytest.raises(openai.NotFoundError, match="there are book, tiny"):
        client.models.retrieve("no/such")


def test_nothing_of_the_servers_folders_is_told(url):
    assert "/srv" not in httpx.get(f"{url}/v1/models").text


def test_tokens_of_a_text_and_of_messages(url):
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


def test_a_text_of_tokens(url):
    assert httpx.post(f"{url}/detokenize", json={"tokens": [97, 98]}).json() == {"prompt": "ab"}


def test_what_a_client_must_know_of_a_tokenizer(url):
    told = httpx.get(f"{url}/tokenizer_info").json()
    assert (told["bos_token"], told["eos_token"], told["vocab_size"]) == ("<s>", "</s>", 259)
    assert httpx.get(f"{url}/tokenizer_info", params={"model": "nope"}).status_code == 404


def test_a_model_that_is_being_loaded_is_a_moment_away(url, service):
    service.fault = Loading("the model is being loaded", 2)
    answer = httpx.get(f"{url}/tokenizer_info")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
