"""Training text: docstrings, comments and code that every machine has, and the files of named folders.

The standard library is under the PSF licence and the packages beside it under permissive ones. `pydoc_data`
is left out: the project's demo runs on it. Nothing is downloaded.
"""

from __future__ import annotations

import ast
import io
import json
import random
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

LEFT_OUT = ("pydoc_data", "offload_decode", "test", "tests", "idlelib", "lib2to3")
MIN_CHARS = 80  # shorter docstrings are mostly "Return x." and teach nothing
SOURCE_CHARS = 20_000  # of one module's code: enough of each, and no generated table whole


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of one Python module, outermost first; nothing where it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text


def comments(source: str) -> Iterator[str]:
    """Runs of comment lines of one Python module, each run as one paragraph."""
    run: list[str] = []
    last = -2
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type != tokenize.COMMENT:
                continue
            if token.start[0] != last + 1 and run:
                yield " ".join(run)
                run = []
            run.append(token.string.lstrip("#: ").rstrip())
            last = token.start[0]
    except (tokenize.TokenError, SyntaxError):
        return
    if run:
        yield " ".join(run)


def installed(prose_chars: int = 8_000_000, code_chars: int = 2_000_000, seed: int = 0) -> tuple[str, str]:
    """Prose (longer docstrings and comments) and source code of installed modules, in the seed's order."""
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")}
    prose: list[str] = []
    code: list[str] = []
    seen: set[str] = set()
    sizes = [0, 0]
    paths = sorted(p for root in roots for p in root.rglob("*.py"))
    random.Random(seed).shuffle(paths)
    for path in paths:
        if any(part in LEFT_OUT for part in path.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if sizes[1] < code_chars:
            code.append(source[:SOURCE_CHARS])
            sizes[1] += len(code[-1])
        for part in (*docstrings(source), *comments(source)):
            tidy = re.sub(r"\n{3,}", "\n\n", part.strip())
            if len(tidy) >= MIN_CHARS and tidy not in seen:
                seen.add(tidy)
                prose.append(tidy)
                sizes[0] += len(tidy)
        if sizes[0] >= prose_chars:
            break
    return "\n\n".join(prose), "\n\n".join(code)


def folder_texts(folders: Sequence[Path]) -> dict[str, str]:
    """Each text file of the folders by its name, paragraphs as they are."""
    return {
        path.stem: path.read_text(encoding="utf-8", errors="replace")
        for folder in folders
        for path in sorted(folder.rglob("*.txt"))
    }


def cached(path: Path, folders: Sequence[Path], seed: int) -> dict[str, str]:
    """Every text by name, read from path when an earlier start of the same run wrote it."""
    if not path.exists():
        prose, code = installed(seed=seed)
        part = path.with_suffix(".part")
        found = {"docstrings": prose, "code": code} | folder_texts(folders)
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(path)
    return dict(json.loads(path.read_text(encoding="utf-8")))
