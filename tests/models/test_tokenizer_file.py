"""Numbers and rules of a tokenizer.json that a library would make room for without end."""

import base64
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload_decode import demo_models
from offload_decode.common.errors import ModelError
from offload_decode.models.tokenizer_file import check_tokenizer
from tests.models.tokenizers import KINDS, tokenizer_of

ADDED = {"id": 1, "content": "<a>", "special": True}
TWICE = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
SPACE = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}


TEXT = {"Sequence": {"id": "A", "type_id": 0}}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def sequence(rule: dict[str, Any], times: int) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [rule] * times}


def repeated(times: int) -> dict[str, Any]:
    """A post-processor that puts the text so many times."""
    return {"type": "TemplateProcessing", "single": [TEXT] * times, "pair": [TEXT], "special_tokens": {}}


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
    "a text that is repeated": lambda held: held.update(post_processor=repeated(1500)),
    "a text that is repeated ten times": lambda held: held.update(post_processor=repeated(10)),
    "a text that is repeated by two": lambda held: held.update(
        post_processor={"type": "Sequence", "processors": [repeated(100), repeated(100)]}
    ),
    "bytes of bytes": lambda held: held.update(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 30}
    ),
    "decoders": lambda held: held.update(decoder={"type": "Sequence", "decoders": [TWICE] * 5}),
    "a rule that the library does not know": lambda held: held.update(normalizer={"type": "Nothing"}),
    "a table that panics": lambda held: held.update(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAB4AA=="}
    ),
    "a vocabulary of a million": lambda held: held["model"]["vocab"].update(
        {f"x{n}": 5000 + n for n in range(1 << 20)}
    ),
    "a list of half a million": lambda held: held.update(
        model={"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]] * ((1 << 19) + 1)}
    ),
    "nothing but brackets": lambda held: held.update(normalizer=nested(300)),
    "a table": lambda held: held.update(normalizer={"precompiled_charsmap": "A" * (20 << 20)}),
    "a table with a long text": lambda held: held.update(normalizer=table(b"x" * 300)),
    "a table of gigabytes": lambda held: held.update(normalizer={"precompiled_charsmap": "/////w=="}),
}


def nested(depth: int) -> Any:
    return {"normalizers": [nested(depth - 1)]} if depth else {}


def table(texts: bytes) -> dict[str, Any]:
    """A normalizer with a table of characters that has nothing but the texts in their places."""
    held = (4096).to_bytes(4, "little") + bytes(4096) + texts
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(held).decode()}


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
    for rules in (None, sequence(SPACE, 6), table(b"x\0" * (1 << 20)), sequence(TWICE, 2)):
        check_tokenizer(file(tmp_path, lambda held, rules=rules: held.update(normalizer=rules)))


def test_a_tokenizer_that_fails_on_some_texts_is_left_to_them(tmp_path: Path) -> None:
    backtracks = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    check_tokenizer(file(tmp_path, lambda held: held.update(pre_tokenizer=backtracks)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_passes(kind: str, tmp_path: Path) -> None:
    tokenizer_of(kind, "added at both ends").save_pretrained(tmp_path)
    check_tokenizer(tmp_path / "tokenizer.json")


def test_a_trial_has_only_so_much_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = file(tmp_path, lambda held: held.update(padding=["x" * 1000] * 100_000))
    started = subprocess.run
    command = "import offload_decode.models.tokenizer_trial as trial; trial.MEMORY = 200 << 20; trial.main()"
    monkeypatch.setattr(
        subprocess, "run", lambda given, **more: started([given[0], "-c", command, given[-1]], **more)
    )
    with pytest.raises(ModelError, match="takes more than 2 GiB"):
        check_tokenizer(big)


def test_what_was_tried_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file(tmp_path, lambda held: held.update(padding=None))
    check_tokenizer(path)
    monkeypatch.setattr(subprocess, "run", None)
    check_tokenizer(path)
