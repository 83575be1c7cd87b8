"""Documents: their text in its order, or a reason, and notes on what was left out."""

import io
import sys

import pytest

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.corpus import read_corpus
from offload_decode.prefill_jobs.documents import base
from offload_decode.prefill_jobs.documents import pdf as pdf_module
from offload_decode.prefill_jobs.documents.reading import read_document
from tests.prefill_jobs.packages import workbook

pypdf = pytest.importorskip("pypdf")


def pdf(*pages: str, user: str | None = None) -> bytes:
    """A PDF document with a line of text on each page; it is encrypted if there is a `user` password."""
    name, dictionary, writer = pypdf.generic.NameObject, pypdf.generic.DictionaryObject, pypdf.PdfWriter()
    font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    named = dictionary({name(key): name(value) for key, value in font.items()})
    for text in pages:
        content = pypdf.generic.DecodedStreamObject()
        content.set_data(f"BT /F1 24 Tf 72 720 Td ({text}) Tj ET".encode())
        page = writer.add_blank_page(612, 792)
        page[name("/Contents")] = writer._add_object(content)
        page[name("/Resources")] = dictionary({name("/Font"): dictionary({name("/F1"): named})})
    if user is not None:
        writer.encrypt(user, "owner", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def test_the_pages_of_a_pdf_follow_each_other():
    assert (
        read_document("a", pdf("The first page", "and the second")).text == "The first page\nand the second"
    )


def test_a_pdf_that_anyone_may_read_is_read():
    assert read_document("a.pdf", pdf("hidden", user="")).text == "hidden"


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.pdf", pdf(""), "PDF document that holds no text"),
        ("a.pdf", pdf("hidden", user="secret"), "an encrypted PDF document"),
        ("a.pdf", pdf("text")[:200], "a PDF document that is damaged"),
        ("a.pdf", b"%PDF-1.7", "a PDF document that is damaged"),
    ],
)
def test_unreadable_documents_give_a_reason(name, data, reason):
    with pytest.raises(CorpusError, match=reason):
        read_document(name, data)


def test_what_a_document_holds_is_bounded(monkeypatch):
    monkeypatch.setattr(base, "MAX_SIZE", 10)
    with pytest.raises(CorpusError, match="MiB of text"):
        read_document("a.pdf", pdf("longer than ten letters"))
    monkeypatch.setattr(pdf_module, "MAX_PAGES", 1)
    with pytest.raises(CorpusError, match="more than 1 pages"):
        read_document("a.pdf", pdf("a", "b"))


@pytest.mark.parametrize(
    ("name", "data", "library"),
    [("a.pdf", pdf("text"), "pypdf"), ("a.xlsx", workbook([["text"]]), "openpyxl")],
)
def test_a_library_that_is_missing_is_named_with_its_extra(tmp_path, monkeypatch, name, data, library):
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / name).write_bytes(data)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(
        CorpusError, match=rf"{name} cannot .* missing \(pip install 'offload-decode\[documents\]'"
    ):
        read_corpus(str(tmp_path / name))
    ((document,), (skipped,)) = read_corpus(str(tmp_path))
    assert (document.name, skipped.name) == ("a.txt", name)
    assert "offload-decode[documents]" in skipped.reason
