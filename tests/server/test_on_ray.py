"""Servers on a Ray cluster: what needs none, and a real one on this machine."""

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from offload_decode.common.errors import ConfigError, StoreNotFound
from offload_decode.config import EngineConfig
from offload_decode.engine.engine import Engine
from offload_decode.prefill_jobs.buckets import push
from offload_decode.server.http.front import create_front
from offload_decode.server.http.security import Access
from offload_decode.server.metrics import Metrics
from offload_decode.server.requests import Settings
from tests.prefill_jobs.test_ray import descendants
from tests.server.http.conftest import listening
from tests.server.test_catalog import until

pytest.importorskip("ray")

from offload_decode.server.on_ray import BucketCatalog, Plan, merged, on_ray, plan_for  # it imports ray

QUESTION = "What is the colour of thing 3?"


def test_metrics_of_several_servers_are_told_apart():
    one, other = Metrics(), Metrics()
    one.watch("book")
    found = {
        (sample.labels["replica"], sample.labels["model_name"]): sample.value
        for family in text_string_to_metric_families(merged([one.text(), other.text(), one.text()]).decode())
        for sample in family.samples
        if sample.name == "offload_decode:num_requests_waiting"
    }
    assert found == {("0", "book"): 1, ("2", "book"): 1}


def test_stores_in_buckets_are_named_before_they_are_here(shelf, tmp_path):
    store, url = shelf / "stores" / "book.kv", f"file://{tmp_path}/bucket/far.kv"
    push(store, url)
    plan = plan_for([str(shelf / "stores"), url], Settings(), tmp_path / "cache")
    with closing(BucketCatalog(plan)) as catalog:
        far, near = catalog.entry("far"), catalog.entry("book")
        assert (far.tokens, far.model_id) == (near.tokens, near.model_id)
        assert far in catalog.entries()
        shutil.copytree(store, tmp_path / "cache" / "far.kv")
        catalog.refresh()
        assert [one.digest for one in catalog.entries() if one.name == "far"] == [near.digest]


def test_stores_in_buckets_must_be_there_and_have_names_of_their_own(shelf, tmp_path):
    with pytest.raises(StoreNotFound, match="there is no store at"):
        plan_for([f"file://{tmp_path}/nothing.kv"], Settings(), tmp_path)
    urls = [f"file://{tmp_path}/{folder}/far.kv" for folder in "ab"]
    for url in urls:
        push(shelf / "stores" / "book.kv", url)
    with pytest.raises(ConfigError, match="one name"):
        plan_for(urls, Settings(), tmp_path)


def test_a_ray_client_cannot_stream(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", "ray://somewhere:10001")
    with pytest.raises(ConfigError, match="RAY_ADDRESS=auto"), on_ray(Plan((), {}, Settings())):
        pass


@dataclass
class Cluster:
    """A front that listens at `base`, over two replicas; `cache` is where they pull to."""

    base: str
    cache: Path

    def ask(self, model: str, tokens: int = 6, question: str = QUESTION) -> dict[str, Any]:
        body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": tokens}
        answered = httpx.post(f"{self.base}/v1/chat/completions", json=body, timeout=120)
        assert answered.status_code == 200, answered.text
        return dict(answered.json())

    def answers(self) -> dict[str, dict[str, float]]:
        """Answers that each replica has begun, by model."""
        told = httpx.get(f"{self.base}/metrics", timeout=60).text
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(told):
            for sample in family.samples:
                if sample.name == "offload_decode:request_queue_time_seconds_count":
                    own = found.setdefault(sample.labels["model_name"], {})
                    own[sample.labels["replica"]] = sample.value
        return found


@pytest.fixture(scope="module")
def cluster(shelf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    names = sorted(path.stem for path in (shelf / "stores").glob("*.kv"))
    far = f"file://{folder}/bucket/far.kv"
    push(shelf / "stores" / f"{names[0]}.kv", far)
    settings = Settings(config=EngineConfig(options={"budget": "24"}), max_models=2)
    plan = plan_for((str(shelf / "stores"), far), settings, folder / "cache")
    with ExitStack() as stack:
        replicas = stack.enter_context(on_ray(plan, 2))
        base = stack.enter_context(listening(create_front(replicas, Access(), 1 << 20)))
        until(lambda: httpx.get(f"{base}/health", timeout=60).status_code == 200, 120)
        yield Cluster(base, folder / "cache")


@pytest.mark.slow
def test_a_store_is_asked_where_it_is_open(cluster, shelf):
    path = shelf / "stores" / "book.kv"
    expected = Engine.open(path, options={"budget": "24"}).answer(QUESTION, 6).text
    for _ in range(6):
        assert cluster.ask("book")["choices"][0]["message"]["content"].strip() == expected
    asked = cluster.answers()["book"]
    assert sorted(asked.values()) == [6], "the second replica was never asked for it"


@pytest.mark.slow
def test_a_store_is_pulled_when_it_is_first_asked_for(cluster):
    assert not (cluster.cache / "far.kv").exists()
    listed = httpx.get(f"{cluster.base}/v1/models", timeout=60).json()["data"]
    assert "far" in {one["id"] for one in listed}
    answered = cluster.ask("far")
    assert answered["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert (cluster.cache / "far.kv").is_dir()


@pytest.mark.slow
def test_what_is_not_there_is_refused_as_by_one_server(cluster):
    body = {"model": "nothing", "messages": [{"role": "user", "content": "?"}]}
    refused = httpx.post(f"{cluster.base}/v1/chat/completions", json=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.slow
def test_a_lost_replica_loses_no_request(cluster):
    """Twelve long answers, not streamed, so that none begins before it is whole; one replica is killed."""
    cluster.ask("book")
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(cluster.ask, "book", 200, f"{QUESTION} {number}") for number in range(12)]
        time.sleep(0.2)
        os.kill(busiest(), signal.SIGKILL)
        answers = [each.result(timeout=180) for each in asked]
    assert [one["usage"]["completion_tokens"] > 0 for one in answers] == [True] * 12


def busiest() -> int:
    """The replica that works most."""

    def spent() -> dict[int, int]:
        found = {}
        for pid, title in descendants(os.getpid()).items():
            if "ServeReplica" in title:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found[pid] = int(fields[11]) + int(fields[12])
        return found

    before = spent()
    time.sleep(0.5)
    return max(spent().items(), key=lambda one: one[1] - before.get(one[0], one[1]))[0]
