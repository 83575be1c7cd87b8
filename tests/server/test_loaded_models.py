"""What a server holds: models one after another, stores until the last answer from them has ended, nothing of
what was replaced.
"""

import gc
import io
import shutil
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from offload_decode.common.errors import ModelError, StoreNotFound
from offload_decode.prefill_jobs.append import append
from offload_decode.prefill_jobs.job import prefill
from offload_decode.server import loaded_models
from offload_decode.server.job import Upload
from offload_decode.server.loaded_models import Releases
from offload_decode.server.requests import Delta, Generation, Loading, NoSuchName
from offload_decode.store.reader import KVStore
from tests.server import conftest
from tests.server.conftest import TEXTS, prefilled
from tests.server.test_catalog import until
from tests.tiny import plain_lora, saved_model


def ask(service, model, **more):
    return conftest.ask(service, model, "Why?", 4, **more).all()


def ask_patiently(service, model):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            return ask(service, model)
        except Loading:
            time.sleep(0.05)
    raise AssertionError("never loaded")


def test_the_stores_used_least_recently_are_closed(serve):
    service = serve(max_open=2)
    opened = service.loaded_models.get(service.catalog.entry("book"))
    held = weakref.ref(opened.start.prefix.host)
    del opened
    for options in ({"budget": "8"}, {"budget": "9"}):
        assert ask(service, "notes", options=options).error is None
    gc.collect()
    assert service.loaded_models.open_stores() == ["notes"]
    assert held() is None
    assert ask(service, "book").error is None


def test_open_stores_are_bounded_by_their_number_of_files(serve, monkeypatch):
    service = serve()
    monkeypatch.setattr("offload_decode.server.loaded_models.MOST_FILES", 1)
    assert ask(service, "book").error is None
    assert ask(service, "notes").error is None
    assert service.loaded_models.open_stores() == ["notes"]
    assert len(service.prefix_cache) == 1  # that of the other store went with it
    assert ask(service, "book").error is None


def test_the_last_selectors_of_a_store_stay_in_memory(service):
    entry = service.catalog.entry("book")
    held = []
    for budget in range(8, 8 + 3 * loaded_models.MOST_WAYS):
        options = {"budget": str(budget)}
        assert ask(service, "book", selector="quest", options=options).error is None
        held.append(weakref.ref(service.loaded_models.get(entry, "quest", options).start.prefix.selector))
    while service.scheduler.uses("book"):
        time.sleep(0.01)
    gc.collect()
    assert sum(one() is not None for one in held) == loaded_models.MOST_WAYS


def test_selectors_of_one_store_share_its_rows(service):
    entry = service.catalog.entry("book")
    hosts = {
        id(service.loaded_models.get(entry, selector).start.prefix.host)
        for selector in ("topk", "quest", "dense")
    }
    assert len(hosts) == 1


def test_a_store_that_grew_is_opened_again(serve, own, tmp_path):
    service = serve(own)
    before = ask(service, "book")
    (tmp_path / "more.txt").write_text("One more thing, whose colour is grey.\n")
    append(own / "book.kv", str(tmp_path / "more.txt"))
    service.catalog.refresh()
    after = ask(service, "book")
    assert after.error is None
    assert after.usage.cached > before.usage.cached
    shutil.rmtree(own / "book.kv")
    service.catalog.refresh()
    with pytest.raises(NoSuchName, match="'book'"):
        ask(service, "book")
    assert "book" not in service.loaded_models.open_stores()


def test_models_take_turns(serve, shelf, tmp_path):
    prefilled(tmp_path, "others", TEXTS["notes"], saved_model(tmp_path / "other", seed=1))
    service = serve(shelf / "stores", tmp_path / "stores")
    held = weakref.ref(service.loaded_models.model(service.catalog.entry("book")).model)
    assert ask(service, "book").error is None  # what is remembered of it does not keep the model
    with pytest.raises(Loading, match=r"'others' has been loading for \d+ s"):
        ask(service, "others")
    assert ask_patiently(service, "others").error is None
    gc.collect()
    assert held() is None
    assert ask_patiently(service, "book").error is None


def test_a_bare_model_never_has_scaled_rope(serve):
    service = serve(max_models=2)
    entry = service.catalog.entry("book")
    scaled = service.loaded_models.preload(replace(entry, scaled="yarn:2")).result(timeout=120)
    assert scaled.scaled == "yarn:2"
    key = service.loaded_models._model_key(replace(entry, path=None))
    assert key.scaled == ""


def test_stores_are_answered_with_their_adapter_which_no_other_shares(serve, shelf, tmp_path):
    folder = plain_lora(tmp_path / "lora")
    lent = tmp_path / "stores" / "adapted.kv"
    lent.parent.mkdir()
    (tmp_path / "text.txt").write_text(TEXTS["notes"])
    prefill(str(tmp_path / "text.txt"), model=str(shelf / "model"), out=lent, adapter=str(folder))
    service = serve(shelf / "stores", lent.parent, max_models=2)
    held, entry = service.loaded_models, service.catalog.entry
    base, adapted = (held.preload(entry(name)).result(timeout=120) for name in ("book", "adapted"))
    assert (base.adapter, adapted.adapter) == ("", str(folder))
    assert ask_patiently(service, "adapted").error is None
    assert ask_patiently(service, "model+lora").error is None
    assert len(held.models()) == 2, "the bare model is the one of the store"


