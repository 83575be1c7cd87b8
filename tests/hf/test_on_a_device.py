"""Models whose layers are not plain attention, on a stand-in for a device: what they store and answer is what
they store and answer on the host, bit for bit.
"""

import pytest
import torch

from offload_decode.engine.batching import Turn, run_turns
from offload_decode.engine.engine import Engine
from offload_decode.hf import attention
from offload_decode.prefill_jobs.append import append_tokens
from offload_decode.store.reader import KVStore
from offload_decode.testing.method_contract import assert_same_rows
from offload_decode.types import Document
from tests.families import FAMILIES
from tests.tiny import random_ids, served_model, token_store

IDS = random_ids(60)
QUESTIONS = ["Who?", "What is it?"]


@pytest.fixture(autouse=True)
def _attention_of_torch(monkeypatch):
    """Bit by bit as on the host: tests/attention/test_host_dense.py has the loops of hosts alone."""
    monkeypatch.setattr(attention, "attend_tensors", lambda *_: None)


def stored_and_answered(device, family, folder):
    loaded = served_model(family, device)
    token_store(folder, loaded, IDS[:37], chunk=16)
    append_tokens(loaded, IDS[37:], [Document("second", 37, 60)], folder)
    engine = Engine.open(folder, loaded, options={"budget": "20", "dense_layers": ""})
    engine.prefix.host.placement.attend = "host"
    answers = [answer.tokens for answer in engine.answer_many(QUESTIONS, 2)]
    logits = [engine.extend(tokens) for tokens in ([5, 6, 7], [8])]
    turns = [Turn(engine.fork(), tokens) for tokens in ([9], [10, 11])]
    return [own.cpu() for own in (*logits, *run_turns(turns))], answers


# Recurrent states; sinks, windows and experts; latents; chunks of attention and a temperature.
@pytest.mark.parametrize(
    "family", [family for family in ("lfm2", "gpt-oss", "minicpm3", "llama4") if family in FAMILIES]
)
def test_a_model_stores_and_answers_what_it_does_on_the_host(card, family, tmp_path):
    one = stored_and_answered("cpu", family, tmp_path / "host")
    other = stored_and_answered("cuda", family, tmp_path / "device")
    assert all(map(torch.equal, one[0], other[0]))
    assert one[1] == other[1]
    assert_same_rows(KVStore.open(tmp_path / "host"), KVStore.open(tmp_path / "device"))
