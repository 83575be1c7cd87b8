"""PDF documents: their text in reading order, and a reason for each that has none to give."""

import hashlib
import os
from pathlib import Path

import pytest

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents import base, pdf
from offload_decode.prefill_jobs.documents.reading import read_document

pytest.importorskip("pypdfium2")

FONT = "/F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
LEFT = [
    "The ferry left the harbour before",
    "dawn, and nobody on the pier had",
    "seen that its lamps were dark,",
]
RIGHT = [
    "Prices of wheat rose for the third",
    "month in a row, the ministry said;",
    "bakers expect higher prices soon.",
]


def at(x: int, y: int, text: str) -> str:
    return f"BT /F1 10 Tf {x} {y} Td ({text}) Tj ET\n"


def document(
    *pages: str, fields: str = "", annotations: str = "", trailer: str = "", catalog: str = ""
) -> bytes:
    """A PDF document with such pages; `fields` are objects from 900 on, and `annotations` those of page 1."""
    objects = [f"1 0 obj\n<< /Type /Catalog /Pages 2 0 R {catalog} >>\nendobj\n"]
    kids = " ".join(f"{10 * n} 0 R" for n in range(1, len(pages) + 1))
    objects.append(f"2 0 obj\n<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>\nendobj\n")
    for n, content in enumerate(pages, 1):
        objects.append(
            f"{10 * n} 0 obj\n<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {10 * n + 1} 0 R"
            f" /Resources << /Font << {FONT} >> >> /Annots [{annotations if n == 1 else ''}] >>\nendobj\n"
            f"{10 * n + 1} 0 obj\n<< /Length {len(content)} >>\nstream\n{content}\nendstream\nendobj\n"
        )
    return f"%PDF-1.4\n{''.join(objects)}{fields}trailer << /Root 1 0 R {trailer} >>\n".encode("latin-1")


def lines(*texts: str, x: int = 72) -> str:
    return "".join(at(x, 700 - 12 * n, text) for n, text in enumerate(texts))


def across(left: list[str], right: list[str]) -> str:
    """Two columns that are written line by line across both."""
    return "".join(
        at(72, 700 - 12 * n, a) + at(320, 700 - 12 * n, b)
        for n, (a, b) in enumerate(zip(left, right, strict=True))
    )


def words(data: bytes) -> str:
    return " ".join(read_document("a.pdf", data).text.split())


def test_the_pages_follow_each_other():
    assert (
        words(document(lines("The first page"), lines("and the second"))) == "The first page and the second"
    )


@pytest.mark.parametrize("before", [b"\n", b"\r\n\r\n", b"\x00\x05MIME junk\n" * 9])
def test_bytes_before_the_header_do_not_matter(before):
    assert words(before + document(lines("text"))) == "text"


def test_columns_that_were_written_line_by_line_are_read_one_after_the_other():
    content = (
        at(72, 740, "A heading over both") + across(LEFT, RIGHT) + at(72, 600, "A line below both columns")
    )
    assert words(document(content)) == " ".join(
        ["A heading over both", *LEFT, *RIGHT, "A line below both columns"]
    )
    in_order = lines(*LEFT) + lines(*RIGHT, x=320)
    assert words(document(in_order)) == " ".join([*LEFT, *RIGHT])
    divided = document(across(["The ferry left the har-", "bour before dawn, and", "nobody saw it."], RIGHT))
    assert read_document("a.pdf", divided).text.startswith("The ferry left the harbour before dawn, and\n")


def test_tables_are_read_row_by_row():
    table = across(["Year", "1901", "1902", "1903"], ["Boats", "17", "23", "31"])
    assert words(document(table)) == "Year Boats 1901 17 1902 23 1903 31"


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        (("The infor-", "mation is here."), "The information is here."),
        (("COVID-", "19 and Anglo-", "American"), "COVID- 19 and Anglo- American"),
        (("A well-", "known town, known to all."), "A well- known town, known to all."),
        (("1990 -", "and after"), "1990 - and after"),
    ],
)
def test_a_word_that_two_lines_divide_is_joined_where_it_is_surely_one(text, joined):
    assert words(document(lines(*text))) == joined


def test_values_of_a_form_are_text_with_the_names_of_their_fields():
    fields = [
        "/FT /Tx /T (name) /TU (Full name) /V (Jane Example)",
        "/FT /Tx /T (empty) /V ()",
        "/FT /Tx /Ff 8192 /T (password) /V (secret)",
        "/FT /Tx /F 2 /T (hidden) /V (unseen)",
        "/FT /Ch /T (town) /Opt [(Kiel) (Ulm)] /V (Ulm)",
        "/FT /Ch /Ff 2097152 /T (ports) /Opt [[(k) (Kiel)] [(u) (Ulm)] [(b) (Bonn)]] /V [(k) (b)]",
        "/FT /Btn /T (member) /V /Yes /AS /Yes /AP << /N << /Yes 3 0 R /Off 3 0 R >> >>",
        "/FT /Btn /T (guest) /V /Off /AS /Off /AP << /N << /Yes 3 0 R /Off 3 0 R >> >>",
    ]
    objects = "".join(
        f"{900 + n} 0 obj\n<< /Type /Annot /Subtype /Widget /Rect [9 9 99 29] {field} >>\nendobj\n"
        for n, field in enumerate(fields)
    )
    objects += "3 0 obj\n<< /Subtype /Form /BBox [0 0 9 9] /Length 0 >>\nstream\n\nendstream\nendobj\n"
    all_of_them = " ".join(f"{900 + n} 0 R" for n in range(len(fields)))
    form = document(
        lines("Form"),
        fields=objects,
        annotations=all_of_them,
        catalog=f"/AcroForm << /Fields [{all_of_them}] >>",
    )
    assert read_document("a.pdf", form).text.split("\n") == [
        "Form",
        "Full name: Jane Example",
        "town: Ulm",
        "ports: Kiel, Bonn",
        "member: checked",
        "guest: not checked",
    ]


