"""What a job makes, in this process: the store of the commands, what it leaves out, and its record."""

import io
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload_decode.common.errors import ConfigError, CorpusError, DoesNotFit, TextRefused
from offload_decode.models import prompt
from offload_decode.models.loading import load
from offload_decode.models.prompt import encode
from offload_decode.prefill_jobs.append import append_texts
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import Settings, prefill_texts
from offload_decode.server.job import JobFiles, Upload, Work, run
from offload_decode.store.reader import KVStore
from tests.server.test_catalog import shelf
from tests.store.jobs import tree
from tests.tiny import tiny_tokenizer

__all__ = ["shelf"]

FACTS = "".join(f"Fact {n}: the colour of thing {n} is number {n * n}.\n" for n in range(6))
MORE = "Another thing: the sky is blue. " * 4
CHUNK = {"chunk": 64}


def text(name: str, content: str = FACTS) -> Upload:
    return Upload(name, io.BytesIO(content.encode()), text=True)


def run_here(folder: Path, work: Work, *documents: Upload) -> tuple[dict[str, Any], list[str]]:
    """A job in this process: what it made, and its stages."""
    stages: list[str] = []
    with closing(JobFiles(folder)) as files:
        job = files.create(work, documents)
        made = run(files.of(job.id), "cpu", lambda stage, done, total: stages.append(stage))
    return made, list(dict.fromkeys(stages))


def test_what_a_job_makes_is_what_the_commands_make(shelf, tiny, tmp_path):
    model = str(tiny)
    work = Work("prefill", "book", str(shelf / "book.kv"), model, options=CHUNK)
    made, stages = run_here(shelf, work, text("facts"))
    assert stages == ["read", "load", "tokenize", "prefill", "publish", "index"]
    loaded = load(model, "cpu")
    plain = tmp_path / "plain" / "book.kv"
    report = prefill_texts(loaded, [TextDocument("facts", FACTS.strip("\n"))], plain, Settings(options=CHUNK))
    assert (made["n_tokens"], made["documents"]) == (report.n_tokens, 1)
    assert made["recall"] == build_indexes(plain, "clusters").recall
    assert tree(shelf / "book.kv") == tree(plain)
    assert tree(shelf / "book.kv.indexes").keys() == tree(plain.with_name("book.kv.indexes")).keys()
    again, stages = run_here(shelf, work, text("facts"))
    assert "prefill" not in stages
    assert again["n_tokens"] == made["n_tokens"]

    appended = Work("append", "book", str(shelf / "book.kv"), model)
    added, stages = run_here(shelf, appended, text("more", MORE))
    assert stages[-1] == "exchange"
    assert added["added"] == ("more",)
    append_texts(loaded, [TextDocument("more", MORE)], plain)
    assert tree(shelf / "book.kv") == tree(plain)
    again, stages = run_here(shelf, appended, text("more", MORE))
    assert (again["added"], again["known"]) == ((), ("more",))


def test_a_renewed_store_is_that_of_its_documents_as_they_are_now(shelf, tiny, tmp_path, monkeypatch):
    loaded = load(str(tiny), "cpu")
    now = [TextDocument("facts", FACTS.strip("\n")), TextDocument("more", MORE.upper().strip())]
    sent = [text(own.name, own.text) for own in now]
    path, plain = shelf / "book.kv", tmp_path / "plain" / "book.kv"
    work = Work("renew", "book", str(path), str(tiny))
    run_here(shelf, replace(work, kind="prefill", options=CHUNK), text("facts"), text("more", MORE))
    prefill_texts(loaded, now, plain, Settings(options=CHUNK))
    made, stages = run_here(shelf, work, *sent)
    assert tree(path) == tree(plain)
    assert stages[:3] == ["read", "tokenize", "load"]
    assert stages[-1] == "exchange"
    assert [made[name] for name in ("added", "changed", "gone", "failed")] == [(), ("more",), (), []]
    assert (
        made["kept_tokens"] + made["run_tokens"] == made["n_tokens"] == KVStore.open(path).manifest.n_tokens
    )
    assert made["kept_tokens"] >= CHUNK["chunk"]

    monkeypatch.setattr("offload_decode.models.loading.load", lambda *given: pytest.fail("a model is loaded"))
    again, _ = run_here(shelf, work, *[text(own.name, own.text) for own in now])
    assert [again[name] for name in ("changed", "run_tokens", "seconds")] == [(), 0, 0.0]
    with pytest.raises(ConfigError, match=r"or --drop \(over HTTP \"drop\": true\)"):
        run_here(shelf, work, text("another"))
    unread = Upload("more", io.BytesIO(b"GIF89a\0\0"))
    with pytest.raises(CorpusError, match=r"more is in .* and cannot be read now"):
        run_here(shelf, work, text("facts"), unread)
    assert tree(path) == tree(plain)
    monkeypatch.undo()
    dropped, _ = run_here(shelf, replace(work, drop=True), text("another"))
    assert (dropped["added"], dropped["gone"]) == (("another",), ("facts", "more"))


