"""Two stores of a tiny model, and a collection of three documents."""

import pytest

from offload_decode.prefill_jobs.collect import collect
from offload_decode.prefill_jobs.job import Maker, Settings, prefill
from tests.tiny import saved_model

TEXTS = {
    "book": "".join(f"Fact {n}: the colour of thing {n} is number {n * n}.\n" for n in range(12)),
    "notes": "The quick brown fox jumps over the lazy dog. " * 9,
    "minutes": "The harbour office closes at seven, and the keeper goes home. " * 6,
}


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    """`book.kv`, `notes.kv` and `all.collection` in a folder, of the model in `model/`; for reading only."""
    folder = tmp_path_factory.mktemp("retrieved")
    model, how = str(saved_model(folder / "model")), Settings(options={"chunk": 64})
    (folder / "texts").mkdir()
    for name, text in TEXTS.items():
        (folder / "texts" / f"{name}.txt").write_text(text)
    for name in ("book", "notes"):
        prefill(str(folder / "texts" / f"{name}.txt"), model=model, out=folder / f"{name}.kv", settings=how)
    collect(str(folder / "texts"), folder / "all.collection", Maker(model, how))
    return folder
