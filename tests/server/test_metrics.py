"""What is counted of a request from its submission to its end, and of passes; and lines of a log, one each,
which hold nothing that looks like another line.
"""

import io
import json
import logging
from contextlib import closing

import pytest
from prometheus_client.parser import text_string_to_metric_families

from offload_decode.server.catalog import Catalog
from offload_decode.server.metrics import LOG, Metrics, Watch, configure, log_fields, logged_request
from offload_decode.server.requests import Busy, Delta, Done, Ended, Failed, Prompted, Scored, Settings, Usage
from offload_decode.server.service import Service
from offload_decode.types import StepStats

USAGE = Usage(prompt=100, cached=90, completion=3)


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Every sample by its name, without our prefix, and the values of its labels in their names' order."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            values = (sample.labels[label] for label in sorted(sample.labels))
            found[sample.name.removeprefix("offload_decode:"), *values] = sample.value
    return found


def answered(watch: Watch, *deltas: int, finish: str = "stop") -> None:
    """A request of one answer, with so many tokens in each delta."""
    watch.started()
    watch.event(Prompted(USAGE))
    for tokens in deltas:
        watch.event(Delta(0, "text", (Scored(7),) * tokens))
    watch.event(Ended(0, finish))
    watch.event(Done(USAGE, StepStats()))


def test_a_request_waits_runs_and_ends():
    metrics = Metrics()

    def queue() -> tuple[float, float]:
        seen = samples(metrics)
        return seen["num_requests_waiting", "book"], seen["num_requests_running", "book"]

    watch = metrics.watch("book")
    assert queue() == (1, 0)
    watch.started()
    assert queue() == (0, 1)
    watch.event(Ended(0, "stop"))
    watch.event(Done(USAGE, StepStats()))
    assert queue() == (0, 0)


def test_tokens_are_counted_and_timed():
    metrics = Metrics()
    answered(metrics.watch("book"), 1, 0, 3)
    seen = samples(metrics)
    assert seen["prompt_tokens_total", "book"] == 100
    assert seen["prefix_cache_queries_total", "book"] == 100
    assert seen["prefix_cache_hits_total", "book"] == 90
    assert seen["generation_tokens_total", "book"] == 4
    assert seen["time_to_first_token_seconds_count", "book"] == 1
    assert seen["inter_token_latency_seconds_count", "book"] == 3
    assert seen["e2e_request_latency_seconds_count", "book"] == 1
    assert seen["request_queue_time_seconds_count", "book"] == 1
    assert seen["request_success_total", "stop", "book"] == 1
    assert seen["request_success_total", "length", "book"] == 0


def test_latency_between_tokens_is_timed_per_answer():
    metrics = Metrics()
    watch = metrics.watch("book")
    for index in (0, 1, 0, 1):
        watch.event(Delta(index, "", (Scored(7),)))
    seen = samples(metrics)
    assert seen["inter_token_latency_seconds_count", "book"] == 2
    assert seen["time_to_first_token_seconds_count", "book"] == 1


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("reason", ["abort", "error"])
def test_what_does_not_end_well_is_counted_once_and_waits_no_longer(started, reason):
    metrics = Metrics()
    watch = metrics.watch("book")
    if started:
        watch.started()
    if reason == "error":
        watch.event(Failed(ValueError("a text")))
    watch.aborted()
    watch.aborted()
    watch.event(Done(USAGE, StepStats()))
    seen = samples(metrics)
    assert seen["request_success_total", reason, "book"] == 1
    assert seen["num_requests_waiting", "book"] == seen["num_requests_running", "book"] == 0
    assert sum(value for name, value in seen.items() if name[0] == "request_success_total") == 1


def test_costs_of_passes_are_added():
    metrics = Metrics()
    for _ in range(2):
        stats = StepStats(selected=5, bytes_moved=640, cache_hits=3, cache_misses=2, search_s=0.5)
        metrics.passed(4, 9, 0.02, stats)
    seen = samples(metrics)
    assert seen["iteration_rows_count",] == 2
    assert seen["iteration_rows_sum",] == 8
    assert seen["iteration_tokens_total_sum",] == 18
    assert seen["stored_kv_read_bytes_total",] == 1280
    assert seen["attended_tokens_total",] == 10
    assert (seen["device_cache_hits_total",], seen["device_cache_misses_total",]) == (6, 4)
    assert seen["iteration_stage_seconds_total", "search"] == 1.0


