"""`ask`, `chat` and `batch` with `--server`, through the app of `serve`."""

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse

from offload_decode.cli import client
from offload_decode.cli.client import AnswerOptions, Server, ServerAddress, ServerAnswer
from offload_decode.common.errors import StoreError
from offload_decode.server.http.app import create_app
from offload_decode.server.http.security import Access
from offload_decode.server.requests import Busy, Joined, JoinedDocument
from tests.cli.conftest import imported, json_of, lines_of, refused, run, write_lines
from tests.server.fakes import STORED, FakeService
from tests.server.http.conftest import listening, running, service, url

__all__ = ["running", "service", "url"]

HEAVY = {"torch", "transformers", "numpy", "numba", "zarr", "faiss", "fastapi"}
MANNER = AnswerOptions("topk", {}, 64)


def test_a_server_answers_with_the_given_options(url, service):
    for store in ("book", "book.kv", "some/where/book.kv"):
        ran = run("ask", store, " Who wrote it? ", "--server", url)
        assert (ran.code, ran.out, ran.err) == (0, "Who wrote it?\n", "")
    how = ["-s", "quest", "-o", "budget=64", "--temperature", "0.5", "--top-p", "0.9", "--seed", "7"]
    ran = run("ask", "book", "Who wrote it?", "--server", f"{url}/v1/", "--max-new-tokens", "3", *how)
    assert ran.out == "Who\n"
    asked = service.tickets[-1].asked
    assert (asked.model, asked.selector, asked.options) == ("book", "quest", {"budget": "64"})
    told = asked.generation
    assert (told.max_tokens, told.temperature, told.top_p, told.seed) == (3, 0.5, 0.9, 7)


def test_json_has_the_fields_of_the_server(url):
    told = json_of("ask", "book", "Who?", "--server", url, "--cite")
    assert (told["question"], told["answer"], told["tokens"], told["finish"]) == ("Who?", "Who?", 4, "stop")
    assert (told["store"], told["model"], told["stored_tokens"]) == ("book", "tiny", STORED)
    assert told["cached_tokens"] == STORED
    (document,) = told["citations"]
    assert (document["name"], document["share"]) == ("minutes.txt", 0.75)
    assert told["stats"]["bytes_moved"] == 1000
    assert "citations" not in json_of("ask", "book", "Who?", "--server", url)


def test_notes_show_citations_and_cost(url):
    ran = run("ask", "book", "Who?", "--server", url, "--cite", "--stats")
    assert ran.out == "Who?\n"
    assert "75%  minutes.txt" in ran.err
    assert f"{STORED:,} of them stored or cached" in ran.err
    ran = run("chat", "book", "--server", url, "--cite", stdin="Who?\n")
    assert (ran.out, ran.err.splitlines()[0]) == ("Who?\n", " 75%  minutes.txt")
    assert run("chat", "book", "--server", url, stdin="Who?\n").err == ""


def test_an_answer_of_several_stores_says_what_it_is(url, service, tmp_path):
    """A collection of the server is asked by its name."""
    documents = JoinedDocument("a.txt", "papers/a.kv", 0.75), JoinedDocument("b.txt", "papers/b.kv", 0.25)
    service.joined, service.notes = Joined("mixture", False, documents), ("Joined by mixture from 2.",)
    ran = run("ask", "book", "Who?", "--server", url)
    assert (ran.code, ran.out, ran.err) == (0, "Who?\n", "Joined by mixture from 2.\n")
    ran = run("chat", "book", "--server", url, stdin="Who?\n")
    assert (ran.out, ran.err) == ("Who?\n", "Joined by mixture from 2.\n")
    joined = json_of("ask", "book", "Who?", "--server", url)["joined"]
    assert (joined["join"], joined["exact"], joined["notes"]) == ("mixture", False, list(service.notes))
    assert [(one["document"], one["share"]) for one in joined["documents"]] == [
        ("a.txt", 0.75),
        ("b.txt", 0.25),
    ]
    write_lines(tmp_path / "q.jsonl", {"question": "Who?"})
    files = ["--questions", tmp_path / "q.jsonl", "--out", tmp_path / "a.jsonl"]
    assert run("batch", "book", *files, "--server", url).code == 0
    (line,) = lines_of(tmp_path / "a.jsonl")
    assert line["joined"] == joined
    told = refused(2, "ask", "book", "Who?", "--server", url, "--only-grounded", "0.5")
    assert "for passages that are read" in told


