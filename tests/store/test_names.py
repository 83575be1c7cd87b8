"""Names of arrays and files are built once a job, however many chunks it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload_decode.store.layout import ArraySpec, array_name
from tests.store.jobs import make_job


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_further_chunks_build_no_names(kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    head_files = ArraySpec.head_files

    def counted(spec: ArraySpec, head: int) -> list[str]:
        built.append(spec.name)
        return head_files(spec, head)

    monkeypatch.setattr(ArraySpec, "head_files", counted)
    array_name.cache_clear()
    job = make_job(1300, kv=kv)
    with job.open(tmp_path / "store") as writer:
        job.feed(writer, [100], until=100)
        assert len(built) == 2 * 2 * 6, "two layers with two heads, of six arrays each"
        misses = array_name.cache_info().misses
        assert misses >= 2 * 6
        job.feed(writer, until=1300)
        assert len(built) == 2 * 2 * 6
        assert array_name.cache_info().misses == misses
        writer.publish()
