"""Word documents: what is shown is read once, in its order, and what is left out is counted."""

import pytest

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents import base
from offload_decode.prefill_jobs.documents.reading import read_document
from tests.prefill_jobs.packages import STRICT, archive, links, paragraph, part, word


def text_of(data: bytes) -> str:
    return read_document("a.docx", data).text


def run(text: str, properties: str = "") -> str:
    return f"<w:r><w:rPr>{properties}</w:rPr><w:t>{text}</w:t></w:r>"


def cells(*texts: str) -> str:
    return "".join(f"<w:tc>{paragraph(text)}</w:tc>" for text in texts)


@pytest.mark.parametrize(
    "around",
    [
        "<w:hyperlink>{}</w:hyperlink>",
        "<w:smartTag>{}</w:smartTag>",
        "<w:fldSimple w:instr='REF a'>{}</w:fldSimple>",
        "<w:customXml>{}</w:customXml>",
        "<w:sdt><w:sdtPr><w:tag/></w:sdtPr><w:sdtContent>{}</w:sdtContent></w:sdt>",
        "<w:ins>{}</w:ins>",
        "<w:moveTo>{}</w:moveTo>",
        "<w:ins><w:sdt><w:sdtContent><w:smartTag>{}</w:smartTag></w:sdtContent></w:sdt></w:ins>",
        "<w:r><w:del/></w:r>{}",
        "<w:bdo>{}</w:bdo>",
        "<w:notYetInvented>{}</w:notYetInvented>",
    ],
)
def test_runs_within_other_elements_are_read_in_their_place(around):
    assert text_of(word(f"<w:p>{run('a ')}{around.format(run('b'))}{run(' c')}</w:p>")) == "a b c"


@pytest.mark.parametrize(
    "around", ["<w:sdt><w:sdtContent>{}</w:sdtContent></w:sdt>", "<w:customXml>{}</w:customXml>"]
)
def test_paragraphs_rows_and_cells_within_other_elements_are_read_in_their_place(around):
    within = around.format
    rows = f"<w:tr>{cells('1', '2')}</w:tr>" + within(f"<w:tr>{cells('3')}{within(cells('4'))}</w:tr>")
    document = word(
        paragraph("before") + within(paragraph("p")) + f"<w:tbl>{rows}</w:tbl>" + paragraph("after")
    )
    assert text_of(document) == "before\np\n1\t2\n3\t4\nafter"


def test_empty_cells_keep_their_places_and_tables_within_cells_their_rows():
    inner = f"<w:tbl><w:tr>{cells('x', 'y')}</w:tr><w:tr>{cells('z')}</w:tr></w:tbl>"
    table = f"<w:tbl><w:tr>{cells('', 'b')}</w:tr><w:tr><w:tc>{inner}<w:p/></w:tc>{cells('d')}</w:tr></w:tbl>"
    assert text_of(word(paragraph("top") + table)) == "top\n\tb\nx\ty\nz\t\td"


def test_tracked_changes_are_read_as_if_they_were_accepted():
    changed = run("the fee is ") + f"<w:del>{run('200')}<w:r><w:delText>2</w:delText></w:r></w:del>"
    changed += f"<w:ins>{run('250')}</w:ins>" + run(" euros") + f"<w:moveFrom>{run(', gone')}</w:moveFrom>"
    joined = f"<w:p><w:pPr><w:rPr><w:del/></w:rPr></w:pPr>{run('one ')}</w:p>{paragraph('line')}"
    rows = f"<w:tr><w:trPr><w:del/></w:trPr>{cells('old')}</w:tr><w:tr>{cells('new')}</w:tr>"
    document = word(f"<w:p>{changed}</w:p>{joined}<w:tbl>{rows}</w:tbl>")
    assert text_of(document) == "the fee is 250 euros\none line\nnew"


def test_a_text_box_is_read_once_after_the_paragraph_of_its_anchor():
    box = f"<w:txbxContent>{paragraph('box')}</w:txbxContent>"
    twice = f"<mc:Choice>{box}</mc:Choice><mc:Fallback><v:shape>{box}</v:shape></mc:Fallback>"
    shape = f"<w:r><mc:AlternateContent>{twice}</mc:AlternateContent></w:r>"
    body = f"<w:p>{run('be')}{shape}{run('fore')}</w:p>{paragraph('after')}"
    assert text_of(word(body)) == "before\nbox\nafter"
    assert text_of(word(f"<w:p><w:r><w:pict>{box}</w:pict></w:r></w:p>")) == "box"


def test_the_code_of_a_field_is_left_out_and_its_result_is_read():
    def mark(kind: str) -> str:
        return f"<w:r><w:fldChar w:fldCharType='{kind}'/></w:r>"

    code = "<w:r><w:instrText>IF </w:instrText></w:r>"
    inner = mark("begin") + code + mark("separate") + run("condition") + mark("end")
    field = mark("begin") + code + inner + mark("separate") + run("result") + mark("end")
    assert text_of(word(paragraph("a") + f"<w:p>{field}{run(' b')}</w:p>")) == "a\nresult b"
    assert text_of(word(f"<w:p>{mark('begin')}{run('kept')}</w:p>")) == "kept", "a field that never ends"


