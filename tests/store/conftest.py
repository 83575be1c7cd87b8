from pathlib import Path

import pytest

from offload_decode.store import layout
from tests.store.jobs import Job, make_job


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunk files a head in stores of a thousand tokens."""
    monkeypatch.setattr(layout, "CHUNK_TOKENS", 256)


@pytest.fixture
def job() -> Job:
    return make_job()


@pytest.fixture
def store(job: Job, tmp_path: Path) -> Path:
    return job.write(tmp_path / "store")
