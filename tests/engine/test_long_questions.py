"""A long question runs in several passes: the same answer, in memory that grows with it and not with its
square.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload_decode.attention import dense
from offload_decode.common.errors import DoesNotFit
from offload_decode.engine.engine import Engine
from offload_decode.prefill_jobs.job import Settings, prefill
from offload_decode.selectors import registry
from offload_decode.selectors.budgets import LEAST_PASS, PASS_TOKENS, WHOLE_QUESTION, pass_tokens
from tests.tiny import text_store

QUESTION = [(7 * place) % 50 + 3 for place in range(150)]
AS_A_WHOLE = {"quoka", "snapkv"}
DRAWN_IN_ORDER = {"random"}


# One has windows and caps its scores, the other enough layers for each selector to choose.
@pytest.fixture(scope="module", params=["gemma2", "llama"])
def store(request, tmp_path_factory):
    text = "The quick brown fox jumps over the lazy dog. " * 6
    return text_store(tmp_path_factory.mktemp("long"), text, request.param, chunk=32) / "store"


GROWTH = """
import sys
from offload_decode.engine.engine import Engine
from offload_decode.common.memory import Peak, own_memory

engine = Engine.open(sys.argv[1], device="cpu")
engine.fork().extend(list(range(10, 600)))
before = own_memory()
with Peak() as peak:
    engine.extend([10 + place % 3000 for place in range(20_000)])
print(peak.bytes - before)
"""


def opened(store, selector, pass_tokens=None):
    engine = Engine.open(store, selector=selector, options={"budget": "20"} if selector != "dense" else {})
    engine.pass_tokens = pass_tokens or engine.pass_tokens
    return engine


@pytest.mark.parametrize("selector", sorted(set(registry.names()) - AS_A_WHOLE - DRAWN_IN_ORDER - {"own"}))
def test_a_question_in_passes_is_the_question_in_one(store, selector):
    whole = opened(store, selector, 10_000)
    expected = [whole.extend(QUESTION), whole.extend([7])]
    for size in (64, 149):
        parts = opened(store, selector, size)
        for logits, given in zip(expected, (QUESTION, [7]), strict=True):
            torch.testing.assert_close(parts.extend(given), logits, atol=1e-4, rtol=0)
        assert parts.length == whole.length
        assert parts.prefix.stats.tokens == len(QUESTION) + 1


def test_a_pass_is_never_of_one_token(store, monkeypatch):
    # One token is a step: quest chooses pages of the conversation then, topk takes over from the step before.
    engine, sizes = opened(store, "dense", 50), []
    encode, forward = engine.loaded.encode, engine.loaded.forward
    for name, run in (("encode", encode), ("forward", forward)):
        monkeypatch.setattr(
            type(engine.loaded),
            name,
            lambda _, tokens, *rest, run=run: (sizes.append(tokens.shape[1]), run(tokens, *rest))[1],
        )
    engine.extend([*QUESTION, 7])
    assert sizes == [37, 38, 38, 38]


def test_a_selector_that_judges_a_question_as_a_whole_is_given_it_whole(store):
    for name in set(registry.names()) - {"own"}:
        expected = WHOLE_QUESTION if name in AS_A_WHOLE else PASS_TOKENS
        assert opened(store, name).pass_tokens == expected
    assert opened(store, "topk").fork().pass_tokens == PASS_TOKENS


@pytest.mark.parametrize("selector", ["topk", "quest", "lessismore"])
def test_a_batch_in_passes_answers_as_one_by_one(store, selector):
    engine = opened(store, selector)
    questions = ["Who jumps? " * 12, "Why", "Over what does it jump, and how often?"]
    alone = [engine.answer(question, 6).tokens for question in questions]
    engine.pass_tokens = 1  # as little as there is: `LEAST_PASS` tokens of each
    assert [answer.tokens for answer in engine.answer_many(questions, 6)] == alone


def test_the_tokens_of_a_pass_are_shared_by_a_batch():
    assert [pass_tokens(512, batch) for batch in (1, 2, 8, 1000)] == [512, 256, 64, LEAST_PASS]
    assert pass_tokens(7) == 7


def test_a_question_is_admitted_before_it_runs(store):
    engine, asked = opened(store, "dense"), []
    engine.admit = lambda tokens, sequences: asked.append((tokens, sequences)) or 64
    engine.extend(QUESTION)
    engine.extend([7])  # a step: nobody asks
    engine.fork().extend([7, 8])
    engine.answer_many(["Why?", "Who jumps?"], 1)
    longest = len(engine.question_tokens("Who jumps?"))
    assert asked == [(150, 1), (153, 1), (151 + longest, 2)]

    def refuse(tokens, sequences):
        raise DoesNotFit("too long")

    engine.admit, before = refuse, engine.length
    with pytest.raises(DoesNotFit):
        engine.extend(QUESTION)
    assert engine.length == before


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation made."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        sizes = [one.untyped_storage().nbytes() for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
        type(self).bytes = max(type(self).bytes, *sizes, 0)
        return made


@pytest.mark.parametrize("selector", ["topk", "dense", "quest"])
def test_no_tensor_is_as_large_as_the_square_of_a_question(store, selector):
    engine, tokens = opened(store, selector), 6000
    Largest.bytes = 0
    with Largest():
        engine.extend((QUESTION * 40)[:tokens])
    assert Largest.bytes <= 4 * dense.SCORES < tokens**2  # one pass would have a mask of that many bytes


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_twenty_thousand_tokens_take_a_few_hundred_megabytes(tmp_path):
    (tmp_path / "corpus.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    prefill(str(tmp_path / "corpus.txt"), model="demo", out=tmp_path / "s.kv", settings=Settings())
    ran = subprocess.run(
        [sys.executable, "-c", GROWTH, str(tmp_path / "s.kv")], capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) < 400 << 20  # 5 GB in one pass