def test_an_unknown_name_is_refused_with_the_known_ones(url):
    told = refused(2, "ask", "no.kv", "q", "--server", url)
    assert told.endswith("has no no.kv: it has book, tiny")


def test_an_absent_server_is_an_error_that_says_how_to_start_one():
    told = refused(1, "ask", "book", "q", "--server", "http://127.0.0.1:9")
    assert "start one with `offload-decode serve STORE`" in told


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://"])
def test_a_wrong_url_is_refused(url):
    assert "is not the URL of a server" in refused(2, "ask", "book", "q", "--server", url)


@pytest.mark.parametrize("answer", [None, "<html>", "[1, 2]", '{"data": 7}', '{"data": [7]}', "{"])
def test_another_http_server_is_recognised(answer):
    other = FastAPI()
    if answer is not None:
        other.get("/v1/models")(lambda: Response(answer, media_type="application/json"))
    with listening(other) as url:
        assert "is not an offload-decode server" in refused(1, "ask", "book", "q", "--server", url)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "broke off: ask again"),
        (['data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}', ""], "broke off: ask again"),
        (['data: {"error": {"message": "the store shrank"}}', ""], "the store shrank"),
        (["data: {", ""], "is not an offload-decode server"),
        (['data: {"choices": 7}', ""], "is not an offload-decode server"),
    ],
)
def test_a_broken_stream_is_an_error(lines, says):
    other = FastAPI()
    other.get("/v1/models")(lambda: {"object": "list", "data": [{"id": "book", "object": "model"}]})
    body = "".join(line + "\n" for line in lines)
    other.post("/v1/chat/completions")(lambda: Response(body, media_type="text/event-stream"))
    with listening(other) as url:
        assert says in refused(1, "ask", "book", "q", "--server", url, "--json")


def test_keys_of_openai_go_to_nobody_and_no_redirection_is_followed(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "private")
    seen: list[str] = []
    other = FastAPI()

    @other.get("/v1/models")
    def models(request: Request) -> Response:
        seen.extend(map(str, request.headers.items()))
        return RedirectResponse("/elsewhere")

    other.get("/elsewhere")(lambda: seen.append("elsewhere"))
    with listening(other) as url:
        assert "is not an offload-decode server" in refused(1, "ask", "book", "q", "--server", url)
    assert seen
    assert not [line for line in seen if "private" in line or "authorization" in line or "elsewhere" in line]


@pytest.mark.parametrize("given", [["--device", "cpu"], ["--model", "demo"], ["--ram", "1GiB"]])
def test_options_of_the_server_are_refused(given, tmp_path):
    told = refused(2, "ask", "book", "q", "--server", "http://127.0.0.1:9", *given)
    assert told.startswith(f"error: {given[0]} is an option of the server")
    (tmp_path / "q.jsonl").write_text('{"question": "q"}')
    files = ["--questions", tmp_path / "q.jsonl", "--out", tmp_path / "a.jsonl"]
    assert told == refused(2, "batch", "book", *files, "--server", "http://127.0.0.1:9", *given)


def test_a_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    (tmp_path / "key").write_text("secret\n")
    with listening(create_app(FakeService(), Access(("secret",)))) as url:
        told = refused(2, "ask", "book", "q", "--server", url)
        assert "asks for a key: give --api-key-file, or set OFFLOAD_DECODE_API_KEY" in told
        assert run("ask", "book", "q", "--server", url, "--api-key-file", tmp_path / "key").out == "q\n"
        monkeypatch.setenv("OFFLOAD_DECODE_API_KEY", "secret")
        assert run("ask", "book", "q", "--server", url).out == "q\n"
    assert "give --server URL too" in refused(2, "ask", "book", "q", "--api-key-file", tmp_path / "key")
    assert "cannot be read" in refused(2, "ask", "book", "q", "--server", url, "--api-key-file", tmp_path)


