"""Header fields of documents that are really there: `python -m benchmarks.headers FOLDER --text-tokens 32K`.

Twenty documents of a folder make a text, each behind its name as in a prefilled folder and cut to an equal
share of the tokens; one field of each one's header (`Field: value` lines at its start) is asked for, with
dense attention and with top-k (tier T1 where the model is a demo model). The control has the same documents
without their headers.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cli.counts import token_count
from cli.eval.run import PrefilledStores, contenders_of, show
from cli.progress import Progress
from offload_decode.errors import ConfigError
from offload_decode.evals.answering import Answering, AnswerPlan
from offload_decode.evals.haystack import Haystack
from offload_decode.evals.runs import run
from offload_decode.evals.tasks import Context, Material, Question, Task
from offload_decode.evals.tasks.header import DocumentHeader, asked
from offload_decode.evals.tasks.words import Split
from offload_decode.models.loading import load
from prefill_jobs.job import Settings

FIELDS = ("Title", "Author", "Status", "Type", "Created", "Python-Version", "Replaces", "Requires", "Topic")
_LINE = re.compile(r"([A-Z][A-Za-z-]+): (\S.*)")


@dataclass(frozen=True)
class Headed:
    """A document: its name, the fields of its header that stand in one line, and what follows the header."""

    name: str
    header: str
    fields: Mapping[str, str]
    rest: str


def headed(path: Path) -> Headed | None:
    """A document with its header; None where it has none."""
    header, _, rest = path.read_text(encoding="utf-8").partition("\n\n")
    lines = header.splitlines()
    fields: dict[str, str] = {}
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        found = _LINE.fullmatch(line)
        if found and found[1] in FIELDS and not following.startswith(" "):
            fields[found[1]] = found[2].strip()
    return Headed(path.name, header, fields, rest) if fields else None


class RealHeaders(Task):
    """Fields of real documents' headers."""

    name: ClassVar[str] = "real-headers"
    max_new_tokens: ClassVar[int] = 48

    def __init__(self, documents: list[Headed], count: int) -> None:
        self.documents, self.count = documents, count
        self._scores = DocumentHeader()

    @property
    def per_context(self) -> int:
        """One a document."""
        return self.count

    def parameters(self) -> dict[str, object]:
        """The documents by name."""
        return {"documents": [document.name for document in self.documents], "count": self.count}

    def context(self, rng: random.Random, material: Material, split: Split = "eval") -> Context:
        """Documents drawn afresh, in an order drawn afresh."""
        chosen = rng.sample(self.documents, self.count)
        texts, controls, questions, depths = [], [], [], []
        each = material.tokens // self.count
        for number, document in enumerate(chosen):
            name = f"Document: {document.name}\n"
            room = each - material.count(f"{name}{document.header}\n\n")
            if room < 1:
                raise ConfigError(
                    f"{each:,} tokens do not hold the header of {document.name}: take a longer text"
                )
            rest = _cut(document.rest, room, material)
            texts.append(f"{name}{document.header}\n\n{rest}")
            controls.append(f"{name}{rest}")
            field = rng.choice(sorted(document.fields))
            questions.append(asked(rng, field, document.name, document.fields[field]))
            depths.append(number / self.count)
        return Context("\n\n".join(texts), "\n\n".join(controls), tuple(questions), tuple(depths))

    def guess(self, rng: random.Random, question: Question) -> str:
        """What the generator of headers would have there."""
        return self._scores.guess(rng, question)

    def score(self, question: Question, said: str) -> float:
        """As for generated headers."""
        return self._scores.score(question, said)


def _cut(text: str, tokens: int, material: Material) -> str:
    """The beginning of a text, of about so many tokens."""
    size = material.count(text)
    return text if size <= tokens else text[: len(text) * tokens // size]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--text-tokens", default="32K", help="of all documents together")
    parser.add_argument("--budgets", default="64,1024")
    parser.add_argument("--limit", type=int, default=100, help="questions")
    parser.add_argument("--out", type=Path, default=Path("headers.jsonl"))
    options = parser.parse_args()
    found = [document for path in sorted(options.folder.iterdir()) if (document := headed(path))]
    task = RealHeaders(found, options.documents)
    loaded = load(options.model, "auto")
    plan = AnswerPlan(
        "real-headers",
        (token_count(options.text_tokens),),
        contenders_of(["topk"], options.budgets, None),
        options.limit,
        begins=False,
    )
    stores = PrefilledStores(loaded, options.folder.name, Settings())
    haystack = Haystack(options.folder.name, "".join(document.rest for document in found))
    with Progress() as progress:
        results = run(
            Answering(plan, [task], loaded, haystack, stores),
            loaded,
            options.out,
            lambda done, total: progress("prefill", done, total),
        )
    show(results, as_json=False, quiet=False)


if __name__ == "__main__":
    main()
