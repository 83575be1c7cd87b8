"""What a server holds: models one after another, stores while they are used, nothing of what was replaced."""

import gc
import shutil
import time
import weakref
from dataclasses import replace

import pytest

from offload_decode.common.errors import ModelError
from offload_decode.prefill_jobs.append import append
from offload_decode.server import loaded_models
from offload_decode.server.requests import Loading, NoSuchName
from tests.server import conftest
from tests.server.conftest import TEXTS, prefilled
from tests.tiny import saved_model


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


def test_so_many_stores_are_open_as_have_room_among_the_maps_of_memory(serve, monkeypatch):
    service = serve()
    monkeypatch.setattr("offload_decode.server.loaded_models.MOST_FILES", 1)
    assert ask(service, "book").error is None
    assert ask(service, "notes").error is None
    assert service.loaded_models.open_stores() == ["notes"]
    assert len(service.prefix_cache) == 1  # that of the other store went with it
    assert ask(service, "book").error is None


def test_of_the_ways_to_ask_a_store_the_last_ones_stay_in_memory(service):
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


def test_a_store_that_grew_is_opened_again(serve, shelf, tmp_path):
    shutil.copytree(shelf / "stores", tmp_path / "stores")
    service = serve(tmp_path / "stores")
    before = ask(service, "book")
    (tmp_path / "more.txt").write_text("One more thing, whose colour is grey.\n")
    append(tmp_path / "stores" / "book.kv", str(tmp_path / "more.txt"))
    service.catalog.refresh()
    after = ask(service, "book")
    assert after.error is None
    assert after.usage.cached > before.usage.cached
    shutil.rmtree(tmp_path / "stores" / "book.kv")
    service.catalog.refresh()
    with pytest.raises(NoSuchName, match="'book'"):
        ask(service, "book")
    assert "book" not in service.loaded_models.open_stores()


def test_models_take_turns(serve, shelf, tmp_path):
    prefilled(tmp_path, "others", TEXTS["notes"], saved_model(tmp_path / "other", seed=1))
    service = serve(shelf / "stores", tmp_path / "stores")
    held = weakref.ref(service.loaded_models.model(service.catalog.entry("book")).model)
    assert ask(service, "book").error is None  # what is remembered of it does not keep the model
    with pytest.raises(Loading, match="'others'"):
        ask(service, "others")
    assert ask_patiently(service, "others").error is None
    gc.collect()
    assert held() is None
    assert ask_patiently(service, "book").error is None


def test_a_bare_model_is_none_whose_positions_are_scaled(serve):
    service = serve(max_models=2)
    entry = service.catalog.entry("book")
    scaled = service.loaded_models.preload(replace(entry, scaled="yarn:2")).result(timeout=120)
    assert scaled.scaled == "yarn:2"
    key = service.loaded_models._model_key(replace(entry, path=None))
    assert key.scaled == ""


def test_a_model_whose_request_never_comes_back_makes_way(serve, monkeypatch):
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


def test_a_model_that_cannot_be_loaded_is_tried_again(serve, shelf, tmp_path):
    shutil.copytree(shelf / "stores", tmp_path / "stores")
    service = serve(tmp_path / "stores", max_models=2)
    missing = service.catalog.entry("book")
    object.__setattr__(missing, "model_id", str(tmp_path / "missing"))
    for _ in range(2):
        with pytest.raises(ModelError):
            ask_patiently(service, "book")
    assert ask(service, "notes").error is None
