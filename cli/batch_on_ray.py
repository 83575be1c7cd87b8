"""`batch --workers`: questions are answered on the machines of a Ray cluster, answers are written here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from offload_decode.cli.limits import Asking
from offload_decode.cli.output import Progress
from offload_decode.cli.questions import Question, append_answers
from offload_decode.common.errors import OffloadDecodeError
from offload_decode.prefill_jobs.buckets.collections import FarStores
from offload_decode.prefill_jobs.on_ray.asking import Given, Part, answer_on_ray
from offload_decode.prefill_jobs.on_ray.workers import Cluster, Standing

Line = Callable[[str, Question, Given], dict[str, object]]
Failures = dict[str, tuple[int, OffloadDecodeError]]
"""Of each store that could not answer all: questions left unanswered, and what came first in their way."""


def answer_there(
    cluster: Cluster,
    left: Mapping[str, Sequence[Question]],
    far: FarStores | None,
    how: Asking,
    out: Path,
    line: Line,
    *,
    max_new_tokens: int,
    batch_size: int,
    cites: bool,
    progress: Progress,
) -> Failures:
    """Answers of the stores, which may be `far`, go to the end of `out` as they come, `batch_size` of them at
    a time.
    """
    given = [
        (store, own[start : start + batch_size])
        for store, own in left.items()
        for start in range(0, len(own), batch_size)
    ]
    parts = [Part(store, tuple(question.text for question in own)) for store, own in given]
    failures: Failures = {}
    done, total = 0, sum(map(len, left.values()))

    def watch(standing: Standing) -> None:
        fetching = sum(bytes_of > 0 for _, bytes_of in standing.values())
        fetch = f", {fetching} of them fetching" if fetching else ""
        at_work = f"{len(standing)} at work{fetch}" if standing else "(waiting for workers)"
        progress("answer", done, total, at_work)

    for number, result in answer_on_ray(parts, cluster, how.config, max_new_tokens, cites, far, watch):
        store, own = given[number]
        if isinstance(result, OffloadDecodeError):
            before, first = failures.get(store, (0, result))
            failures[store] = before + len(own), first
        else:
            append_answers(out, [line(store, q, a) for q, a in zip(own, result, strict=True)])
        done += len(own)
    return failures
