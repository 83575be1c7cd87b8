"""A renewed store has the bytes of a prefill of its corpus as it is now; how much of it stays."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload_decode.common.errors import ConfigError, CorpusError, StoreBusy, StoreMismatch
from offload_decode.engine.engine import Engine
from offload_decode.kv.indexes import examine, staging_folder
from offload_decode.models.loading import LoadedModel
from offload_decode.prefill_jobs import continuing, job
from offload_decode.prefill_jobs.append import append_texts, append_tokens
from offload_decode.prefill_jobs.continuing import replaced
from offload_decode.prefill_jobs.corpus import TextDocument, encode_corpus
from offload_decode.prefill_jobs.folders import Skipped
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import Settings, prefill, prefill_texts, prefill_tokens
from offload_decode.prefill_jobs.renew import Renewal, compared, renew, renew_as
from offload_decode.selectors.topk import HeadIndexes
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import partial_path
from offload_decode.types import Document
from tests.prefill_jobs.killing import tree
from tests.prefill_jobs.test_append import CHAT, loaded
from tests.tiny import saved_model

CHUNK = 16
TEXTS = [TextDocument(f"{name}.txt", f"{name} has {n}. " * (4 + 3 * n)) for n, name in enumerate("abcde")]
Texts = Sequence[TextDocument]


def settings(method: str = "dense", kv: str = "auto", **options: object) -> Settings:
    """Of 328 to 655 tokens queries are kept at the multiples of one power of two."""
    return Settings(method, {"chunk": CHUNK, **options}, query_samples=40, kv=kv)


def edited(number: int, at: int, old: int, new: str) -> Texts:
    """The texts with `new` for `old` characters of one of them."""
    text = TEXTS[number].text
    changed = TEXTS[number]._replace(text=text[:at] + new + text[at + old :])
    return [changed if one is TEXTS[number] else one for one in TEXTS]


CASES: dict[str, Texts] = {
    "the first token": edited(0, 0, 1, "X"),
    "longer in the middle": edited(2, 60, 0, " and more"),
    "shorter in the middle": edited(3, 60, 4, ""),
    "the last token": edited(4, len(TEXTS[4].text) - 2, 1, "!"),
    "across a token": edited(3, 61, 1, "as"),
    "a beginning": TEXTS[:4],
    "one gone": [*TEXTS[:3], TEXTS[4]],
    "reordered": [*TEXTS[:3], TEXTS[4], TEXTS[3]],
    "grown": [*TEXTS, TextDocument("f.txt", "f is new. " * 8)],
    "another name": [*TEXTS[:4], TEXTS[4]._replace(name="z.txt")],
}
WAYS = {
    "llama": ("llama", None, settings()),
    "llama, chat": ("llama", CHAT, settings()),
    "llama, int8": ("llama", None, settings(kv="int8")),
    "gemma2, quoka": ("gemma2", None, settings("quoka", budget="20", queries=4)),
    "gemma2, int4": ("gemma2", None, settings(kv="int4-values")),
    "qwen3_next": ("qwen3_next", None, settings()),
    "deepseek_v3, int8": ("deepseek_v3", None, settings(kv="int8")),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By way, a model and a store of the texts, made when it is asked for; nobody changes them."""
    made: dict[str, tuple[LoadedModel, Settings, Path]] = {}

    def of(way: str) -> tuple[LoadedModel, Settings, Path]:
        if way not in made:
            family, template, how = WAYS[way]
            model, store = loaded(family, template), tmp_path_factory.mktemp("begun") / "s.kv"
            prefill_texts(model, TEXTS, store, how)
            made[way] = model, how, store
        return made[way]

    return of


@pytest.fixture
def copied(begun: Any, tmp_path: Path) -> Any:
    """By way, a model, its settings and a store of the texts that may be changed."""

    def of(way: str = "llama") -> tuple[LoadedModel, Settings, Path]:
        model, how, store = begun(way)
        shutil.copytree(store, tmp_path / "s.kv")
        return model, how, tmp_path / "s.kv"

    return of


def planned(model: LoadedModel, store: Path, texts: Texts, **more: Any) -> Renewal:
    return compared(KVStore.open(store), model.tokenizer, model.prompt, texts, **more)


def first_change(plan: Renewal) -> int:
    """The first token that differs."""
    before, now = plan.earlier.tokens, plan.tokens
    count = min(len(before), len(now))
    different = np.flatnonzero(before[:count] != now[:count])
    return int(different[0]) if len(different) else count


