"""The pieces of a streamed answer are together the text of its tokens, whatever the tokenizer."""

import copy
import random

import pytest

from offload_decode.engine.engine import Engine
from offload_decode.models.loading import wrap
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.job import prefill_texts
from tests.models.tokenizers import KINDS, SPECIAL, tokenizer_of
from tests.tiny import tiny_model

TEXTS = ("the lamp , it 's low . Who ?", "  é字🙂 is\n\n calm .", "🙂🙂")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tidies", [False, True])
def test_pieces_make_the_text(kind, tidies, tmp_path):
    tokenizer = copy.deepcopy(tokenizer_of(kind))
    tokenizer.clean_up_tokenization_spaces = tidies
    loaded = wrap(tiny_model(vocab_size=len(tokenizer)), tokenizer)
    prefill_texts(loaded, [TextDocument("d", "The lamp burns low.")], tmp_path / "store")
    engine = Engine.open(tmp_path / "store", loaded, selector="dense")
    chance = random.Random(0)
    for text in TEXTS * 10:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        for _ in range(3):  # tokens that are not shown stand between them
            tokens.insert(chance.randrange(len(tokens) + 1), chance.randrange(len(SPECIAL) - 1))
        if "\ufffd" not in engine.decode(tokens):  # a character in two
            assert "".join(engine.pieces(tokens)) == engine.decode(tokens)
