"""Texts in every encoding: what they declare is followed, what is guessed or replaced is noted."""

import time

import pytest

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents.encodings import decode

GERMAN = "Über die Brücke gingen zwölf Männer, und jeder trug schöne, große Körbe voll süßer Äpfel.\n"
RUSSIAN = "Привет, мир. Это довольно длинный текст в старой кодировке, и его надо прочитать.\n"
POLISH = "Zażółć gęślą jaźń: ścieżka wśród źródeł prowadzi ku łące, gdzie pasą się źrebięta.\n"
JAPANESE = "これは日本語の電子メールです。明日の会議は三時に始まります。\n"
CHINESE = "这是一个测试文件，内容是中文。我们明天下午三点开会。\n"
KOREAN = "이것은 한국어로 쓴 전자 우편입니다. 회의는 내일 세 시에 시작합니다.\n"
ENGLISH = "“It’s the dog’s dinner,” she said — and the café’s cat wasn’t pleased.\n"


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        (GERMAN, "cp1252"),
        (GERMAN, "cp850"),
        (GERMAN, "cp437"),
        (ENGLISH * 3, "cp1252"),
        (ENGLISH * 3, "mac_roman"),
        (RUSSIAN, "cp1251"),
        (RUSSIAN, "cp866"),
        (RUSSIAN, "koi8_r"),
        (RUSSIAN, "mac_cyrillic"),
        (RUSSIAN, "iso8859_5"),
        (POLISH, "cp1250"),
        (POLISH, "iso8859_2"),
        (JAPANESE, "cp932"),
        (JAPANESE, "euc_jp"),
        (JAPANESE, "iso2022_jp"),
        (CHINESE, "gb18030"),
        (CHINESE, "hz"),
        ("這是一個測試文件，內容是中文。我們明天下午三點開會。\n", "big5"),
        (KOREAN, "cp949"),
        (KOREAN, "iso2022_kr"),
        ("นี่เป็นข้อความภาษาไทยที่ยาวพอสมควร และต้องอ่านได้\n", "cp874"),
        (GERMAN, "utf-7"),
        (JAPANESE, "utf-7"),
        *[
            (text, f"utf-{wide}")
            for text in (GERMAN, RUSSIAN, JAPANESE)
            for wide in ("16-le", "16-be", "32-le", "32-be")
        ],
    ],
)
def test_a_guess_is_right_and_noted(text, codec):
    reading = decode("a.txt", text.encode(codec))
    assert reading.text == text
    (note,) = reading.notes
    assert note.startswith("decoded as ")
    assert note.endswith(", a guess")


def test_a_note_has_the_usual_name_of_an_encoding():
    assert decode("a.txt", POLISH.encode("cp1250")).notes == ("decoded as windows-1250, a guess",)
    assert decode("a.txt", RUSSIAN.encode("cp866")).notes == ("decoded as cp866, a guess",)


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_is_followed_and_taken_off(codec):
    assert decode("a.txt", GERMAN.encode(codec)) == (GERMAN, ())
    cut = decode("a.txt", (GERMAN + "ß").encode(codec)[:-1])
    assert cut.text == GERMAN + "\ufffd"
    assert cut.notes[0].startswith("1 invalid")


@pytest.mark.parametrize(
    ("declaration", "codec"),
    [
        ('<meta charset="iso-8859-2">', "iso8859_2"),
        ("<META http-equiv=Content-Type content='text/html; charset=windows-1250'>", "cp1250"),
        ('<!-- <meta charset="utf-8"> --><meta charset=windows-1250>', "cp1250"),
        ('<?xml version="1.0" encoding="ISO-8859-2"?>\n<rss>', "iso8859_2"),
        ("#!/usr/bin/env python\n# -*- coding: latin2 -*-\n", "iso8859_2"),
        ("# vim: set fileencoding=cp1250 :\n", "cp1250"),
        ('@charset "windows-1250";', "cp1250"),
        ("Subject: x\nContent-Type: text/plain; charset=iso-8859-2\n\n", "iso8859_2"),
    ],
)
def test_a_declaration_is_followed_where_it_decodes(declaration, codec):
    assert decode("a.html", (declaration + "Ś").encode(codec)) == (declaration + "Ś", ())