def check(model: LoadedModel, how: Settings, store: Path, texts: Texts) -> Renewal:
    """Renew, and compare with a prefill."""
    plan = planned(model, store, texts)
    done = renew_as(plan, model, store).done
    whole = store.with_name("whole.kv")
    prefill_texts(model, texts, whole, how)
    assert tree(store) == tree(whole)
    assert done is not None
    assert (done.n_tokens, done.kept_tokens) == (len(plan.tokens), plan.kept_tokens)
    assert plan.kept_tokens % CHUNK == 0
    KVStore.open(store).verify()
    return plan


@pytest.mark.parametrize("case", CASES)
def test_all_chunks_before_the_first_change_stay(copied, case):
    plan = check(*copied("llama"), CASES[case])
    last = min(first_change(plan), len(plan.tokens) - 1)  # a chunk is always run
    assert plan.kept_tokens == last // CHUNK * CHUNK
    assert plan.run_tokens == len(plan.tokens) - plan.kept_tokens
    assert plan.kept_tokens or case == "the first token"


@pytest.mark.parametrize("case", ["shorter in the middle", "the last token", "grown"])
@pytest.mark.parametrize(
    "way",
    [way if number > 3 else pytest.param(way, marks=pytest.mark.slow) for number, way in enumerate(WAYS)],
)
def test_with_windows_states_latents_encodings_and_methods(copied, way, case):
    """They go back to the last mark, or to the seam."""
    plan = check(*copied(way), CASES[case])
    own = plan.earlier.manifest
    last = min(first_change(plan), len(plan.tokens) - 1)
    marks = own.marks if own.shape.local_layers or own.shape.state_layers or own.encoded else CHUNK
    assert marks is not None
    assert plan.kept_tokens == (own.seam if last >= (own.seam or 0) else last // marks * marks)
    assert plan.kept_tokens


@pytest.mark.parametrize("texts", [TEXTS[:1], [TextDocument("a.txt", "Z")]])
def test_where_a_much_shorter_corpus_lacks_queries(copied, texts):
    """Another power of two: chunks of which other queries are kept run once more, or nothing stays."""
    model, how, store = copied()
    plan = planned(model, store, texts, drop=True)
    done = renew_as(plan, model, store).done
    prefill_texts(model, texts, store.with_name("whole.kv"), how)
    assert tree(store) == tree(store.with_name("whole.kv"))
    assert done is not None
    assert plan.run_tokens <= len(plan.tokens)


def test_some_chunks_run_again_for_their_queries_alone(tmp_path):
    """From 96 tokens to 95 of which two queries are kept, every 32nd position is one and not every 64th."""
    model, how = loaded("llama"), Settings(options={"chunk": CHUNK}, query_samples=2)
    tokens = np.arange(3, 99, dtype=np.int32)
    store = tmp_path / "s.kv"
    prefill_tokens(model, tokens, [Document("a", 0, 96)], store, how)
    done = replaced(
        model, KVStore.open(store), tokens[:95], [Document("a", 0, 95)], store, "renew", lambda *_: None
    )
    assert done.again
    prefill_tokens(model, tokens[:95], [Document("a", 0, 95)], tmp_path / "whole.kv", how)
    assert tree(store) == tree(tmp_path / "whole.kv")


def test_nothing_is_done_where_nothing_has_changed(tmp_path, monkeypatch):
    saved_model(tmp_path / "model")
    corpus = tmp_path / "texts"
    corpus.mkdir()
    for one in TEXTS:
        (corpus / one.name).write_text(one.text)
    how = Settings(options={"chunk": CHUNK}, query_samples=64)
    prefill(str(corpus), model=str(tmp_path / "model"), out=tmp_path / "s.kv", settings=how)
    before = tree(tmp_path / "s.kv")
    with monkeypatch.context() as patched:
        patched.setattr(continuing, "load", None)  # it is not loaded
        report = renew(tmp_path / "s.kv", str(corpus))
    assert report.done is None
    assert report.summary()["kept"]
    assert tree(tmp_path / "s.kv") == before
    (corpus / "e.txt").write_text(TEXTS[4].text[:-20])
    assert renew(tmp_path / "s.kv", str(corpus)).plan.changed == ("e.txt",)
    prefill(str(corpus), model=str(tmp_path / "model"), out=tmp_path / "whole.kv", settings=how)
    assert tree(tmp_path / "s.kv") == tree(tmp_path / "whole.kv")


def test_what_has_changed_is_named(copied):
    model, _, store = copied()
    texts = [TEXTS[1], *edited(2, 5, 0, "new")[2:4], TextDocument("g.txt", "new")]
    plan = planned(model, store, texts)
    assert (plan.added, plan.changed, plan.gone) == (("g.txt",), ("b.txt", "c.txt"), ("a.txt", "e.txt"))


def test_documents_of_one_name_are_told_apart(copied):
    """As an earlier state of --on made them."""
    model, _, store = copied()
    texts = [TextDocument(one.name, "Another text. " * 4) for one in TEXTS[4:]]
    end = KVStore.open(store).manifest.n_tokens
    tokens, (one,), _ = encode_corpus(model.tokenizer, model.prompt, texts, end)
    append_tokens(model, tokens, [one], store)
    plan = planned(model, store, TEXTS)
    assert (plan.added, plan.changed, plan.gone) == ((), (), ("e.txt",))
    plan = planned(model, store, [*TEXTS[:4], TEXTS[4]._replace(text="A third. ")])
    assert (plan.added, plan.changed, plan.gone) == ((), ("e.txt",), ("e.txt",))


def test_most_documents_are_dropped_only_on_demand_and_unread_ones_not_at_all(copied):
    model, _, store = copied()
    with pytest.raises(
        ConfigError, match=r"would lose 3 of its 5 documents, such as c\.txt, which the corpus does not have"
    ):
        planned(model, store, TEXTS[:2])
    assert planned(model, store, TEXTS[:2], drop=True).gone == ("c.txt", "d.txt", "e.txt")
    with pytest.raises(CorpusError, match=r"e\.txt is in .* and cannot be read now \(Permission denied\)"):
        planned(model, store, TEXTS[:4], skipped=(Skipped("e.txt", "Permission denied"),))


def test_the_only_document_and_all_of_the_base_are_dropped_only_on_demand(copied, tmp_path):
    model, _, _ = copied()
    base, child = tmp_path / "base.kv", tmp_path / "child.kv"
    prefill_texts(model, TEXTS[:1], base, settings())
    prefill_texts(model, TEXTS[1:4], child, Settings(base=base))
    with pytest.raises(ConfigError, match=r"would lose 1 of its 1 documents, such as a\.txt"):
        planned(model, base, TEXTS[1:2])
    with pytest.raises(ConfigError, match=r"would lose 1 of its 4 documents, such as a\.txt"):
        planned(model, child, TEXTS[1:4])
    assert planned(model, child, TEXTS[1:4], drop=True).gone == ("a.txt",)
    assert planned(model, child, TEXTS[:3]).gone == ("d.txt",)


def test_of_a_store_on_a_store_on_a_store_every_base_is_dropped_only_on_demand(copied, tmp_path):
    model, _, store = copied()
    for number, name in enumerate("fghi"):
        texts, base = [TextDocument(f"{name}.txt", f"{name} is new. " * 4)], store
        store = tmp_path / f"{number}.kv"
        prefill_texts(model, texts, store, Settings(base=base))
    more = [TextDocument(f"{name}.txt", f"{name} is new. " * 4) for name in "fghi"]
    more += [TextDocument(f"{name}.txt", "More. " * 4) for name in "jk"]
    append_texts(model, more[4:], store)
    with pytest.raises(ConfigError, match="would lose 5 of its 11 documents"):
        planned(model, store, more)
    assert planned(model, store, more, drop=True).gone == tuple(one.name for one in TEXTS)
    assert planned(model, store, [*TEXTS[4:], *more]).gone == tuple(one.name for one in TEXTS[:4])


def test_another_model_is_refused(copied):
    _, _, store = copied()
    before = tree(store)
    other = loaded("llama", seed=1)
    with pytest.raises(StoreMismatch, match="other weights"):
        renew_as(planned(other, store, CASES["reordered"]), other, store)
    chat = loaded("llama", CHAT)
    with pytest.raises(StoreMismatch, match="prompt"):
        planned(chat, store, TEXTS)
    assert tree(store) == before


@pytest.mark.parametrize(("case", "stays"), [("the last token", True), ("shorter in the middle", False)])
def test_a_store_of_an_earlier_release_goes_on_from_its_seam(tmp_path, monkeypatch, case, stays):
    """It has no marks, and nothing to spare; where all of it is run it gets them."""
    model, how, store = loaded(), settings(), tmp_path / "s.kv"
    with monkeypatch.context() as patched:
        patched.setattr(job, "marks_for", lambda manifest: None)
        prefill_texts(model, TEXTS, store, how)
        if stays:
            prefill_texts(model, CASES[case], tmp_path / "whole.kv", how)
    if not stays:
        prefill_texts(model, CASES[case], tmp_path / "whole.kv", how)
    plan = planned(model, store, CASES[case])
    assert plan.kept_tokens == (plan.earlier.manifest.seam if stays else 0)
    renew_as(plan, model, store)
    assert tree(store) == tree(tmp_path / "whole.kv")


def test_a_store_that_grew_and_shrank_again(copied):
    model, how, store = copied("qwen3_next")
    more = [*TEXTS, TextDocument("f.txt", "f is new. " * 20)]
    append_texts(model, more[5:], store)
    check(model, how, store, TEXTS)


def test_indexes_are_extended_or_built_anew(copied):
    model, how, store = copied()
    for kind in ("clusters", "flat", "hnswlib"):
        build_indexes(store, kind, recall=0.9, k=8)
    for case, grown in (("grown", True), ("shorter in the middle", False)):
        done = renew_as(planned(model, store, CASES[case]), model, store).done
        assert done is not None
        assert (done.grown, done.left) == (grown, ())
        assert [each.kind for each in done.indexes] == ["clusters", "flat", "hnswlib"]
        assert not staging_folder(store, "clusters").exists()
        found = HeadIndexes(KVStore.open(store), "clusters").get(1, 0).recall
        assert found is not None
        assert (found.target, found.k) == (0.9, 8)
    whole = store.with_name("whole.kv")
    prefill_texts(model, CASES["shorter in the middle"], whole, how)
    build_indexes(whole, "clusters", recall=0.9, k=8)
    ours, theirs = (tree(one.with_name(f"{one.name}.indexes") / "clusters") for one in (store, whole))
    assert ours == theirs


def test_answers_are_those_of_a_prefill(copied):
    model, how, store = copied("llama, chat")
    check(model, how, store, CASES["longer in the middle"])
    both = (Engine.open(one, model, options={"budget": "20"}) for one in (store, store.with_name("whole.kv")))
    ours, theirs = ([*engine.generate(engine.ask("What has 3?"), 5)] for engine in both)
    assert ours == theirs


def test_an_interrupted_renewal_goes_on_and_another_one_waits(copied):
    model, how, store = copied("gemma2, int4")
    before, texts = tree(store), CASES["shorter in the middle"]
    plan, seen = planned(model, store, texts), list[int]()

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "prefill":
            seen.append(done)
            with pytest.raises(StoreBusy):
                renew_as(plan, model, store)
            if len(seen) == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        renew_as(plan, model, store, stop)
    assert tree(store) == before
    done = renew_as(planned(model, store, texts), model, store).done
    assert done is not None
    assert (done.resumed_from, seen[0], done.discarded) == (seen[2], plan.kept_tokens, 0)
    prefill_texts(model, texts, store.with_name("whole.kv"), how)
    assert tree(store) == tree(store.with_name("whole.kv"))


def stopped(model: LoadedModel, store: Path, texts: Texts) -> int:
    """Begin a renewal, and stop after a chunk; the tokens that it ran."""
    seen = list[int]()

    def stop(stage: str, done: int, total: int) -> None:
        seen.extend([done] if stage == "prefill" else [])
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        renew_as(planned(model, store, texts), model, store, stop)
    return seen[1] - seen[0]


@pytest.mark.parametrize("way", ["llama, chat", "gemma2, int4", "qwen3_next"])
def test_a_corpus_that_changes_again_after_an_interrupted_renewal(copied, way):
    """What was begun makes way, and is told of; so it does where the corpus is that of the store again."""
    model, how, store = copied(way)
    before, partial = tree(store), partial_path(store)
    begun = stopped(model, store, CASES["the last token"])
    report = renew_as(planned(model, store, TEXTS), None, store)
    assert (report.done, report.discarded, report.summary()["discarded"]) == (None, begun, begun)
    assert not partial.exists()
    begun = stopped(model, store, CASES["shorter in the middle"])
    assert tree(store) == before
    report = renew_as(planned(model, store, CASES["grown"]), model, store)
    assert report.done is not None
    assert (report.discarded, report.done.resumed_from) == (begun, report.plan.kept_tokens)
    prefill_texts(model, CASES["grown"], store.with_name("whole.kv"), how)
    assert tree(store) == tree(store.with_name("whole.kv"))
    assert not partial.exists()


def test_an_index_that_a_kill_left_unpublished_is_renewed_too(copied, monkeypatch):
    """The store has its place, and its index had not when the corpus changed again."""
    model, _, store = copied()
    build_indexes(store, "clusters", recall=0.9, k=8)
    with monkeypatch.context() as patched:
        patched.setattr(continuing, "publish_indexes", lambda store: None)
        renew_as(planned(model, store, CASES["reordered"]), model, store)
    done = renew_as(planned(model, store, CASES["shorter in the middle"]), model, store).done
    assert done is not None
    assert ([each.kind for each in done.indexes], done.left) == (["clusters"], ())
    assert examine(KVStore.open(store), "clusters").whole
    assert not staging_folder(store, "clusters").exists()


def test_who_reads_the_store_goes_on_and_is_told(copied):
    model, _, store = copied()
    reader = KVStore.open(store)
    keys = reader.keys(0, 0)
    held = keys.copy()
    renew_as(planned(model, store, CASES["reordered"]), model, store)
    np.testing.assert_array_equal(keys, held)
    with pytest.raises(StoreMismatch, match="another store now"):
        reader.keys(0, 1)
