"""A document that the tokenizer fails on is named, and stops no other."""

from pathlib import Path
from typing import Any

import pytest

from offload_decode.common.errors import CorpusError
from offload_decode.models.loading import LoadedModel, wrap
from offload_decode.prefill_jobs.append import append_texts
from offload_decode.prefill_jobs.collect import collect
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.job import Maker, PrefillReport, Settings, prefill_texts
from offload_decode.prefill_jobs.many import Job, prefill_many
from offload_decode.store.reader import KVStore
from tests.cli.conftest import run
from tests.prefill_jobs.killing import tree
from tests.tiny import saved_model, text_model, tiny_tokenizer

BAD = "x" * 60
TEXTS = [
    TextDocument("a.txt", BAD),
    TextDocument("b.txt", "The lamp burns."),
    TextDocument("c.txt", BAD + "!"),
]
SETTINGS = Settings(options={"chunk": 16})
FAILS = "the tokenizer fails on the text"


def giving_up(tokenizer: Any) -> Any:
    """A regular expression of Rust that gives up on `BAD`."""
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    own = tokenizer.backend_tokenizer.pre_tokenizer
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, own])
    return tokenizer


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    loaded = wrap(text_model(), giving_up(tiny_tokenizer()), "tiny")
    monkeypatch.setattr("offload_decode.prefill_jobs.many.load", lambda *_: loaded)
    return loaded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for document in TEXTS:
        (tmp_path / "texts" / document.name).write_text(document.text)
    return tmp_path / "texts"


def names(failed: Any) -> list[str]:
    assert all(one.reason.startswith(FAILS) for one in failed)
    return [one.name for one in failed]


def test_a_prefill_of_several_documents_holds_the_others(loaded, tmp_path):
    report = prefill_texts(loaded, TEXTS, tmp_path / "store", SETTINGS)
    assert names(report.failed) == ["a.txt", "c.txt"]
    store = KVStore.open(tmp_path / "store")
    assert [(one.name, one.start) for one in store.documents] == [("b.txt", 0)]
    assert "Document: b.txt\nThe lamp burns." in tiny_tokenizer().decode(store.tokens)
    with pytest.raises(CorpusError, match=rf"a\.txt: {FAILS}.*c\.txt: {FAILS}"):
        prefill_texts(loaded, TEXTS[::2], tmp_path / "none", SETTINGS)


def test_several_corpora_and_a_collection_go_on(loaded, folder, tmp_path):
    jobs = [Job(str(folder / one.name), str(tmp_path / f"{one.name}.kv")) for one in TEXTS]
    first, second, third = prefill_many(jobs, model="tiny", settings=SETTINGS).values()
    assert isinstance(second, PrefillReport)
    assert [type(first), type(third)] == [CorpusError, CorpusError]
    maker = Maker("tiny", SETTINGS)
    maker.__dict__["loaded"] = loaded
    report = collect(str(folder), tmp_path / "out", maker)
    assert (report.made, names(report.failed)) == (1, ["a.txt", "c.txt"])


def test_an_append_adds_the_others(loaded, tmp_path):
    prefill_texts(loaded, TEXTS[1:2], tmp_path / "store", SETTINGS)
    more = [*TEXTS, TextDocument("d.txt", "The sea was calm.")]
    report = append_texts(loaded, more, tmp_path / "store")
    assert (report.known, report.added, names(report.failed)) == (("b.txt",), ("d.txt",), ["a.txt", "c.txt"])
    before = tree(tmp_path)
    again = append_texts(loaded, [*more, TextDocument("d.txt", BAD)], tmp_path / "store")
    assert (again.kept, names(again.failed)) == (True, ["a.txt", "c.txt", "d.txt"])
    with pytest.raises(CorpusError, match=FAILS):
        append_texts(loaded, TEXTS[:1], tmp_path / "store")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("more", [[], ["second"]])
def test_the_commands_name_it_and_end_with_1(folder, tmp_path, more):
    model = saved_model(tmp_path / "model")
    giving_up(tiny_tokenizer()).save_pretrained(model)
    for name in more:
        (tmp_path / name).mkdir()
        (tmp_path / name / "d.txt").write_text("The sea was calm.")
    corpora = [folder, *(tmp_path / name for name in more)]
    for _ in range(2):  # once more, where all is there already
        ran = run("prefill", *corpora, "--model", model, "--out", tmp_path / "out")
        assert ran.code == 1
        assert all(ran.err.count(f"{name}: {FAILS}") == 1 for name in ("a.txt", "c.txt"))
