"""What a server counts and times, for Prometheus (vLLM's names where the thing is the same, under our
prefix), and what it logs: text or JSON, a line for each record, and one record for each request, with its id.

Every `Metrics` has a registry of its own. A `Watch` follows one request by its events; gauges (jobs, memory
in use) are read when somebody looks. Nothing that a client wrote is logged but names: a request's id, the
model it asked for, the route.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from offload_decode.server.requests import Busy, Delta, Done, Ended, Event, Failed, Prompted
from offload_decode.types import StepStats

LOG = logging.getLogger("offload_decode.server")
_ITS_OWN = ("offload_decode", "uvicorn", "uvicorn.error")
_fields_of_request: ContextVar[dict[str, Any]] = ContextVar("fields")


def log_fields() -> dict[str, Any]:
    """The fields that will be logged of the current HTTP request, for whoever learns one to put it there;
    outside of a request, fields that nobody reads.
    """
    return _fields_of_request.get({})


@contextmanager
def logged_request(level: int = logging.INFO, **fields: Any) -> Iterator[dict[str, Any]]:
    """Inside, `log_fields()` are this request's; when the block ends, they are logged with its seconds."""
    token, began = _fields_of_request.set(fields), time.perf_counter()
    try:
        yield fields
    finally:
        fields["seconds"] = round(time.perf_counter() - began, 4)
        LOG.log(level, "request", extra={"fields": dict(fields)})
        _fields_of_request.reset(token)


def configure(style: Literal["text", "json"] = "text", stream: TextIO | None = None) -> None:
    """Let everything that this process logs go to `stream` (stderr) in one form, uvicorn's own included:
    start it with `log_config=None, access_log=False`.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in _ITS_OWN:
        logging.getLogger(name).setLevel(logging.INFO)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What a record says beyond its message: its own fields, or the id of the request it belongs to."""
    of_request = {name: value for name, value in log_fields().items() if name == "request_id"}
    own = getattr(record, "fields", None)
    return of_request if own is None else own


def _when(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"


class JsonLines(logging.Formatter):
    """An object in one line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _when(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """Time, level, message and fields as `name=value`; what is not plain text is spelled out, so that no
    value can look like a line of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_spelled(value)}" for name, value in _fields(record).items())
        line = f"{_when(record)} {record.levelname.lower()} {_plain(record.getMessage())}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _plain(text: str) -> str:
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def _spelled(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and not set(text) & set(' ="') else json.dumps(text)


PREFIX = "offload_decode"
_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 20)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

Values = float | Mapping[str, float]


class Metrics:
    """The counters of one service. Every method may be called from any thread, and takes microseconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def of_kind(
            kind: Any, name: str, about: str, labels: Sequence[str] = ("model_name",), **more: Any
        ) -> Any:
            return kind(f"{PREFIX}:{name}", about, labels, registry=self.registry, **more)

        gauge, counter, times = (partial(of_kind, kind) for kind in (Gauge, Counter, Histogram))
        self._by_model = {
            "running": gauge("num_requests_running", "Requests that are being answered."),
            "waiting": gauge("num_requests_waiting", "Requests in the queue."),
            "refused": counter("admission_rejections", "Requests refused because the queue was full."),
            "queued": times("request_queue_time_seconds", "In the queue.", buckets=_WHOLE),
            "first": times("time_to_first_token_seconds", "Until the first token.", buckets=_FIRST),
            "between": times("inter_token_latency_seconds", "From token to token.", buckets=_BETWEEN),
            "whole": times("e2e_request_latency_seconds", "Until the last token.", buckets=_WHOLE),
            "prompt": counter("prompt_tokens", "Tokens of prompts, the stored ones among them."),
            "written": counter("generation_tokens", "Tokens of answers."),
            "looked_up": counter("prefix_cache_queries", "Tokens of prompts that were looked up."),
            "found": counter("prefix_cache_hits", "Tokens of prompts that were stored or remembered."),
        }
        finished = ("model_name", "finished_reason")
        self._ended = counter("request_success", "Answers, by why they ended.", labels=finished)
        counter, times = partial(counter, labels=()), partial(times, labels=())
        self._rows = times("iteration_rows", "Requests that share a forward pass.", buckets=_COUNTS)
        self._tokens = times("iteration_tokens_total", "Tokens of a forward pass.", buckets=_COUNTS)
        self._passes = times("iteration_seconds", "Seconds of a forward pass.", buckets=_BETWEEN)
        attended = "Stored tokens attended to, for every layer and query head."
        self._by_stat = {
            "bytes_moved": counter("stored_kv_read_bytes", "Stored keys and values that were read."),
            "bus_bytes": counter("bus_bytes", "Bytes sent to a device and back."),
            "selected": counter("attended_tokens", attended),
            "cache_hits": counter("device_cache_hits", "Rows that the device's cache held."),
            "cache_misses": counter("device_cache_misses", "Rows that the device's cache did not hold."),
        }
        stages = counter("iteration_stage_seconds", "Seconds of passes, by stage.", labels=("stage",))
        self._by_stat |= {f"{stage}_s": stages.labels(stage) for stage in ("search", "gather", "attend")}
        self._models: dict[str, SimpleNamespace] = {}

    def watch(self, model: str) -> Watch:
        """Follow a request from now, its submission, on; `model` is a name of the catalog."""
        if model not in self._models:
            counts = {name: metric.labels(model) for name, metric in self._by_model.items()}
            ended = {end: self._ended.labels(model, end) for end in ("stop", "length", "abort", "error")}
            self._models[model] = SimpleNamespace(model=model, ended=ended, **counts)
        return Watch(self._models[model])

    def passed(self, rows: int, tokens: int, seconds: float, stats: StepStats) -> None:
        """A forward pass of `tokens` tokens of `rows` requests; `stats` are the pass' own."""
        self._rows.observe(rows)
        self._tokens.observe(tokens)
        self._passes.observe(seconds)
        for name, counter in self._by_stat.items():
            counter.inc(getattr(stats, name))

    def read(self, name: str, about: str, value: Callable[[], Values], label: str = "model_name") -> None:
        """A gauge that is read whenever somebody looks: `value` gives a number, or numbers by `label`."""

        class Read(Collector):  # without `describe`, which would ask for its value at once
            def collect(self) -> Iterator[GaugeMetricFamily]:
                now = value()
                if isinstance(now, Mapping):
                    family = GaugeMetricFamily(f"{PREFIX}:{name}", about, labels=[label])
                    for key, one in now.items():
                        family.add_metric([key], one)
                    yield family
                else:
                    yield GaugeMetricFamily(f"{PREFIX}:{name}", about, value=now)

        self.registry.register(Read())

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)


