"""A store under a model that answers: ids beyond N, numbers that are none, tokens of no vocabulary."""

from pathlib import Path

from offload_decode.engine.engine import Engine
from offload_decode.models.loading import load
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import prefill
from offload_decode.store import KVStore
from tests.fuzz.stores import Sealed, is_list
from tests.tiny import saved, text_model


class Answering(Sealed):
    """A store of a tiny model: whoever asks gets an answer or a sentence."""

    def __init__(self, folder: Path) -> None:
        model = folder / "model"
        saved(text_model(num_hidden_layers=1), model)
        (folder / "text").write_text("Ada keeps the minutes of the society. " * 20)
        self.loaded = load(str(model), "cpu", "auto")
        prefill(str(folder / "text"), model=str(model), out=folder / "s")
        build_indexes(folder / "s", "clusters", k=8)
        super().__init__(folder / "s", lambda name: not is_list(name) or name == "zarr.json")

    def use(self) -> None:
        engine = Engine.open(KVStore.open(self.path), self.loaded, options={"budget": "20"})
        engine.answer_many(["Who?"], 2, 1, True)


TARGETS = {"clusters": Answering}
