"""Documents added to a store: what is equal to what, which are refused, and the indexes beside it."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload_decode.common import files
from offload_decode.common.errors import ConfigError, CorpusError, StoreBusy, StoreForeign, StoreMismatch
from offload_decode.kv.indexes import heads_of, index_path, kind_folder, staging_folder
from offload_decode.models.loading import LoadedModel, wrap
from offload_decode.prefill_jobs import continuing, indexing
from offload_decode.prefill_jobs.append import append_texts
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.destinations import Place
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import Settings, prefill_texts, prepare, settled
from offload_decode.selectors.topk import HeadIndexes
from offload_decode.store import writer
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import REPLACED
from tests.prefill_jobs.killing import tree
from tests.tiny import text_model, tiny_tokenizer

CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
TEXTS = [TextDocument(f"{name}.txt", f"{name} has {n}. " * (9 + 5 * n)) for n, name in enumerate("abcde")]
SHORT = [TextDocument(one.name, one.text[: 40 + 16 * n]) for n, one in enumerate(TEXTS)]


def loaded(family: str = "gemma2", template: str | None = None, **changes: Any) -> LoadedModel:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return wrap(text_model(family=family, **changes), tokenizer, "tiny")


def settings(method: str = "dense", kv: str = "auto", **options: object) -> Settings:
    return Settings(method, {"chunk": 16, **options}, query_samples=64, kv=kv)


def grown(model: LoadedModel, folder: Path, parts: Sequence[Sequence[TextDocument]], how: Settings) -> Path:
    store = folder / "grown.kv"
    prefill_texts(model, parts[0], store, how)
    for part in parts[1:]:
        append_texts(model, part, store)
    return store


@pytest.fixture
def begun(tmp_path) -> tuple[LoadedModel, Path]:
    """A model, and a store of the first two documents."""
    model, store = loaded(), tmp_path / "s.kv"
    prefill_texts(model, TEXTS[:2], store, settings())
    return model, store


FAMILIES = ["llama", "gemma2", "qwen3_next", "deepseek_v3", "gpt-oss", "lfm2", "falcon_h1", "llama4"]


@pytest.mark.parametrize(
    ("family", "template"),
    [
        *((family, None) for family in FAMILIES[:4]),
        *(pytest.param(family, None, marks=pytest.mark.slow) for family in FAMILIES[4:]),
        ("llama", CHAT),
        pytest.param("gemma2", CHAT, marks=pytest.mark.slow),
    ],
)
def test_two_appends_are_one_prefill(tmp_path, family, template):
    """Windows, chunks of attention, recurrent states and latents included."""
    model = loaded(family, template)
    store = grown(model, tmp_path, [SHORT[:2], SHORT[2:3], SHORT[3:]], settings())
    prefill_texts(model, SHORT, tmp_path / "whole.kv", settings())
    assert tree(store) == tree(tmp_path / "whole.kv")


@pytest.mark.parametrize(
    "how",
    [
        settings("quoka", budget="20", queries=4),
        settings("sample", budget="30%"),
        settings("window", budget="25%"),
        settings(kv="int8"),
        settings("quoka", kv="int4-values", budget="50%"),
        pytest.param(settings(chunk=1), marks=pytest.mark.slow),
        settings(chunk=5000),
    ],
    ids=str,
)
def test_with_every_method_and_encoding(tmp_path, how):
    model = loaded()
    store = grown(model, tmp_path, [SHORT[:2], SHORT[2:4], SHORT[4:]], how)
    prefill_texts(model, SHORT, tmp_path / "whole.kv", how)
    assert tree(store) == tree(tmp_path / "whole.kv")


def test_a_store_of_one_document_has_no_heading_and_the_others_have(tmp_path):
    model = loaded()
    store = KVStore.open(grown(model, tmp_path, [TEXTS[:1], TEXTS[1:3]], settings()))
    first, *rest = (model.tokenizer.decode(store.tokens[d.start : d.end]) for d in store.documents)
    assert first.startswith("<s>a has 0")
    assert [text.strip().partition("\n")[0] for text in rest] == ["Document: b.txt", "Document: c.txt"]


def test_report(begun):
    model, store = begun
    before = KVStore.open(store).manifest.n_tokens
    report = append_texts(model, TEXTS[1:4], store)
    after = KVStore.open(store)
    assert (report.added, report.known) == (("c.txt", "d.txt"), ("b.txt",))
    assert report.n_tokens == before + report.added_tokens == after.manifest.n_tokens
    assert report.repeated == before % 16
    assert report.copied > 0
    assert report.bytes == sum(after.cost().values())
    assert not report.resumed_from
    assert not report.kept


def test_documents_that_are_there_are_passed_over(tmp_path):
    model = loaded()
    for store, first in (("one.kv", TEXTS[:1]), ("two.kv", TEXTS[:2])):
        prefill_texts(model, first, tmp_path / store, settings())
        append_texts(model, TEXTS[2:4], tmp_path / store)
        before = tree(tmp_path)
        again = append_texts(model, [*first, *TEXTS[2:4]], tmp_path / store)
        assert again.kept
        assert (again.added_tokens, again.repeated, len(again.known)) == (0, 0, len(first) + 2)
        assert tree(tmp_path) == before
    with pytest.raises(CorpusError, match=r"c\.txt is in .* already, with another text"):
        append_texts(model, [TEXTS[4], TextDocument("c.txt", "something else")], tmp_path / "one.kv")
    with pytest.raises(CorpusError, match=r"a\.txt is in"):
        append_texts(model, [TextDocument("a.txt", "a has")], tmp_path / "one.kv")
    assert tree(tmp_path) == before


def test_lengths_that_a_store_was_not_rotated_for_are_refused(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = loaded("llama", rope_parameters=rope, max_position_embeddings=256)
    how = Settings("dense", {"chunk": 16}, query_samples=64, context=300)
    prefill_texts(model, TEXTS[:2], tmp_path / "s.kv", how)
    append_texts(model, TEXTS[2:3], tmp_path / "s.kv")
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match="prefill again with a larger --context"):
        append_texts(model, TEXTS[3:], tmp_path / "s.kv")
    assert tree(tmp_path) == before


def test_another_model_or_tokenizer_is_refused(tmp_path, begun):
    _, store = begun
    before = tree(tmp_path)
    for other in (loaded(seed=1), loaded("llama"), loaded(sliding_window=9), loaded(template=CHAT)):
        with pytest.raises(StoreMismatch):
            append_texts(other, TEXTS[2:], store)
    half = wrap(text_model(family="gemma2").half(), tiny_tokenizer(), "tiny")
    with pytest.raises(StoreMismatch, match="dtype"):
        append_texts(half, TEXTS[2:], store)
    assert tree(tmp_path) == before


def test_a_store_of_an_earlier_release_is_refused(begun, monkeypatch):
    model, store = begun
    real = KVStore.open(store)
    object.__setattr__(real.manifest, "seam", None)
    monkeypatch.setattr(continuing.KVStore, "open", lambda path: real)
    with pytest.raises(StoreForeign, match=r"earlier release .* prefill all of it again"):
        append_texts(model, TEXTS[2:], store)
    assert real.query_heads.tolist() == [0, 1] * 32, "as its stores have them"


def test_unknown_method(begun):
    store = KVStore.open(begun[1])
    store.manifest.prefill["method"] = "psychic"
    with pytest.raises(ConfigError, match="'psychic'"):
        continuing.method_of(store)


def test_failed_append_keeps_the_store_and_resumes(tmp_path, begun, monkeypatch):
    model, store = begun
    prefill_texts(model, TEXTS, tmp_path / "whole.kv", settings())
    before = tree(store)
    seen: list[int] = []

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "prefill":
            seen.append(done)
            if len(seen) == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        append_texts(model, TEXTS[2:], store, progress=stop)
    assert tree(store) == before
    report = append_texts(model, TEXTS[2:], store)
    assert report.resumed_from == seen[4]
    assert tree(store) == tree(tmp_path / "whole.kv")


def test_a_store_behind_a_link(tmp_path):
    model = loaded()
    (tmp_path / "disk").mkdir()
    prefill_texts(model, TEXTS[:2], tmp_path / "disk/s.kv", settings())
    (tmp_path / "link.kv").symlink_to("disk/s.kv")
    build_indexes(tmp_path / "link.kv", "clusters", k=8)
    report = append_texts(model, TEXTS[2:], tmp_path / "link.kv")
    assert (tmp_path / "link.kv").is_symlink()
    assert [each.kind for each in report.indexes] == ["clusters"]
    assert HeadIndexes(KVStore.open(tmp_path / "link.kv"), "auto").kind == "clusters"
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["s.kv"]


# Indexes


def test_indexes_are_extended_and_their_recall_is_stated(begun):
    model, store = begun
    kinds = ("clusters", "faiss-hnsw", "faiss-ivf", "flat", "hnswlib")
    for kind in kinds:
        build_indexes(store, kind, recall=0.9, k=8)
    report = append_texts(model, TEXTS[2:], store)
    opened = KVStore.open(store)
    assert [each.kind for each in report.indexes] == list(kinds)
    assert not report.left
    for each in report.indexes:
        assert (each.heads, each.built, each.folder) == (2, 2, kind_folder(store, each.kind))
        assert each.bytes == sum(file.stat().st_size for file in each.folder.iterdir())
        assert not staging_folder(store, each.kind).exists()
        indexes = HeadIndexes(opened, each.kind)
        found = [indexes.get(1, head).recall for head in (0, 1)]
        if each.kind == "flat":
            assert (each.recall, found) == (1.0, [None, None])
            continue
        measured = [record.measured for record in found if record is not None]
        assert (each.recall, each.lowest_recall) == (sum(measured) / 2, min(measured))
        assert all(record is not None and (record.target, record.k) == (0.9, 8) for record in found)
        again = build_indexes(store, each.kind, recall=0.9, k=8)
        assert (again.built, again.reused) == (0, 2), "nothing is left to build"


@pytest.mark.parametrize("kind", ["clusters", "hnswlib"])
def test_an_index_of_fewer_keys_than_recall_is_measured_on_is_built_anew(tmp_path, kind):
    model, store = loaded(), tmp_path / "s.kv"
    prefill_texts(model, [TextDocument("few.txt", "Few.")], store, settings())
    build_indexes(store, kind)
    append_texts(model, TEXTS, store)
    indexes = HeadIndexes(KVStore.open(store), kind)
    assert [indexes.get(1, head).recall.k for head in (0, 1)] == [100, 100]
    assert build_indexes(store, kind).built == 0


@pytest.mark.parametrize("method", ["dense", "quoka"])
def test_indexes_of_heads_whose_old_keys_changed_are_built_anew(tmp_path, method):
    """The last chunk runs again with more tokens, for which a sparse method chooses others: from the second
    layer on, old tokens have other keys. Those heads have the index of one prefill.
    """
    model, store, whole = loaded("llama"), tmp_path / "s.kv", tmp_path / "whole.kv"
    letters = np.random.default_rng(0).choice([*"abcdefghij klmnop"], (3, 400))
    texts = [TextDocument(f"{number}.txt", "".join(text)) for number, text in enumerate(letters)]
    options = {"quoka": {"budget": "20", "queries": 4}}.get(method, {})
    how = Settings(method, {"chunk": 256, **options}, query_samples=64)
    prefill_texts(model, texts[:2], store, how)
    build_indexes(store, "faiss-ivf", recall=0.9, k=8)
    earlier = KVStore.open(store)
    before = {place: np.array(earlier.keys(*place)) for place in heads_of(earlier)}
    (report,) = append_texts(model, texts[2:], store).indexes
    prefill_texts(model, texts, whole, how)
    build_indexes(whole, "faiss-ivf", recall=0.9, k=8)
    after = KVStore.open(store)
    off = {place: np.abs(after.keys(*place)[: len(keys)] - keys).max() for place, keys in before.items()}
    changed = [place for place, most in off.items() if most > 1e-4]
    assert changed == ([] if method == "dense" else [place for place in before if place[0]])
    for place in changed:
        ours, theirs = (index_path(kind_folder(path, "faiss-ivf"), *place) for path in (store, whole))
        for suffix in (".json", ".faiss"):
            assert ours.with_suffix(suffix).read_bytes() == theirs.with_suffix(suffix).read_bytes()
    assert report.extended == len(before) - len(changed)


def test_an_index_that_cannot_be_extended_is_named_and_the_store_grows(begun):
    model, store = begun
    for kind in ("clusters", "hnswlib", "faiss-ivf"):
        build_indexes(store, kind, k=8)
    kind_folder(store, "clusters").joinpath("layer-001-head-001.json").unlink()
    damaged = index_path(kind_folder(store, "hnswlib"), 1, 0).with_suffix(".hnsw")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    shutil.copytree(kind_folder(store, "faiss-ivf"), kind_folder(store, "annoy"))
    report = append_texts(model, TEXTS[2:], store)
    assert [each.kind for each in report.indexes] == ["faiss-ivf"]
    told = dict(zip(("annoy", "clusters", "hnswlib"), report.left, strict=True))
    assert "built by an extension that is not installed here" in told["annoy"]
    assert "unfinished (1 of 2 heads)" in told["clusters"]
    assert "not those that were written" in told["hnswlib"]
    assert len(KVStore.open(store).documents) == 5


def test_indexes_that_were_extended_but_not_published_are_found(begun, monkeypatch):
    """Killed when the store had its name, and its indexes had not."""
    model, store = begun
    build_indexes(store, "clusters", k=8)
    with monkeypatch.context() as patched:
        patched.setattr(continuing, "publish_indexes", lambda store: None)
        append_texts(model, TEXTS[2:], store)
    assert staging_folder(store, "clusters").exists()
    monkeypatch.setattr(indexing, "_extend", None)  # nothing is extended again
    assert append_texts(model, TEXTS[2:], store).kept
    assert HeadIndexes(KVStore.open(store), "auto").kind == "clusters"
    assert not staging_folder(store, "clusters").exists()


def test_a_store_that_a_kill_left_without_its_name_is_not_to_be_removed(begun, monkeypatch):
    """Where names cannot be exchanged it lies in the staging folder for a moment: the only copy."""
    model, store = begun
    before = tree(store)
    rename = files.rename

    def killed(old: Path, new: Path) -> None:
        rename(old, new)
        if new.name == REPLACED:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(writer, "_at_once", lambda new, old: False)
        patched.setattr(files, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            append_texts(model, TEXTS[2:3], store)
    assert not store.exists()
    with pytest.raises(StoreMismatch, match="run that again to go on, or choose another path"):
        prefill_texts(model, TEXTS[4:], store, settings())
    with pytest.raises(StoreMismatch, match="is there already, of another length and another text"):
        settled(prepare(model, TEXTS[4:], settings(), Place(store)), Place(store))
    assert tree(store) == before
    assert append_texts(model, TEXTS[2:3], store).added == ("c.txt",)


def test_only_one_append_at_a_time(begun):
    model, store = begun
    busy: list[str] = []

    def second(stage: str, done: int, total: int) -> None:
        if stage == "publish":
            with pytest.raises(StoreBusy) as refused:
                append_texts(model, TEXTS[3:], store)
            busy.append(str(refused.value))

    append_texts(model, TEXTS[2:3], store, progress=second)
    assert len(busy) == 1
