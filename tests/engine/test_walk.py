"""A step that reads aloud: how many functions and files of this project one generated token enters."""

import sys
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch

import offload_decode
from offload_decode.common.rows import threads
from offload_decode.engine.engine import Engine
from offload_decode.models.loading import load
from tests.tiny import random_ids, token_store

ROOT = Path(offload_decode.__file__).resolve().parents[1]
ROOMS = tuple(f"{ROOT / room}/" for room in ("offload_decode", "indexes"))


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> list[CodeType]:
    """What the third token of an answer of the demo model enters, in order, comprehensions left out."""
    loaded = load("demo", "cpu")
    store = token_store(tmp_path_factory.mktemp("walk") / "store", loaded, random_ids(600, 5), chunk=512)
    engine = Engine.open(store, loaded, selector="topk", options={"budget": "64"})
    answer = engine.generate(engine.extend([5, 6, 7, 8]), 10)
    next(answer), next(answer)
    entered: list[CodeType] = []

    def see(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOMS) and not code.co_name.startswith("<"):
            entered.append(code)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threads, "run", lambda work, tasks: [work(task) for task in tasks])  # on this thread
        sys.setprofile(see)
        try:
            with torch.inference_mode():
                next(answer)
        finally:
            sys.setprofile(None)
    return entered


def test_a_token_enters_few_functions(walk: list[CodeType]) -> None:
    assert 40 < len(set(walk)) <= 90
    assert 10 < len({code.co_filename for code in walk} | {threads.__file__}) <= 18, "files"


def test_few_calls_come_before_the_first_layer(walk: list[CodeType]) -> None:
    names = [code.co_name for code in walk]
    assert names.index("prefix_attention") > names.index("update") <= 20