def test_errors_of_the_server_are_shown(url, service):
    assert "temperature" in refused(2, "ask", "book", "q", "--server", url, "--temperature", "3")
    service.early = StoreError("the store is damaged: restore it")
    assert refused(1, "ask", "book", "q", "--server", url) == "error: the store is damaged: restore it"
    service.early, service.late = None, StoreError("the store shrank")
    ran = run("ask", "book", "q", "--server", url)
    assert (ran.code, ran.err) == (1, "error: the store shrank\n")


def test_a_busy_server_is_retried(url, service, monkeypatch):
    monkeypatch.setattr(client, "LONGEST_WAIT_S", 0)
    faults = iter([Busy("the queue is full", 1), Busy("the queue is full", 1), None])
    begin = service.chat

    def chat(asked, emit):  # type: ignore[no-untyped-def]
        if fault := next(faults):
            raise fault
        return begin(asked, emit)

    monkeypatch.setattr(service, "chat", chat)
    assert run("ask", "book", "q", "--server", url).out == "q\n"
    service.fault = Busy("the queue is full", 1)
    monkeypatch.setattr(service, "chat", begin)
    assert refused(1, "ask", "book", "q", "--server", url) == "error: the queue is full"


def test_closing_the_stream_cancels_the_request(url, service):
    service.pace_s = 0.05
    with Server(ServerAddress(url)) as server:
        pieces = server.stream("book", [{"role": "user", "content": "x" * 64}], MANNER, ServerAnswer())
        assert next(pieces) == "x"
        pieces.close()  # type: ignore[attr-defined]
        assert service.tickets[0].cancelled.wait(10)


def test_a_chat_sends_all_turns(url, service, tmp_path):
    ran = run("chat", "book", "--server", url, stdin="one\ntwo\n/reset\nthree\n")
    assert (ran.code, ran.out) == (0, "one\ntwo\nthree\n")
    sent = [[one["content"] for one in ticket.asked.messages] for ticket in service.tickets]
    assert sent == [["one"], ["one", "one", "two"], ["three"]]
    assert [one["role"] for one in service.tickets[1].asked.messages] == ["user", "assistant", "user"]
    for command in ("/save", "/load"):
        told = run("chat", "book", "--server", url, stdin=f"{command} {tmp_path / 'c.json'}\n")
        assert told.code == 2
        assert "chat without --server for that" in told.err


def test_a_batch_is_asked_concurrently_and_resumes(url, service, out, tmp_path):
    lines = [{"question": f"What is {n}?", "id": n, "topic": "n"} for n in range(5)]
    write_lines(tmp_path / "q.jsonl", *lines)
    command = ["batch", "x/book.kv", "--questions", tmp_path / "q.jsonl", "--out", out, "--server", url]
    ran = run(*command, "--batch-size", "3", "--cite", "-q")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    told = sorted(lines_of(out), key=lambda line: line["id"])
    assert [(one["answer"], one["store"], one["topic"]) for one in told] == [
        (line["question"], "x/book.kv", "n") for line in lines
    ]
    assert told[0]["citations"][0]["name"] == "minutes.txt"
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:4]))
    ran = run(*command, "--cite")
    assert (ran.code, len(service.tickets)) == (0, 6)
    assert "1 answer, 4 there already" in ran.err


def test_a_batch_names_unanswered_questions(url, service, out, tmp_path):
    write_lines(tmp_path / "q.jsonl", {"question": "a"}, {"question": "b"})
    command = ["batch", "book", "no", "--questions", tmp_path / "q.jsonl", "--out", out, "--server", url]
    ran = run(*command)
    assert ran.code == 2
    assert "has no no: it has book, tiny (unanswered: 2 questions to no)" in ran.err
    assert len(out.read_text().splitlines()) == 2
    out.unlink()
    service.early = StoreError("the store is damaged")
    ran = run(*command[:2], *command[3:], "--batch-size", "1")
    assert (ran.code, out.exists()) == (1, False)
    assert "error: the store is damaged (unanswered: 2 questions to book)" in ran.err


def test_asking_a_server_skips_slow_imports(url):
    printed, modules = imported("ask", "book", "q", "--server", url, "--cite")
    assert printed == "q\n"
    assert not modules & HEAVY
