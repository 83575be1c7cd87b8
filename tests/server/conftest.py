"""A tiny model, two stores that it prefilled, and a service over them."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from pathlib import Path

import pytest

from offload_decode.config import EngineConfig
from offload_decode.prefill_jobs.job import Settings as PrefillSettings
from offload_decode.prefill_jobs.job import prefill
from offload_decode.server.catalog import Catalog
from offload_decode.server.requests import AnsweredRequest, Event, Failed, Settings, Usage
from offload_decode.server.scheduler import Ticket
from offload_decode.server.service import Service
from offload_decode.types import CitedDocument
from tests.tiny import text_model, tiny_tokenizer

TEXTS = {
    "book": "".join(f"Fact {n}: the colour of thing {n} is number {n * n}.\n" for n in range(12)),
    "notes": "The quick brown fox jumps over the lazy dog. " * 9,
}


@dataclass
class Heard(AnsweredRequest):
    """All that a request was told, or the error it ended with."""

    error: Exception | None = None

    @property
    def text(self) -> str:
        return self.answers[0].text if self.answers else ""

    @property
    def tokens(self) -> dict[int, list[int]]:
        return {index: [one.token for one in each.tokens] for index, each in self.answers.items()}

    @property
    def usage(self) -> Usage:
        assert self.done is not None, self.error
        return self.done.usage

    @property
    def citations(self) -> tuple[CitedDocument, ...] | None:
        assert self.done is not None, self.error
        return self.done.citations


class Listener:
    """An `emit`, and a queue of what it was told."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.ticket: Ticket | None = None

    def __call__(self, event: Event) -> None:
        self.events.put(event)

    def next(self) -> Event:
        return self.events.get(timeout=60)

    def until(self, kind: type) -> None:
        while not isinstance(self.next(), kind):
            pass

    def all(self) -> Heard:
        """Waits for the end."""
        heard = Heard()
        while heard.done is None and heard.error is None:
            event = self.next()
            heard.add(event)
            if isinstance(event, Failed):
                heard.error = event.error
        return heard


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    """A folder with `model/`, and `stores/` that it prefilled: for reading only."""
    folder = tmp_path_factory.mktemp("shelf")
    text_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
        prefill(
            str(folder / f"{name}.txt"),
            model=str(folder / "model"),
            out=folder / "stores" / f"{name}.kv",
            settings=PrefillSettings(options={"chunk": 64}),
        )
    return folder


@pytest.fixture
def serve(shelf):
    """Makes services over the stores, or over `places`, which are closed in the end."""
    opened: list[Service] = []

    def make(*places: Path, **settings: object) -> Service:
        config = EngineConfig(options={"budget": "24"})
        service = Service(
            Catalog([*places] or [shelf / "stores"]), Settings(**{"config": config, **settings})
        )
        opened.append(service)
        service.loaded_models.preload(service.catalog.entries()[0]).result(timeout=120)
        return service

    yield make
    for service in opened:
        service.close()


@pytest.fixture
def service(serve):
    return serve()