def test_text_that_was_typed_onto_a_page_is_read_and_comments_are_counted():
    notes = "".join(
        f"{900 + n} 0 obj\n<< /Type /Annot /Subtype /{kind} /Rect [9 9 99 29] /Contents ({text}) >>\nendobj\n"
        for n, (kind, text) in enumerate([("FreeText", "Approved"), ("Text", "why?"), ("Highlight", "see 3")])
    )
    data = document(lines("Minutes"), fields=notes, annotations="900 0 R 901 0 R 902 0 R")
    assert read_document("a.pdf", data) == ("Minutes\nApproved", ("2 comments left out",))


def rc4(key: bytes, data: bytes) -> bytes:
    state, i, j, out = list(range(256)), 0, 0, bytearray()
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) % 256
        state[i], state[j] = state[j], state[i]
    j = 0
    for n, byte in enumerate(data, 1):
        i = n % 256
        j = (j + state[i]) % 256
        state[i], state[j] = state[j], state[i]
        out.append(byte ^ state[(state[i] + state[j]) % 256])
    return bytes(out)


def test_a_document_that_anyone_may_open_is_read_though_it_is_encrypted():
    """As the PDF Reference has it in 3.5: RC4 with 40 bits of a key that is made of an empty password."""
    padding = bytes.fromhex("28BF4E5E4E758A4164004E56FFFA01082E2E00B6D0683E802F0CA9FE6453697A")
    key = hashlib.md5(padding + bytes(32) + (-4).to_bytes(4, "little", signed=True) + b"\0").digest()[:5]
    of_page = hashlib.md5(key + (11).to_bytes(3, "little") + bytes(2)).digest()[:10]
    entry = f"/Filter /Standard /V 1 /R 2 /O <{'00' * 32}> /U <{rc4(key, padding).hex()}> /P -4"
    content = rc4(of_page, lines("hidden").encode()).decode("latin-1")
    assert words(document(content, trailer=f"/Encrypt << {entry} >> /ID [<00> <00>]")) == "hidden"


def test_pages_of_images_alone_are_counted():
    image = "q 9 0 0 9 9 9 cm BI /W 1 /H 1 /CS /G /BPC 8 ID \x80 EI Q"
    assert read_document("a.pdf", document(lines("text"), image, image)).notes == (
        "2 scanned pages left out",
    )


ENCRYPTED = "/Encrypt << /Filter /Standard /V 1 /R 2 /O <{0}> /U <{0}> /P -4 >> /ID [<00> <00>]".format(
    "00" * 32
)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (document(""), "PDF document that holds no text"),
        (document(lines("text"), trailer=ENCRYPTED), "an encrypted PDF document"),
        (b"%PDF-1.7", "a PDF document that is damaged"),
    ],
)
def test_unreadable_documents_give_a_reason(data, reason):
    with pytest.raises(CorpusError, match=reason):
        read_document("a.pdf", data)


def test_what_is_too_much_is_refused(monkeypatch):
    two = document(lines("a"), lines("b"))
    monkeypatch.setattr(base, "MAX_SIZE", 1)
    with pytest.raises(CorpusError, match="MiB of text"):
        read_document("a.pdf", two)
    monkeypatch.setattr(pdf, "MAX_PAGES", 1)
    with pytest.raises(CorpusError, match="more than 1 pages"):
        read_document("a.pdf", two)
    monkeypatch.setattr(pdf, "MAX_SECONDS", 0)
    with pytest.raises(CorpusError, match="more than 0 seconds"):
        read_document("a.pdf", two)


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        ("import os; os.abort()", "PDFium fails on"),
        ("while True: pass", "PDFium fails on|more than 1 seconds"),
        ("raise ImportError", r"pypdfium2 is missing \(pip install 'offload-decode\[documents\]'\)"),
    ],
)
def test_a_library_that_crashes_hangs_or_is_missing_costs_one_document(
    tmp_path: Path, monkeypatch, library, reason
):
    (tmp_path / "pypdfium2.py").write_text(library)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    if "while" in library:
        monkeypatch.setattr(pdf, "MAX_SECONDS", 1)
    with pytest.raises(CorpusError, match=reason):
        read_document("a.pdf", document(lines("text")))
