"""Stores over the wire: made of texts and files, listed, appended to, renewed and deleted."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from offload_decode.server.catalog import Catalog
from offload_decode.server.http.app import create_app
from offload_decode.server.jobs import Jobs
from offload_decode.server.metrics import Metrics
from offload_decode.server.requests import Settings
from offload_decode.store.reader import KVStore
from offload_decode.types import Document
from tests.server.test_catalog import make_store, until
from tests.server.test_jobs import DONE, HALF, WAIT, says
from tests.store.jobs import FULL, make_job

__all__ = ["says"]

JSON = {"Content-Type": "application/json"}
PAGE = b"<p>Hello</p>"
WRONG_NAMES = ("../x", "a/b", "a\nb", "x" * 101, "x" * 10_000, 7)


@pytest.fixture
def shelf(tmp_path):
    return make_store(tmp_path / "shelf" / "book.kv").parent


@pytest.fixture
def opened(shelf):
    """Starts an app over the shelf; what it is given goes into its settings."""
    with ExitStack() as stack:

        def start(**given: Any) -> TestClient:
            settings, catalog = Settings(**given), stack.enter_context(closing(Catalog([shelf])))
            jobs = stack.enter_context(closing(Jobs(catalog, device="cpu", read_only=settings.read_only)))
            own = {"catalog": catalog, "jobs": jobs, "settings": settings, "metrics": Metrics()}
            app = create_app(SimpleNamespace(**own, close=lambda: None))
            return TestClient(app, raise_server_exceptions=False)

        yield start


@pytest.fixture
def client(opened):
    return opened()


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response that must have one, in OpenAI's shape and without a path of the server."""
    assert response.status_code == status, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "/shelf" not in response.text
    return response.json()["error"]


def ended(client: TestClient, job: dict[str, Any]) -> dict[str, Any]:
    until(lambda: client.get(f"/v1/jobs/{job['id']}").json()["status"] not in ("queued", "running"))
    return client.get(f"/v1/jobs/{job['id']}").json()


def test_stores_are_listed_and_told_of(client, shelf):
    stored = KVStore.open(shelf / "book.kv")
    listed = client.get("/v1/stores").json()
    assert [one["id"] for one in listed["data"]] == ["book"]
    assert listed["data"][0] | {"created": 0} == {
        "id": "book",
        "object": "store",
        "created": 0,
        "root": "test/model",
        "tokens": 40,
        "documents": 2,
        "note": None,
        "recall": None,
        "digest": stored.store_digest,
    }
    told = client.get("/v1/stores/book")
    assert told.json()["spans"] == [
        {"name": "a.txt", "start": 0, "end": 20},
        {"name": "b/ü.md", "start": 20, "end": 40},
    ]
    assert told.json()["bytes"] == sum(stored.cost().values())
    assert str(shelf) not in told.text
    assert "no store" in error(client.get("/v1/stores/model"), 404)["message"]
    assert "there are book" in error(client.get("/v1/stores/other"), 404)["message"]
    for name in ("..%2Fbook", "%2e%2e", "book.kv", "%00", "x" * 600):
        assert client.get(f"/v1/stores/{name}").status_code in (400, 404)


def test_a_store_is_made_of_texts(client, shelf, says):
    says([HALF, WAIT])
    texts = [{"name": "one", "text": "Hello"}, {"name": "ü/two", "text": "World"}]
    asked = {"name": "new", "documents": texts, "kv": "int8", "options": {"chunk": 64}, "index": False}
    asked["system"] = "Be brief."
    made = client.post("/v1/stores", json=asked)
    assert made.status_code == 202
    job = made.json()
    assert (job["store"], job["kind"], job["documents"]) == ("new", "prefill", 2)
    until(lambda: client.get(f"/v1/jobs/{job['id']}").json()["progress"] is not None)
    now = client.get(f"/v1/jobs/{job['id']}").json()
    assert now["status"] == "running"
    assert now["progress"] | {"seconds_left": None} == HALF | {"seconds_left": None}
    jobs: Jobs = client.app.state.service.jobs
    kept = jobs.job(job["id"])
    assert (kept.work.kv, kept.work.options, kept.work.index) == ("int8", {"chunk": 64}, False)
    assert kept.work.system == "Be brief."
    assert (kept.work.model, kept.work.dtype) == ("test/model", "float32")
    assert kept.documents == (("one", True), ("ü/two", True))
    assert (shelf / ".jobs" / kept.id / "1").read_text() == "World"
    assert client.post(f"/v1/jobs/{job['id']}/cancel").json()["status"] == "cancelled"
    assert [one["id"] for one in client.get("/v1/jobs").json()["data"]] == [job["id"]]