def test_a_renewal_that_failed_makes_way_for_one_to_another_text(shelf, tiny, tmp_path):
    path, plain = shelf / "book.kv", tmp_path / "plain.kv"
    work = Work("renew", "book", str(path), str(tiny))
    run_here(shelf, replace(work, kind="prefill", options=CHUNK), text("facts"))
    before = tree(path)

    def fail(stage: str, done: int, total: int) -> None:
        if stage == "prefill" and done:
            raise MemoryError

    with closing(JobFiles(shelf)) as files:
        failed = files.create(work, [text("facts", MORE + FACTS)])
        with pytest.raises(DoesNotFit):
            run(files.of(failed.id), "cpu", fail)
    assert tree(path) == before
    made, _ = run_here(shelf, work, text("facts", FACTS + MORE))
    assert made["discarded"] == CHUNK["chunk"]
    now = [TextDocument("facts", (FACTS + MORE).strip())]
    prefill_texts(load(str(tiny), "cpu"), now, plain, Settings(options=CHUNK))
    assert tree(path) == tree(plain)


def test_a_system_message_is_put_where_the_template_has_a_place_for_one(shelf, tiny):
    work = Work("prefill", "book", str(shelf / "book.kv"), str(tiny), options=CHUNK, system="Be brief.")
    with pytest.raises(ConfigError, match="no place for a system message"):
        run_here(shelf, work, text("facts"))


def test_files_are_read_by_what_they_are(shelf, tiny):
    work = Work("prefill", "book", str(shelf / "book.kv"), str(tiny), index=False)
    page = Upload("page.html", io.BytesIO(b"<title>x</title><p>Hello &amp; welcome</p>"))
    run_here(shelf, work, page, text("as it is.html", "<p>raw</p>"))
    store = KVStore.open(shelf / "book.kv")
    decoded = tiny_tokenizer().decode(store.tokens)
    assert [document.name for document in store.documents] == ["page.html", "as it is.html"]
    assert "Hello & welcome" in decoded
    assert "<p>raw</p>" in decoded
    with pytest.raises(CorpusError, match=r"picture\.png cannot be read, because it is an image"):
        run_here(
            shelf,
            Work("prefill", "b", str(shelf / "b.kv"), str(tiny)),
            Upload("picture.png", io.BytesIO(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")),
        )


def test_a_document_that_fails_is_named_and_the_others_go_on(shelf, tiny, monkeypatch):
    def encoded(tokenizer, written, letters=False):
        if "bad" in written:
            raise TextRefused("the tokenizer fails on the text")
        return encode(tokenizer, written, letters)

    monkeypatch.setattr(prompt, "encode", encoded)
    work = Work("prefill", "book", str(shelf / "book.kv"), str(tiny), index=False)
    picture = Upload("a.gif", io.BytesIO(b"GIF89a\0\0"))
    made, _ = run_here(shelf, work, text("facts"), picture, text("bad"))
    assert made["documents"] == 1
    reasons = "it cannot be read, because it is an image", "the tokenizer fails on the text"
    failed = [{"name": name, "reason": why} for name, why in zip(("a.gif", "bad"), reasons, strict=True)]
    assert made["failed"] == failed
    added, _ = run_here(shelf, replace(work, kind="append"), text("more"), text("bad"))
    assert (added["added"], added["failed"]) == (("more",), failed[1:])


def test_the_result_of_a_job_says_what_was_left_out(shelf, tiny):
    noted = "![plot](data:image/png;base64,iVBORw0KGgo=) text"
    documents = [Upload(f"{number:02}.md", io.BytesIO(noted.encode())) for number in range(22)]
    work = Work("prefill", "book", str(shelf / "book.kv"), str(tiny), index=False)
    made, _ = run_here(shelf, work, *documents[:21])
    assert made["notes"][0] == "00.md: left out: 1 embedded file"
    assert (len(made["notes"]), made["notes"][-1]) == (21, "and 1 more")
    appended, _ = run_here(shelf, Work("append", "book", str(shelf / "book.kv"), str(tiny)), documents[21])
    assert appended["notes"] == ["21.md: left out: 1 embedded file"]


def test_a_record_is_read_as_it_was_written(shelf):
    files = JobFiles(shelf)
    work = Work("prefill", "book", "/x/book.kv", "demo", options={"chunk": 64})
    job = files.create(work, [text("a"), Upload("b.pdf", io.BytesIO(b"%PDF"))])
    assert job.documents == (("a", True), ("b.pdf", False))
    assert files.all() == [job]
    record = files.of(job.id) / "job.json"
    for spoilt in ("[]", "{}", "null", '{"id": 1}', record.read_text().replace(job.id, "job-2"), "x"):
        record.write_text(spoilt)
        assert files.all() == []
    files.close()
