"""Servers on the machines of a Ray cluster, behind one front: Ray Serve keeps the replicas and chooses among
them, by the store that a request names. The only file of the server that knows ray.

A replica opens the stores that it is asked for, and pulls them from a bucket first where that is their place.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast
from uuid import uuid4

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from offload_decode.common.errors import (
    ConfigError,
    OffloadDecodeError,
    StoreBusy,
    StoreExists,
    StoreNotFound,
)
from offload_decode.indexes.verified import cache_folder
from offload_decode.planning.caps import apply_caps
from offload_decode.prefill_jobs.buckets import is_url, pull
from offload_decode.prefill_jobs.buckets.bucket import Bucket
from offload_decode.prefill_jobs.on_ray.workers import connected, installed, shares
from offload_decode.server import metrics
from offload_decode.server.catalog import SUFFIX, Catalog, Entry
from offload_decode.server.http.app import create_app
from offload_decode.server.http.errors import refused
from offload_decode.server.http.front import STORES, Lost, others, run
from offload_decode.server.requests import Busy, Settings
from offload_decode.server.service import Service
from offload_decode.store.format import Manifest
from offload_decode.store.layout import ROOT, header_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

APP = "offload-decode"
_POLL_S = 1.0


@dataclass(frozen=True)
class Plan:
    """What every replica is told. `places` are stores and folders on its own machine; `far` are stores in
    buckets, by URL, which are pulled to their paths there.
    """

    places: tuple[Path, ...]
    far: Mapping[str, Entry]
    settings: Settings
    log_format: Literal["text", "json"] = "text"


def plan_for(
    stores: Sequence[str], settings: Settings, cache: Path, log_format: Literal["text", "json"] = "text"
) -> Plan:
    """For paths and URLs; those of buckets are pulled into `cache`, a folder of the replica's machine. Raises
    what a bucket that cannot be read raises, and `ConfigError` for two of one name.
    """
    places = tuple(Path(os.path.abspath(store)) for store in stores if not is_url(store))
    far = {url: _far(url, cache) for url in stores if is_url(url)}
    if len({entry.name for entry in far.values()}) < len(far):
        raise ConfigError("two stores in buckets have one name: serve one, or copy it to another name")
    return Plan(places, far, settings, log_format)


def _far(url: str, cache: Path) -> Entry:
    bucket = Bucket(url)
    header = header_of(bucket.read(f"{bucket.name}/{ROOT}") or b"")
    if header is None:
        raise StoreNotFound(f"there is no store at {url}: push one there first")
    name = PurePosixPath(bucket.name).name.removesuffix(SUFFIX)
    return Entry.of(Manifest.from_json(header), cache / f"{name}{SUFFIX}")


class BucketCatalog(Catalog):
    """A catalog that names the stores of buckets too, before they are here."""

    def __init__(self, plan: Plan):
        self._far = {entry.name: entry for entry in plan.far.values()}
        caches = {entry.path.parent for entry in self._far.values() if entry.path is not None}
        for cache in caches:
            cache.mkdir(parents=True, exist_ok=True)
        config = plan.settings.config
        super().__init__([*plan.places, *sorted(caches)], config.model, config.adapter)

    def entries(self) -> tuple[Entry, ...]:
        here = {entry.name: entry for entry in super().entries()}
        return tuple((here | {name: far for name, far in self._far.items() if name not in here}).values())

    def entry(self, name: str) -> Entry:
        return {entry.name: entry for entry in self.entries()}.get(name) or super().entry(name)


class Replica:
    """A whole server, in a process of its own; `serve.deployment` makes it one of several."""

    def __init__(self, plan: Plan) -> None:
        settings = plan.settings
        apply_caps(settings.caps, settings.config.device)
        metrics.configure(plan.log_format)
        self.far = {entry.name: (url, entry) for url, entry in plan.far.items()}
        self.service = Service(BucketCatalog(plan), settings)
        self.service.preload()
        self.app = create_app(self.service)

        async def hold(name: str) -> OpenStore:
            if name in self.far:
                await asyncio.to_thread(self._fetch, *self.far[name])
            return OpenStore(self.service, name)

        # Ray is told of what this has given, and sends requests for it here.
        self.hold = _serve().multiplexed(max_num_models_per_replica=settings.max_open)(hold)

    async def ask(self, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
        """Answer a request; see `front.Replicas`."""
        name = _serve().get_multiplexed_model_id()
        stores = {entry.name for entry in self.service.catalog.entries() if entry.is_store}
        app: ASGIApp = self.app
        try:
            for one in dict.fromkeys((name, *await others(body))):
                if one in {STORES, *stores}:
                    await self.hold(one)
        except OffloadDecodeError as error:
            app = refused(error)
        async with aclosing(run(app, scope, body)) as answered:
            async for messages in answered:
                yield messages

    async def metrics(self) -> bytes:
        """What it counts."""
        return await asyncio.to_thread(self.service.metrics.text)

    def _fetch(self, url: str, entry: Entry) -> None:
        """Pull a store, unless it is here; another replica may be at it. Then load its model."""
        assert entry.path is not None, "a store has a path"
        while not entry.path.exists():
            try:
                pull(url, entry.path)
            except StoreBusy:
                time.sleep(_POLL_S)
            except StoreExists:
                break
        self.service.catalog.refresh()
        self.service.loaded_models.preload(self.service.catalog.entry(entry.name)).result()


class OpenStore:
    """A store that a replica has open, until it is given up for another."""

    def __init__(self, service: Service, name: str):
        self._service, self._name = service, name

    def __del__(self) -> None:
        self._service.loaded_models.forget(self._name)


class RayReplicas:
    """`front.Replicas`, through a handle of Ray Serve."""

    def __init__(self, handle: Any):
        self._handle = handle
        self._errors = importlib.import_module("ray.exceptions")
        self._refusals = importlib.import_module("ray.serve.exceptions")

    async def ask(self, name: str, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
        handle = self._handle.options(stream=True, multiplexed_model_id=name)
        answering = handle.ask.remote(dict(scope), body)
        try:
            async for messages in answering:
                yield messages
        except self._refusals.BackPressureError:
            raise Busy("all servers are at work: try again in a moment") from None
        except (self._errors.RayActorError, self._refusals.DeploymentUnavailableError) as error:
            raise Lost from error
        finally:
            answering.cancel()

    async def metrics(self) -> bytes:
        """Of all replicas, each under its number."""
        texts = await self._handle.broadcast("metrics").results_async(timeout_s=10, return_exceptions=True)
        return merged([text for text in texts if isinstance(text, bytes)])


def merged(texts: list[bytes]) -> bytes:
    """Metrics of several servers as one text, with a label `replica`."""
    families: dict[str, Metric] = {}
    for number, text in enumerate(texts):
        for family in text_string_to_metric_families(text.decode()):
            whole = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type, family.unit)
            )
            for sample in family.samples:
                labels = {**sample.labels, "replica": str(number)}
                whole.samples.append(sample._replace(labels=labels))
    return generate_latest(cast(CollectorRegistry, SimpleNamespace(collect=families.values)))


@contextmanager
def on_ray(plan: Plan, replicas: int | None = None) -> Iterator[RayReplicas]:
    """Replicas on the cluster that RAY_ADDRESS names, or on this machine alone, one for each GPU or for each
    machine where nothing else is said. They end with the block. Raises `ConfigError` where Ray is not
    installed, `OffloadDecodeError` where no cluster answers.
    """
    ray = installed("--on ray")
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        raise ConfigError("a Ray client streams no answers: run this in the cluster, with RAY_ADDRESS=auto")
    settings = plan.settings
    with connected(ray, "ray"):
        count, share = shares(ray, replicas, settings.config.device)
        serve = _serve()
        deployed = serve.deployment(
            name=APP,
            num_replicas=count,
            ray_actor_options=share,
            max_ongoing_requests=settings.max_running,
            max_queued_requests=settings.max_waiting,
            health_check_period_s=2.0,
            graceful_shutdown_timeout_s=5.0,
        )(Replica)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled")
        name = f"{APP}-{uuid4().hex[:8]}"  # others may serve on the same cluster
        try:
            yield RayReplicas(serve.run(deployed.bind(plan), name=name, route_prefix=None))
        finally:
            if os.environ.get("RAY_ADDRESS"):
                serve.delete(name)
            else:
                serve.shutdown()


def cache_for(stores: Sequence[str]) -> Path:
    """Where a machine keeps the stores that it pulled: a folder for each list of stores."""
    return cache_folder() / "served" / hashlib.sha256("\n".join(stores).encode()).hexdigest()[:16]


def _serve() -> Any:
    return importlib.import_module("ray.serve")
