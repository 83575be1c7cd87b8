"""A tokenizer.json, looked at before a library reads it: what it makes of a text is bounded.

The tokenizers library makes room by the largest id, puts any text at each place of another, and ends the
process where there is no memory for it.
"""

import base64
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from offload_decode.common.errors import ModelError
from offload_decode.hf.user_cache import cached_fingerprint

# All several times the largest that are known.
_MOST_ID, _MOST_ADDED, _LONGEST_ADDED = 1 << 22, 1 << 16, 1 << 12
_MOST_RULES = 1 << 16  # letters of JSON
_MOST_CHARACTERS = 1 << 24  # letters of a table of characters
_MOST_GROWTH = 256
"""By how many times rules may make a text longer."""

_RULES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_TABLE = "precompiled_charsmap"


def check_tokenizer(path: Path) -> None:
    """`ModelError` for ids or rules of no tokenizer. A tokenizer.json is read once, while it is unchanged."""

    def checked() -> str:
        try:
            tokenizer = json.loads(path.read_bytes())
        except (ValueError, RecursionError):  # the library says what is wrong with it
            return "0"
        try:
            _check(tokenizer if isinstance(tokenizer, dict) else {})
        except ValueError as error:
            raise ModelError(f"{path} cannot be used, because {error}: fetch the checkpoint again") from error
        return "1"

    cached_fingerprint([path], "tokenizer 1", checked)


def _check(tokenizer: dict[str, Any]) -> None:
    added = _listed(tokenizer.get("added_tokens"))
    if len(added) > _MOST_ADDED:
        raise ValueError(f"it adds {len(added):,} tokens to its vocabulary")
    for token in added:
        if isinstance(token, dict) and len(str(token.get("content", ""))) > _LONGEST_ADDED:
            raise ValueError(f"it adds a token of more than {_LONGEST_ADDED:,} letters")
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: list[Any] = [token.get("id") for token in added if isinstance(token, dict)]
    ids += vocabulary.values() if isinstance(vocabulary, dict) else ()
    if odd := next((one for one in ids if type(one) is not int or not 0 <= one <= _MOST_ID), None):
        raise ValueError(f"a token has the id {odd!r:.40}, and ids are whole numbers up to {_MOST_ID:,}")
    for name in _RULES:
        _check_rules(name, tokenizer.get(name))


def _check_rules(name: str, rules: Any) -> None:
    each = list(_each(rules))
    tables = [rule.pop(_TABLE, "") for rule in each]
    if not all(isinstance(table, str) and _is_whole(table) for table in tables):
        raise ValueError(f"its {name} has a table of characters that is too large, or cut off")
    if len(json.dumps(rules)) > _MOST_RULES:
        raise ValueError(f"its {name} has more than {_MOST_RULES:,} letters")
    if math.prod(map(_growth, each)) > _MOST_GROWTH:
        raise ValueError(f"its {name} makes texts more than {_MOST_GROWTH} times as long")


def _is_whole(table: str) -> bool:
    """Whether a table of characters holds the bytes that it says it does, in its first four."""
    size = int.from_bytes(base64.b64decode(table[:8])[:4], "little")
    return len(table) <= _MOST_CHARACTERS and size <= len(table) * 3 // 4


def _each(rules: Any) -> Iterable[dict[str, Any]]:
    if isinstance(rules, dict):
        yield rules
        for inner in rules.values():
            for rule in _listed(inner):
                yield from _each(rule)


def _growth(rule: dict[str, Any]) -> int:
    """How much longer it makes a text at most; a regular expression may match at every letter."""
    pattern, put = rule.get("pattern"), len(str(rule.get("content", "")))
    matched = pattern.get("String") if isinstance(pattern, dict) else None
    replaced = -(-put // len(matched)) if isinstance(matched, str) and matched else 1 + put
    put_before = len(str(rule.get("prepend", "")))
    return max(1, replaced if "content" in rule else 1) * (1 + put_before)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
