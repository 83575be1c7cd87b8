"""Stores on a base beside whole ones: `python -m benchmarks.on_a_base MODEL BASE TEXT… --folder F`.

Prefills the text file BASE with its index, then each TEXT on it, and BASE with the first TEXT as one corpus.
Prints seconds, and the bytes of stores and indexes on disk (every inode once) and in memory: the proportional
set size of their files in this process, which maps and reads all of them.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import option_parser, table
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.models.loading import LoadedModel, load
from offload_decode.prefill_jobs.corpus import TextDocument, read_corpus
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import Settings, prefill_texts
from offload_decode.selectors.topk import HeadIndexes
from offload_decode.store.reader import KVStore

KIND = "clusters"


def main(model: str, base: str, texts: Sequence[str], folder: Path) -> None:
    loaded, manual = load(model, "cpu", "auto", "auto"), read_corpus(base)[0]
    store = folder / "on it/0.kv"
    rows = [["the base", f"{made(loaded, manual, store, Settings()):.1f} s", *held(store.parent)]]
    documents = [read_corpus(text)[0] for text in texts]
    on_it = Settings(base=store)
    each = [made(loaded, text, folder / f"on it/{n}.kv", on_it) for n, text in enumerate(documents, 1)]
    name = f"with {len(each)} stores on it"
    rows.append([name, f"{sum(each) / len(each):.1f} s each", *held(store.parent)])
    whole = made(loaded, [*manual, *documents[0]], folder / "whole/1.kv", Settings())
    rows.append(["one whole store", f"{whole:.1f} s", *held(folder / "whole")])
    print(table(["stores, with their indexes", "made in", "on disk", "in memory"], rows))


def held(folder: Path) -> tuple[str, str]:
    """The bytes of stores and indexes on disk and in memory."""
    return f"{on_disk(folder) / 1e6:,.0f} MB", f"{resident(folder) / 1e6:,.0f} MB"


def made(loaded: LoadedModel, documents: Sequence[TextDocument], store: Path, settings: Settings) -> float:
    """Seconds that a store and its index take."""
    seconds = prefill_texts(loaded, documents, store, settings).seconds
    return seconds + build_indexes(store, KIND).seconds


def on_disk(folder: Path) -> int:
    files = [file.stat() for file in folder.rglob("*")]
    return sum({file.st_ino: 512 * file.st_blocks for file in files}.values())


def resident(folder: Path) -> int:
    """Bytes of a folder's files in this process, when keys, values and indexes of all stores were read."""
    held = []
    for path in folder.glob("*.kv"):
        store = KVStore.open(path)
        indexes, shape = HeadIndexes(store, KIND), store.manifest.shape
        for layer in shape.full_layers:
            for head in range(shape.kv_heads):
                parts = [store.keys(layer, head), store.values(layer, head)]
                index = indexes.get(layer, head)
                assert isinstance(index, ClusteredIndex)
                parts += [*index.cells, *index.summaries]
                held += [(part, part.tobytes()[:1]) for part in parts]
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split(maxsplit=1)[0].endswith(":"):
            total += int(line.split()[1]) * 1024 if inside and line.startswith("Pss:") else 0
        else:
            inside = f"{folder.resolve()}/" in line
    return total


if __name__ == "__main__":
    parser = option_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("base")
    parser.add_argument("texts", nargs="+", metavar="TEXT")
    parser.add_argument("--folder", type=Path, required=True)
    main(**vars(parser.parse_args()))
