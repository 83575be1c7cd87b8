"""A tiny model, two stores that it prefilled, and a service over them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from offload_decode.config import EngineConfig
from offload_decode.prefill_jobs.job import Settings as PrefillSettings
from offload_decode.prefill_jobs.job import prefill
from offload_decode.server.catalog import Catalog
from offload_decode.server.requests import (
    CitedDocument,
    Delta,
    Done,
    Ended,
    Event,
    Failed,
    Prompted,
    Settings,
    Usage,
)
from offload_decode.server.scheduler import Ticket
from offload_decode.server.service import Service
from tests.tiny import text_model, tiny_tokenizer

TEXTS = {
    "book": "".join(f"Fact {n}: the colour of thing {n} is number {n * n}.\n" for n in range(12)),
    "notes": "The quick brown fox jumps over the lazy dog. " * 9,
}


@dataclass
class AttentionDemand:
    """What a request was told, whole."""

    prompted: Prompted | None = None
    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    done: Done | None = None
    error: Exception | None = None

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

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

    def all(self) -> AttentionDemand:
        """Waits for the end."""
        heard = AttentionDemand()
        while heard.done is None and heard.error is None:
            match self.next():
                case Prompted() as event:
                    heard.prompted = event
                case Delta(index, text, tokens):
                    heard.texts[index] = heard.texts.get(index, "") + text
                    heard.tokens.setdefault(index, []).extend(one.token for one in tokens)
                case Ended(index, finish):
                    heard.finish[index] = finish
                case Done() as event:
                    heard.done = event
                case Failed(error):
                    heard.error = error
        return heard


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def serve(shelf: Path) -> Iterator[Callable[..., Service]]:
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
def service(serve: Callable[..., Service]) -> Service:
    return serve()
