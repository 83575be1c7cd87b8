"""`push` and `pull` as a user meets them, against an S3 service on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator

import boto3
import pytest

from tests.cli.conftest import refused, run
from tests.prefill_jobs.services import Service, moto, serving, use_s3


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with serving(moto()) as served:
        use_s3(monkeypatch, served.url)
        boto3.client("s3", endpoint_url=served.url).create_bucket(Bucket="bucket")
        yield served


def test_a_store_goes_there_and_comes_back(service, store, tmp_path):
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
    assert run("verify", back).code == 0
    assert run("pull", url, tmp_path / "quiet.kv", "-q").err == ""


def test_refusals(service, store, tmp_path):
    url = f"s3://bucket{tmp_path}/x.kv"
    assert "There is no store at s3://" in refused(1, "pull", url, tmp_path / "back.kv")
    assert "There is no store at" in refused(1, "push", tmp_path / "none.kv", url)
    assert "There is no store at s3://" in refused(1, "pull", url, store)
    assert run("push", store, there := f"s3://bucket{tmp_path}/there.kv").code == 0
    (kept := tmp_path / "kept.kv").mkdir()
    (kept / "notes.txt").write_text("mine")
    assert "exists already" in refused(1, "pull", there, kept)
    assert (kept / "notes.txt").read_text() == "mine"
    assert "s3://BUCKET/NAME" in refused(2, "push", store, tmp_path / "x.kv")
    assert "s3://BUCKET/NAME" in refused(2, "pull", store, url)
    assert "There is no bucket" in refused(1, "push", store, "s3://no-bucket/x.kv")
    service.refuse_after = 0
    assert "was refused" in refused(1, "pull", url, tmp_path / "back.kv")
