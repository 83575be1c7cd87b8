"""A batch on a Ray cluster of a collection in a bucket: each machine fetches what its workers ask, once."""

import fcntl
import json
import os
import platform
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload_decode.cli.questions import append_answers
from offload_decode.collections.collection import Collection
from offload_decode.common.errors import BucketError, DoesNotFit, OffloadDecodeError, StoreNotFound
from offload_decode.config import EngineConfig
from offload_decode.indexes.verified import cache_folder
from offload_decode.planning.caps import Caps
from offload_decode.prefill_jobs.buckets.collections import RemoteStores
from offload_decode.prefill_jobs.on_ray import asking, workers
from offload_decode.prefill_jobs.on_ray.asking import Asker, QuestionBatch
from offload_decode.prefill_jobs.on_ray.workers import TRIES, Cluster, TryAgain
from tests.cli.conftest import batch, done, lines_of, refused, run
from tests.cli.test_on_ray import sorted_lines
from tests.prefill_jobs.test_ray import descendants


@pytest.fixture(scope="module")
def bucket(collection: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is a bucket with a collection; for reading only."""
    folder = tmp_path_factory.mktemp("bucket")
    done("push", collection, f"file://{folder}/texts")
    return folder


@pytest.fixture
def url(bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the collection, for a machine that has fetched nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"file://{bucket}/texts"


def stores_at(url: str) -> list[str]:
    collection = Collection(Path(url.removeprefix("file://")))
    return [f"{url}/{entry.store}" for entry in collection.entries]


def asker(url: str, limit: int = 1 << 30) -> Asker:
    header = Path(url.removeprefix("file://"), "collection.json").read_text()
    return Asker(stores_at(url), RemoteStores(url, header, limit), EngineConfig(), Caps(), 4, False, False)


def kept() -> dict[Path, bool]:
    """The folders of stores in this machine's cache, and whether each is held."""
    found = {}
    for lock in (cache_folder() / "fetched").glob("*/lock"):
        if (lock.parent / "content" / "zarr.json").exists():
            with open(lock, "ab") as own:
                try:
                    fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    found[lock.parent] = False
                except BlockingIOError:
                    found[lock.parent] = True
    return found


def test_a_worker_fetches_what_it_is_asked_and_tells_what_is_here(url):
    worker, stores = asker(url), stores_at(url)
    assert worker.load().stores == frozenset()
    for number, store in enumerate(stores, start=1):
        told = worker.do(QuestionBatch(store, ("Why?",)))
        assert isinstance(told.result, list)
        assert told.stores == set(stores[:number])
        assert list(kept().values()).count(True) == 1, "the one that is open cannot leave"
    assert worker.progress() == (0, 0), "nothing is on its way"
    other = asker(url)
    assert other.load().stores == set(stores), "another worker of the machine finds them"
    assert isinstance(other.do(QuestionBatch(stores[0], ("Why?",))).result, list)


def test_two_workers_of_a_machine_keep_within_its_bound(url, monkeypatch):
    """There is room for two stores: what the other worker has open stays, and what it had open goes."""
    stores = stores_at(url)
    sizes = [
        sum(file.stat().st_size for file in Path(store.removeprefix("file://")).rglob("*") if file.is_file())
        for store in stores
    ]
    monkeypatch.setattr(workers, "PATIENCE_S", 0.0)
    one, other = (asker(url, limit=2 * max(sizes) + min(sizes) // 2) for _ in range(2))
    one.load(), other.load()
    for first, second in [(0, 1), (0, 2), (1, 2)]:
        assert isinstance(one.do(QuestionBatch(stores[first], ("Why?",))).result, list)
        assert isinstance(other.do(QuestionBatch(stores[second], ("Why?",))).result, list)
        assert list(kept().values()) == [True, True]
    small = asker(url, limit=min(sizes) // 2)
    small.load()
    again = small.do(QuestionBatch(stores[0], ("Why?",)))
    assert isinstance(again.result, TryAgain)
    assert isinstance(again.result.error, DoesNotFit), "another machine may have room for it"


def test_a_worker_that_cannot_fetch_gives_its_task_back(url, tmp_path, monkeypatch):
    worker, stores = asker(url), stores_at(url)
    worker.load()
    with monkeypatch.context() as broken:
        away = BucketError("away")

        def refuse(*_: object, **__: object) -> None:
            raise away

        broken.setattr("offload_decode.prefill_jobs.buckets.collections.pull", refuse)
        for _ in range(TRIES):
            assert worker.load().result is None
            told = worker.do(QuestionBatch(stores[0], ("Why?",)))
            assert isinstance(told.result, TryAgain)
            assert str(told.result.error) == f"on the machine {platform.node()}: away"
        assert isinstance(worker.load().result, OffloadDecodeError), "its machine is of no use"
        broken.setattr("offload_decode.prefill_jobs.buckets.collections.Bucket", refuse)
        assert str(asker(url).load().result) == f"on the machine {platform.node()}: away"
        fresh = asker(url).do(QuestionBatch(stores[0], ("Why?",)))
        assert isinstance(fresh.result, TryAgain), "one in place of a lost worker gives its task back too"
    assert isinstance(worker.do(QuestionBatch(stores[0], ("Why?",))).result, list)
    assert worker.load().result is None, "it counts those in a row"


def test_a_worker_whose_cache_cannot_be_written_gives_its_task_back(url, tmp_path):
    (tmp_path / "cache").write_text("a file")
    worker = asker(url)
    assert worker.load().stores == frozenset()
    again = worker.do(QuestionBatch(stores_at(url)[0], ("Why?",))).result
    assert isinstance(again, TryAgain)
    assert "cannot be written (Not a directory)" in str(again.error)


def test_an_error_of_a_store_is_not_the_workers(url, bucket, tmp_path, monkeypatch):
    shutil.copytree(bucket, tmp_path / "bucket")
    url = f"file://{tmp_path}/bucket/texts"
    worker, stores = asker(url), stores_at(url)
    shutil.rmtree(stores[0].removeprefix("file://"))
    worker.load()
    assert isinstance(worker.do(QuestionBatch(stores[0], ("Why?",))).result, StoreNotFound)
    assert isinstance(worker.do(QuestionBatch(stores[1], ("Why?",))).result, list)


def by_one_worker(
    batches: list[QuestionBatch],
    cluster: Cluster,
    config: EngineConfig,
    most: int,
    cites: bool = False,
    check: bool = False,
    remote: RemoteStores | None = None,
    watch: object = None,
    least: float | None = None,
) -> Iterator[tuple[int, Any]]:
    """What a cluster of one machine, this one, returns: the last part first."""
    stores = tuple(one.store for one in batches)
    worker = Asker(stores, remote, config, cluster.caps, most, cites, check, least)
    worker.load()
    for number, one in reversed(list(enumerate(batches))):
        yield number, worker.do(one).result


def rounded(value: Any) -> Any:
    """Shares of other passes differ by float32's rounding."""
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 6))


def test_ask_puts_its_question_to_workers(url, bucket, tmp_path, monkeypatch):
    """Of a collection in a bucket and of one here: the answers are those of this process, in their order."""
    monkeypatch.setattr(asking, "answer_on_ray", by_one_worker)
    how = ("Which word is beta?", "--all", "--json", "--cite", "--max-new-tokens", "3")
    here = Path(url.removeprefix("file://"))
    alone = json.loads(run("ask", here, *how).out)["answers"]
    for place in (url, here):
        ran = done("ask", place, *how, "--workers", "ray")
        found = json.loads(ran.out)["answers"]
        what = ("document", "answer", "tokens", "finish", "citations")
        assert [[rounded(one[key]) for key in what] for one in found] == [
            [rounded(one[key]) for key in what] for one in alone
        ]
        assert [one["stats"]["selected"] for one in found] == [one["stats"]["selected"] for one in alone]
    assert len(kept()) == 3, "fetched, and into no other cache"
    shown = run("ask", url, "Which word is beta?", "--all", "--max-new-tokens", "3", "--workers", "ray")
    assert shown.out.startswith("gamma.txt: "), "as they come"


def test_ask_names_the_document_that_no_worker_could_answer(url, bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(asking, "answer_on_ray", by_one_worker)
    shutil.copytree(bucket, tmp_path / "bucket")
    url = f"file://{tmp_path}/bucket/texts"
    shutil.rmtree(stores_at(url)[0].removeprefix("file://"))
    ran = run("ask", url, "Which?", "--all", "--json", "--max-new-tokens", "2", "--workers", "ray")
    assert ran.code == 1
    told = json.loads(ran.out)
    assert [one["document"] for one in told["answers"]] == ["beta.txt", "gamma.txt"]
    assert [one["document"] for one in told["failed"]] == ["alpha.txt"]


@pytest.mark.parametrize("option", [("--stats",), ("--temperature", "0.5")])
def test_options_that_workers_do_not_support_are_refused(url, option):
    assert f"--workers and {option[0]}" in refused(2, "ask", url, "Which?", "--workers", "ray", *option)


QUESTIONS = [{"question": f"Which word is word {n}?", "id": n} for n in range(4)]


ON_RAY = ("--all", "--batch-size", "1", "--workers", "ray", "--worker-count")


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster whose machines are added by a test, each with a cache of its own."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    cluster.add = lambda name: cluster.add_node(num_cpus=1, env_vars={"XDG_CACHE_HOME": str(tmp_path / name)})
    yield cluster
    cluster.shutdown()


def idle() -> int:
    """How many workers have loaded and are given nothing."""
    return [title.strip() for title in descendants(os.getpid()).values()].count("ray::Asker")


def fetched(folder: Path) -> int:
    """How many stores a machine has fetched."""
    return len(list(folder.glob("offload-decode/fetched/*/content/zarr.json")))


@pytest.mark.slow
def test_three_workers_one_of_which_is_killed(url, questions, tmp_path, machines, monkeypatch):
    """On two machines, the second of which has two workers; one is killed after the first answers."""
    machines.add("m")
    machines.add_node(num_cpus=2, env_vars={"XDG_CACHE_HOME": str(tmp_path / "n")})
    killed: list[int] = []

    def append_and_kill(path: Path, answers: list[dict[str, Any]]) -> None:
        append_answers(path, answers)
        workers = [pid for pid, title in descendants(os.getpid()).items() if "ray::Asker.do" in title]
        if workers and not killed:
            killed.append(workers[0])
            os.kill(workers[0], signal.SIGKILL)

    monkeypatch.setattr("offload_decode.cli.batch.append_answers", append_and_kill)
    out, plain = tmp_path / "out.jsonl", tmp_path / "plain.jsonl"
    ran = batch(questions, out, url, *ON_RAY, "3")
    assert ran.code == 0, ran.err
    assert killed
    assert fetched(tmp_path / "m") + fetched(tmp_path / "n") >= 3
    assert fetched(tmp_path / "cache") == 0, "this machine asks nothing"
    asked = 3 * len(QUESTIONS)
    assert batch(questions, out, url, *ON_RAY, "3").err == f"{out}: 0 answers, {asked} there already\n"
    assert batch(questions, plain, url, "--all").code == 0
    assert sorted_lines(out) == sorted_lines(plain), "nothing lost, nothing twice"


@pytest.mark.slow
def test_a_machine_that_comes_late_gets_work(url, questions, tmp_path, machines, monkeypatch):
    """Two workers for one machine; the second machine comes after the first answer, and is waited for there,
    that there be work left.
    """
    machines.add("early")

    def append_and_add_a_machine(path: Path, answers: list[dict[str, Any]]) -> None:
        append_answers(path, answers)
        if not (tmp_path / "late").exists():
            (tmp_path / "late").mkdir()
            machines.add("late")
            deadline = time.monotonic() + 120
            while idle() < 2 and time.monotonic() < deadline:
                time.sleep(0.2)

    monkeypatch.setattr("offload_decode.cli.batch.append_answers", append_and_add_a_machine)
    out = tmp_path / "out.jsonl"
    ran = batch(questions, out, url, *ON_RAY, "2")
    assert ran.code == 0, ran.err
    assert len({(line["store"], line["id"]) for line in lines_of(out)}) == len(lines_of(out)) == 12
    assert fetched(tmp_path / "early") >= 1
    assert fetched(tmp_path / "late") >= 1
