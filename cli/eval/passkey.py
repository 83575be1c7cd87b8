"""`offload-decode eval passkey`: a pass key among sentences that repeat, by Quest's protocol."""

from __future__ import annotations

from offload_decode.cli.eval.run import (
    Budgets,
    CommonOptions,
    Group,
    Lengths,
    Limit,
    Selectors,
    ask_all,
    contenders_of,
)
from offload_decode.cli.options import with_groups


@with_groups
def passkey(
    *,
    lengths: Lengths = "10000,100000",
    selector: Selectors = None,
    budgets: Budgets = "64,128,256,512,1024,2048,4096",
    option: CommonOptions = None,
    limit: Limit = 100,
    how: Group,
) -> None:
    """Ask for a pass key, by Quest's protocol (arXiv 2406.10774).

    A number of five digits stands among sentences that repeat, at a place drawn afresh, in
    10,000 and in 100,000 tokens.
    """
    from offload_decode.evals.tasks.passkey import Passkey

    ways = contenders_of(selector or ["quest", "topk"], budgets, option)
    ask_all("passkey", [Passkey()], how, lengths, ways, limit)
