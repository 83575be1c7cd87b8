"""Does an answer cite the passage it stands in? `python -m benchmarks.citations --model M --texts FOLDER`.

Made-up facts are planted in eight documents of a folder, each cut to `--tokens` tokens; all of them are then
asked for, behind one store. Counts the right answers, and of these: is the fact in the first passage of the
first document that is cited, and is it the document that the fact stands in? And of all questions: is the
fact in the first passage that is found before any answer, or in the first three? Several such stores.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import option_parser
from offload_decode.engine.engine import Engine
from offload_decode.evals.haystack import Haystack
from offload_decode.evals.stats import wilson
from offload_decode.evals.tasks.base import insert, string_match
from offload_decode.evals.tasks.made_up_articles import articles, question
from offload_decode.models.loading import LoadedModel, load
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import prefill_texts
from offload_decode.types import CitedDocument, Passage

DOCUMENTS = 8
FACTS = {
    "river": "The river {answer} runs through the town of {name}.",
    "mayor": "The mayor of {name} is {answer}.",
    "founder": "The company {name} was founded by {answer}.",
    "seat": "The company {name} has its seat in {answer}.",
    "instrument": "{name} plays the {answer}.",
}


@dataclass(frozen=True)
class Planted:
    """A fact, what asks for it, and the document it stands in."""

    sentence: str
    question: str
    answer: str
    document: str


def planted(rng: random.Random, names: Sequence[str], count: int) -> Iterator[Planted]:
    """Facts for the documents in turn."""
    for number, article in enumerate(rng.sample(articles(), count)):
        fact = rng.choice([fact for fact in FACTS if fact in article.facts])
        answer, document = article.facts[fact], names[number % len(names)]
        sentence = FACTS[fact].format(name=article.name, answer=answer)
        yield Planted(sentence, question(article, fact), answer, document)


def asked(
    loaded: LoadedModel, texts: dict[str, str], facts: Sequence[Planted], rng: random.Random, budget: str
) -> Iterator[tuple[Planted, str, tuple[CitedDocument, ...], tuple[Passage, ...]]]:
    """Every fact with the answer, what it cites, and the passages that are found without it."""
    documents = []
    for name, text in texts.items():
        own = [fact.sentence for fact in facts if fact.document == name]
        documents.append(TextDocument(name, insert(text, own, [rng.random() for _ in own])))
    with TemporaryDirectory() as folder:
        store = Path(folder, "store")
        prefill_texts(loaded, documents, store)
        build_indexes(store, "clusters")
        engine = Engine.open(store, loaded, options={"budget": budget})
        for fact in facts:
            answer = engine.answer(fact.question, 24, cites=True)
            yield fact, answer.text, answer.citations or (), engine.passages(fact.question, 3)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", required=True, help="a folder, an id, or a .gguf file")
    parser.add_argument("--texts", type=Path, required=True, help="folder of at least eight text files")
    parser.add_argument("--tokens", type=int, default=500, help="tokens of each document")
    parser.add_argument("--stores", type=int, default=4)
    parser.add_argument("--facts", type=int, default=25, help="facts in each store")
    parser.add_argument("--budget", default="1024")
    arguments = parser.parse_args()
    loaded, files = load(arguments.model), sorted(arguments.texts.iterdir())
    right, passages, places, firsts, threes = (list[float]() for _ in range(5))
    for number in range(arguments.stores):
        rng = random.Random(number)
        chosen = rng.sample(files, DOCUMENTS)
        texts = {
            path.name: Haystack(path.name, path.read_text("utf-8")).cut(loaded.tokenizer, arguments.tokens)
            for path in chosen
        }
        facts = list(planted(rng, list(texts), arguments.facts))
        for fact, said, cited, found in asked(loaded, texts, facts, rng, arguments.budget):
            right.append(string_match((fact.answer,), said))
            if right[-1] == 1:
                first = cited[0] if cited else None
                text = " ".join(first.spans[0].text.split()) if first and first.spans else ""
                passages.append(float(fact.sentence in text))
                places.append(float(first is not None and first.name == fact.document))
            held = [fact.sentence in " ".join(one.text.split()) for one in found]
            firsts.append(float(held[:1] == [True]))
            threes.append(float(any(held)))
        print(f"store {number + 1}: {sum(right):.0f} of {len(right)} right so far", flush=True)
    counts = {"right answers": right, "first passage": passages, "first document": places}
    counts |= {"found first": firsts, "found among three": threes}
    for name, count in counts.items():
        share = wilson(count)
        print(f"{name}: {sum(count):.0f} of {len(count)} ({100 * share.low:.0f} to {100 * share.high:.0f} %)")


if __name__ == "__main__":
    main()
