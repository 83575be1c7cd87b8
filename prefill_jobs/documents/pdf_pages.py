"""The process that `pdf` starts: a PDF document on standard input, its text as JSON on standard output."""

import ctypes
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents import base
from offload_decode.prefill_jobs.documents.base import Reading, joined, library
from offload_decode.prefill_jobs.documents.pdf_columns import regions

_LETTERS = 1 << 20  # of one value of a form
_MARK = "\x02"  # of PDFium, for a hyphen at the end of a line that it joined with the next
_HYPHENATED = re.compile(rf"(\w+)(?:{_MARK}|-\n)(\w+)")
_HIDDEN, _PASSWORD = 1 << 1, 1 << 13  # flags of an annotation, of a field


def main() -> None:
    """Answers on standard output; the arguments are bounds: pages, characters, seconds, bytes of memory."""
    pages, base.MAX_SIZE, seconds, memory = map(int, sys.argv[1:])
    data = sys.stdin.buffer.read()
    _limit(seconds, memory)
    try:
        answer = read(data, pages)._asdict()
    except CorpusError as error:
        answer = {"reason": str(error)}
    json.dump(answer, sys.stdout)


def _limit(seconds: int, memory: int) -> None:
    """Bounds of this process, where the system has them; also when nobody waits for it any longer."""
    try:
        import resource
    except ImportError:  # on Windows
        return
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, memory),
    ):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def read(data: bytes, pages: int) -> Reading:
    """Raises `CorpusError`, also beyond that many pages."""
    with library("a PDF document", "pypdfium2", "pypdfium2") as pdfium:
        try:
            document = pdfium.PdfDocument(data[max(0, data.find(b"%PDF-", 0, 1024)) :])
        except pdfium.PdfiumError as error:
            if error.err_code == pdfium.raw.FPDF_ERR_PASSWORD:
                raise CorpusError("it is an encrypted PDF document") from error
            raise
        if len(document) > pages:
            raise CorpusError(f"it is a PDF document of more than {pages:,} pages")
        document.init_forms()
        left_out: Counter[str] = Counter()
        text = joined(_pages(pdfium, document, left_out))
        left_out["attached file"] = document.count_attachments()
    if not text.strip():
        raise CorpusError("it is a PDF document that holds no text, as if it was scanned")
    notes = [f"{count:,} {kind}{'s' * (count > 1)} left out" for kind, count in left_out.items() if count]
    return Reading(_without_hyphens(text), tuple(notes))


def _pages(pdfium: Any, document: Any, left_out: Counter[str]) -> Iterator[str]:
    for page in document:
        textpage = page.get_textpage()
        pieces = [textpage.get_text_bounded(*region, errors="replace") for region in regions(textpage)]
        pieces += _annotations(pdfium.raw, document.formenv, page, left_out)
        text = "\n".join(piece for piece in pieces if piece.strip())
        if not text and any(page.get_objects([pdfium.raw.FPDF_PAGEOBJ_IMAGE], max_depth=2)):
            left_out["scanned page"] += 1
        textpage.close()
        page.close()
        yield text


def _annotations(raw: Any, forms: Any, page: Any, left_out: Counter[str]) -> Iterator[str]:
    """The fields of a page that are filled in, with their names; text that was typed onto it."""
    for number in range(raw.FPDFPage_GetAnnotCount(page)):
        annotation = raw.FPDFPage_GetAnnot(page, number)
        kind = raw.FPDFAnnot_GetSubtype(annotation)
        contents = _string(raw.FPDFAnnot_GetStringValue, annotation, b"Contents")
        if raw.FPDFAnnot_GetFlags(annotation) & _HIDDEN:
            pass
        elif kind == raw.FPDF_ANNOT_WIDGET and forms:
            yield _field(raw, forms, annotation)
        elif kind == raw.FPDF_ANNOT_FREETEXT:
            yield contents
        elif contents.strip() and kind not in (raw.FPDF_ANNOT_LINK, raw.FPDF_ANNOT_POPUP):
            left_out["comment"] += 1
        raw.FPDFPage_CloseAnnot(annotation)


def _field(raw: Any, forms: Any, annotation: Any) -> str:
    """ "name: value" of a field that is filled in; of a box, whether it is checked."""
    kind = raw.FPDFAnnot_GetFormFieldType(forms, annotation)
    name = _string(raw.FPDFAnnot_GetFormFieldAlternateName, forms, annotation)
    name = name or _string(raw.FPDFAnnot_GetFormFieldName, forms, annotation)
    value = _string(raw.FPDFAnnot_GetFormFieldValue, forms, annotation)
    if kind == raw.FPDF_FORMFIELD_CHECKBOX:
        value = "checked" if raw.FPDFAnnot_IsChecked(forms, annotation) else "not checked"
    elif kind == raw.FPDF_FORMFIELD_RADIOBUTTON:
        checked = raw.FPDFAnnot_IsChecked(forms, annotation)
        value = _string(raw.FPDFAnnot_GetFormFieldExportValue, forms, annotation) if checked else ""
    elif kind in (raw.FPDF_FORMFIELD_COMBOBOX, raw.FPDF_FORMFIELD_LISTBOX):
        value = _chosen(raw, forms, annotation) or value
    elif kind != raw.FPDF_FORMFIELD_TEXTFIELD:
        return ""
    if raw.FPDFAnnot_GetFormFieldFlags(forms, annotation) & _PASSWORD or not value.strip():
        return ""
    return f"{name}: {value}" if name else value


def _chosen(raw: Any, forms: Any, annotation: Any) -> str:
    """The options of a list that are selected, as they are shown: several may be, and a value is one."""
    return ", ".join(
        _string(raw.FPDFAnnot_GetOptionLabel, forms, annotation, option)
        for option in range(raw.FPDFAnnot_GetOptionCount(forms, annotation))
        if raw.FPDFAnnot_IsOptionSelected(forms, annotation, option)
    )


def _string(get: Callable[..., int], *arguments: Any) -> str:
    """A string of PDFium's: asked for its size first."""
    size = get(*arguments, None, 0)
    if not 2 < size <= 2 * _LETTERS:
        return ""
    buffer = (ctypes.c_ushort * (size // 2))()
    get(*arguments, buffer, size)
    return bytes(buffer)[: size - 2].decode("utf-16-le", "replace")


def _without_hyphens(text: str) -> str:
    """Words that lines divide are joined, unless the text has the second part as a word of its own."""
    text = re.sub(r"[ \r]+\n", "\n", text)
    words = set(re.findall(r"\w+", _HYPHENATED.sub(" ", text)))

    def join(found: re.Match[str]) -> str:
        first, second = found.groups()
        sure = first + second in words or (second[0].islower() and second not in words)
        return first + second if sure else f"{first}-\n{second}"

    return _HYPHENATED.sub(join, text).replace(_MARK, "-\n")


if __name__ == "__main__":
    main()
