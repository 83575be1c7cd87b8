"""Edits that are drawn: after each renewal a store holds what a prefill of its corpus does, whatever it went
through before. Some renewals are stopped, and the corpus changes again before the next one.
"""

import random
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from offload_decode.models.loading import LoadedModel
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.job import Settings, prefill_texts
from offload_decode.prefill_jobs.renew import compared, renew_as
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import partial_path
from tests.prefill_jobs.killing import tree
from tests.prefill_jobs.test_append import CHAT, loaded
from tests.prefill_jobs.test_on import numbers

CHUNK = 16
WAYS = {
    "llama, chat, int8": ("llama", CHAT, {"kv": "int8"}),
    "gemma2, int4": ("gemma2", None, {"kv": "int4-values"}),
    "qwen3_next": ("qwen3_next", CHAT, {}),
    "llama": ("llama", None, {}),
    "deepseek_v3, quoka": ("deepseek_v3", None, {"method": "quoka", "budget": "20"}),
    "lfm2": ("lfm2", None, {}),
}
Texts = list[TextDocument]


def cases(ways: Sequence[str], quick: int) -> list[Any]:
    """Every way with nine seeds: the first `quick` ways with the first seed in every run of the tests."""
    return [
        pytest.param(way, seed, marks=[pytest.mark.slow] if seed or number >= quick else [])
        for seed in range(9)
        for number, way in enumerate(ways)
    ]


class Draw(random.Random):
    """Draws texts and edits."""

    def text(self, least: int, most: int) -> str:
        return "".join(self.choices(string.ascii_letters + " é\n", k=self.randint(least, most)))

    def corpus(self, names: Iterable[str]) -> Texts:
        return [TextDocument(name, self.text(1, 90)) for name in names]

    def edited(self, texts: Texts, fresh: str) -> Texts:
        """Another corpus; `fresh` is the name of a new document."""
        texts = list(texts)
        at = self.randrange(len(texts))
        text = texts[at].text
        start = self.choice([0, max(0, len(text) - 1), len(text), self.randint(0, len(text))])
        stop = min(len(text), start + self.choice([0, 1, self.randint(0, 40)]))
        match self.choice(
            ["replace", "replace", "replace", "insert", "move", "shuffle", "gone", "few", "name"]
        ):
            case "replace":
                new = text[:start] + self.choice(["", "x", self.text(1, 40)]) + text[stop:]
                texts[at] = texts[at]._replace(text=new or "x")
            case "insert":
                texts.insert(self.randint(0, len(texts)), TextDocument(fresh, self.text(1, 90)))
            case "move":
                texts.insert(self.randrange(len(texts)), texts.pop(at))
            case "shuffle":
                self.shuffle(texts)
            case "gone" if len(texts) > 1:
                del texts[at]
            case "few":
                texts = [TextDocument(fresh, self.text(1, 1))]
            case _:
                texts[at] = texts[at]._replace(name=fresh)
        return texts


def stopped_or_renewed(draw: Draw, model: LoadedModel, store: Path, texts: Texts) -> bool:
    """Renew, unless it is drawn that this stops at some stage; whether it came to its end."""
    plan = compared(KVStore.open(store), model.tokenizer, model.prompt, texts, drop=True)
    steps, before = draw.choice([0, 0, draw.randint(1, 30)]), tree(store)

    def count(stage: str, done: int, total: int) -> None:
        nonlocal steps
        steps -= 1
        if steps == 0:
            raise KeyboardInterrupt

    try:
        report = renew_as(plan, model, store, count)
    except KeyboardInterrupt:
        assert tree(store) == before
        return False
    assert report.plan.kept_tokens % CHUNK == 0 or report.done is None
    assert not partial_path(store).exists()
    return True


@pytest.mark.parametrize(("way", "seed"), cases([*WAYS], 3))
def test_whatever_was_edited(tmp_path: Path, way: str, seed: int) -> None:
    family, template, how = WAYS[way]
    options = {"chunk": CHUNK, **{name: own for name, own in how.items() if name == "budget"}}
    given = {name: own for name, own in how.items() if name != "budget"}
    draw, model = Draw(f"{way} {seed}"), loaded(family, template)
    settings = Settings(options=options, query_samples=draw.choice([1, 7, 40, 1024]), **given)
    texts, store = draw.corpus("abcd"), tmp_path / "s.kv"
    prefill_texts(model, texts, store, settings)
    for number in range(5):
        texts = draw.edited(texts, f"new {number}")
        if stopped_or_renewed(draw, model, store, texts):
            whole = tmp_path / f"{number}.kv"
            prefill_texts(model, texts, whole, settings)
            assert tree(store) == tree(whole), (number, texts)
            KVStore.open(store).verify()


@pytest.mark.parametrize(("way", "seed"), cases(["gemma2, int4", "llama, chat, int8", "qwen3_next"], 1))
def test_whatever_was_edited_in_a_tree(tmp_path: Path, way: str, seed: int) -> None:
    """The root, one on it, and one on that, in any order: none changes another, though they share files."""
    family, template, how = WAYS[way]
    draw, model = Draw(f"{way} {seed}"), loaded(family, template)
    settings = Settings(options={"chunk": CHUNK}, query_samples=40, **how)
    stores = [tmp_path / f"{name}.kv" for name in ("root", "middle", "leaf")]
    parts = [draw.corpus("abc"), draw.corpus("de"), draw.corpus("fg")]
    for number, store in enumerate(stores):
        on = Settings(base=stores[number - 1]) if number else settings
        prefill_texts(model, parts[number], store, on)
    corpora = [[one for part in parts[:end] for one in part] for end in (1, 2, 3)]
    for number in range(5):
        at = draw.randrange(3)
        others = [numbers(store) for store in stores if store != stores[at]]
        corpora[at] = draw.edited(corpora[at], f"new {number}")
        if stopped_or_renewed(draw, model, stores[at], corpora[at]):
            whole = tmp_path / f"{number}.kv"
            prefill_texts(model, corpora[at], whole, settings)
            assert numbers(stores[at]) == numbers(whole), (number, corpora[at])
            KVStore.open(stores[at]).verify()
        assert [numbers(store) for store in stores if store != stores[at]] == others
