"""A client's text that is stored is found, whatever stands at its seams, and nothing else ever is."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload_decode.models.loading import wrap
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.job import prefill_texts
from offload_decode.server import matching
from offload_decode.server.matching import Matcher
from offload_decode.server.requests import WrongField
from offload_decode.store.reader import KVStore
from tests.models.tokenizers import KINDS, tokenizer_of
from tests.server.conftest import TEXTS as SERVED
from tests.server.conftest import ask
from tests.server.test_chat_prompt import CHAT, said, user
from tests.tiny import tiny_model

BOOK = "The lamp burns low. (He said so.)\n\n    Who wrote it? The keeper of </s> é 字 🙂 the lighthouse"
PLAIN = BOOK.split("of </s>")[0] + "of the lamp"  # letters that every tokenizer of the tests knows
LONGER = f"{BOOK}\n\nand the sea was calm."
TEXTS = {
    "plain": [TextDocument("d", PLAIN)],
    "book": [TextDocument("d", BOOK)],
    "longer": [TextDocument("d", LONGER)],
    "several": [TextDocument("a.txt", BOOK), TextDocument("b.txt", "  What is the sea?\n")],
}


class Stored(NamedTuple):
    name: str
    path: Path | None
    digest: str


@pytest.fixture(scope="module")
def stocked(tmp_path_factory):
    @cache
    def of(kind, template, names):
        tokenizer = tokenizer_of(kind, "added", template)
        loaded = wrap(tiny_model(vocab_size=len(tokenizer)), tokenizer)
        folder, stores = tmp_path_factory.mktemp("stores"), [Stored("bare", None, "")]
        for name in names:
            prefill_texts(loaded, TEXTS[name], folder / name)
            stores.append(Stored(name, folder / name, KVStore.open(folder / name).store_digest))
        return loaded, stores

    return of


MATCHER = Matcher(0)


def matched(stocked, *messages, matcher=MATCHER):
    loaded, stores = stocked
    found = matcher.match(loaded, messages, stores)
    return None if found is None else (found[0].name, found[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [None, CHAT], ids=["plain", "chat"])
def test_a_stored_text_is_found_for_every_kind_of_tokenizer(stocked, kind, template):
    held = stocked(kind, template, ("plain",))
    for gap in ("\n\n", " ", "\n\n\n\t", "\n<end>\n"):
        found = matched(held, user(f"{PLAIN}{gap}Who is it?"))
        assert found == ("plain", [user(f"{gap.strip()}\nWho is it?".strip())])


@pytest.fixture
def held(stocked):
    return stocked("llama 3", CHAT, ("book", "longer", "several"))


def test_text_around_the_stored_text_is_the_question(held):
    ahead = {"role": "system", "content": "Be brief."}
    turns = [said("He."), user("Why?")]
    found = matched(held, ahead, user(f"<text>{BOOK}</text>\nWho?"), *turns)
    assert found == ("book", [user("Be brief.\n\n<text>\n\n</text>\nWho?"), *turns])
    parts = [{"type": "text", "text": BOOK}, {"type": "text", "text": "\nWho?"}]
    assert matched(held, user(parts)) == ("book", [user("Who?")])
    assert matched(held, {"role": "system", "content": BOOK}, user("Who?")) == ("book", [user("Who?")])
    assert matched(held, user(BOOK), said("Yes?"), user("Who?")) == (
        "book",
        [user(""), said("Yes?"), user("Who?")],
    )


def test_the_longest_of_several_is_taken(held):
    assert matched(held, user(f"{LONGER} Who?")) == ("longer", [user("Who?")])


def test_several_documents_are_found_with_any_white_space_between(held):
    first, second = (f"Document: {one.name}\n{one.text}" for one in TEXTS["several"])
    for gap in ("\n\n", "\n", "  \n\n\n"):
        assert matched(held, user(f" {first}{gap}{second}{gap}Who?")) == ("several", [user("Who?")])
    assert matched(held, user(f"{first}{second[1:]} Who?")) is None


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_text_that_differs_in_one_letter_is_not_matched(held, data):
    place = data.draw(st.integers(0, len(BOOK) - 1))
    other = data.draw(st.sampled_from([letter for letter in "ax. \n字" if letter != BOOK[place]]))
    assert matched(held, user(f"{BOOK[:place]}{other}{BOOK[place + 1 :]}\n\nWho?")) is None


@pytest.mark.parametrize("text", [BOOK[:-1], f"{BOOK}s", f"{BOOK}.", BOOK.replace("    ", "  "), BOOK[1:]])
def test_another_text_is_not_taken_for_it(held, text):
    assert matched(held, user(text)) is None
    assert matched(held, user(f"{text} Who?")) is None


def test_line_ends_and_composed_letters_are_one_text(held):
    import unicodedata

    windows = BOOK.replace("\n", "\r\n")
    assert matched(held, user(f"{windows}\r\n\r\nWho?")) == ("book", [user("Who?")])
    apart = unicodedata.normalize("NFD", BOOK)
    assert apart != BOOK
    assert matched(held, user(f"{apart}\n\nWho?")) == ("book", [user("Who?")])


def test_only_the_beginning_of_a_chat_is_matched(held):
    assert matched(held, user("Who?"), said(BOOK), user(BOOK)) is None
    assert matched(held, said(BOOK), user("Who?")) is None
    assert matched(held, user(f"{'x' * matching.AHEAD} {BOOK} Who?")) is None


def test_a_template_may_name_the_day(stocked):
    loaded, stores = stocked("llama 3", CHAT.replace("<s>", "<s>It is today.</s>"), ("book",))
    later = dataclasses.replace(loaded)
    later.__dict__["prompt"] = dataclasses.replace(loaded.prompt, before="<s>It is tomorrow.</s>[user]")
    assert matched((later, stores), user(f"{BOOK} Who?"), matcher=Matcher(0)) == ("book", [user("Who?")])


def test_a_short_message_is_not_looked_at(held):
    text = user(f"{BOOK} Who?")
    assert matched(held, text, matcher=Matcher(len(BOOK) + 6)) is None
    assert matched(held, text, matcher=Matcher(len(BOOK) + 5)) is not None


def test_a_store_of_another_model_is_passed_over(held):
    loaded, _ = held
    other = wrap(tiny_model(seed=1, vocab_size=len(loaded.tokenizer)), loaded.tokenizer)
    assert matched((other, held[1]), user(f"{BOOK} Who?")) is None


def test_a_damaged_store_is_named_in_the_log(held, tmp_path, caplog):
    assert matched((held[0], [Stored("x", tmp_path, "x")]), user(f"{BOOK} Who?")) is None
    assert str(tmp_path) in caplog.text


def test_messages_that_cannot_be_read_are_refused(held):
    with pytest.raises(WrongField):
        matched(held, user(None))


def test_a_long_message_is_matched_without_being_read_as_tokens(held, monkeypatch):
    loaded, stores = held
    matcher, asked = Matcher(0), [user(f"{BOOK} {'Who? ' * 80_000}")]
    matcher.match(loaded, asked, stores)
    monkeypatch.setattr(matching, "_decoded", None)
    monkeypatch.setattr(matching, "encode", None)
    assert matcher.match(loaded, asked, stores) is not None


def test_a_service_answers_from_the_store_that_is_found(service):
    service.matcher = Matcher(0)
    question = "What is the colour of thing 3?"
    [bare] = [entry.name for entry in service.catalog.entries() if entry.path is None]
    whole = ask(service, bare, f"{SERVED['book']}\n\n{question}", 5).all()
    asked = ask(service, "book", question, 5).all()
    assert whole.tokens == asked.tokens
    assert whole.usage.prompt == asked.usage.prompt
    assert whole.usage.cached >= service.catalog.entry("book").tokens
    twice = ask(service, "book", f"{SERVED['book']}\n\n{question}", 5).all()
    assert twice.usage.prompt > service.catalog.entry("book").tokens + len(SERVED["book"])