def test_a_model_that_is_not_asked_again_makes_way(serve, monkeypatch):
    monkeypatch.setattr(loaded_models, "RETURN_S", 0.2)
    service = serve()
    other = replace(service.catalog.entry("book"), name="other", dtype="bfloat16")
    assert ask_patiently(service, "book").error is None
    service.loaded_models.preload(other).result(timeout=60)  # nobody asks it
    assert ask_patiently(service, "book").error is None
    with pytest.raises(Loading):
        service.loaded_models.model(other)  # nor again
    assert ask_patiently(service, "book").error is None


def test_a_store_that_was_opened_too_late_is_not_kept(service, monkeypatch):
    """Another model took the place of its own while it was being opened."""
    opened = service.loaded_models._opened

    def late(*args):
        with service.loaded_models._lock:
            service.loaded_models._drop(next(iter(service.loaded_models._models)))
        return opened(*args)

    monkeypatch.setattr(service.loaded_models, "_opened", late)
    service.loaded_models.get(service.catalog.entry("book"))
    assert service.loaded_models.open_stores() == []


def test_a_model_that_cannot_be_loaded_is_tried_again(serve, own, tmp_path):
    service = serve(own, max_models=2)
    missing = service.catalog.entry("book")
    object.__setattr__(missing, "model_id", str(tmp_path / "missing"))
    for _ in range(2):
        with pytest.raises(ModelError):
            ask_patiently(service, "book")
    assert ask(service, "notes").error is None


def test_a_store_is_released_when_nothing_uses_it():
    answered, closed = {"book", "other"}, []
    own = Releases(answered.__contains__, closed.append)
    inside, leave = threading.Event(), threading.Event()

    def release() -> None:
        with own.released("book"):
            inside.set()
            leave.wait(60)

    with own.asking("book"):
        thread = threading.Thread(target=release)
        thread.start()
        answered.discard("book")
        time.sleep(0.1)
        assert not inside.is_set()
    assert inside.wait(60)
    assert closed == ["book"]
    with pytest.raises(Loading), own.asking("book"):
        pass
    with own.asking("other"):
        pass
    leave.set()
    thread.join()
    with own.asking("book"):
        pass


def test_names_of_finished_requests_are_forgotten():
    own = Releases(set().__contains__, [].append)
    for number in range(9):
        with own.asking(f"name {number}"):
            assert len(own._beginning) == 1
    assert not own._beginning


def test_a_release_waits_patiently_before_it_refuses_requests(monkeypatch):
    monkeypatch.setattr(loaded_models, "PATIENCE_S", 0.2)
    answered, done = {"book"}, threading.Event()
    own = Releases(answered.__contains__, [].append)

    def release() -> None:
        with own.released("book"):
            done.set()

    thread = threading.Thread(target=release)
    thread.start()
    with own.asking("book"):  # nobody is refused while there is hope for a quiet moment
        pass

    def refused() -> bool:
        try:
            with own.asking("book"):
                return False
        except Loading:
            return True

    until(refused)
    assert not done.is_set()
    answered.clear()
    thread.join()
    assert done.is_set()
    assert not refused()


def test_a_store_is_released_to_one_at_a_time():
    own = Releases(set().__contains__, [].append)
    inside: list[int] = []
    most: list[int] = []

    def release(number: int) -> None:
        with own.released("book"):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.01)
            inside.remove(number)

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(release, range(5)))
    assert most == [1] * 5


def begun(service, tokens):
    """An answer of so many tokens, the first of which is there."""
    heard = conftest.ask(service, generation=Generation(max_tokens=tokens, ignore_end=True))
    heard.until(Delta)
    return heard


def assert_whole(heard, tokens):
    answered = heard.all()
    assert (answered.error, answered.usage.completion) == (None, tokens)


def test_a_store_is_deleted_behind_the_last_answer_from_it(serve, own):
    service = serve(own)
    heard = begun(service, 300)
    thread = threading.Thread(target=service.jobs.delete, args=("book",))
    thread.start()
    until(lambda: "book" not in [entry.name for entry in service.catalog.entries()])
    with pytest.raises(NoSuchName):
        ask(service, "book")
    assert_whole(heard, 300)
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
    heard = begun(service, 3000)
    until(lambda: service.jobs.job(job.id).over, 600)
    assert service.jobs.job(job.id).error is None
    assert_whole(heard, 3000)
    after = service.catalog.entry("book")
    assert (after.documents, after.digest == before.digest) == (2, False)
    assert ask(service, "book").usage.cached == after.tokens