def test_a_store_is_pinned_and_expires(client, shelf):
    keep = {"pinned": True, "expires_after": 3600}
    before = client.get("/v1/stores/book").json()
    assert [before[name] for name in ("pinned", "expires_after", "last_used")] == [False, None, None]
    assert client.post("/v1/stores/book", json=keep).json().items() >= keep.items()
    told = client.post("/v1/stores/book", json={"pinned": False}).json()
    assert (told["pinned"], told["expires_after"]) == (False, 3600)
    assert abs(told["last_used"] - time.time()) < 60
    assert client.post("/v1/stores/book", json={"expires_after": None}).json()["expires_after"] is None
    error(client.post("/v1/stores/other", json=keep), 404)
    for wrong in ({"pinned": 1}, {"expires_after": 0}, {"expires_after": 1.5}, {"expires_after": 10**10}, []):
        error(client.post("/v1/stores/book", json=wrong), 400)
    client.delete("/v1/stores/book")
    assert list((shelf / ".kept").iterdir()) == []


def test_half_a_character_in_a_text_is_the_replacement_character(client, shelf, says):
    says([HALF, WAIT])
    made = client.post("/v1/stores", content=rb'{"name": "new", "text": "a\ud800"}', headers=JSON).json()
    assert (shelf / ".jobs" / made["id"] / "0").read_text() == "a\ufffd"
    client.post(f"/v1/jobs/{made['id']}/cancel")


def test_a_store_is_made_of_files(client, shelf, says):
    says([DONE])
    files = [("file", ("../../page.html", PAGE)), ("file", ("b.bin", b"\xff\xfe" * 2_000_000))]
    listed = json.dumps([{"name": "a", "text": "b"}])
    fields = {"name": "new", "options": '{"chunk": 64}', "index": "false", "text": "and this"}
    fields["documents"] = listed
    made = client.post("/v1/stores", data=fields, files=files)
    assert made.status_code == 202, made.text
    done = ended(client, made.json())
    assert (done["status"], done["result"], done["documents"]) == ("done", {"n_tokens": 7}, 4)
    kept = client.app.state.service.jobs.job(done["id"])
    assert kept.documents == (("new", True), ("a", True), ("../../page.html", False), ("b.bin", False))
    assert (kept.work.options, kept.work.index) == ({"chunk": 64}, False)
    assert sorted(path.name for path in shelf.iterdir()) == [".jobs", "book.kv"]


def test_documents_are_appended(client, says):
    says([DONE])
    for how in ({"json": {"documents": [{"name": "a", "text": "b"}]}}, {"files": {"f": ("a.html", PAGE)}}):
        made = client.post("/v1/stores/book/append", **how)
        assert made.status_code == 202, made.text
        assert (made.json()["kind"], made.json()["store"]) == ("append", "book")
        assert ended(client, made.json())["status"] == "done"
    error(client.post("/v1/stores/other/append", json={"documents": [{"name": "a", "text": "b"}]}), 404)
    assert error(client.post("/v1/stores/book/append", json={}), 400)["param"] == "documents"


def test_a_store_is_renewed(client, says):
    says([DONE])
    documents = [{"name": "a", "text": "b"}]
    form = {"data": {"drop": "true"}, "files": {"f": ("a.html", PAGE)}}
    for drop, how in ((False, {"json": {"documents": documents}}), (True, form)):
        made = client.post("/v1/stores/book/renew", **how)
        assert made.status_code == 202, made.text
        done = ended(client, made.json())
        assert [done[name] for name in ("kind", "store", "status")] == ["renew", "book", "done"]
        assert client.app.state.service.jobs.job(done["id"]).work.drop == drop
    error(client.post("/v1/stores/other/renew", json={"documents": documents}), 404)
    for wrong, where in (({}, "documents"), ({"documents": documents, "drop": "yes, all"}, "drop")):
        assert error(client.post("/v1/stores/book/renew", json=wrong), 400)["param"] == where


def test_a_text_is_that_of_the_only_document_or_of_the_one_called_as_its_store(client, shelf, says):
    """So a store that was made of a text is renewed with one, whatever was appended to it since."""
    says([DONE])
    jobs: Jobs = client.app.state.service.jobs
    made = client.post("/v1/stores", json={"name": "new.kv", "text": "Hello"}).json()
    assert jobs.job(made["id"]).documents == (("new", True),)
    job = make_job(40, "float32", (FULL,), query_samples=8)
    replace(job, documents=(Document("corpus.txt", 0, 40),)).write(shelf / "one.kv")
    until(lambda: client.get("/v1/stores/one").status_code == 200)
    more = [{"name": "a", "text": "b"}]
    for name, document in (("one", "corpus.txt"), ("book", "book")):
        for further in ([], more):
            renewed = client.post(f"/v1/stores/{name}/renew", json={"text": "Hi", "documents": further})
            assert renewed.status_code == 202, renewed.text
            found = jobs.job(ended(client, renewed.json())["id"]).documents
            assert found == ((document, True), ("a", True))[: 1 + len(further)]
    error(client.post("/v1/stores/other/renew", json={"text": "Hi"}), 404)


