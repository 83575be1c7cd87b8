"""Numbers and rules of a tokenizer.json that a library would make room for without end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload_decode import demo_models
from offload_decode.common.errors import ModelError
from offload_decode.models.tokenizer_file import check_tokenizer

ADDED = {"id": 1, "content": "<a>", "special": True}
TWICE = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
SPACE = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}


def sequence(rule: dict[str, Any], times: int) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [rule] * times}


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an id": lambda held: held["model"]["vocab"].update(x=1 << 30),
    "an id below 0": lambda held: held["model"]["vocab"].update(x=-1),
    "an id that is none": lambda held: held["model"]["vocab"].update(x="1"),
    "an added id": lambda held: held.update(added_tokens=[ADDED | {"id": 1 << 40}]),
    "many tokens": lambda held: held.update(added_tokens=[ADDED] * 70_000),
    "a long token": lambda held: held.update(added_tokens=[ADDED | {"content": "a" * 5000}]),
    "a long rule": lambda held: held.update(normalizer={"type": "Prepend", "prepend": "x" * 100_000}),
    "many ids of one": lambda held: held.update(post_processor={"ids": [0] * 100_000}),
    "growth": lambda held: held.update(normalizer=sequence(TWICE, 40)),
    "growth that is nested": lambda held: held.update(normalizer=sequence(sequence(TWICE, 3), 3)),
    "growth at every letter": lambda held: held.update(normalizer=SPACE | {"content": "▁" * 300}),
    "a table": lambda held: held.update(normalizer={"precompiled_charsmap": "A" * (20 << 20)}),
    "a table of gigabytes": lambda held: held.update(normalizer={"precompiled_charsmap": "/////w=="}),
}


def file(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    held = json.loads((demo_models.path("demo") / "tokenizer.json").read_text())
    change(held)
    (folder / "tokenizer.json").write_text(json.dumps(held))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_no_tokenizer_has_is_refused(change: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be used, because") as raised:
        check_tokenizer(file(tmp_path, change))
    assert "\n" not in str(raised.value)


def test_what_tokenizers_have_is_not(tmp_path: Path) -> None:
    for rules in (None, sequence(SPACE, 6), {"precompiled_charsmap": "A" * (4 << 20)}, sequence(TWICE, 7)):
        check_tokenizer(file(tmp_path, lambda held, rules=rules: held.update(normalizer=rules)))
