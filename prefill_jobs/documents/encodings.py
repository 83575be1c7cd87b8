"""Bytes to characters: by the byte order mark, else as declared, else as UTF-8, else by a guess with a note.

uchardet guesses (package cchardet), and a wrong guess among the encodings of one byte shows in the letters.
How often that is right, and other libraries are: docs/prefill.md.
"""

import codecs
import mimetypes
import re
import unicodedata
from collections import Counter
from functools import cache
from itertools import islice

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents.base import Reading

_MARKUP = {b"%!PS": "a PostScript document", b"{\\rtf": "an RTF document"}  # letters, but no text

_BYTE_ORDER_MARKS = {  # UTF-32 first: its little-endian mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
    codecs.BOM_UTF8: "utf-8",
}
_WIDE = ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
_UNUSED = frozenset({"Cn", "Co", "Cs"})  # categories of code points that are no characters

_HEAD = 8192  # bytes that are searched for a declaration
_COMMENT = re.compile(rb"<!--.*?-->", re.DOTALL)
_DECLARATION = re.compile(
    rb"""\A\s*<\?xml[^>]*?\sencoding\s*=\s*["']([\w:.-]{1,40})
    | \A\s*(?:<(?s:.)*?)?<meta\s[^>]*?charset\s*=\s*["']?\s*([\w:.-]{1,40})  # not where prose names it
    | \A@charset\s"([\w:.-]{1,40})";
    | \A(?:.*\n)?[^\w\n]{1,20}.*?coding[:=][ \t]*([\w.-]{1,40})  # as in Python (PEP 263), Ruby, Emacs, Vim
    | ^"?Content-Type:.*?charset="?([\w:.-]{1,40})  # of a mail, of gettext""",
    re.IGNORECASE | re.VERBOSE | re.MULTILINE,
)
_CODEPAGE = re.compile(r"(?:windows|win|dos|ibm)[-_]?(\d+)")
_CODEC = re.compile(
    r"(?:cp|iso8859-|koi8-|mac-|gb|big5|euc_|shift_jis|iso2022_|kz)\w+|utf-(?:7|8|16|32).*|ascii|hz|johab"
)
_SUPERSETS = {  # what is meant by these names, on the web and elsewhere
    "iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874", "tis-620": "cp874",
    "koi8-r": "koi8-u", "shift_jis": "cp932", "euc_jp": "euc_jis_2004", "iso2022_jp": "iso2022_jp_2",
    "euc_kr": "cp949", "gb2312": "gb18030", "gbk": "gb18030", "big5": "big5hkscs",
}  # fmt: skip
_BY_CHANCE = 3  # characters beyond ASCII, all of which may happen to be valid UTF-8

_SHIFTS = {  # what text in encodings whose bytes are all ASCII has somewhere
    "iso2022_jp_2": (iso_2022 := rb"\x1b\$|\x1b\([IJ]"),
    "iso2022_jp_ext": iso_2022,
    "iso2022_kr": iso_2022,
    "hz": rb"~\{(?:[!-w][!-~])+~\}",
    # Letters of an alphabet, symbols, or long words: `vim +MANPAGER file` and `+100-200` would decode too.
    "utf-7": rb"\+[ABHIJ][A-Za-z0-9/]{2,}-|\+(?=[A-Z0-9/]*[a-z])(?=[a-z0-9/]*[A-Z])[A-Za-z0-9/]{11,}",
}
_SURROGATE = re.compile("[\ud800-\udfff]")

_SAMPLE = 100_000  # bytes that a guess looks at
_AROUND = 500  # bytes before what is not ASCII, and up to ten times as many behind
_BEYOND_ASCII = re.compile(rb"[\x80-\xff]")

_ONE_BYTE = (  # the usual first
    "cp1252", "cp850", "mac-roman", "cp1250", "cp1251", "cp866", "koi8-u", "mac-cyrillic", "cp852",
    "iso8859-2", "cp855", "cp1253", "cp737",
)  # fmt: skip
# What uchardet calls Western text more often than what has these encodings.
_MISTAKEN = frozenset({"utf-8", "viscii", "iso-8859-3", "iso-8859-4", "iso-8859-10"})
_WITHIN_WORDS = "'’‘\xad\xa0—–…-·"

_NULS = re.compile(rb"\0+")
_CONTROLS = re.compile(r"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f]")  # that text has no use for
_STRAY = 0.01  # of the characters: as many NULs, other controls, or invalid sequences may be in a text

