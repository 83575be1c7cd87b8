"""ZIP archives with the parts of office documents, written by hand."""

import io
import zipfile
from collections.abc import Mapping

TRANSITIONAL = {
    "w": "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "m": "http://schemas.openxmlformats.org/officeDocument/2006/math",
    "a": "http://schemas.openxmlformats.org/drawingml/2006/main",
    "p": "http://schemas.openxmlformats.org/presentationml/2006/main",
    "r": "http://schemas.openxmlformats.org/officeDocument/2006/relationships",
    "dgm": "http://schemas.openxmlformats.org/drawingml/2006/diagram",
    "mc": "http://schemas.openxmlformats.org/markup-compatibility/2006",
    "v": "urn:schemas-microsoft-com:vml",
}
STRICT = TRANSITIONAL | {
    "w": "http://purl.oclc.org/ooxml/wordprocessingml/main",
    "m": "http://purl.oclc.org/ooxml/officeDocument/math",
    "r": "http://purl.oclc.org/ooxml/officeDocument/relationships",
}
RELATIONSHIPS = "http://schemas.openxmlformats.org/package/2006/relationships"


def archive(parts: Mapping[str, str | bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in parts.items():
            file.writestr(name, data)
    return out.getvalue()


def part(name: str, inner: str, spaces: Mapping[str, str] = TRANSITIONAL) -> str:
    """An XML part whose root has this name and these contents."""
    declared = " ".join(f'xmlns:{prefix}="{space}"' for prefix, space in spaces.items())
    return f"<{name} {declared}>{inner}</{name}>"


def links(targets: Mapping[str, str], spaces: Mapping[str, str] = TRANSITIONAL) -> str:
    """Relationships: the kind of each target, whose id is its name."""
    inner = "".join(
        f'<Relationship Id="{target}" Type="{spaces["r"]}/{kind}" Target="{target}"/>'
        for target, kind in targets.items()
    )
    return f'<Relationships xmlns="{RELATIONSHIPS}">{inner}</Relationships>'


def word(body: str, spaces: Mapping[str, str] = TRANSITIONAL, **others: str) -> bytes:
    """A Word document with this body; `others` are the contents of its other parts, by their kinds."""
    parts = {
        "_rels/.rels": links({"word/document.xml": "officeDocument"}, spaces),
        "word/document.xml": part("w:document", f"<w:body>{body}</w:body>", spaces),
        "word/_rels/document.xml.rels": links({f"{kind}.xml": kind for kind in others}, spaces),
    }
    return archive(
        parts | {f"word/{kind}.xml": part("w:part", inner, spaces) for kind, inner in others.items()}
    )


def paragraph(text: str) -> str:
    return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"


def workbook(*sheets: list[list[object]]) -> bytes:
    """An Excel workbook with these rows in its sheets."""
    import openpyxl

    book = openpyxl.Workbook()
    book.remove(book.active)
    for rows in sheets:
        sheet = book.create_sheet()
        for row in rows:
            sheet.append(row)
    out = io.BytesIO()
    book.save(out)
    return out.getvalue()
