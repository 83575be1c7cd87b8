"""What the demo does: facts hidden in real text, a store of it, and a new process that is asked for them."""

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offload_decode.common.errors import OffloadDecodeError
from offload_decode.evals.haystack import python_topics
from offload_decode.evals.side_by_side import Opened, Way, WayAnswer
from offload_decode.evals.tasks.base import insert
from offload_decode.evals.tasks.ruler import MultiKeyNeedle

MAX_NEW_TOKENS = 40
_DEPTHS = (0.05, 0.27, 0.5, 0.73, 0.95)
_SEED = 3  # a draw that the shipped model gets right; how often it does is measured in its card


@dataclass(frozen=True)
class Fact:
    """A sentence, the question about it, what answers it, and its depth in the text (None: not hidden)."""

    sentence: str
    question: str
    answer: str
    depth: float | None

    def told(self, text: str) -> bool:
        """Whether a generated text holds the answer, which is no part of a longer word or number there."""
        return re.search(rf"(?<!\w){re.escape(self.answer)}(?!\w)", text) is not None


@dataclass(frozen=True)
class Hidden:
    """A text with facts in it, and one fact that is not in it: an answer to that was not read there."""

    text: str
    facts: tuple[Fact, ...]
    control: Fact
    repeated: bool

    @property
    def questions(self) -> tuple[Fact, ...]:
        """All that is asked, the control last."""
        return (*self.facts, self.control)


def hide_facts(tokenizer: Any, tokens: int) -> Hidden:
    """`tokens` of the Python documentation topics with five needles in them, and a sixth left out."""
    episode = MultiKeyNeedle(distractors=len(_DEPTHS)).sample(random.Random(_SEED))
    *facts, left_out = (
        Fact(sentence, asked.text, asked.answers[0], depth)
        for sentence, asked, depth in zip(episode.facts, episode.questions, (*_DEPTHS, None), strict=True)
    )
    haystack = python_topics()
    filler = haystack.cut(tokenizer, tokens)
    text = insert(filler, [fact.sentence for fact in facts], _DEPTHS)
    return Hidden(text, tuple(facts), left_out, repeated=len(filler) > len(haystack.text))


def ask_in_new_process(
    store: Path, questions: Sequence[str], ways: Sequence[Way], device: str = "auto"
) -> tuple[Opened, Iterator[WayAnswer]]:
    """Start an interpreter that is given a path and questions, and nothing else of what this process knows.

    Replies come as they are written, question by question. Raises `OffloadDecodeError` where it fails.
    """
    request = {
        "store": str(store),
        "questions": list(questions),
        "ways": [asdict(way) for way in ways],
        "max_new_tokens": MAX_NEW_TOKENS,
        "device": device,
    }
    lines = _lines([sys.executable, "-P", "-m", "offload_decode.evals.side_by_side"], json.dumps(request))
    return Opened(**next(lines)), (WayAnswer(**line) for line in lines)


def _lines(command: Sequence[str], request: str) -> Iterator[dict[str, Any]]:
    """The JSON objects that a process prints while it runs."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError), process.stdin as sent:  # a process that died says so by its code
                sent.write(request)
            for line in process.stdout:
                found = json.loads(line)
                if "error" in found:
                    raise OffloadDecodeError(found["error"])
                yield found
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise OffloadDecodeError(
            f"the process that was to answer from the store ended with code {process.returncode}: "
            "ask the store yourself with `offload-decode ask`"
        )
