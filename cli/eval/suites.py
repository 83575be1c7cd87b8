"""`offload-decode eval needle`, `ruler`, `aggregate` and `passkey`: tasks of one suite each."""

from typing import TYPE_CHECKING, Annotated

from offload_decode.cli.eval import run
from offload_decode.cli.eval.run import Asking, Contenders, Lengths, Limit, Tasks, Text, ask_all
from offload_decode.cli.options import option, with_groups
from offload_decode.common.errors import ConfigError

if TYPE_CHECKING:
    from offload_decode.evals.tasks.base import Task


@with_groups
def needle(
    *,
    text: Text = None,
    lengths: Lengths = "2K,8K,32K",
    depths: Annotated[
        str, option("P,…", "Where the needle is hidden, in percent of the text.")
    ] = "0,25,50,75,100",
    contenders: Contenders,
    limit: Limit = 1,
    how: Asking,
) -> None:
    """Find a needle at every length and depth.

    A number is hidden in a text and asked for, with dense attention and with each selector at each budget,
    and as a control in the same text without it, where nothing should be found.
    """
    from offload_decode.evals.tasks.ruler import needle_at

    at = {task.name: task for task in map(needle_at, map(_share, depths.split(",")))}
    ask_all("needle", None, how, lengths, contenders, limit, text, known=[*at], own=at)


def _share(percent: str) -> float:
    try:
        share = float(percent.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"'{percent}' is no depth: write a percentage of the text from 0 to 100")
    return share


@with_groups
def ruler(
    *,
    text: Text = None,
    lengths: Lengths = "4K,16K",
    tasks: Tasks = None,
    contenders: Contenders,
    qa: Annotated[
        list[str] | None,
        option(
            "FILE",
            "Questions and documents for qa_1 (in SQuAD's format) or qa_2 (in HotpotQA's); repeatable.  "
            "[default: questions about made-up articles]",
        ),
    ] = None,
    limit: Limit = 20,
    how: Asking,
) -> None:
    """Ask RULER's thirteen tasks.

    Needles, variables, word counts, and questions about documents. Every question is answered with dense
    attention and with each selector at each budget. Every fourth text is also asked without what is asked
    for, as a control. The worst task stands first, then the mean.
    """
    from offload_decode.evals.tasks import ruler_qa
    from offload_decode.evals.tasks.ruler import SUITE

    own: dict[str, Task] = {}
    for file in qa or []:
        task = ruler_qa.task_of(ruler_qa.read(file))
        if task.name in own:
            raise ConfigError(
                f"two files are for {task.name}: give one in SQuAD's and one in HotpotQA's format"
            )
        own[task.name] = task
    names = run.tasks_named(tasks, SUITE)
    if left_out := [name for name in own if name not in names]:
        raise ConfigError(f"a file of --qa is for {left_out[0]}: add that to --tasks, or leave the file out")
    ask_all("ruler", tasks, how, lengths, contenders, limit, text, known=SUITE, own=own)


@with_groups
def aggregate(
    *,
    text: Text = None,
    lengths: Lengths = "4K,16K",
    tasks: Tasks = None,
    contenders: Contenders,
    limit: Limit = 20,
    how: Asking,
) -> None:
    """Ask for what no small part of a text can tell.

    Joining the facts of a story, extracting every record as JSON, classifying and tallying lines: methods
    that attend to few tokens are known to break here. Every question is answered with dense attention and
    with each selector at each budget.
    """
    from offload_decode.evals.tasks.aggregate import SUITE

    ask_all("aggregate", tasks, how, lengths, contenders, limit, text, known=SUITE)


@with_groups
def passkey(
    *,
    lengths: Lengths = "10000,100000",
    selector: Annotated[list[str] | None, run.selectors_option("quest and topk")] = None,
    budgets: run.Budgets = "64,128,256,512,1024,2048,4096",
    option: run.CommonOptions = None,
    limit: Limit = 100,
    how: Asking,
) -> None:
    """Ask for a pass key, by Quest's protocol (arXiv 2406.10774).

    A number of five digits stands among sentences that repeat, at a place drawn afresh, in 10,000 and in
    100,000 tokens.
    """
    ways = run.contenders(selector or ["quest", "topk"], budgets, option)
    ask_all("passkey", None, how, lengths, ways, limit, known=["passkey"])
