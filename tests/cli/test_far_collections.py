"""Stores and collections in a bucket: they come back, are renewed, and are asked where few stores fit."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_decode.collections.collection import Collection
from offload_decode.collections.words import WORDS
from offload_decode.indexes.verified import cache_folder
from offload_decode.store.files import SEAL
from tests.cli.conftest import batch, done, json_of, lines_of, refused, run, write_lines
from tests.prefill_jobs.killing import tree
from tests.prefill_jobs.services import Service, clear, client, moto, objects, serving, use_s3


@pytest.fixture
def collection(collection: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of its own for each test, and an empty cache."""
    clear(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(collection, tmp_path / "here"))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/texts"


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with serving(moto()) as served:
        use_s3(monkeypatch, served.url)
        client(served).create_bucket(Bucket="bucket")
        yield served


def content(collection: Path) -> dict[str, bytes]:
    """Its files, without those that are of one machine, and its words, which SQLite may pack anew."""
    return {name: data for name, data in tree(collection).items() if name not in ("lock", WORDS)}


def asked(place: str | Path, *options: str) -> dict[str, str]:
    ran = done("ask", place, "Which word is beta?", "--json", "--max-new-tokens", "3", *options)
    return {one["document"]: one["answer"] for one in json.loads(ran.out)["answers"]}


def kept() -> list[Path]:
    """The stores that the cache holds."""
    return [path for path in (cache_folder() / "fetched").glob("*/content") if (path / "zarr.json").exists()]


def test_a_store_is_pushed_and_pulled(service, store, tmp_path):
    url, back = f"s3://bucket{tmp_path}/x.kv", tmp_path / "back.kv"
    pushed = run("push", store, url)
    assert (pushed.code, pushed.out) == (0, "")
    assert f"{url}: " in pushed.err
    assert f"offload-decode pull {url} STORE" in pushed.err
    again = run("push", store, url, "--json", "-q")
    assert again.err == ""
    found = json.loads(again.out)
    assert (found["files"], found["bytes"], found["url"]) == (0, 0, url)
    assert found["skipped_files"] > 0
    pulled = run("pull", url, back, "--json")
    assert json.loads(pulled.out)["bytes"] == found["skipped_bytes"]
    assert "files fetched" in pulled.err
    done("verify", back)
    assert run("pull", url, tmp_path / "quiet.kv", "-q").err == ""


def test_missing_stores_and_buckets_are_refused(service, store, tmp_path):
    url = f"s3://bucket{tmp_path}/x.kv"
    assert "There is no store at s3://" in refused(1, "pull", url, tmp_path / "back.kv")
    assert "There is no store at" in refused(1, "push", tmp_path / "none.kv", url)
    assert "There is no store at s3://" in refused(1, "pull", url, store)
    done("push", store, there := f"s3://bucket{tmp_path}/there.kv")
    (kept := tmp_path / "kept.kv").mkdir()
    (kept / "notes.txt").write_text("mine")
    assert "exists already" in refused(1, "pull", there, kept)
    assert (kept / "notes.txt").read_text() == "mine"
    assert "s3://BUCKET/NAME" in refused(2, "push", store, tmp_path / "x.kv")
    assert "s3://BUCKET/NAME" in refused(2, "pull", store, url)
    assert "There is no bucket" in refused(1, "push", store, "s3://no-bucket/x.kv")
    service.refuse_after = 0
    assert "was refused" in refused(1, "pull", url, tmp_path / "back.kv")


def test_a_collection_is_pushed_and_pulled(collection, service, tmp_path):
    url = f"s3://bucket{tmp_path}/texts"
    ran = run("push", collection, url, "--json")
    assert (ran.code, json.loads(ran.out)["moved"]) == (0, 3)
    service.requests.clear()
    again = json_of("push", collection, url)
    assert (again["moved"], again["kept"], again["files"]) == (0, 3, 0)
    assert service.sent("PUT") == []
    back = tmp_path / "back"
    ran = run("pull", url, back)
    assert "3 documents fetched" in ran.err
    assert content(back) == content(collection)
    done("verify", back)
    assert asked(back) == asked(collection)


