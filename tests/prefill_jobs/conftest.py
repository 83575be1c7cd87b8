"""Processes that can be killed, a small job for them, and buckets with stores to push there."""

import os
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.prefill_jobs.killing import Disk, Runner
from tests.prefill_jobs.services import (
    BUCKET,
    GoogleXml,
    Service,
    clear,
    client,
    moto,
    serving,
    use_google,
    use_s3,
)
from tests.store.jobs import FULL, SLIDING, make_job
from tests.tiny import saved, text_model

LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


@pytest.fixture(scope="session")
def runner() -> Iterator[Runner]:
    with closing(Runner()) as started:
        yield started


@pytest.fixture
def disk(runner: Runner, tmp_path: Path) -> Disk:
    """A disk of 8 MB, in use by nobody else."""
    if not runner.has_disks:
        pytest.skip("small disks need the right to mount a tmpfs (root, or user namespaces)")
    return Disk(runner, tmp_path / "disk", 8 * 1024 * 1024)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/`, of sliding and full attention, and `corpus.txt`, of about 340 tokens."""
    folder = tmp_path_factory.mktemp("inputs")
    saved(text_model(family="gemma2", num_hidden_layers=4, layer_types=LAYERS), folder / "model")
    words = random.Random(0)
    text = " ".join(words.choice(["corpus", "key", "value"]) for _ in range(60))
    (folder / "corpus.txt").write_text(text)
    return folder


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    clear(monkeypatch)


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a.kv` with indexes beside it, `b.kv` of other keys, and `big.kv` with objects of several parts."""
    home = tmp_path_factory.mktemp("stores")
    make_job(60, layers=(FULL, SLIDING)).write(home / "a.kv")
    make_job(60, layers=(FULL, SLIDING), seed=1).write(home / "b.kv")
    make_job(34_000, "float32", layers=(FULL,)).write(home / "big.kv", [34_000])
    kind = home / "a.kv.indexes" / "faiss-ivf"
    kind.mkdir(parents=True)
    for number in range(4):
        (kind / f"layer-000-head-{number:03d}.faiss").write_bytes(os.urandom(1000 * number))
    (kind / "left.json.tmp").write_bytes(b"of a build that was killed")
    return home


@pytest.fixture(scope="session")
def s3_service() -> Iterator[Service]:
    with serving(moto()) as service:
        client(service).create_bucket(Bucket=BUCKET)
        yield service


@pytest.fixture
def s3(s3_service: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    """An S3 service whose bucket this process uses; `url(s3, tmp_path)` is a fresh place in it."""
    use_s3(monkeypatch, s3_service.url)
    s3_service.requests.clear()
    s3_service.refuse_after, s3_service.delay = None, 0.0
    return s3_service


@pytest.fixture(params=["s3", "gs", "file"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The URL of a fresh place in each kind of bucket."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        yield f"s3://{BUCKET}{tmp_path}/x y.kv"
    elif request.param == "gs":
        with serving(GoogleXml(BUCKET)) as service:
            use_google(monkeypatch, service.url)
            yield f"gs://{BUCKET}/x y.kv"
    else:
        yield f"file://{tmp_path}/made/x%20y.kv"


@pytest.fixture
def url(s3: Service, tmp_path: Path) -> str:
    return f"s3://{BUCKET}{tmp_path}/x.kv"
