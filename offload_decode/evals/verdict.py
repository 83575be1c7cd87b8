"""What has to be said before anything else: sentences on whether a run's accuracies mean anything."""

from __future__ import annotations

from collections.abc import Sequence

from offload_decode.evals.contender import DENSE
from offload_decode.evals.stats import CONFIDENCE, Share, larger, wilson, wilson_of
from offload_decode.evals.summary import TRUSTED, Summary


def verdict(summary: Summary) -> list[str]:
    """Sentences, the gravest first; none where there is nothing to warn of."""
    done, units = summary.units
    unfinished = f"The run is not finished: {done:,} of {units:,} parts are measured." if done < units else ""
    said = [_chance(summary), _controls(summary), _dense(summary), unfinished]
    return [sentence for sentence in said if sentence]


def of_needles(found: Sequence[Sequence[float]], control: Sequence[float]) -> list[str]:
    """Of a grid: scores of needles in every way, and of the control."""
    chance, most = wilson(control), max(map(len, found))
    if larger(Share(1.0, most, 0.0, 1.0), chance) >= 1 - CONFIDENCE:
        return [
            f"{most} needle{'s' if most > 1 else ''}: even to find all of them could not be told from "
            "chance. Hide more (--trials)."
        ]
    if all(larger(wilson(scores), chance) >= (1 - CONFIDENCE) / len(found) for scores in found):
        return [
            "This model finds needles no more often than it answers where there are none, in every way that "
            "was measured: nothing here says anything about a selector."
        ]
    return []


def at_chance(summary: Summary) -> list[str]:
    """Tasks that no way answers better than chance at any length, sure of all together (Bonferroni)."""
    confidence = _confidence(summary)
    above = {cell.task for cell in summary.cells if cell.above_chance(confidence)}
    return [task for task in summary.tasks if task not in above]


def _confidence(summary: Summary) -> float:
    return 1 - (1 - CONFIDENCE) / len(summary.cells)


def _chance(summary: Summary) -> str:
    tasks = at_chance(summary)
    if not any(cell.could_be_above_chance(_confidence(summary)) for cell in summary.cells):
        most = max(cell.score.count for cell in summary.cells)
        asked = f"{most} question{'s' if most > 1 else ''} for each task and length"
        return (
            f"At most {asked}: even right answers to all of them could not be told from chance, all "
            "cells considered. Ask more (--limit)."
        )
    if len(tasks) == len(summary.tasks):
        which = f"the task {tasks[0]}" if len(tasks) == 1 else "every task"
        return (
            f"This model answers no better than chance on {which}, in every way that was measured: "
            "nothing here says anything about a selector."
        )
    single = {cell.task for cell in summary.cells if not cell.at_chance}
    parts = {
        "No better than chance, in every way: {} (of {} tasks).": [t for t in tasks if t not in single],
        "Better than chance in single cells of {} (of {} tasks), which among so many cells may be luck: "
        "ask more (--limit).": [t for t in tasks if t in single],
    }
    return " ".join(
        said.format(", ".join(named), len(summary.tasks)) for said, named in parts.items() if named
    )


def _controls(summary: Summary) -> str:
    """What is answered beyond guessing where the facts were taken out was not read from the text."""
    places = {(cell.task, cell.length): cell for cell in summary.cells}
    confidence = 1 - (1 - CONFIDENCE) / len(places)
    answered: dict[str, float] = {}
    for (task, _), cell in places.items():
        if (control := cell.control) and wilson_of(control.mean, control.count, confidence).low > cell.guess:
            answered[task] = max(control.mean, answered.get(task, 0.0))
    if not answered:
        return ""
    most = 100 * max(answered.values())
    return (
        f"The control was answered in up to {most:.2g} %, although the facts were taken out of its "
        f"texts ({', '.join(answered)}): do not trust the accuracies there."
    )


def _dense(summary: Summary) -> str:
    dense = [cell for cell in summary.cells if cell.way == DENSE]
    lost = at_chance(summary)
    weak = dict.fromkeys(cell.task for cell in dense if cell.score.mean < TRUSTED and cell.task not in lost)
    if not weak:
        return ""
    return (
        f"Dense attention itself is under {100 * TRUSTED:.0f} % in {', '.join(weak)}: "
        "no ratio to dense is given where it is."
    )