_MEDIA = {"image": "an image", "audio": "a recording", "video": "a video", "font": "a font"}
_SURE = 0.3  # of puremagic's confidence: signatures of three bytes and more


def decode(name: str, data: bytes) -> Reading:
    """The characters of a text, without halves of surrogate pairs. Raises as `read_document`."""
    for signature, kind in _MARKUP.items():
        if data.startswith(signature):
            raise CorpusError(f"it is {kind}")
    removed: tuple[str, ...] = ()
    reading = _marked(data)
    if reading is None and b"\0" in data:
        kept = data.replace(b"\0", b"")
        if not (_few_nuls(data) and _read(kept, "utf-8")):
            reading = _wide(data)
        if reading is None:
            binary = _binary_kind(name, data)
            if binary or not _few_nuls(data) or 2 * len(kept) < len(data):
                raise CorpusError(f"it is {binary or 'binary'}")
            count, data = len(data) - len(kept), kept
            removed = (f"{count:,} {'NUL was' if count == 1 else 'NULs were'} removed",)
    reading = reading or _declared(data) or _shifting(data) or _read(data, "utf-8")
    if reading is None:
        binary = _binary_kind(name, data)
        reading = None if binary in _MEDIA.values() else _guess(data)
        if reading is None:
            raise CorpusError(f"it is {binary}" if binary else "its encoding is unknown")
    if len(_CONTROLS.findall(reading.text)) > max(1, _STRAY * len(reading.text)):
        raise CorpusError(f"it is {_binary_kind(name, data) or 'binary'}")
    return Reading(reading.text, (*removed, *reading.notes))


def _read(data: bytes, codec: str, *notes: str) -> Reading | None:
    """Decoded; invalid sequences are replaced where they are few beside valid ones, and else it is `None`."""
    try:
        return Reading(data.decode(codec), notes)
    except UnicodeDecodeError:
        text = data.decode(codec, "replace")
    invalid = len(text) - len(data.decode(codec, "ignore"))
    # Text of another encoding than UTF-8 has more sequences that UTF-8 lacks than characters that it has.
    if invalid > (_STRAY * len(text) + 1 if codec in _WIDE else _beyond_ascii(text) / 3):
        return None
    were = "sequence was" if invalid == 1 else "sequences were"
    return Reading(text, (*notes, f"{invalid:,} invalid {codec} {were} replaced by U+FFFD"))


def _beyond_ascii(text: str) -> int:
    return len(text) - len(text.encode("ascii", "ignore"))


def _marked(data: bytes) -> Reading | None:
    """By a byte order mark."""
    found = next(((mark, codec) for mark, codec in _BYTE_ORDER_MARKS.items() if data.startswith(mark)), None)
    return _read(data[len(found[0]) :], found[1]) if found else None


def _wide(data: bytes) -> Reading | None:
    """UTF-16 and UTF-32 without a mark: all are characters of text, and of the fewest blocks of 256."""
    blocks = {}
    for codec in _WIDE:
        try:
            text = codecs.getincrementaldecoder(codec)().decode(data[:_SAMPLE])
        except UnicodeDecodeError:
            continue
        used = Counter(ord(character) >> 8 for character in text)
        swapped = sum(not ord(character) & 0xFF for character in text)  # whose NUL is not that of ASCII
        if used[0] > 9 * swapped and not (_CONTROLS.search(text) or _has_unused(text)):
            blocks[codec] = len(used)
    likely = min(blocks, key=blocks.__getitem__, default=None)
    return _read(data, likely, f"decoded as {likely}, a guess") if likely else None


def _has_unused(text: str) -> bool:
    return not _UNUSED.isdisjoint(map(unicodedata.category, text))


def _declared(data: bytes) -> Reading | None:
    """As the text itself says, unless it is UTF-8 not by chance: who converts a file may leave that."""
    found = _DECLARATION.search(_COMMENT.sub(b"", data[:_HEAD]))
    label = next(filter(None, found.groups()), b"").decode("ascii") if found else ""
    codec = _codec(label)
    if codec is None or label.encode().decode(codec, "replace") != label:  # UTF-16, EBCDIC
        return None
    if codec != "utf-8" and not data.isascii():
        reading = _read(data, "utf-8")
        if reading and not reading.notes:
            if _beyond_ascii(reading.text) > _BY_CHANCE or _odd_letters(data, codec):
                return reading._replace(notes=(f"declared as {label}, but valid UTF-8",))
            return _read(data, codec, f"decoded as {label}, which it declares, but valid UTF-8 too")
    return _read(data, codec)


