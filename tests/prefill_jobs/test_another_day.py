"""A chat template may name the day: what was begun before midnight goes on after it, in equal bytes."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from offload_decode.common.errors import StoreMismatch
from offload_decode.engine.engine import Engine
from offload_decode.models.loading import LoadedModel, wrap
from offload_decode.models.prompt import encode, rendered
from offload_decode.prefill_jobs.append import append_texts
from offload_decode.prefill_jobs.collect import collect
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.destinations import Place, same_store
from offload_decode.prefill_jobs.job import Maker, Settings, make, prefill_texts, prepare, settled
from offload_decode.prefill_jobs.many import Job, prefill_many
from offload_decode.prefill_jobs.renew import compared, renew_as
from offload_decode.server.catalog import Entry
from offload_decode.server.matching import Matcher
from offload_decode.store.reader import KVStore
from tests.prefill_jobs.killing import tree
from tests.tiny import text_model, tiny_tokenizer

TEMPLATE = (
    "Today Date: {{ strftime_now('%d %b %Y') }}\n\n{% for message in messages %}{{ message['content'] }}"
    "{{ '</s>' if message['role'] == 'assistant' else '\nAnswer:' }}{% endfor %}"
)
BEFORE, AFTER = datetime(2026, 11, 25, 23, 59), datetime(2026, 11, 26, 0, 1)
TEXTS = [TextDocument("a.txt", "The lamp burns low. " * 5), TextDocument("b.txt", "Who wrote it?")]
SETTINGS = Settings(options={"chunk": 16})


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[datetime], LoadedModel]:
    """The model as a process has it that begins at a time."""

    def at(time: datetime) -> LoadedModel:
        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return time

        monkeypatch.setattr(chat_template_utils, "datetime", Clock)
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = TEMPLATE
        return wrap(text_model(), tokenizer, "tiny")

    return at


def interrupt(stage: str, done: int, total: int) -> None:
    if stage == "prefill" and done:
        raise KeyboardInterrupt


def test_a_prefill_that_was_begun_the_day_before_goes_on(on, tmp_path):
    prefill_texts(on(BEFORE), TEXTS, tmp_path / "whole", SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        prefill_texts(on(BEFORE), TEXTS, tmp_path / "store", SETTINGS, progress=interrupt)
    assert prefill_texts(on(AFTER), TEXTS, tmp_path / "store", SETTINGS).resumed_from == 16
    assert tree(tmp_path / "store") == tree(tmp_path / "whole")


def test_a_store_of_the_day_before_is_there_already_and_another_text_is_refused(on, tmp_path):
    made = make(
        loaded := on(BEFORE), prepare(loaded, TEXTS, SETTINGS, place := Place(tmp_path / "s")), place, print
    )
    again = prepare(on(AFTER), TEXTS, SETTINGS, place)
    assert (found := settled(again, place)) is not None
    assert (found.kept, found.n_tokens) == (True, made.n_tokens)
    with pytest.raises(StoreMismatch, match="another text"):
        settled(prepare(on(AFTER), TEXTS[:1], SETTINGS, place), place)


def test_a_store_that_does_not_state_its_opening_is_kept_on_its_day(on, tmp_path):
    loaded, place = on(BEFORE), Place(tmp_path / "store")
    prefill_texts(loaded, TEXTS, place.path, SETTINGS)
    found, work = place.found(), prepare(loaded, TEXTS, SETTINGS, place)
    assert found is not None
    assert found.manifest.opening == "Today Date: 25 Nov 2026\n\n"
    earlier = found._replace(manifest=replace(found.manifest, opening=None))
    same_store(earlier, work.manifest, work.documents, "store")


def test_an_append_on_another_day_equals_one_prefill_of_all(on, tmp_path):
    prefill_texts(on(BEFORE), TEXTS, tmp_path / "whole", SETTINGS)
    more = [*TEXTS, TextDocument("c.txt", "The sea was calm. " * 4)]
    prefill_texts(on(BEFORE), more, tmp_path / "all", SETTINGS)
    report = append_texts(on(AFTER), more, tmp_path / "whole")
    assert (report.known, report.added) == (("a.txt", "b.txt"), ("c.txt",))
    assert tree(tmp_path / "whole") == tree(tmp_path / "all")


def test_a_renewal_on_another_day_keeps_the_opening_of_the_store(on, tmp_path):
    edited = [TEXTS[0], TEXTS[1]._replace(text="Who read it?")]
    prefill_texts(on(BEFORE), TEXTS, tmp_path / "store", SETTINGS)
    prefill_texts(on(BEFORE), edited, tmp_path / "whole", SETTINGS)
    loaded = on(AFTER)
    plan = compared(KVStore.open(tmp_path / "store"), loaded.tokenizer, loaded.prompt, edited)
    assert plan.kept_tokens >= 16
    renew_as(plan, loaded, tmp_path / "store")
    assert tree(tmp_path / "store") == tree(tmp_path / "whole")


def test_collections_and_several_corpora_are_kept_on_another_day(on, tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    for document in TEXTS:
        (tmp_path / "texts" / document.name).write_text(document.text)
    jobs = [Job(str(tmp_path / "texts" / one.name), str(tmp_path / f"{one.name}.kv")) for one in TEXTS]
    for time in (BEFORE, AFTER):
        maker = Maker("tiny", SETTINGS)
        maker.__dict__["loaded"] = loaded = on(time)
        assert not collect(str(tmp_path / "texts"), tmp_path / "out", maker).failed
        (tmp_path / "out" / "documents.jsonl").write_bytes(b"")  # a kill before an entry, after its store
        monkeypatch.setattr("offload_decode.prefill_jobs.many.load", lambda *_, loaded=loaded: loaded)
        results = prefill_many(jobs, model="tiny", settings=SETTINGS).values()
        assert [one.kept for one in results] == [time == AFTER] * 2


@pytest.mark.parametrize("more", [[], TEXTS[1:]])
def test_a_question_of_another_day_follows_what_the_template_wrote_then(on, tmp_path, more):
    loaded = on(BEFORE)
    prefill_texts(loaded, [TEXTS[0], *more], tmp_path / "store", SETTINGS)
    first = TEXTS[0].text.rstrip()
    asked = f"Document: a.txt\n{first}\n\nDocument: b.txt\n{more[0].text}" if more else first
    whole = rendered(
        loaded.tokenizer, [{"role": "user", "content": f"{asked}\n\nWho?"}], add_generation_prompt=True
    )
    engine = Engine.open(tmp_path / "store", on(AFTER))
    found = [*engine.store.tokens.tolist(), *engine.question_tokens("Who?")]
    assert found == encode(loaded.tokenizer, whole)
    assert "25 Nov" in whole


def test_what_is_cited_and_matched_leaves_out_the_opening_of_that_day(on, tmp_path):
    prefill_texts(on(BEFORE), TEXTS, tmp_path / "store", SETTINGS)
    store, loaded = KVStore.open(tmp_path / "store"), on(AFTER)
    engine = Engine.open(store, loaded)
    assert loaded.prompt.before == "Today Date: 26 Nov 2026\n\n"
    assert engine.prompt.before == "Today Date: 25 Nov 2026\n\n"
    assert engine.prompt == replace(loaded.prompt, before=engine.prompt.before)
    entry = Entry.of(store.manifest, store.path, digest=store.store_digest)
    text = "\n\n".join(f"Document: {one.name}\n{one.text.rstrip()}" for one in TEXTS)
    found = Matcher(0).match(loaded, [{"role": "user", "content": f"{text}\n\nWho?"}], [entry])
    assert found is not None
    assert found[1] == [{"role": "user", "content": "Who?"}]


def test_a_store_keeps_its_system_message_and_another_one_is_refused(on, tmp_path):
    loaded, brief = on(BEFORE), replace(SETTINGS, system="Be brief.")
    loaded.tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"
    prefill_texts(loaded, TEXTS, tmp_path / "store", brief)
    engine = Engine.open(tmp_path / "store", loaded)
    opening = "[system]Be brief.[user]"
    assert engine.decode(engine.store.tokens.tolist()).startswith(f"{opening}Document: a.txt")
    assert engine.store.manifest.opening == engine.prompt.before == opening
    assert prefill_texts(loaded, TEXTS, tmp_path / "again", brief).n_tokens == engine.store.manifest.n_tokens
    place = Place(tmp_path / "store")
    assert settled(prepare(loaded, TEXTS, brief, place), place)
    for other in (SETTINGS, replace(SETTINGS, system="Be long.")):
        with pytest.raises(StoreMismatch, match="of another"):
            settled(prepare(loaded, TEXTS, other, place), place)