def test_a_job_says_why_it_failed_without_paths(client, shelf, says):
    says([{"error": f"{shelf}/new.kv.partial cannot be written (No space left on device)"}], [DONE])
    made = client.post("/v1/stores", json={"name": "new", "text": "Hello"}).json()
    failed = ended(client, made)
    assert failed["status"] == "failed"
    assert failed["error"]["message"] == "new.kv.partial cannot be written (No space left on device)"
    assert client.post(f"/v1/jobs/{made['id']}/retry").status_code == 200
    assert ended(client, made)["status"] == "done"
    error(client.post(f"/v1/jobs/{made['id']}/retry"), 400)
    for way in ("", "/cancel", "/retry"):
        method = "POST" if way else "GET"
        error(client.request(method, f"/v1/jobs/job-0{way}"), 404)


def test_waiting_deletions_do_not_block_other_requests(client, monkeypatch):
    done = threading.Event()
    monkeypatch.setattr(Jobs, "delete", lambda self, name: done.wait(60))
    with client, ThreadPoolExecutor(60) as pool:
        waiting = [pool.submit(client.delete, f"/v1/stores/{number}") for number in range(50)]
        try:
            assert pool.submit(client.get, "/v1/stores").result(timeout=20).status_code == 200
        finally:
            done.set()
        assert {one.result().status_code for one in waiting} == {200}


def test_a_store_is_deleted(client, shelf):
    gone = client.delete("/v1/stores/book")
    assert gone.json() == {"id": "book", "object": "store", "deleted": True}
    assert list(shelf.iterdir()) == []
    error(client.delete("/v1/stores/book"), 404)
    error(client.delete("/v1/stores/..%2Fbook"), 404)


@pytest.mark.parametrize(
    ("sent", "status", "param"),
    [
        *(({"json": {"name": wrong, "text": "a"}}, 400, "name") for wrong in WRONG_NAMES),
        ({"json": {"text": "a"}}, 400, "name"),
        ({"json": {"name": "x"}}, 400, "documents"),
        ({"json": {"name": "x", "documents": [{"name": "a"}]}}, 400, "documents[0].text"),
        ({"json": {"name": "x", "text": "a", "model": "http://host/m"}}, 404, None),
        ({"json": {"name": "x", "text": "a", "kv": "int3"}}, 400, None),
        ({"json": {"name": "x", "text": "a", "options": {"chunk": None}}}, 400, "options.chunk"),
        ({"json": {"name": "book", "text": "a"}}, 409, None),
        ({"json": ["x"]}, 400, None),
        ({"content": b"{", "headers": JSON}, 400, None),
        ({"content": b'{"name": "x"}', "headers": {"Content-Type": "text/plain"}}, 400, None),
        ({"content": b"", "headers": {"Content-Type": "multipart/form-data"}}, 400, None),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data; boundary=y"}}, 400, None),
        ({"data": {"name": "x", "options": "{"}, "files": {"file": ("a", b"b")}}, 400, "options"),
        ({"data": {"name": "x"}, "files": {"file": ("a" * 501, b"b")}}, 400, "documents"),
        ({"data": {"name": "x"}, "files": [("file", ("a", b"b")), ("file", ("a", b"c"))]}, 400, "documents"),
        ({"json": {"name": "x", "text": "a" * 20_000}}, 413, None),
        ({"data": {"name": "x"}, "files": {"file": ("a", b"b" * 50_000)}}, 413, None),
    ],
)  # fmt: skip
def test_invalid_requests_for_stores_are_refused(opened, shelf, sent, status, param):
    client = opened(max_body=15_000, max_upload=45_000)
    said = error(client.post("/v1/stores", **sent), status)
    assert said["param"] == param, said
    assert len(said["message"]) < 600
    assert not list((shelf / ".jobs").glob("job*"))


def test_a_read_only_server_refuses_changes(opened):
    client = opened(read_only=True)
    assert client.get("/v1/stores/book").status_code == 200
    assert client.get("/v1/jobs").json()["data"] == []
    for path in ("", "/book", "/book/append", "/book/renew"):
        said = error(client.post(f"/v1/stores{path}", json={"name": "x", "text": "a"}), 403)
        assert said["code"] == "read_only"
    error(client.delete("/v1/stores/book"), 403)


def test_an_address_names_all_the_methods_it_takes(client):
    for path, methods in (("", "GET, POST"), ("/book", "GET, POST, DELETE"), ("/book/append", "POST")):
        refused = client.request("PATCH", f"/v1/stores{path}")
        error(refused, 405)
        assert refused.headers["Allow"] == methods
