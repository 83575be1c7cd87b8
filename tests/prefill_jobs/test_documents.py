"""A document whose reader needs a library that is missing is named with its extra."""

import sys

import pytest

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.corpus import read_corpus
from tests.prefill_jobs.packages import workbook


def test_a_library_that_is_missing_is_named_with_its_extra(tmp_path, monkeypatch):
    name = "a.xlsx"
    (tmp_path / name).write_bytes(workbook([["text"]]))
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(
        CorpusError, match=rf"{name} cannot .* missing \(pip install 'offload-decode\[documents\]'"
    ):
        read_corpus(str(tmp_path / name))
    ((document,), (skipped,)) = read_corpus(str(tmp_path))
    assert (document.name, skipped.name) == ("a.txt", name)
    assert "offload-decode[documents]" in skipped.reason
