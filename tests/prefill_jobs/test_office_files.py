"""Presentations, sheets, books, messages, notebooks: what they show is read in its order."""

import io
import json
import zipfile
from datetime import date, datetime
from email.message import EmailMessage

import pytest

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.corpus import read_corpus
from offload_decode.prefill_jobs.documents import workbooks
from offload_decode.prefill_jobs.documents.reading import read_document
from tests.prefill_jobs.packages import archive, links, paragraph, part, word, workbook


def slides(*shapes: str, beside: dict[str, str] | None = None) -> bytes:
    """A presentation with these shapes on its slides, and what belongs to the first, by its kind."""
    names = [f"slide{number}.xml" for number in range(len(shapes))]
    listed = "".join(f'<p:sldId id="256" r:id="{name}"/>' for name in reversed(names))
    parts = {
        "_rels/.rels": links({"ppt/presentation.xml": "officeDocument"}),
        "ppt/presentation.xml": part("p:presentation", f"<p:sldIdLst>{listed}</p:sldIdLst>"),
        "ppt/_rels/presentation.xml.rels": links(dict.fromkeys(names, "slide")),
        "ppt/_rels/slide0.xml.rels": links({f"{kind}.xml": kind for kind in beside or {}}),
    }
    parts |= {f"ppt/{kind}.xml": part("p:part", inner) for kind, inner in (beside or {}).items()}
    parts |= {f"ppt/{name}": part("p:sld", shape) for name, shape in zip(names, shapes, strict=True)}
    return archive(parts)


def line(text: str) -> str:
    return f"<a:p><a:r><a:t>{text}</a:t></a:r></a:p>"


def test_slides_are_read_in_the_order_of_the_presentation_with_their_notes_and_diagrams():
    table = f"<a:tbl><a:tr><a:tc>{line('1')}</a:tc><a:tc>{line('2')}</a:tc></a:tr></a:tbl>"
    numbered = "<a:p><a:fld type='slidenum'><a:t>7</a:t></a:fld></a:p><a:blip/>"
    first = line("one") + table + numbered + "<dgm:relIds r:dm='diagramData.xml'/>"
    beside = {"notesSlide": line("said"), "diagramData": line("box"), "comments": "<p:cm/>"}
    read = read_document("a.pptx", slides(first, line("zero"), beside=beside))
    assert read.text == "zero\n\none\n1\t2\nbox\nsaid"
    assert read.notes == ("left out: 1 comment, 1 image",)


def test_sheets_are_read_row_by_row_with_tabs_between_cells():
    rows = [["name", "on", "n"], ["a b", date(2024, 2, 29), 2.0], [None, None, None], [None, True, 0.5]]
    rows += [["x\ny", datetime(2024, 2, 29, 12, 30), None]]
    text = read_document("a.xlsx", workbook(rows, [["second"]])).text
    expected = ["Sheet", "name\ton\tn", "a b\t2024-02-29\t2", "\tTrue\t0.5", "x y\t2024-02-29 12:30:00"]
    assert text.split("\n") == [*expected, "", "Sheet1", "second"]


def test_formulas_that_were_never_computed_are_counted():
    read = read_document("a.xlsx", workbook([[1, 2, "=A1+B1", "=A1*2"]]))
    assert (read.text, read.notes) == ("Sheet\n1\t2", ("left out: 2 uncomputed formulas",))


def test_text_boxes_of_sheets_are_counted():
    data = io.BytesIO(workbook([["a"]]))
    with zipfile.ZipFile(data, "a") as file:
        body = f"<a:txBody>{line('said')}</a:txBody>"
        file.writestr("xl/drawings/drawing1.xml", part("a:d", body * 2 + "<a:txBody/>"))
    assert read_document("a.xlsx", data.getvalue()).notes == ("left out: 2 text boxes",)


def test_the_cells_of_a_workbook_are_bounded(monkeypatch):
    monkeypatch.setattr(workbooks, "MAX_CELLS", 1000)
    with pytest.raises(CorpusError, match="more than 1,000 cells"):
        read_document("a.xlsx", workbook([[None] * 600 + ["far"]] * 2))


OPEN = "urn:oasis:names:tc:opendocument:xmlns"
SPACES = {"office": f"{OPEN}:office:1.0", "text": f"{OPEN}:text:1.0", "table": f"{OPEN}:table:1.0"}
SPACES |= {"draw": f"{OPEN}:drawing:1.0", "style": f"{OPEN}:style:1.0"}


def opendocument(body: str, styles: str = "") -> bytes:
    content = f"<office:automatic-styles>{styles}</office:automatic-styles><office:body>{body}</office:body>"
    around = "<style:header><text:p>top</text:p></style:header><style:footer><text:p/></style:footer>"
    return archive(
        {
            "META-INF/manifest.xml": "<a/>",
            "content.xml": part("office:c", content, SPACES),
            "styles.xml": part("office:s", around, SPACES),
        }
    )


