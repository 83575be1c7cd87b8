"""JSON lines of a batch, its questions and its answers, and a conversation that was saved."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from offload_decode.cli import questions
from offload_decode.cli.chat import FORMAT, VERSION, _read
from offload_decode.common.files import remove
from tests.fuzz.edits import Edit, Files, apply, join, put_back

SETTINGS = {"selector": "topk", "options": {}, "max_new_tokens": 5, "model": None, "weights": None}
OTHERS = [{"question": "Où?", "id": "x"}, {"question": "When?"}]
QUESTIONS = [{"question": "Who?", "id": 1, "store": "a.kv"}, *OTHERS]
ANSWERS = [
    {"id": 1, "store": "a.kv", "question": "Who?", "answer": "I", "tokens": 1, "finish": "stop", **SETTINGS}
]
TURN = {"question": "Who?", "answer": "I", "tokens": [3]}
TALK = {"format": FORMAT, "version": VERSION, "store": "d", "model": "m", "turns": [TURN]}


class Lines(Files):
    """A file whose every line is edited as a document of its own."""

    def __init__(self, name: str, documents: Sequence[Any], folder: Path) -> None:
        self.name = name
        for number, document in enumerate(documents):
            (folder / f"{number}.json").write_text(json.dumps(document))
        super().__init__(folder, [f"{number}.json" for number in range(len(documents))])
        self.file = folder / name

    def attempt(self, case: Sequence[Edit]) -> None:
        apply(self.root, case)
        join(self.file, [self.root / name for name in self.files], case)
        self.use()

    def restore(self, case: Sequence[Edit]) -> None:
        remove(self.file)
        put_back(self.root, self.files, self.files)

    def must_refuse(self, case: Sequence[Edit]) -> bool:
        return False  # a user's own file may be a link

    def use(self) -> None:
        if self.name == "questions.jsonl":
            stores = ["folder/a.kv", "b.kv"]
            asked = questions.assign(questions.read_questions(self.file), stores, questions.among(stores))
            lines = [{**q.extra, "id": q.id, "store": s, "question": q.text} for s in asked for q in asked[s]]
            questions.append_answers(self.root / "out", lines)
        elif self.name == "answers.jsonl":
            questions.check_out(self.file)
            questions.read_answered(self.file, SETTINGS)
        else:
            _read(self.file)


TARGETS: dict[str, Any] = {
    "questions": partial(Lines, "questions.jsonl", QUESTIONS),
    "answers": partial(Lines, "answers.jsonl", ANSWERS),
    "conversation": partial(Lines, "talk.json", [TALK]),
}
