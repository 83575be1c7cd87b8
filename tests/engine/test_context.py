"""A conversation ends where its model's context does, and a store that is longer is asked as it was made."""

import pytest

from offload_decode.common.errors import ContextEnds
from offload_decode.engine.engine import Engine
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.job import prefill_texts
from tests.tiny import served_model

pytestmark = pytest.mark.filterwarnings("ignore:.*the model was trained for")
TEXT = "The lamp burns low. " * 8  # 160 letters, a token each


@pytest.fixture
def opened(tmp_path):
    def engine(context: int) -> Engine:
        loaded = served_model(max_position_embeddings=context)
        prefill_texts(loaded, [TextDocument("d", TEXT)], tmp_path / "store")
        return Engine.open(tmp_path / "store", loaded)

    return engine


def test_an_answer_ends_where_the_context_does(opened):
    engine = opened(256)
    answer = engine.answer("What burns?", 1000)
    asked = engine.prefix.length + len(engine.question_tokens("What burns?"))
    assert answer.finish == "length"
    assert asked + len(answer.tokens) == 256 + 1  # the last one is not run
    with pytest.raises(ContextEnds, match="the context of this model ends at 256"):
        engine.answer("What burns? " * 20, 10)


def test_a_store_beyond_the_context_is_asked_as_it_was_made(opened):
    assert len(opened(64).answer("What burns?", 100).tokens) == 100