def test_opendocument_texts_are_read_in_their_order():
    note = "<text:note-citation>1</text:note-citation><text:note-body><text:p>why</text:p></text:note-body>"
    box = "<draw:frame><draw:text-box><text:p>box</text:p></draw:text-box><draw:image/></draw:frame>"
    gone = "<text:tracked-changes><text:p>gone</text:p></text:tracked-changes>"
    styles = "<style:style style:name='H'><style:text-properties text:display='none'/></style:style>"
    hidden = "<text:span text:style-name='H'>no</text:span>"
    spans = f"<text:span>b</text:span><text:s text:c='2'/>c<text:tab/>d {hidden}e"
    body = f"{gone}<text:h>Head</text:h>\n<text:p>a\n {spans}{note}{box}<text:line-break/>f</text:p>"
    read = read_document("a.odt", opendocument(body, styles))
    assert read.text == "Head\na b  c\td e[1]\nf\n[1] why\nbox"
    assert read.notes == ("left out: 1 header, 1 hidden text, 1 image",)


def test_opendocument_sheets_keep_their_cells_apart():
    def cell(text: str, times: int = 1) -> str:
        inner = f"<text:p>{text}</text:p>" if text else ""
        return f"<table:table-cell table:number-columns-repeated='{times}'>{inner}</table:table-cell>"

    rows = [cell("a") + cell("") + cell("b"), cell("0", 3) + cell("", 16_000), cell("c")]
    table = "".join(f"<table:table-row>{row}</table:table-row>" for row in rows)
    text = read_document("a.ods", opendocument(f"<table:table>{table}</table:table>")).text
    assert text == "a\t\tb\n0\t0\t0\nc"


def book(encryption: str = "") -> dict[str, str]:
    items = "".join(f'<item id="{name}" href="{name}.xhtml"/>' for name in ("b", "a", "nav"))
    spine = "".join(f'<itemref idref="{name}"/>' for name in ("b", "a"))
    found = {"META-INF/encryption.xml": encryption} if encryption else {}
    return found | {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": '<c xmlns="u"><rootfile full-path="in/book.opf"/></c>',
        "in/book.opf": f'<package xmlns="o">{items}<spine>{spine}</spine></package>',
        "in/a.xhtml": "<html><head><title/></head><body><p>last</p></body></html>",
        "in/b.xhtml": "<html><body><p>first</p></body></html>",
        "in/nav.xhtml": "<html><body>contents</body></html>",
    }


def test_the_chapters_of_a_book_are_read_in_its_order():
    assert read_document("a.epub", archive(book())).text == "first\n\nlast"
    fonts = '<e><CipherReference xmlns="x" URI="in/font.otf"/></e>'
    assert read_document("a.epub", archive(book(fonts))).text == "first\n\nlast"
    with pytest.raises(CorpusError, match="an encrypted EPUB book"):
        read_document("a.epub", archive(book(fonts.replace("font.otf", "a.xhtml"))))


def test_a_message_is_read_once_and_its_attachments_are_named():
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = "Zoë <z@example.org>", "a@example.org", "Grüße"
    message.set_content("plain text ä\n")
    message.add_alternative("<p>the same in <b>HTML</b></p>", subtype="html")
    message.add_attachment(b"%PDF", maintype="application", subtype="pdf", filename="bill.pdf")
    read = read_document("a.eml", bytes(message))
    assert read.text == "From: Zoë <z@example.org>\nTo: a@example.org\nSubject: Grüße\n\nplain text ä"
    assert read.notes == ("left out: attached bill.pdf",)
    two = EmailMessage()
    two.set_content("body")
    two.add_attachment("the list's footer", disposition="inline")
    assert read_document("a.eml", bytes(two)).text == "body\n\nthe list's footer"
    unknown = "Subject: =?u\ufffd8?q?a?= =?none?q?b?=\n\ntext".encode()
    assert read_document("a.eml", unknown).text == "Subject: =?u\ufffd8?q?a?= =?none?q?b?=\n\ntext"
    page = b"Content-Type: text/html; charset=koi8-r\r\n\r\n<p>" + "день".encode("koi8-r") + b"<p hidden>no"
    assert read_document("a.mht", page).text == "день"


def notebook() -> dict[str, object]:
    plot = {"image/png": "iVBORw0KGgo" * 1000, "text/plain": ["<Figure size 640x480 with 1 Axes>"]}
    table = {"text/plain": "   a\n0  1", "text/html": "<table><tr><td>0<td>1</table>"}
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["one\n", "two\n"]},
        {"output_type": "display_data", "data": plot},
        {"output_type": "execute_result", "data": table},
        {"output_type": "display_data", "data": {"text/html": "<b>bold</b><script>x</script>"}},
        {"output_type": "display_data", "data": {"application/vnd.widget": {}}},
        {"output_type": "error", "ename": "E", "traceback": ["\x1b[0;31mE\x1b[0m: no"]},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Head\n", "text"], "attachments": {"a.png": {}}},
        {"cell_type": "code", "source": "print()", "outputs": outputs},
    ]
    return {"nbformat": 4, "cells": cells}