@pytest.mark.parametrize(
    ("label", "data", "text"),
    [
        ("iso-8859-1", b"\x93\x80\x94", "“€”"),
        ("gb2312", "镕".encode("gbk"), "镕"),
        ("shift_jis", "①".encode("cp932"), "①"),
        ("x-sjis", "価格".encode("cp932"), "価格"),
        ("euc-kr", "똠".encode("cp949"), "똠"),
        ("windows-1252", GERMAN.encode("cp1252"), GERMAN),
        ("ibm866", RUSSIAN.encode("cp866"), RUSSIAN),
    ],
)
def test_a_label_means_what_the_web_means_by_it(label, data, text):
    head = f"<meta charset={label}>"
    assert decode("a.html", head.encode() + data) == (head + text, ())


@pytest.mark.parametrize("label", ["utf-16", "cp037", "unicode_escape", "idna", "hex", "rot13", "nonsense"])
def test_a_declaration_that_cannot_be_true_is_ignored(label):
    text = f'<?xml version="1.0" encoding="{label}"?><a>\\u0041 {GERMAN}</a>'
    assert decode("a.xml", text.encode()) == (text, ())


def test_valid_utf_8_is_read_as_such_though_it_declares_another_encoding():
    reading = decode("a.html", b"<meta charset=iso-8859-1>" + GERMAN.encode())
    assert reading.text.endswith(GERMAN)
    assert reading.notes == ("declared as iso-8859-1, but valid UTF-8",)
    assert decode("a.html", "<meta charset=iso-8859-1>é".encode()).text.endswith("é")


def test_what_a_declaration_makes_of_valid_utf_8_has_a_note():
    data = "<meta charset=ibm866>раб".encode("ibm866")
    note = "decoded as ibm866, which it declares, but valid UTF-8 too"
    assert decode("a.html", data) == ("<meta charset=ibm866>раб", (note,))


def test_a_declaration_that_prose_tells_of_is_none():
    text = "# Pages\n\nOld ones have `<meta charset=shift_jis>`: Grüße\n"
    assert decode("a.md", text.encode()) == (text, ())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (GERMAN.encode() + b"\xe4" + GERMAN.encode(), f"{GERMAN}\ufffd{GERMAN}"),
        (GERMAN.encode() + "漢".encode()[:2], f"{GERMAN}\ufffd"),
    ],
)
def test_one_fault_in_utf_8_harms_no_other_character(data, text):
    assert decode("a.txt", data) == (text, ("1 invalid utf-8 sequence was replaced by U+FFFD",))


def test_nuls_of_a_log_are_removed_and_counted():
    line = b"2025-01-01 start\n"
    assert decode("a.log", line * 50 + b"\0" + line) == ((line * 51).decode(), ("1 NUL was removed",))
    crashed = decode("a.log", line * 50 + bytes(512) + line)
    assert crashed == ((line * 51).decode(), ("512 NULs were removed",))
    assert decode("a.log", line * 9 + b"\x07\x1b[31mred\x1b(B\x1b[m").notes == ()


@pytest.mark.parametrize(
    "text",
    [
        "export MANPAGER='vim +MANPAGER -'",
        "a + b, c++, +1-2, x=+3yY]",
        "cp ~/a ~{b,c} ~user",
        "\x1b[31mred\x1b(B\x1b[m",
        "AAAA+BCD/EFG+HIJ=",
        "git+https://example.org +ACE",
        "between +100-200 points",
        "gtk+foo-bar with +password-file",
    ],
)
def test_ascii_that_resembles_a_shifting_encoding_stays_as_it_is(text):
    assert decode("a.txt", text.encode()) == (text, ())


def test_half_a_surrogate_pair_becomes_a_replacement_character():
    assert decode("a.txt", b"caf+AOk-s and +2D0- half").text == "cafés and \ufffd half"


@pytest.mark.parametrize(
    "data",
    [
        bytes(range(256)) * 8,
        b"\x7fELF" + bytes(60) + b"text" * 50,
        b"\0" * 100,
        bytes(range(32)) * 100,
        bytes(range(1, 256)) * 4,
    ],
)
def test_binary_files_are_refused(data):
    with pytest.raises(CorpusError, match=r"binary|unknown"):
        decode("a", data)


def test_the_time_of_a_guess_grows_no_faster_than_the_text():
    """A million letters of ASCII, then the one line that decides, and what would be slow to search for."""
    began = time.perf_counter()
    assert decode("a.txt", b"a " * 500_000 + GERMAN.encode("cp1252")).text.endswith(GERMAN)
    decode("a.txt", b"<!--" * 250_000 + b"+AAA" * 250_000 + b"\xfc" * 9)
    decode("a.txt", GERMAN.encode("cp1252") * 20_000)
    assert time.perf_counter() - began < 20