def test_lists_larger_than_the_disk_are_not_fetched(collection, url, tmp_path):
    run("push", collection, url)
    os.truncate(Path(url.removeprefix("file://"), WORDS), 1 << 43)
    assert "GB more and the disk has" in refused(1, "pull", url, tmp_path / "back")


def test_a_list_that_does_not_fit_its_checksum_is_refused(collection, service, tmp_path):
    url = f"s3://bucket{tmp_path}/texts"
    run("push", collection, url)
    place = {"Bucket": "bucket", "Key": f"{str(tmp_path)[1:]}/texts/documents.jsonl"}
    s3 = client(service)
    found = s3.get_object(**place)
    changed = found["Body"].read().replace(b"alpha", b"delta")
    s3.put_object(**place, Body=changed, Metadata=found["Metadata"])
    assert "is not what its checksum says" in refused(1, "ask", url, "Which?")
    assert "is not what its checksum says" in refused(1, "pull", url, tmp_path / "back")


@pytest.mark.parametrize("command", ["push", "pull"])
def test_an_interrupted_push_or_pull_resumes(command, collection, service, tmp_path):
    def way(number: int) -> tuple[str | Path, ...]:
        url = f"s3://bucket{tmp_path}/{command if command == 'pull' else number}"
        return (command, collection, url) if command == "push" else (command, url, tmp_path / str(number))

    if command == "pull":
        run("push", collection, str(way(0)[1]))
    service.requests.clear()
    done(*way(0))
    requests = len(service.requests)
    for cut in range(2, requests, requests // 2):
        service.requests.clear()
        service.refuse_after = cut
        assert run(*way(cut)).code == 1
        service.refuse_after = None
        if command == "pull":
            assert not (tmp_path / str(cut)).exists()
            done(*way(cut))
            assert content(tmp_path / str(cut)) == content(collection)
            continue
        there = objects(service, f"s3://bucket{tmp_path}/{cut}/")
        assert "documents.jsonl" not in there or sum(key.endswith(SEAL) for key in there) == 3
        done(*way(cut))
        assert "3 there already" in run(*way(cut)).err


def test_a_push_updates_the_collection_in_the_bucket(collection, home, texts, tmp_path, url):
    done("push", collection, url)
    folder = Path(shutil.copytree(texts, tmp_path / "own"))
    (folder / "alpha.txt").unlink()
    (folder / "beta.txt").write_text("The word is beta, of another text.")
    done("collect", folder, "--model", home / "model", "--out", collection)
    ran = run("push", collection, url)
    assert "1 document sent" in ran.err
    assert "1 there already, 2 removed" in ran.err
    there = tmp_path / "bucket" / "texts"
    assert content(there) == content(collection)
    assert [path.name for path in there.rglob("PUSHING")] == []
    assert set(asked(url, "--all")) == {"beta.txt", "gamma.txt"}


def test_a_store_that_was_made_anew_takes_the_place_of_the_earlier(collection, tmp_path, url):
    done("push", collection, url)
    far = Collection(tmp_path / "bucket" / "texts")
    store = far.store(far.entries[0])
    sums = store / "SHA256SUMS.sha256"
    sums.write_bytes(b"0" * len(sums.read_bytes()))
    assert "1 document sent" in run("push", collection, url).err
    assert content(tmp_path / "bucket" / "texts") == content(collection)


def test_a_push_that_removes_most_documents_needs_drop(collection, home, texts, tmp_path, url):
    done("push", collection, url)
    before = content(tmp_path / "bucket" / "texts")
    folder, part = tmp_path / "part", tmp_path / "part.collection"
    folder.mkdir()
    shutil.copy(texts / "alpha.txt", folder)
    done("collect", folder, "--model", home / "model", "--out", part)
    told = refused(2, "push", part, url)
    assert "3 documents lie at" in told
    assert "give --drop" in told
    assert content(tmp_path / "bucket" / "texts") == before
    assert run("push", collection, url).code == 0, "nothing holds the URL"
    assert "2 removed" in run("push", part, url, "--drop").err


def test_indexes_that_were_built_since_are_sent(collection, tmp_path, url):
    done("push", collection, url)
    done("index", collection, "--k", "10")
    assert "3 documents sent" in run("push", collection, url).err
    assert len(list((tmp_path / "bucket").rglob("*.kv.indexes"))) == 3
    assert "3 there already" in run("push", collection, url).err


def test_a_pull_reuses_nothing_of_another_models_collection(collection, tmp_path, url, monkeypatch):
    """Documents of the same bytes have stores of the same name."""
    other = Path(shutil.copytree(collection, tmp_path / "other"))
    header = json.loads((other / "collection.json").read_text())
    (other / "collection.json").write_text(json.dumps(header | {"model_id": "another"}))
    done("push", collection, url)
    done("push", other, f"{url}-other")
    out = tmp_path / "back"

    def cut(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("offload_decode.prefill_jobs.buckets.collections.Changing.sweep", cut)
        assert run("pull", f"{url}-other", out).code != 0
    ran = run("pull", url, out)
    assert "3 documents fetched" in ran.err
    assert content(out) == content(collection)


def test_a_collection_is_asked_in_its_bucket(collection, url, tmp_path):
    done("push", collection, url)
    assert list(asked(url, "--top", "1")) == ["beta.txt"]
    assert len(kept()) == 1
    expected = asked(collection, "--all")
    assert asked(url, "--all") == expected
    questions = write_lines(tmp_path / "q.jsonl", {"question": "Which word is beta?"})
    out = tmp_path / "out.jsonl"
    assert batch(questions, out, url, "--all", "--max-new-tokens", "3").code == 0
    lines = lines_of(out)
    assert {line["document"]: line["answer"] for line in lines} == expected
    assert all(line["store"].startswith(f"{url}/stores/") for line in lines)
    assert "0 answers, 3 there already" in batch(questions, out, url, "--all", "--max-new-tokens", "3").err


def test_the_stores_that_are_kept_stay_within_their_bound(collection, url):
    done("push", collection, url)
    stores = [Collection(collection).store(entry) for entry in Collection(collection).entries]
    one = max(sum(path.stat().st_size for path in store.rglob("*") if path.is_file()) for store in stores)
    lists = sum(path.stat().st_size for path in collection.glob("*.*"))
    assert set(asked(url, "--all", "--cache", str(lists + one + one // 2))) == {
        "alpha.txt", "beta.txt", "gamma.txt"
    }  # fmt: skip
    assert len(kept()) == 1
    ran = run("ask", url, "Which word?", "--all", "--json", "--cache", str(lists + 1))
    told = json.loads(ran.out)
    assert (ran.code, len(told["answers"]), len(told["failed"])) == (1, 1, 2), "what is here stays"
    assert "let it hold more, with --cache" in told["failed"][0]["error"]


def test_refusals(collection, home, store, tmp_path, url):
    assert "There is no store at" in refused(1, "pull", url, tmp_path / "back")
    assert "is in a bucket: pull it first" in refused(2, "ask", url, "Which?")
    done("push", store, url)
    assert "something else than a collection" in refused(1, "push", collection, url)
    assert "pull it first" in refused(2, "ask", url, "Which?")
    other = tmp_path / "other"
    shutil.copytree(collection, other)
    header = (other / "collection.json").read_text()
    (other / "collection.json").write_text(header.replace('"float32"', '"bfloat16"'))
    done("push", collection, url + "2")
    assert "is a collection of another model" in refused(1, "push", other, url + "2")
    assert "exists already" in refused(1, "pull", url + "2", other)
    (tmp_path / "bucket" / "texts2" / "PUSHING").write_text("another")
    assert "Another collection is being pushed" in refused(1, "push", collection, url + "2")
    (tmp_path / "bucket" / "texts2" / "documents.jsonl").unlink()
    assert "has not finished" in refused(1, "ask", url + "2", "Which?")
    (other / WORDS).unlink()
    assert "collect again, then push" in refused(1, "push", other, url + "3")
    assert "this one is on this machine" in refused(2, "ask", collection, "Which?", "--cache", "1GiB")