class Watch:
    """One request: it waits, starts, has events, and ends, by its last event or given up.

    Its figures go to the metrics, and to the line that is logged of the HTTP request it came with.
    """

    def __init__(self, counts: SimpleNamespace):
        self._counts = counts
        self._began = time.perf_counter()
        self._last: dict[int, float] = {}
        self._first: float | None = None
        self._reasons: list[str] = []
        self._tokens = 0
        self._started = self._over = False
        self._line = log_fields()
        self._line["model"] = counts.model
        counts.waiting.inc()

    def started(self) -> None:
        """It leaves the queue."""
        self._started = True
        self._counts.waiting.dec()
        self._counts.running.inc()
        self._counts.queued.observe(time.perf_counter() - self._began)

    def event(self, event: Event) -> None:
        """Its events in their order; nothing counts after its end."""
        counts = self._counts
        if self._over:
            return
        match event:
            case Prompted(usage):
                counts.prompt.inc(usage.prompt)
                counts.looked_up.inc(usage.prompt)
                counts.found.inc(usage.cached)
                self._line |= {"prompt_tokens": usage.prompt, "cached_tokens": usage.cached}
            case Delta(index, _, tokens) if tokens:
                self._written(index, len(tokens))
            case Ended(_, finish, _):
                counts.ended[finish].inc()
                self._reasons.append(finish)
            case Done():
                self._end(",".join(self._reasons))
            case Failed(error):
                self._line["error"] = type(error).__name__
                if isinstance(error, Busy) and not self._started:
                    counts.refused.inc()
                counts.ended["error"].inc()
                self._end("error")

    def aborted(self) -> None:
        """Its client has gone; nothing where it has ended already."""
        if not self._over:
            self._counts.ended["abort"].inc()
            self._end("abort")

    def _written(self, index: int, tokens: int) -> None:
        counts, now = self._counts, time.perf_counter()
        if self._first is None:
            self._first = now
            counts.first.observe(now - self._began)
            self._line["first_token_s"] = round(now - self._began, 4)
        if index in self._last:
            for _ in range(tokens):
                counts.between.observe((now - self._last[index]) / tokens)
        self._last[index] = now
        self._tokens += tokens
        counts.written.inc(tokens)
        self._line["completion_tokens"] = self._tokens

    def _end(self, finish: str) -> None:
        counts, now = self._counts, time.perf_counter()
        self._over = True
        (counts.running if self._started else counts.waiting).dec()
        counts.whole.observe(now - self._began)
        self._line["finish"] = finish
        if self._first is not None and self._tokens > 1:
            self._line["tokens_per_s"] = round((self._tokens - 1) / max(now - self._first, 1e-9), 1)
