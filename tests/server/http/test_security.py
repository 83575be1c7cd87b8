"""Who may ask, how much is read, and what is told of the server."""

import tracemalloc
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import OpenAI

from offload_decode.common.errors import ConfigError, StoreDamaged
from offload_decode.server.http.security import LOOPBACK, read_keys
from offload_decode.server.requests import Settings

MODELS, COMPLETIONS = "/v1/models", "/v1/completions"
BODY = {"model": "book", "prompt": "a"}


def test_a_key_opens(serve):
    url = serve(keys=("sesame", "schlüssel"))
    for key in ("sesame", "schlüssel"):
        header = f"Bearer {key}".encode()
        assert httpx.get(url + MODELS, headers={"Authorization": header}).status_code == 200
    for wrong in ("Bearer open", "Bearer", "Basic sesame", "sesame", ""):
        answer = httpx.get(url + MODELS, headers={"Authorization": wrong})
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    with pytest.raises(openai.AuthenticationError, match="Authorization: Bearer"):
        OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()


def test_without_one_nothing_is_told_but_that_it_runs(serve):
    url = serve(keys=("sesame",))
    assert httpx.get(f"{url}/health").status_code in (200, 503)
    for path in (MODELS, "/metrics", "/openapi.json", "/tokenizer_info", "/no/such"):
        assert httpx.get(url + path).status_code == 401


def test_keys_of_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    assert read_keys(file) == ("one", "two")
    for wrong in ("", "\n", "x" * 70_000):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="a key in each line"):
            read_keys(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none")


def test_a_body_is_read_up_to_a_limit(serve):
    url = serve(Settings(max_body=1000))
    body = {"model": "book", "prompt": "a" * 900}
    assert httpx.post(url + COMPLETIONS, json=body).status_code == 200

    def pieces() -> Iterator[bytes]:
        yield b'{"model": "book", "prompt": "'
        for _ in range(100):
            yield b"a" * 100

    given = {"Content-Type": "application/json"}
    for content in (b"x" * 1001, pieces()):
        answer = httpx.post(url + COMPLETIONS, content=content, headers=given)
        assert answer.status_code == 413
        assert "1,000 bytes" in answer.json()["error"]["message"]


def test_only_names_of_loopback_where_there_is_no_key(serve):
    url = serve(hosts=LOOPBACK)
    for name in ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000"):
        assert httpx.get(url + MODELS, headers={"Host": name}).status_code == 200
    answer = httpx.get(url + MODELS, headers={"Host": "rebound.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_host")


def test_pages_of_other_origins_are_kept_out(url):
    own = httpx.post(url + COMPLETIONS, json=BODY, headers={"Origin": url})
    assert own.status_code == 200
    for origin in ("https://other.example", "null"):
        other = httpx.post(url + COMPLETIONS, json=BODY, headers={"Origin": origin})
        assert other.status_code == 403
        assert "access-control-allow-origin" not in other.headers


def test_pages_of_origins_that_were_let_in_may_ask(serve):
    url, origin = serve(origins=("https://chat.example",), keys=("sesame",)), "https://chat.example"
    before = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    allowed = httpx.options(url + COMPLETIONS, headers=before)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, origin)
    refused = httpx.post(url + COMPLETIONS, json={}, headers={"Origin": origin})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin)
    given = {"Origin": origin, "Authorization": "Bearer sesame"}
    assert httpx.post(url + COMPLETIONS, json=BODY, headers=given).status_code == 200


def test_errors_of_the_wire_have_openais_shape(url):
    given = {"Content-Type": "application/json"}
    chat = f"{url}/v1/chat/completions"
    answers = {
        404: httpx.get(f"{url}/no/such"),
        405: httpx.get(chat),
        400: httpx.post(chat, content=b"{", headers=given),
    }
    answers[400.1] = httpx.post(chat, content=b"{}")  # no JSON, by its header
    answers[400.2] = httpx.post(chat, content=b"[" * 50_000, headers=given)
    answers[400.3] = httpx.post(chat, content=b'{"model": "\\ud800"}', headers=given)
    for status, answer in answers.items():
        assert answer.status_code == int(status)
        assert {*answer.json()["error"]} == {"message", "type", "param", "code"}
    assert answers[405].headers["allow"] == "POST"


def test_of_a_long_list_one_wrong_member_is_told(url):
    wrong = {
        "completions": {"prompt": [0.5] * 20_000},
        "chat/completions": {"messages": [{"role": "user", "content": [{}] * 20_000}]},
        "responses": {"input": [{"role": "user", "content": [{}] * 20_000}]},
    }
    for route, body in wrong.items():
        tracemalloc.start()
        answer = httpx.post(f"{url}/v1/{route}", json={"model": "book"} | body)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert answer.status_code == 400
        assert most < 10e6  # a kilobyte for each would be 20 MB


def test_no_path_of_the_server_is_told(url, service, caplog):
    service.fault = StoreDamaged(
        "/srv/stores/book.kv: the file '/srv/stores/book.kv/c/0/0' or ../x/secret.bin (of /srv/models/tiny, "
        "see https://example.org/a/b) is cut off"
    )
    answer = httpx.post(url + COMPLETIONS, json=BODY)
    said = answer.json()["error"]["message"]
    assert answer.status_code == 500
    assert said == (
        "book: the file 'book/c/0/0' or secret.bin (of tiny, see https://example.org/a/b) is cut off"
    )
    assert "/srv/stores/book.kv/c/0/0" in caplog.text
