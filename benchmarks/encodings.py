"""How texts in known encodings are read: `python -m benchmarks.encodings FOLDER`.

FOLDER holds folders named ENCODING or ENCODING-LANGUAGE with text files, such as `tests` of the repository
chardet/chardet. A text is right where it is what Python decodes it to by the name of its folder; encodings of
the web are taken as browsers take them (gb2312 as gb18030). Prints how many are right, wrong with a note,
wrong without one, and refused.
"""

import codecs
import sys
import unicodedata
from collections import Counter
from pathlib import Path

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents.encodings import decode

_WEB = {
    "shift_jis": "cp932", "gb2312": "gb18030", "euc-kr": "cp949", "iso-8859-1": "cp1252",
    "iso-8859-9": "cp1254", "ascii": "cp1252", "tis-620": "cp874",
}  # fmt: skip


def plain(text: str) -> str:
    return unicodedata.normalize("NFC", text).lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def judged(file: Path, name: str) -> str | None:
    """How a file is read; None where Python does not decode it either."""
    data, wanted = file.read_bytes(), set()
    for encoding in (name, _WEB.get(name, name)):
        try:
            wanted.add(plain(data.decode(encoding)))
        except ValueError:
            continue
    if not wanted:
        return None
    try:
        read = decode(file.name, data)
    except CorpusError:
        return "refused"
    if plain(read.text) in wanted:
        return "right"
    return "wrong with a note" if read.notes else "wrong without a note"


def main() -> None:
    found: Counter[str] = Counter()
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        name = folder.name.lower()
        while name:
            try:
                codecs.lookup(name)
                break
            except LookupError:
                name = name.rpartition("-")[0]
        for file in sorted(folder.rglob("*")) if name else ():
            if file.is_file() and (how := judged(file, name)):
                found[how] += 1
                if how != "right":
                    print(f"{how}: {file}")
    print(", ".join(f"{how} {count:,}" for how, count in sorted(found.items())))


if __name__ == "__main__":
    main()
