"""What takes all of a text: `python -m benchmarks.context_intensive --model M --text T --out FILE`.

Texts of the aggregate tasks (records to write as JSON, facts to join, letters to tally) are stored, and the
*right* answer is forced behind the question: small models seldom write it themselves, and what a selector
loses is seen anyway. For every way, over the tokens of what was to be looked up (values of the records, the
town, the kind): the share that is the likeliest token, nats a token, and KL to dense attention. The same
command goes on where it was stopped.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.common import lines_of, option_parser, table
from offload_decode.engine.engine import Engine
from offload_decode.evals.contender import DENSE, Contender
from offload_decode.evals.haystack import Haystack, Material
from offload_decode.evals.recorded_queries import forced_passes
from offload_decode.evals.tasks.aggregate import EveryRecord, JoinStory, TallyLines
from offload_decode.evals.tasks.base import Question, Task
from offload_decode.models.loading import LoadedModel, load
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import prefill_texts
from offload_decode.store.reader import KVStore

TASKS: tuple[Task, ...] = (EveryRecord(), JoinStory(), TallyLines())
SELECTORS = "topk", "oracle", "quest", "snapkv", "loki", "streaming"
BUDGETS = "2%", "10%"
WAYS = (Contender(DENSE), *(Contender(name, {"budget": of}) for of in BUDGETS for name in SELECTORS))
MOST = 400  # tokens of an answer that are forced
MEASURES = "right", "nats", "kl"
_VALUE = re.compile(r': "?([^",}]+)')


def forced(loaded: LoadedModel, question: Question) -> tuple[list[int], list[bool]]:
    """The answer's tokens, a record a line, and which of them hold a value."""
    text = question.answers[0].replace("[{", "[\n{").replace("}, {", "},\n{")
    spans = [found.span(1) for found in _VALUE.finditer(text)] or [(0, len(text))]
    lead = "" if text.startswith("[") else question.answer_prefix.strip() + " "
    coded = loaded.known_tokenizer(lead + text, add_special_tokens=False, return_offsets_mapping=True)
    values = [
        any(begin < stop + len(lead) and end > start + len(lead) for start, stop in spans)
        for begin, end in coded["offset_mapping"]
    ]
    return list(coded["input_ids"])[:MOST], values[:MOST]


def measured(loaded: LoadedModel, store: KVStore, question: Question) -> Iterator[dict[str, Any]]:
    """A record for each way; dense attention first."""
    dense: torch.Tensor | None = None
    answer, held = forced(loaded, question)
    values = torch.tensor(held)
    gold = torch.tensor(answer)[values]
    for way in WAYS:
        engine = Engine.open(store, loaded, selector=way.selector, options=way.options)
        put = engine.prompt.first(engine.tokenizer, question.text)
        passes = torch.cat(list(forced_passes(engine, [*put, *answer[:-1]])))
        logs = passes[len(put) - 1 :][values].double().log_softmax(-1)
        dense = logs if dense is None else dense
        yield {
            "way": way.label,
            "right": (logs.argmax(-1) == gold).double().mean().item(),
            "nats": cross_entropy(logs, gold).item(),
            "kl": (dense.exp() * (dense - logs)).sum(-1).mean().item(),
            "tokens": len(gold),
        }


def rows(lines: list[dict[str, Any]], places: Sequence[tuple[str, int]]) -> Iterator[list[str]]:
    """A row for each way, with a column for each task and length: means over tokens."""
    for way in WAYS:
        cells = []
        for place in places:
            own = [one for one in lines if (one["task"], one["length"], one["way"]) == (*place, way.label)]
            tokens = sum(line["tokens"] for line in own)
            means = (sum(line[key] * line["tokens"] for line in own) / tokens for key in MEASURES)
            right, nats, lost = means
            cells.append(f"{right:.0%}, {nats:.2f}, {lost:.3f}")
        yield [way.label, *cells]


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", required=True, help="a folder, an id, or a .gguf file")
    parser.add_argument("--text", type=Path, required=True, help="the text around what is asked for")
    parser.add_argument("--out", type=Path, required=True, help="the file of results")
    parser.add_argument("--lengths", default="4096,8192")
    parser.add_argument("--texts", type=int, default=8, help="texts for each task and length")
    arguments = parser.parse_args()
    out: Path = arguments.out
    lines = lines_of(out)
    there = {(line["task"], line["length"], line["text"]) for line in lines}
    haystack, loaded = Haystack(arguments.text.name, arguments.text.read_text("utf-8")), load(arguments.model)
    wanted = [
        (task, int(length), number)
        for length in arguments.lengths.split(",")
        for number in range(arguments.texts)
        for task in TASKS
        if (task.name, int(length), number) not in there
    ]
    for done, (task, length, number) in enumerate(wanted):
        print(f"{done} of {len(wanted)}: {task.name} {length:,} …", flush=True)
        rng = random.Random(f"{task.name} {length} {number}")
        context = task.context(rng, Material(haystack, loaded.tokenizer, length, rng.random()))
        with TemporaryDirectory() as folder, torch.inference_mode():
            path = Path(folder, "store")
            prefill_texts(loaded, [TextDocument("text", context.text)], path)
            build_indexes(path, "clusters")
            place = {"task": task.name, "length": length, "text": number}
            new = [place | record for record in measured(loaded, KVStore.open(path), context.questions[0])]
        with out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in new)
        lines += new
    places = sorted({(line["task"], line["length"]) for line in lines})
    print(table(("way", *(f"{task} {length:,}" for task, length in places)), list(rows(lines, places))))


if __name__ == "__main__":
    main()