def _codec(label: str) -> str | None:
    """Python's name of the encoding that a label means, if it is one of text."""
    label = label.lower().removeprefix("x-")
    if codepage := _CODEPAGE.fullmatch(label):
        label = f"cp{codepage[1]}"
    try:
        codec = codecs.lookup(label.removesuffix("-i")).name  # iso-8859-8-i: Hebrew in logical order
    except LookupError:
        return None
    codec = _SUPERSETS.get(codec, codec)
    return codec if _CODEC.fullmatch(codec) else None


def _shifting(data: bytes) -> Reading | None:
    """ISO-2022, HZ and UTF-7, whose bytes are all ASCII."""
    if not data.isascii():
        return None
    for codec, shift in _SHIFTS.items():
        if not re.search(shift, data):
            continue
        try:
            text = _SURROGATE.sub("\ufffd", data.decode(codec))
        except UnicodeDecodeError:
            continue
        if not text.isascii() and not _has_unused(text):
            return Reading(text, (f"decoded as {codec}, a guess",))
    return None


def _guess(data: bytes) -> Reading | None:
    """As uchardet takes a sample, or as another encoding of one byte in which fewer letters look wrong."""
    import cchardet

    sample = _sample(data)
    label = (cchardet.detect(sample)["encoding"] or "").lower()
    codec = _ONE_BYTE[0] if label in _MISTAKEN else _codec(label)
    if codec is None:
        return None
    likely = min((codec, *_ONE_BYTE), key=lambda codec: _odd_letters(sample, codec))
    name = re.sub(r"^cp(?=125\d$)", "windows-", likely)
    return _read(data, likely, f"decoded as {name}, a guess")


def _odd_letters(sample: bytes, codec: str) -> float:
    """How many letters stand beside a symbol, before a capital, or beside one of another script."""
    try:
        return len(_odd().findall(sample.decode(codec)))
    except UnicodeDecodeError:
        return float("inf")


@cache
def _odd() -> re.Pattern[str]:
    characters = {c for codec in _ONE_BYTE for c in bytes(range(128, 256)).decode(codec, "ignore")}
    upper, lower = "".join(filter(str.isupper, characters)), "".join(filter(str.islower, characters))
    symbols = "".join(c for c in characters if not c.isalpha() and c not in _WITHIN_WORDS)
    latin = "a-zA-Z" + "".join(c for c in upper + lower if "LATIN" in unicodedata.name(c))
    others = "".join(c for c in upper + lower if "LATIN" not in unicodedata.name(c))
    letter = f"[a-zA-Z{upper}{lower}]"
    return re.compile(
        f"[a-z{lower}][{upper}]|[{lower}][A-Z]|{letter}[{symbols}]{letter}|[{upper}{lower}][{symbols}]"
        f"|[{latin}][{others}]|[{others}][{latin}]"
    )


def _sample(data: bytes) -> bytes:
    """Parts of a text around what is not ASCII."""
    pieces, length, end = [], 0, 0 if len(data) > _SAMPLE else len(data)
    while length < _SAMPLE and (found := _BEYOND_ASCII.search(data, end)):
        start = max(end, found.start() - _AROUND)
        line_end = data.find(b"\n", found.end() + _AROUND, found.end() + 9 * _AROUND)
        end = line_end + 1 or found.end() + 9 * _AROUND
        pieces.append(data[start:end])
        length += end - start
    return b"".join(pieces) or data


def _few_nuls(data: bytes) -> bool:
    """Whether NULs stand in few places, alone or many together, as a crash leaves them in a log."""
    most = int(max(1, _STRAY * len(data)))
    return sum(1 for _ in islice(_NULS.finditer(data), most + 1)) <= most


def _binary_kind(name: str, data: bytes) -> str | None:
    """The kind of a file that is not Unicode text, by its bytes or else by its name."""
    import puremagic

    try:
        matches = puremagic.magic_string(data, name)
    except (puremagic.PureError, ValueError):
        matches = []
    best = matches[0] if matches and matches[0].confidence >= _SURE else None
    mime = (best.mime_type if best else mimetypes.guess_type(name)[0]) or ""
    if mime.endswith("+xml"):
        return None
    return _MEDIA.get(mime.partition("/")[0]) or (f"binary ({best.name})" if best else None)
