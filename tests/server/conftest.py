"""A tiny model, two stores that it prefilled, and a service over them."""

import queue
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from offload_decode.config import EngineConfig
from offload_decode.prefill_jobs.job import Settings as PrefillSettings
from offload_decode.prefill_jobs.job import prefill
from offload_decode.server.catalog import Catalog
from offload_decode.server.requests import AnsweredRequest, Event, Failed, Generation, Settings, Usage
from offload_decode.server.scheduler import Ticket
from offload_decode.server.service import ChatRequest, Service
from offload_decode.types import CitedDocument
from tests.tiny import saved_model

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


def ask(service, model="book", question="What is the colour of thing 3?", tokens=12, **more):
    """Asks a question; who listens to its answer."""
    generation = more.pop("generation", Generation(max_tokens=tokens))
    messages = more.pop("messages", [{"role": "user", "content": question}])
    listener = Listener()
    listener.ticket = service.chat(ChatRequest("id", model, generation, messages=messages, **more), listener)
    return listener


class Letters:
    """As `Pieces`, but each token is a letter of its own."""

    def __init__(self, tokenizer: object) -> None:
        pass

    def push(self, token: int) -> str:
        return chr(0x4E00 + token)

    def rest(self) -> str:
        return ""


def prefilled(folder: Path, name: str, text: str, model: Path) -> None:
    """A store in `folder/stores`, of a text that lies in `folder`."""
    (folder / f"{name}.txt").write_text(text)
    settings, out = PrefillSettings(options={"chunk": 64}), folder / "stores" / f"{name}.kv"
    prefill(str(folder / f"{name}.txt"), model=str(model), out=out, settings=settings)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint: for reading only."""
    return saved_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    """A folder with `model/`, and `stores/` that it prefilled: for reading only."""
    folder = tmp_path_factory.mktemp("shelf")
    model = saved_model(folder / "model")
    for name, text in TEXTS.items():
        prefilled(folder, name, text, model)
    return folder


@pytest.fixture
def own(shelf, tmp_path):
    """The stores, for a test that changes them."""
    return Path(shutil.copytree(shelf / "stores", tmp_path / "stores"))


@pytest.fixture
def serve(shelf):
    """Makes services over the stores, or over `places`, which are closed in the end."""
    with ExitStack() as stack:

        def make(*places: Path, **settings: object) -> Service:
            settings = {"config": EngineConfig(options={"budget": "24"}), **settings}
            service = Service(Catalog([*places] or [shelf / "stores"]), Settings(**settings))
            stack.callback(service.close)
            service.loaded_models.preload(service.catalog.entries()[0]).result(timeout=120)
            return service

        yield make


@pytest.fixture
def service(serve):
    return serve()
