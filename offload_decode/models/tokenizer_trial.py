"""A tokenizer.json is read and tried here first, in a process of its own that may die of it:

    python -P -m offload_decode.models.tokenizer_trial FILE

The tokenizers library makes room by the largest id, puts any text at each place of another, panics in Rust,
and ends its process where there is no memory. Exit code 0: it can be used. 1: stdout says why it cannot.
"""

import base64
import json
import math
import resource
import string
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MEMORY, CPU_S = 2 << 30, 120
MOST_TOKENS = 1 << 19
"""Twice the largest vocabulary that is known; ids are below it."""

# All several times the largest that are known.
_MOST_ADDED, _LONGEST_ADDED = 1 << 16, 1 << 12
_MOST_RULES = 1 << 16  # letters of JSON
_MOST_CHARACTERS = 1 << 24  # letters of a table of characters
_LONGEST_CHARACTER = 1 << 8  # bytes that a table puts in the place of one
_MOST_READ_GROWTH = 256
"""By how many times rules may make a text longer, where each of them matches at every letter."""
_MOST_GROWTH, _ALLOWANCE = 4, 1 << 10
"""By how many times a text that is tried may grow, and by how much more: bytes, tokens or letters."""

_RULES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_TABLE = "precompiled_charsmap"
_MIXED = (
    'The keeper, in 1907:\n\t"straße", Ångström  İ ﷺ ﬁ e\u0301 字仮名 한글 हिन्दी שלום '
    "🙂 🚀 -- ½ \uff10 </s>   x=1;\r\n"
)
_LETTERS = string.printable + "éßİ字🙂▁Ġ"


def check(path: Path) -> None:
    """`ValueError` for a tokenizer.json that a library would make room for without end, or fails on."""
    from tokenizers import Tokenizer

    content = path.read_text(encoding="utf-8")
    try:
        patterns = list(_check(json.loads(content)))
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON ({error})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    try:
        _try(Tokenizer.from_str(content), patterns)
    except ValueError:
        raise
    except MemoryError:
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise ValueError(f"the tokenizers library fails on it ({error!s:.200})") from error


def _check(tokenizer: Any) -> Iterator[str]:
    """The texts that its rules look for."""
    if not isinstance(tokenizer, dict):
        raise ValueError("it is no JSON object")
    added = _listed(tokenizer.get("added_tokens"))
    if len(added) > _MOST_ADDED:
        raise ValueError(f"it adds {len(added):,} tokens to its vocabulary")
    for token in added:
        if isinstance(token, dict) and len(str(token.get("content", ""))) > _LONGEST_ADDED:
            raise ValueError(f"it adds a token of more than {_LONGEST_ADDED:,} letters")
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list | dict) and len(vocabulary) > MOST_TOKENS:
        raise ValueError(f"its vocabulary has {len(vocabulary):,} tokens, and up to {MOST_TOKENS:,} are read")
    ids: list[Any] = [token.get("id") for token in added if isinstance(token, dict)]
    ids += vocabulary.values() if isinstance(vocabulary, dict) else ()
    if odd := next((one for one in ids if type(one) is not int or not 0 <= one < MOST_TOKENS), None):
        raise ValueError(f"a token has the id {odd!r:.40}, and ids are whole numbers below {MOST_TOKENS:,}")
    for name in _RULES:
        yield from _check_rules(name, tokenizer.get(name))


def _check_rules(name: str, rules: Any) -> Iterator[str]:
    each = list(_each(rules))
    tables = [rule.pop(_TABLE, "") for rule in each]
    if not all(isinstance(table, str) and _is_whole(table) for table in tables):
        raise ValueError(f"its {name} has a table of characters that is too large, or cut off")
    if len(json.dumps(rules)) > _MOST_RULES:
        raise ValueError(f"its {name} has more than {_MOST_RULES:,} letters")
    if math.prod(map(_growth, each)) > _MOST_READ_GROWTH:
        raise ValueError(f"its {name} makes texts more than {_MOST_READ_GROWTH} times as long")
    for rule in each:
        if matched := _matched(rule):
            yield matched


def _is_whole(table: str) -> bool:
    """Whether a table of characters holds the bytes that it says it does, in its first four, and puts no long
    text in the place of one.
    """
    if len(table) > _MOST_CHARACTERS:
        return False
    held = base64.b64decode(table)
    size = int.from_bytes(held[:4], "little")
    return size <= len(held) and max(map(len, held[4 + size :].split(b"\0"))) <= _LONGEST_CHARACTER


def _each(rules: Any) -> Iterable[dict[str, Any]]:
    if isinstance(rules, dict):
        yield rules
        for inner in rules.values():
            for rule in _listed(inner):
                yield from _each(rule)


def _matched(rule: dict[str, Any]) -> str:
    """The text that a rule looks for; empty where it looks for none, or has a regular expression."""
    pattern = rule.get("pattern")
    matched = pattern.get("String") if isinstance(pattern, dict) else None
    return matched if isinstance(matched, str) else ""


def _growth(rule: dict[str, Any]) -> int:
    """How much longer it makes a text at most; a regular expression may match at every letter."""
    put, matched = len(str(rule.get("content", ""))), len(_matched(rule))
    replaced = -(-put // matched) if matched else 1 + put
    put_before = len(str(rule.get("prepend", "")))
    return max(1, replaced if "content" in rule else 1) * (1 + put_before)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _try(tokenizer: Any, patterns: list[str]) -> None:
    tokenizer.no_padding()  # callers pad and cut as they ask for it
    tokenizer.no_truncation()
    repeated = (one * (1 + 256 // len(one)) for one in [*_LETTERS, *patterns])
    failure: BaseException | None = None
    worked = False
    for text in [_MIXED[:8], _MIXED, *repeated, _MIXED * 32]:
        try:
            ids = tokenizer.encode(text).ids
            decoded = tokenizer.decode(ids, skip_special_tokens=False)
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001 - a text that it fails on is refused by name, later
            failure = error
            continue
        worked = True
        _compare("tokens", len(ids), "bytes", len(text.encode()))
        letters = sum(len(tokenizer.id_to_token(one) or "") for one in ids)
        _compare("letters", len(decoded), "letters of tokens", letters)
    if failure is not None and not worked:
        raise failure


def _compare(what: str, made: int, of: str, given: int) -> None:
    if made > _MOST_GROWTH * given + _ALLOWANCE:
        raise ValueError(f"it makes {made:,} {what} of {given:,} {of}")


def main() -> None:
    """Check the file that is named."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        check(Path(sys.argv[1]))
    except ValueError as error:
        print(" ".join(str(error).split()))
        sys.exit(1)


if __name__ == "__main__":
    main()
