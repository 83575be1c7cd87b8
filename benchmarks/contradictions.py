"""Documents that contradict each other: `python -m benchmarks.contradictions COLLECTION --out ANSWERS.jsonl`.

With `--texts FOLDER`, documents are written from these texts to the folder --out, for --questions questions
of each kind: a made-up article that stands in one document (`alone`), in two alike (`agree`), or in two of
which the second one has another fact (`contradict`). Collect them as the script says, and run it again: four
documents answer each question, and it prints for how many questions some document is said to dissent, and how
many answers are right (for `contradict`: hold one fact or the other). --first: the number of the first
article, so that others can be asked than those with which the limits were chosen.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import lines_of, option_parser, table
from benchmarks.together import FORM, NEW, SYSTEM
from offload_decode.collections.collection import Collection
from offload_decode.collections.together import distinct, weights
from offload_decode.engine.engine import Engine
from offload_decode.engine.joint import Joint
from offload_decode.engine.opinion_pools import WAYS
from offload_decode.evals.tasks.base import insert, string_match
from offload_decode.evals.tasks.made_up_articles import Article, articles, asked_facts, question
from offload_decode.models.loading import load

KINDS = "alone", "agree", "contradict"
APART = 7  # numbers of articles that are asked for one after the other
CHARACTERS = 700  # of a document, beside its article


def cases(first: int, count: int) -> Iterator[tuple[str, Article, str, str]]:
    """So many of each kind, in turns: the article, the fact that is asked for, and what contradicts it."""
    rng = random.Random(f"contradictions from {first}")
    for number in range(count * len(KINDS)):
        article = articles()[first + APART * number]
        fact = rng.choice(asked_facts(article))
        alike = (one.facts for one in rng.sample(articles(), 400) if one.kind == article.kind)
        own = article.facts[fact]
        other = next(facts[fact] for facts in alike if facts.get(fact, own) != own)
        yield KINDS[number % len(KINDS)], article, fact, other


def write_documents(texts: Path, out: Path, first: int, count: int) -> None:
    """The documents of all cases, named by their numbers."""
    rng, out_of = random.Random(f"texts from {first}"), sorted(texts.glob("*.*"))
    out.mkdir(parents=True)
    for number, (kind, article, fact, other) in enumerate(cases(first, count)):
        told = {"a": article.text}
        if kind == "agree":
            told["b"] = article.text
        elif kind == "contradict":
            told["b"] = article.text.replace(article.facts[fact], other)
        for name, text in told.items():
            filler = rng.choice(out_of).read_text("utf-8", "replace")
            start = rng.randrange(len(filler) - CHARACTERS)
            planted = insert(filler[start : start + CHARACTERS], [text], [rng.random()])
            (out / f"{number:03}{name}.txt").write_text(planted, "utf-8")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("collection", type=Path)
    parser.add_argument(
        "--texts", type=Path, help="write documents of these texts to the folder --out, and end"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int, default=5000)
    parser.add_argument("--questions", type=int, default=24, help="of each kind")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if arguments.texts:
        write_documents(arguments.texts, out, arguments.first, arguments.questions)
        print(f"offload-decode collect {out} --out {arguments.collection} --system '{SYSTEM}' --model …")
        return
    lines = lines_of(out)
    there = {(line["question"], line["way"]) for line in lines}
    collection = Collection(arguments.collection)
    loaded = load(collection.header.model_id)
    for kind, article, fact, other in cases(arguments.first, arguments.questions):
        asked = question(article, fact)
        ways = [way for way in WAYS if (asked, way) not in there]
        if not ways:
            continue
        entries = list(distinct(entry for entry, _ in collection.scored(asked)))[:4]
        begun = Joint([Engine.open(collection.store(entry), loaded) for entry in entries], "pced")
        logits = begun.ask(FORM.format(asked), weights(collection, asked, entries))
        for way in ways:
            joint = begun.fork()
            joint.way = way
            said = joint.talks[0].decode(list(joint.generate(logits, NEW)))
            dissents = [(entries[one.document].name, one.text, one.probability) for one in joint.dissents]
            line = {"kind": kind, "question": asked, "way": way, "said": said, "dissents": dissents}
            lines.append(line | {"facts": [article.facts[fact], *([other] if kind == "contradict" else [])]})
            with out.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    told = Counter((line["way"], line["kind"]) for line in lines if line["dissents"])
    right = Counter(
        (line["way"], line["kind"])
        for line in lines
        if any(string_match((fact,), line["said"]) for fact in line["facts"])
    )
    count = Counter((line["way"], line["kind"]) for line in lines)
    rows = [[*key, f"{told[key]} of {number}", f"{right[key]} of {number}"] for key, number in count.items()]
    print(table(("way", "documents", "somebody dissents", "right"), rows))


if __name__ == "__main__":
    main()
