"""`offload-decode eval sparsity`: how few tokens hold the attention, and does that tell what is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated

from offload_decode.cli import output
from offload_decode.cli.eval.run import Asking, Lengths, Limit, Tasks, Text, ask_all, contenders, token_counts
from offload_decode.cli.options import option, with_groups

if TYPE_CHECKING:
    from offload_decode.evals.runs import Results
    from offload_decode.evals.sparsity import Prediction, Question


@with_groups
def sparsity(
    *,
    text: Text = None,
    tasks: Tasks = None,
    lengths: Lengths = "4K",
    budgets: Annotated[
        str,
        option(
            "K,…",
            "Stored tokens that topk may attend to, from few to many: the fewest that answer as well as "
            "dense attention are what a question needs.",
        ),
    ] = "4,8,16,32,64,128,256,512,1024",
    limit: Limit = 10,
    how: Asking,
) -> None:
    """Measure how sparse attention is, by task, layer and head.

    Every question of the tasks is answered with dense attention. Of the queries from which the answer is
    generated, the table shows how many stored tokens hold 75, 90, 95 and 99 % of the attention to stored
    tokens (the mean over layers and heads; for 90 % also the median head and the one at the 95th percentile),
    the entropy in nats, and its exponential, the effective number of keys.

    Then every question is answered by topk with each of the budgets. The fewest tokens with which, and with
    all larger budgets, an answer scores no less than the dense one are what the question needs; and the last
    table shows how well entropy predicts that (Spearman's rank correlation), beside the length alone.
    """
    from offload_decode.evals.sparsity import Sparsity

    ways = contenders(["topk"], ",".join(map(str, sorted(token_counts(budgets)))))
    ask_all("sparsity", tasks, how, lengths, ways, limit, text, evaluated=Sparsity, told=_text)


def _text(results: Results) -> str:
    from offload_decode.evals.sparsity import HEADING, left_out, predictions, questions, sparse_by

    asked = questions(results)
    by_task = sparse_by(results, lambda record: (record.task, record.length))
    by_layer = sparse_by(results, lambda record: record.layer)
    tasks = [["task", "tokens", *HEADING, "needed", "of them", "dense score"]]
    for (task, length), sparse in by_task.items():
        own = [one for one in asked if (one.asked.task, one.asked.length) == (task, length)]
        tasks.append([task, f"{length:,}", *sparse.cells(), *_needed(own)])
    layers = [["layer", *HEADING], *([str(layer), *own.cells()] for layer, own in by_layer.items())]
    parts = [output.table(tasks), "", output.table(layers), "", output.table(_predicted(predictions(asked)))]
    return "\n".join([*parts, *left_out(asked)])


def _needed(asked: Sequence[Question]) -> list[str]:
    known = [one.needed for one in asked if one.needed is not None]
    shown = f"{median(known):,.0f}" if known else "-"
    return [shown, f"{len(known)}/{len(asked)}", f"{fmean(one.dense for one in asked):.0%}"]


def _predicted(found: Sequence[Prediction]) -> list[list[str]]:
    rows = [["predicts the tokens needed", "over", "rank correlation", "interval", "Pearson (logs)"]]
    for line in found:
        interval = "-" if line.rank.low is None else f"{line.rank.low:+.2f} to {line.rank.high:+.2f}"
        over = f"{line.count} {line.over}"
        rows.append([line.predictor, over, _shown(line.rank.value), interval, _shown(line.pearson)])
    return rows


def _shown(correlation: float) -> str:
    return "-" if math.isnan(correlation) else f"{correlation:+.2f}"