def test_equations_keep_their_parts_apart():
    def of(name: str, inner: str) -> str:
        return f"<m:{name}>{inner}</m:{name}>"

    def m(text: str) -> str:
        return of("r", of("t", text))

    half = of("f", of("num", m("1")) + of("den", m("2")))
    square = of("sSup", of("e", m("x")) + of("sup", m("2")))
    assert text_of(word(f"<w:p>{run('so ')}{of('oMath', half + m('+') + square)}</w:p>")) == "so 1/2+ x^2"
    brackets = of("d", of("e", m("a+b"))) + m("c")
    shown = of(
        "d", of("dPr", '<m:begChr m:val="["/><m:endChr m:val=""/>') + of("e", m("a")) + of("e", m("b"))
    )
    total = of("nary", of("naryPr", '<m:chr m:val="∑"/>') + of("sub", m("i")) + of("e", m("x")))
    root = of("rad", of("deg", "") + of("e", m("y")))
    for inner, text in ((brackets, "(a+b)c"), (shown, "[a|b"), (total, "∑_i x"), (root, "√ y")):
        assert text_of(word(f"<w:p>{of('oMath', inner)}</w:p>")) == text


def test_strict_files_are_read():
    assert text_of(word(paragraph("strict"), STRICT)) == "strict"


def test_hidden_text_is_left_out_and_its_words_are_counted():
    styles = "<w:style w:styleId='Unseen'><w:rPr><w:vanish/></w:rPr></w:style>"
    body = run("seen") + run(" un", "<w:vanish/>") + run("seen words", "<w:vanish w:val='1'/>")
    body += run(" shown", "<w:vanish w:val='0'/>") + run(" a", "<w:rStyle w:val='Unseen'/>")
    hidden = f"<w:p><w:pPr><w:pStyle w:val='Unseen'/></w:pPr>{run('two words')}</w:p>"
    read = read_document("a.docx", word(f"<w:p>{body}</w:p>{hidden}", styles=styles))
    assert read.text == "seen shown"
    assert read.notes == ("left out: 6 hidden words",)


def test_notes_are_read_where_they_are_numbered_and_all_else_is_counted():
    body = f"<w:p>{run('text')}<w:r><w:footnoteReference w:id='2'/><w:object/></w:r></w:p>"
    notes = f"<w:footnote w:id='1'>{paragraph('no')}</w:footnote>"
    notes += f"<w:footnote w:id='2'>{paragraph('note')}</w:footnote>"
    comments = f"<w:comment>{paragraph('why?')}</w:comment>" * 2
    parts = {"footnotes": notes, "comments": comments, "header": paragraph("top"), "footer": "<w:p/>"}
    read = read_document("a.docx", word(body, **parts))
    assert read.text == "text[1]\n[1] note"
    assert read.notes == ("left out: 2 comments, 1 embedded object, 1 header",)


def test_white_space_within_lines_is_kept():
    inner = "<w:t>a</w:t><w:tab/><w:t>b</w:t><w:br/><w:t>c</w:t><w:noBreakHyphen/><w:sym w:char='00E9'/>"
    tabs = "<w:pPr><w:tabs><w:tab w:val='left'/></w:tabs></w:pPr>"
    assert text_of(word(f"<w:p>{tabs}<w:r>{inner}</w:r></w:p>")) == "a\tb\nc-é"


ENTITIES = """<?xml version="1.0"?><!DOCTYPE d [<!ENTITY a "aaaaaaaaaa">
<!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>
<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body><w:p><w:r>
<w:t>&b;</w:t></w:r></w:p></w:body></w:document>"""


def with_main(main: str) -> bytes:
    return archive({"_rels/.rels": links({"word/document.xml": "officeDocument"}), "word/document.xml": main})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (word(paragraph("text"))[:300], "a Word document that is damaged"),
        (b"PK\x03\x04" + bytes(100), "a Word document that is damaged"),
        (with_main("<"), "a Word document that is damaged"),
        (with_main("<w:document/>"), "a Word document that is damaged"),
        (with_main(ENTITIES), "XML that declares entities"),
        (
            with_main(part("w:document", "<w:p>" * 100_000 + "</w:p>" * 100_000)),
            "a Word document that is damaged",
        ),
        (archive({"word/document.xml": "<a/>"}), "a Word document without a document"),
    ],
)
def test_documents_that_cannot_be_read_give_a_reason(data, reason):
    with pytest.raises(CorpusError, match=reason):
        read_document("a.docx", data)


def test_what_a_document_unpacks_to_is_bounded(monkeypatch):
    bomb = word(paragraph("text"), zeros="0" * (1 << 20))
    assert len(bomb) < 1 << 17
    monkeypatch.setattr(base, "MAX_SIZE", 1 << 20)
    with pytest.raises(CorpusError, match="unpacks to more than 1 MiB"):
        read_document("a.docx", bomb)


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        (
            "<w:ddList><w:result w:val='1'/><w:listEntry w:val='no'/><w:listEntry w:val='yes'/></w:ddList>",
            "yes",
        ),
        ("<w:ddList><w:listEntry w:val='red'/><w:listEntry w:val='green'/></w:ddList>", "red"),
        ("<w:ddList><w:result w:val='9'/><w:listEntry w:val='red'/></w:ddList>", ""),
        ("<w:checkBox><w:default w:val='0'/><w:checked/></w:checkBox>", "☒"),
        ("<w:checkBox><w:default w:val='0'/></w:checkBox>", "☐"),
        ("<w:textInput/>", ""),
    ],
)
def test_what_an_old_form_shows_is_read(form, shown):
    begin = f"<w:r><w:fldChar w:fldCharType='begin'><w:ffData>{form}</w:ffData></w:fldChar></w:r>"
    code = "<w:r><w:instrText>FORM</w:instrText></w:r><w:r><w:fldChar w:fldCharType='end'/></w:r>"
    assert text_of(word(f"<w:p>{run('a ')}{begin}{code}{run(' b')}</w:p>")) == f"a {shown} b"
