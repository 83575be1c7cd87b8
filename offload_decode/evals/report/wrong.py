"""A few answers that were wrong, so that a reader can judge the scorer too."""

from __future__ import annotations

import random

from offload_decode.evals.lengths import label
from offload_decode.evals.records import Asked, Said
from offload_decode.evals.report.depths import Answers
from offload_decode.evals.report.html import Markup, cut, join, tag

SHOWN = 3  # of a task


def wrong_answers(answered: Answers) -> Markup | None:
    examples: dict[str, list[tuple[Asked, Said]]] = {}
    rng = random.Random(0)
    seen: dict[str, int] = {}
    for asked, answers in answered:
        wrong = [said for said in answers if said.score < 1 and not said.control]
        if wrong:
            seen[asked.task] = seen.get(asked.task, 0) + 1
            kept = examples.setdefault(asked.task, [])
            # Each wrongly answered question is as likely as the next to be shown.
            place = len(kept) if len(kept) < SHOWN else rng.randrange(seen[asked.task])
            if place < SHOWN:
                kept[place : place + 1] = [(asked, rng.choice(wrong))]
    if not examples:
        return None
    folded = [
        tag(
            "details",
            tag("summary", task, tag("small", f" {seen[task]:,} that some way got wrong")),
            [_example(asked, said) for asked, said in kept],
        )
        for task, kept in examples.items()
    ]
    return join([tag("p", "Drawn at random.", class_="note"), *folded])


def _example(asked: Asked, said: Said) -> Markup:
    depth = "" if asked.depth is None else f", at {100 * asked.depth:.0f} % of the text"
    return tag(
        "blockquote",
        tag("p", tag("b", "asked "), cut(asked.asked)),
        tag("p", tag("b", "expected "), cut(", ".join(asked.expected))),
        tag("p", tag("b", f"{said.way} said "), cut(said.said) or tag("i", "nothing")),
        tag(
            "footer",
            f"{label(asked.length)} tokens{depth}; score {said.score:.2g}, "
            f"string match {said.ruler_score:.2g}",
        ),
    )
