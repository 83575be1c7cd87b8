"""Stores that are deleted and appended to while they are being answered from."""

import io
import shutil
import threading
from pathlib import Path

import pytest

from offload_decode.common.errors import StoreNotFound
from offload_decode.server.job import Upload
from offload_decode.server.requests import Delta, Generation, NoSuchName
from offload_decode.server.service import Service
from offload_decode.store.reader import KVStore
from tests.server import conftest
from tests.server.conftest import Heard, Listener
from tests.server.test_catalog import until


@pytest.fixture
def own(shelf, tmp_path):
    """Stores of this test alone."""
    return Path(shutil.copytree(shelf / "stores", tmp_path / "stores"))


def ask(service: Service, tokens: int, *, begun: bool = False) -> Listener:
    """An answer, of which the first token is there where it has `begun`."""
    heard = conftest.ask(service, generation=Generation(max_tokens=tokens, ignore_end=True))
    if begun:
        heard.until(Delta)
    return heard


def whole(heard: Heard, tokens: int) -> bool:
    return heard.error is None and heard.usage.completion == tokens


def test_a_store_is_deleted_behind_the_last_answer_from_it(serve, own):
    service = serve(own)
    heard = ask(service, 300, begun=True)
    thread = threading.Thread(target=service.jobs.delete, args=("book",))
    thread.start()
    until(lambda: "book" not in [entry.name for entry in service.catalog.entries()])
    with pytest.raises(NoSuchName):
        ask(service, 1)
    assert whole(heard.all(), 300)
    thread.join()
    assert sorted(path.name for path in own.iterdir()) == ["notes.kv"]
    with pytest.raises(StoreNotFound):
        KVStore.open(own / "book.kv")


@pytest.mark.slow
def test_a_store_grows_behind_the_last_answer_from_it(serve, own):
    service = serve(own)
    before = service.catalog.entry("book")
    more = Upload("more.txt", io.BytesIO(b"Thing 99 is grey."), text=True)
    job = service.jobs.append("book", [more])
    until(lambda: (now := service.jobs.progress(job.id)) is not None and now.stage == "tokenize", 600)
    heard = ask(service, 3000, begun=True)
    until(lambda: service.jobs.job(job.id).over, 600)
    assert service.jobs.job(job.id).error is None
    assert whole(heard.all(), 3000)
    after = service.catalog.entry("book")
    assert (after.documents, after.digest == before.digest) == (2, False)
    answered = ask(service, 5).all()
    assert answered.usage.cached == after.tokens
