"""A prefill killed at any moment resumes where it stopped and ends bit-identical to an unbroken one."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offload_decode.errors import StoreIncomplete
from offload_decode.store.reader import KVStore
from tests.tiny import text_model, tiny_tokenizer

RUN = """
import sys
from pathlib import Path
from prefill_jobs.job import prefill
corpus, model, out = sys.argv[1:]
report = prefill(corpus, model=model, out=Path(out), chunk=8, device="cpu",
                 progress=lambda stage, done, total: print(stage, done, flush=True))
print("resumed from", report.resumed_from)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill")
    model = text_model(family="gemma2", num_hidden_layers=3)
    model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    generator = random.Random(0)
    (folder / "corpus.txt").write_text(
        " ".join(generator.choice(["corpus", "key", "value"]) for _ in range(150))
    )
    return folder


def start(job: Path, out: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN, str(job / "corpus.txt"), str(job / "model"), str(job / out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def contents(store: Path) -> dict[str, str]:
    files = sorted(path for path in store.rglob("*") if path.is_file())
    return {str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_killed_again_and_again_ends_as_if_unbroken(job):
    unbroken = start(job, "unbroken")
    assert "resumed from 0" in unbroken.communicate(timeout=120)[0]

    generator, resumed = random.Random(1), []
    for _ in range(4):
        process = start(job, "killed")
        assert process.stdout is not None
        lines = 0
        target = generator.randrange(8, 25)
        for line in process.stdout:
            if line.startswith("prefill"):
                lines += 1
                if lines == 1:
                    resumed.append(int(line.split()[1]))
            if lines == target:
                time.sleep(generator.random() * 0.01)  # somewhere inside a chunk, not at its end
                break
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        with pytest.raises(StoreIncomplete, match="has not finished"):
            KVStore.open(job / "killed")
    assert resumed == sorted(resumed)
    assert resumed[-1] > resumed[0] == 0

    finished = start(job, "killed").communicate(timeout=120)[0]
    assert int(finished.rsplit(maxsplit=1)[-1]) >= resumed[-1]
    assert contents(job / "killed") == contents(job / "unbroken")
    KVStore.open(job / "killed").verify()
