"""Training text that every machine has: docstrings and comments of the installed Python packages.

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
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = ("pydoc_data", "offload_decode", "test", "tests", "idlelib", "lib2to3")
MIN_CHARS = 80  # shorter docstrings are mostly "Return x." and teach nothing


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


def texts(max_chars: int = 16_000_000, seed: int = 0) -> list[str]:
    """One text a module: its longer docstrings and comments, in an order that seed decides."""
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")}
    found: list[str] = []
    seen: set[int] = set()
    total = 0
    paths = sorted(p for root in roots for p in root.rglob("*.py"))
    random.Random(seed).shuffle(paths)
    for path in paths:
        if any(part in LEFT_OUT for part in path.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        parts = []
        for part in (*docstrings(source), *comments(source)):
            tidy = re.sub(r"\n{3,}", "\n\n", part.strip())
            if len(tidy) >= MIN_CHARS and hash(tidy) not in seen:
                seen.add(hash(tidy))
                parts.append(tidy)
        if parts:
            found.append("\n\n".join(parts))
            total += len(found[-1])
        if total >= max_chars:
            break
    return found


def cached(path: Path, seed: int) -> list[str]:
    """The texts, read from path when an earlier start of the same run wrote it."""
    if not path.exists():
        part = path.with_suffix(".part")
        part.write_text(json.dumps(texts(seed=seed)), encoding="utf-8")
        part.replace(path)
    return list(json.loads(path.read_text(encoding="utf-8")))
