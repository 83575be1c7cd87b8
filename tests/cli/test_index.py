"""Many stores are indexed as each of them by itself, here or on Ray workers."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload_decode.common.errors import OffloadDecodeError, UnknownIndex
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.prefill_jobs.indexing import BuildReport, build_indexes
from offload_decode.prefill_jobs.many import Job
from offload_decode.prefill_jobs.on_ray.jobs import Indexer, indexed
from offload_decode.prefill_jobs.on_ray.pool import TaskProgress
from offload_decode.prefill_jobs.on_ray.workers import Reply
from tests.cli.conftest import done, json_of, refused, run
from tests.cli.test_on_ray import killing
from tests.prefill_jobs.killing import tree

Copy = Callable[[str], Path]


def indexes_of(store: Path) -> dict[str, bytes]:
    return tree(store.with_name(store.name + ".indexes"))


def test_several_stores_are_indexed_as_each_alone(copy):
    stores = [copy(name) for name in ("a.kv", "b.kv", "c.kv")]
    done("index", stores[0], "--k", "10")
    told = json_of("index", *stores[1:], "--k", "10")
    assert [report["built"] for report in told["indexes"]] == [report["heads"] for report in told["indexes"]]
    assert indexes_of(stores[0]) == indexes_of(stores[1]) == indexes_of(stores[2])


def test_stores_that_fail_stop_no_other_and_are_named(copy, tmp_path):
    none, unwritable, store = tmp_path / "none.kv", copy("a.kv"), copy("b.kv")
    unwritable.with_name("a.kv.indexes").write_text("in the way")
    ran = run("index", none, unwritable, store, "--k", "10", "--json")
    told = json.loads(ran.out)
    assert (ran.code, len(told["indexes"])) == (1, 1)
    failed = {one["store"]: one["error"] for one in told["failures"]}
    assert failed.keys() == {str(none), str(unwritable)}
    assert "cannot be written" in failed[str(unwritable)]
    assert f"error: {none}: There is no store at {none}" in ran.err


def test_a_collection_is_indexed_store_by_store(home, tmp_path):
    (tmp_path / "texts").mkdir()
    for name in ("one", "two"):
        (tmp_path / "texts" / f"{name}.txt").write_text(f"Chapter {name}. " * 20)
    path = tmp_path / "all.collection"
    done("collect", tmp_path / "texts", "--model", home / "model", "--out", path)
    told = json_of("index", path, "--k", "10")
    assert len(told["indexes"]) == 2
    done("verify", path)


def test_an_index_that_would_not_be_tuned_so_now_is_built_again(copy, monkeypatch):
    store = copy("a.kv")
    done("index", store, "--k", "10")
    kept = json_of("index", store, "--k", "10")
    assert kept["built"] == 0
    monkeypatch.setattr(ClusteredIndex, "least_tuned", 1e9)
    again = json_of("index", store, "--k", "10")
    assert again["built"] == again["heads"]


@pytest.mark.parametrize("wrong", [("--kind", "unheard-of"), ("--recall", "0")])
def test_an_error_that_concerns_all_stores_is_told_once(copy, wrong):
    refused(2, "index", copy("a.kv"), copy("b.kv"), *wrong)


def test_options_that_do_not_go_together_are_refused(store):
    assert "--worker-count needs --workers" in refused(2, "index", store, "--worker-count", "2")
    assert "leave one of them out" in refused(2, "index", store, "--workers", "ray", "--no-sync")
    assert "--workers is ray or ray://HOST:PORT" in refused(2, "index", store, "--workers", "dask")


def indexer(*stores: Path, kind: str = "clusters") -> Indexer:
    return Indexer(list(map(str, stores)), kind, 0.98, 10)


def test_a_worker_builds_what_this_process_would_and_says_how_far_it_is(copy):
    here, there = copy("here.kv"), copy("there.kv")
    build_indexes(here, "clusters", k=10)
    worker = indexer(there)
    assert worker.load().stores == {str(there)}
    report = worker.do(Job("", str(there))).result
    assert isinstance(report, BuildReport)
    assert worker.progress() == (report.heads, report.heads)
    assert indexes_of(here) == indexes_of(there)


def test_a_replacement_worker_continues_the_index(copy, tmp_path, monkeypatch):
    """The first is lost as it has said that a head is done; the second builds the others."""
    store, heads = copy("a.kv"), []

    class Killed(Exception):
        pass

    def note(worker: Indexer, stage: str, done: int, total: int) -> None:
        heads.append(done)
        if done == 1 and len(heads) == 2:
            raise Killed

    monkeypatch.setattr(Indexer, "_note", note)
    first = indexer(store)
    first.load()
    with pytest.raises(Killed):
        first.do(Job("", str(store)))
    moved = indexer(store).do(Job("", str(store)))
    assert moved.stores == {str(store)}
    assert (moved.result.built, moved.result.reused) == (moved.result.heads - 1, 1)
    none = tmp_path / "none.kv"
    assert indexer(none).do(Job("", str(none))) == Reply(None, frozenset())


def test_what_is_wrong_with_the_kind_is_told_as_a_worker_loads(store):
    assert isinstance(indexer(store, kind="unheard-of").load().result, UnknownIndex)


def test_progress_is_in_heads_and_estimated_for_stores_that_are_not_begun():
    report = BuildReport("flat", Path("a"), 4, 4, 0, 1.0, 1, None, 1.0, 1.0, {}, 0)

    class MadeUp:
        def run(self, tasks: object, verb: str, watch: Callable[[TaskProgress], None]) -> Any:
            watch({})
            watch({0: (2, 4)})
            yield 0, report
            watch({1: (1, 4)})
            yield 1, OffloadDecodeError("bad")

    seen: list[Any] = []
    made: Any = MadeUp()
    results = indexed(made, [Job("", name) for name in "abc"], lambda *now: seen.append(now))
    assert seen == [
        ("start workers", 0, 1, "0 of 3 done, 0 at work"),
        ("index", 2, 12, "0 of 3 done, 1 at work"),
        ("index", 5, 12, "1 of 3 done, 1 at work"),
    ]
    assert (results[0], str(results[1])) == (report, "bad")


@pytest.mark.slow
def test_stores_indexed_by_workers_that_are_killed(copy, tmp_path):
    """Two workers on a real local cluster; twice one of them is killed with SIGKILL."""
    if importlib.util.find_spec("ray") is None:  # imported before the command, it would write to stdout
        pytest.skip("Ray is not installed")
    plain = copy("plain.kv")
    done("index", plain, "--k", "10")
    stores = [copy(f"{number}.kv") for number in range(6)]
    none = tmp_path / "none.kv"
    with killing("ray::Indexer", 2, lambda _: 1.0) as killed:
        ran = run("index", *stores, none, "--k", "10", "--json", "--workers", "ray", "--worker-count", "2")
    assert killed
    told = json.loads(ran.out)
    assert [failed["store"] for failed in told["failures"]] == [str(none)]
    assert len(told["indexes"]) == len(stores)
    assert all(indexes_of(store) == indexes_of(plain) for store in stores)