def test_a_notebook_is_read_cell_by_cell_without_its_images():
    read = read_document("a.ipynb", json.dumps(notebook()).encode())
    assert read.text == "# Head\ntext\n\nprint()\n\none\ntwo\n\n   a\n0  1\n\nbold\n\nE: no"
    assert read.notes == ("left out: 2 images, 1 output without text",)


def test_files_within_the_cells_of_a_notebook_are_left_out_and_counted():
    cells = [{"cell_type": "markdown", "source": ["![plot](data:image/png;base64,iVBORw0KGgo=)"]}]
    read = read_document("a.ipynb", json.dumps({"cells": cells}).encode())
    assert (read.text, read.notes) == ("![plot](data:image/png)", ("left out: 1 embedded file",))


def test_a_notebook_of_version_3_is_read_too():
    outputs = [{"output_type": "pyout", "text": ["3"]}, {"output_type": "display_data", "png": "iVBOR"}]
    cells = [{"cell_type": "code", "input": ["1 + 2"], "outputs": outputs}]
    read = read_document("a.ipynb", json.dumps({"worksheets": [{"cells": cells}]}).encode())
    assert (read.text, read.notes) == ("1 + 2\n\n3", ("left out: 1 image",))


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.ipynb", b"{}", "a notebook that is damaged"),
        ("a.ipynb", b"[" * 100_000, "a notebook that is damaged"),
        ("a.pptx", slides(line("a"))[:200], "a PowerPoint presentation that is damaged"),
        ("a.pptx", slides("<a:blip/>"), r"no text \(left out: 1 image\)"),
        ("a.xlsx", archive({"a": "b"}), "an Excel workbook without a document"),
        ("a.epub", archive({"META-INF/container.xml": "<a/>"}), "an EPUB book that is damaged"),
        (
            "a.odt",
            archive({"META-INF/manifest.xml": "<a><encryption-data/></a>", "content.xml": "secret"}),
            "an encrypted OpenDocument file",
        ),
        ("a.zip", archive({"a": "b"}), "a ZIP archive"),
        ("a.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + "WordDocument".encode("utf-16-le"), "before 2007"),
        (
            "a.xls",
            b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + "Workbook, WordDocument".encode("utf-16-le"),
            "an Excel workbook of before 2007",
        ),
        (
            "a.eml",
            b"Content-Type: text/plain; " + b"a=b; " * 1000,
            "a content header of more than 4,000 bytes",
        ),
        ("a.msg", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99), "a compound file"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_kind(name, data, reason):
    with pytest.raises(CorpusError, match=reason):
        read_document(name, data)


@pytest.mark.parametrize("name", ["a.md", "a.svg", "a.rst"])
def test_files_within_a_markdown_file_are_left_out_and_counted(name):
    long = "data:image/png;base64," + "iVBORw0KGgo=" * 1000
    text = f'![plot]({long}) a data: b\n[x]: <{long}>\n<img src="data:image/svg+xml;utf8,%3Csvg%3E"> c'
    read = read_document(name, text.encode())
    left = ["![plot](data:image/png) a data: b", "[x]: <data:image/png>", '<img src="data:image/svg+xml"> c']
    assert read.text.split("\n") == left
    assert read.notes == ("left out: 3 embedded files",)


def test_a_folder_of_many_kinds_gives_all_that_can_be_read_and_names_the_rest_once(tmp_path):
    good = {
        "a.docx": word(paragraph("text")),
        "b.pptx": slides(line("text")),
        "c.xlsx": workbook([["text"]]),
        "d.odt": opendocument("<text:p>text</text:p>"),
        "e.epub": archive(book()),
        "f.ipynb": json.dumps(notebook()).encode(),
        "g.eml": b"Subject: text\n\ntext",
        "h.html": b"<p>text",
        "i.md": b"text",
        "j.csv": b"a,b\n1,2",
    }
    bad = {f"cut/{name}": data[:60] for name, data in good.items() if data.startswith(b"PK")}
    bad |= {"cut/f.ipynb": b"{", "old.doc": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a.zip": archive({"a": "b"})}
    for name, data in (good | bad).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    documents, skipped = read_corpus(str(tmp_path))
    assert [document.name for document in documents] == list(good)
    assert [one.name for one in skipped] == sorted(bad)


def test_images_within_a_web_page_are_counted():
    read = read_document(
        "a.html", b"<img src='data:image/png;base64,iVBORw0KGgo=' alt='a plot'><img src=b.png>"
    )
    assert (read.text, read.notes) == ("a plot", ("left out: 1 embedded file",))
