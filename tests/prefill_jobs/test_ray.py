"""Corpora spread over Ray workers: the driver with made-up workers, and a real local cluster."""

import json
import os
import random
import signal
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload_decode.common.errors import ConfigError, CorpusError, ModelError, OffloadDecodeError, StoreBusy
from offload_decode.planning.caps import Caps
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.job import Maker, PrefillReport, Settings, prefill
from offload_decode.prefill_jobs.many import Job, Texts, jobs_of
from offload_decode.prefill_jobs.on_ray import workers
from offload_decode.prefill_jobs.on_ray.jobs import Prefiller, prefill_on_ray, prefilled
from offload_decode.prefill_jobs.on_ray.pool import Pool
from offload_decode.prefill_jobs.on_ray.workers import TRIES, Cluster, Reply, shares
from tests.prefill_jobs.killing import tree
from tests.prefill_jobs.test_pool import Machines

SETTINGS = Settings(options={"chunk": "4"})


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class MadeUpRay(Machines):
    """A cluster whose workers do what `plan` says of a corpus (or of `load`), one thing after another. What
    Ray does by itself, to start lost workers and their tasks again, is done before it raises.
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, plan: dict[str, list[Any]], machines: list[dict[str, float]] | None = None) -> None:
        super().__init__({})
        self.plan = {name: iter(steps) for name, steps in plan.items()}
        self.machines = machines or [{"CPU": 2.0}]
        self.options: list[dict[str, Any]] = []

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": machine} for machine in self.machines] + [
            {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}
        ]

    def remote(self, kind: type) -> Any:
        assert kind is Prefiller
        return SimpleNamespace(options=self._options)

    def _options(self, **options: Any) -> Any:
        self.options.append(options)
        return SimpleNamespace(remote=self._worker)

    def _worker(self, *setup: object) -> Any:
        return SimpleNamespace(
            load=SimpleNamespace(remote=lambda: lambda: self._do("load")),
            do=SimpleNamespace(remote=lambda texts: lambda: self._do(texts.job.corpus)),
            progress=SimpleNamespace(remote=lambda: lambda: (1, 2)),
        )

    def _do(self, name: str) -> Any:
        step = next(self.plan[name], None) if name in self.plan else None
        if isinstance(step, RayError):
            raise step
        if name == "load":
            return Reply(step, None if step else frozenset())
        return Reply(step or report(name))


def report(name: str) -> PrefillReport:
    return PrefillReport(f"{name}.kv", 10, 1, (), 0, 1.0, 10.0, 100, 1000)


SETUP = Maker("m", Settings()), None, Caps()


def drive(ray: MadeUpRay, names: str = "abc", workers: int = 1) -> tuple[dict[str, Any], list[Any]]:
    """Results by corpus, and what progress was shown."""
    seen: list[Any] = []
    texts = [Texts(Job(name, f"{name}.kv"), [TextDocument(name, "text")], ()) for name in names]
    pool = Pool(ray, Prefiller, SETUP, workers, {"num_cpus": 1}, anywhere=True)
    results = prefilled(pool, texts, lambda *now: seen.append(now))
    return {job.corpus: result for job, result in results.items()}, seen


@pytest.mark.parametrize("workers", [1, 2])
def test_every_corpus_is_done_and_progress_is_in_tokens(workers):
    results, seen = drive(MadeUpRay({}), workers=workers)
    assert {name: type(result) for name, result in results.items()} == dict.fromkeys("abc", PrefillReport)
    assert seen[-1] == ("prefill", 30, 30, "3 of 3 done, 0 at work")
    assert all(done <= total for _, done, total, _ in seen)


def test_ray_restarts_lost_workers_and_their_tasks():
    ray = MadeUpRay({})
    drive(ray)
    (options,) = ray.options
    assert options["max_restarts"] == -1
    assert options["max_task_retries"] == TRIES - 1


def test_a_worker_for_which_nothing_is_left_gives_its_share_back():
    ray = MadeUpRay({})
    drive(ray, workers=2)
    assert len(ray.killed) == 2, "one that was lost may be waiting for it"


def test_a_corpus_that_loses_all_its_workers_stops_no_other():
    results, _ = drive(MadeUpRay({"b": [RayError("gone for good\nmore")]}))
    assert f"{TRIES} Ray workers were lost" in str(results["b"])
    assert "gone for good; " in str(results["b"])
    assert isinstance(results["a"], PrefillReport)
    assert isinstance(results["c"], PrefillReport)


def test_a_bad_corpus_is_not_tried_again():
    results, _ = drive(MadeUpRay({"b": [CorpusError("bad")]}))
    assert str(results["b"]) == "bad"


@pytest.mark.parametrize(
    "plan",
    [
        {"load": [ModelError("stop")]},
        {"a": [ConfigError("stop")]},
        {"a": [RayTaskError(MemoryError("stop"))]},
    ],
)
def test_errors_of_all_corpora_stop_at_once(plan):
    with pytest.raises((OffloadDecodeError, MemoryError), match=r"^stop$"):
        drive(MadeUpRay(plan))


def test_without_a_worker_that_could_load_the_model_nothing_is_waited_for():
    with pytest.raises(OffloadDecodeError, match=f"{TRIES} Ray workers were lost while they loaded"):
        drive(MadeUpRay({"load": [RayError("killed")] * 2}), workers=2)


def test_one_worker_that_could_load_the_model_does_all():
    results, _ = drive(MadeUpRay({"load": [RayError("killed")]}), workers=2)
    assert all(isinstance(result, PrefillReport) for result in results.values())


@pytest.mark.parametrize(
    ("machines", "wanted", "device", "count", "share"),
    [
        ([{"CPU": 8.0}, {"CPU": 16.0}], None, "auto", 2, {"num_cpus": 8}),
        ([{"CPU": 8.0}], 3, "auto", 3, {"num_cpus": 2}),
        ([{"CPU": 8.0}, {"CPU": 8.0}], 3, "auto", 3, {"num_cpus": 4}),
        ([{"CPU": 2.0}], 5, "auto", 2, {"num_cpus": 1}),
        ([{"CPU": 8.0, "GPU": 4.0}, {"CPU": 64.0}], None, "auto", 4, {"num_cpus": 1, "num_gpus": 1}),
        ([{"CPU": 8.0, "GPU": 4.0}], 2, "cuda", 2, {"num_cpus": 1, "num_gpus": 1}),
        ([{"CPU": 8.0, "GPU": 4.0}], None, "cpu", 1, {"num_cpus": 8}),
        ([{"CPU": 8.0, "GPU": 4.0}], 6, "auto", 4, {"num_cpus": 1, "num_gpus": 1}),
    ],
)
def test_shares(machines, wanted, device, count, share):
    assert shares(MadeUpRay({}, machines), wanted, device) == (count, share)
    assert shares(MadeUpRay({}, machines), wanted, device, grows=True) == (wanted or count, share)


def test_a_cluster_without_machines_is_waited_for_where_a_number_is_given():
    none = MadeUpRay({}, [{"memory": 1.0}])
    assert shares(none, 3, "auto", grows=True) == (3, {"num_cpus": 1})
    for wanted, grows in [(None, True), (3, False)]:
        with pytest.raises(OffloadDecodeError, match="no processors for workers: add machines"):
            shares(none, wanted, "auto", grows)


def test_a_lock_of_a_lost_worker_is_waited_for(monkeypatch):
    texts = Texts(Job("a", "a.kv"), [], ())
    answers = iter([StoreBusy("held"), StoreBusy("held"), report("a")])

    def step(worker: Prefiller, texts: Texts) -> PrefillReport:
        answer = next(answers)
        if isinstance(answer, StoreBusy):
            raise answer
        return answer

    monkeypatch.setattr(Prefiller, "begin", lambda worker: None)
    monkeypatch.setattr(Prefiller, "run", step)
    monkeypatch.setattr(workers, "POLL_S", 0.0)
    first, in_its_place = Prefiller(*SETUP), Prefiller(*SETUP)
    first.load()
    assert isinstance(first.do(texts).result, StoreBusy)
    assert isinstance(in_its_place.do(texts).result, PrefillReport)


def test_a_missing_ray_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"offload-decode\[ray\]"):
        prefill_on_ray([], Cluster("ray", None, Caps()), Maker("m", Settings()))


def test_only_ray_addresses_are_taken():
    with pytest.raises(ConfigError, match="ray://HOST:PORT"):
        Cluster("dask", None, Caps())


@pytest.mark.slow
def test_a_local_cluster_that_loses_a_worker(inputs, tmp_path):
    """Two workers; the first to be well into a corpus is killed with SIGKILL."""
    if find_spec("ray") is None:  # imported before `installed` prepares it, it would write to stdout
        pytest.skip("Ray is not installed")
    words = random.Random(0)
    corpora = []
    for name in "abcd":
        corpora.append(str(tmp_path / f"{name}.txt"))
        Path(corpora[-1]).write_text(" ".join(words.choice(["one", "two", "six"]) for _ in range(500)))
    Path(tmp_path / "empty.txt").write_text("")
    out = tmp_path / "out"
    killed: dict[int, int] = {}

    def kill_one(*_: object) -> None:
        if not killed and any(200 < tokens < 1000 for tokens in committed(out)):
            pid = next(pid for pid in descendants(os.getpid()) if holds(pid, "partial/lock"))
            os.kill(pid, signal.SIGKILL)
            killed[pid] = len(list(out.glob("*.kv")))

    results = prefill_on_ray(
        jobs_of([*corpora[:2], str(tmp_path / "empty.txt"), *corpora[2:]], str(out)),
        Cluster("ray", 2, Caps()),
        Maker(str(inputs / "model"), SETTINGS),
        progress=kill_one,
    )
    assert killed
    failed = {job.corpus: result for job, result in results.items() if isinstance(result, OffloadDecodeError)}
    assert list(failed) == [str(tmp_path / "empty.txt")]
    made = [result for result in results.values() if isinstance(result, PrefillReport)]
    assert sum(result.resumed_from > 0 for result in made) == 1, "it went on where it was killed"
    for corpus in corpora:
        name = Path(corpus).stem
        prefill(corpus, model=str(inputs / "model"), out=tmp_path / name, settings=SETTINGS)
        assert tree(tmp_path / name) == tree(out / f"{name}.kv")
    assert not [title for title in descendants(os.getpid()).values() if "ray" in title]


def committed(out: Path) -> list[int]:
    """Tokens that each of the stores that are being written has."""
    found = []
    for file in out.glob("*.partial/progress.json"):
        try:
            found.append(int(json.loads(file.read_text())["tokens"]))
        except FileNotFoundError:
            continue  # it has been published just now
    return found


def holds(pid: int, name: str) -> bool:
    """Whether a process has a file open whose path ends so."""
    try:
        return any(os.readlink(link).endswith(name) for link in Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        return False


def descendants(root: int) -> dict[int, str]:
    """Titles of the processes below `root`, by id."""
    children: dict[int, list[int]] = defaultdict(list)
    titles: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            titles[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        children[parent].append(int(folder.name))
    found, rest = {}, list(children[root])
    while rest:
        pid = rest.pop()
        found[pid] = titles[pid]
        rest += children[pid]
    return found