def test_gauges_are_read_on_demand():
    metrics, jobs = Metrics(), {"running": 1.0}
    metrics.read("jobs", "Jobs, by state.", lambda: jobs, label="state")
    metrics.read("kv_cache_usage_perc", "Share.", lambda: 0.25)
    assert samples(metrics)["jobs", "running"] == 1
    jobs["running"] = 2.0
    assert samples(metrics)["jobs", "running"] == 2
    assert samples(metrics)["kv_cache_usage_perc",] == 0.25


def test_two_services_share_nothing():
    one, other = Metrics(), Metrics()
    one.watch("book")
    assert samples(one)["num_requests_waiting", "book"] == 1
    assert ("num_requests_waiting", "book") not in samples(other)


def test_a_full_queue_is_counted():
    metrics = Metrics()
    metrics.watch("book").event(Failed(Busy("full")))
    metrics.watch("book").event(Failed(ValueError("wrong")))
    seen = samples(metrics)
    assert seen["admission_rejections_total", "book"] == 1
    assert seen["num_requests_waiting", "book"] == 0


def test_a_service_tells_what_it_holds(tmp_path):
    with closing(Service(Catalog([tmp_path]), Settings())) as service:
        seen = samples(service.metrics)
    assert seen["kv_cache_usage_perc",] == 0
    assert ("jobs", "running") not in seen


def test_the_line_of_a_request_says_how_it_went():
    with logged_request(request_id="r1") as line:
        answered(Metrics().watch("book"), 1, 2, finish="length")
    assert {name: line[name] for name in ("model", "prompt_tokens", "cached_tokens", "finish")} == {
        "model": "book",
        "prompt_tokens": 100,
        "cached_tokens": 90,
        "finish": "length",
    }
    assert line["completion_tokens"] == 3
    assert line["tokens_per_s"] > 0
    assert line["first_token_s"] >= 0


def log(style: str) -> io.StringIO:
    """Configures the log in a style, and gives where it goes."""
    out = io.StringIO()
    configure(style, out)
    return out


def test_records_within_a_request_name_it_and_others_do_not():
    out = log("json")
    with logged_request(request_id="r1", route="/v1/models"):
        LOG.warning("something")
        log_fields()["status"] = 200
    LOG.warning("something")
    within, request, outside = [json.loads(text) for text in out.getvalue().splitlines()]
    assert within["request_id"] == "r1"
    assert "request_id" not in outside
    assert (request["message"], request["request_id"], request["status"]) == ("request", "r1", 200)
    assert request["seconds"] >= 0
    assert request["time"].endswith("Z")


@pytest.mark.parametrize("style", ["text", "json"])
def test_logged_values_cannot_forge_lines(style):
    out = log(style)
    with logged_request(model="book\n2026 error all is lost\x1b[2J\u2028"):
        LOG.info("a message\nwith a break")
    assert len(out.getvalue().splitlines()) == 2
    assert "\x1b" not in out.getvalue()


def test_text_lines_can_be_read_by_people():
    out = log("text")
    with logged_request(request_id="r1", model="my book"):
        pass
    assert ' info request request_id=r1 model="my book" seconds=' in out.getvalue()


def test_uvicorn_says_what_it_says_in_the_same_form_and_libraries_only_warn():
    out = log("json")
    logging.getLogger("uvicorn.error").info("Started")
    logging.getLogger("httpx").info("chatter")
    logging.getLogger("httpx").warning("odd", extra={"fields": None})
    assert [json.loads(text)["message"] for text in out.getvalue().splitlines()] == ["Started", "odd"]


def test_an_exception_stays_in_its_line():
    out = log("json")
    LOG.error("failed", exc_info=ValueError("wrong"))
    assert "ValueError: wrong" in json.loads(out.getvalue())["exception"]


def test_outside_of_a_request_nothing_is_remembered():
    log_fields()["model"] = "book"
    assert log_fields() == {}
