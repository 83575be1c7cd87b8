"""A store renewed from its corpus as it is now: what comes before the first changed token stays."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from offload_decode.common.errors import ConfigError, CorpusError
from offload_decode.common.memory import give_back
from offload_decode.models.loading import LoadedModel, load_tokenizer
from offload_decode.models.prompt import Prompt, prompt_for
from offload_decode.prefill_jobs.continuing import (
    Start,
    Tokens,
    WriteReport,
    load_for,
    opened,
    prompt_of,
    replaced,
    settle,
    start_of,
)
from offload_decode.prefill_jobs.corpus import (
    Note,
    TextDocument,
    check_some,
    encode_corpus,
    notes_on,
    read_corpus,
)
from offload_decode.prefill_jobs.folders import EVERYTHING, Rules, Skipped
from offload_decode.prefill_jobs.job import admit_text, memory_errors
from offload_decode.store.files import Progress
from offload_decode.store.reader import KVStore
from offload_decode.store.tree import bases_of
from offload_decode.types import Document


@dataclass(frozen=True)
class Renewal:
    """What a renewal is to do, found without the model: the `tokens` and `documents` of the corpus as it is
    now, and the `start` of what is prefilled of them, None where nothing has changed. `added`, `changed` and
    `gone` are names of documents; one that only moved is none of these.
    """

    earlier: KVStore
    tokens: Tokens
    documents: list[Document]
    start: Start | None
    added: tuple[str, ...]
    changed: tuple[str, ...]
    gone: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    failed: tuple[Skipped, ...]
    notes: tuple[Note, ...]

    @property
    def kept_tokens(self) -> int:
        """Tokens that stay as they are."""
        return self.start.kept if self.start else len(self.tokens)

    @property
    def run_tokens(self) -> int:
        """Tokens that run through the model: the others, and those of which only queries are taken."""
        return len(self.tokens) - self.kept_tokens + (self.start.again if self.start else 0)


@dataclass(frozen=True)
class RenewReport:
    """What a renewal did: `plan` is what there was to do, `done` None where that was nothing. `discarded`:
    tokens that an interrupted run for another text had run, and that are of no use for this one.
    """

    store: Path
    plan: Renewal
    done: WriteReport | None
    discarded: int = 0

    def summary(self) -> dict[str, Any]:
        """Numbers and names, for JSON; sizes in bytes, times in seconds."""
        plan = self.plan
        names = ("added", "changed", "gone", "skipped", "failed", "notes", "kept_tokens", "run_tokens")
        told = {"store": self.store, "n_tokens": len(plan.tokens), "documents": len(plan.documents)}
        told |= {name: getattr(plan, name) for name in names}
        told |= {"kept": plan.start is None, "discarded": self.discarded}
        return told | (asdict(self.done) if self.done else {})


def renew(
    store: Path,
    corpus: str,
    *,
    model: str | None = None,
    adapter: str = "",
    device: str = "auto",
    weights: str = "auto",
    rules: Rules = EVERYTHING,
    drop: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> RenewReport:
    """Make a store what a prefill of `corpus` (a file, a folder, or `-`) is now, with the model, the method
    and the settings that it was made with: `plan_renewal`, then `renew_as`. The model is loaded where there
    is something to run. `device` and `weights` as in `prefill_jobs.append.append`.

    An interrupted call is resumed by the same one; where the corpus has changed since, what was begun is
    discarded. Raises as these two do, and `ModelError`.
    """
    plan = plan_renewal(store, corpus, model=model, rules=rules, drop=drop, progress=progress)
    loaded = load_for(plan.earlier, model, device, weights, adapter) if plan.start else None
    return renew_as(plan, loaded, store, progress)


def plan_renewal(
    store: Path,
    corpus: str,
    *,
    model: str | None = None,
    rules: Rules = EVERYTHING,
    drop: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> Renewal:
    """Read a corpus and compare it with a store. Most of its documents are dropped only with `drop`: the
    corpus may be the wrong one. Raises `CorpusError`, `StoreError`, `ConfigError`, `DoesNotFit`, and
    `ModelError` where the tokenizer cannot be read.
    """
    earlier = opened(store)
    texts, skipped = read_corpus(corpus, rules)
    progress("tokenize", 0, len(texts))
    return plan_of_texts(earlier, model, texts, tuple(skipped), drop)


def plan_of_texts(
    earlier: KVStore,
    model: str | None,
    texts: Sequence[TextDocument],
    skipped: tuple[Skipped, ...] = (),
    drop: bool = False,
) -> Renewal:
    """`plan_renewal` with documents that are read. Of the model only the tokenizer is."""
    tokenizer, known = load_tokenizer(model or earlier.manifest.model_id)
    earlier.check_model(tokenizer_hash=known)
    return compared(earlier, tokenizer, prompt_for(tokenizer, known), texts, skipped, drop)


def compared(
    earlier: KVStore,
    tokenizer: Any,
    prompt: Prompt,
    texts: Sequence[TextDocument],
    skipped: tuple[Skipped, ...] = (),
    drop: bool = False,
) -> Renewal:
    """`plan_of_texts` with the tokenizer and prompt of the store's model."""
    admit_text(sum(len(document.text) for document in texts))
    tokens, documents, failed = encode_corpus(tokenizer, prompt_of(earlier, prompt), texts)
    give_back()
    check_some(failed, texts)
    # A store may have several documents of one name.
    before, now = (Counter(one.name for one in listed) for listed in (earlier.documents, documents))
    gone = tuple((before - now).elements())
    unread = {one.name: one.reason for one in (*skipped, *failed) if one in failed or one.unread}
    for name in gone:
        for part in (name, *map(str, PurePosixPath(name).parents)):
            if part in unread:
                raise CorpusError(
                    f"{name} is in {earlier.path} and cannot be read now ({unread[part]}): mend it, or leave "
                    "it out (--exclude)"
                )
    ends = [base.tokens for base in bases_of(earlier)] if gone else []
    bases = [{one.name for one in earlier.documents if one.start < end} for end in ends]
    there = before.total()
    if (2 * len(gone) > there or any(base and base.issubset(gone) for base in bases)) and not drop:
        raise ConfigError(
            f"{earlier.path} would lose {len(gone):,} of its {there:,} documents, such as {gone[0]}, "
            'which the corpus does not have: give all of the corpus, or --drop (over HTTP "drop": true)'
        )
    stored = {(one.name, earlier.tokens[one.start : one.end].tobytes()) for one in earlier.documents}
    other = [one.name for one in documents if (one.name, tokens[one.start : one.end].tobytes()) not in stored]
    added = tuple((now - before).elements())
    changed = tuple(name for name in other if name in before)
    same = list(earlier.documents) == documents and np.array_equal(earlier.tokens, tokens)
    return Renewal(
        earlier=earlier,
        tokens=tokens,
        documents=documents,
        start=None if same else start_of(earlier, tokens),
        added=added,
        changed=changed,
        gone=gone,
        skipped=skipped,
        failed=tuple(failed),
        notes=notes_on([text for text in texts if text.name in (*added, *changed)]),
    )


def renew_as(
    plan: Renewal,
    loaded: LoadedModel | None,
    store: Path,
    progress: Progress = lambda stage, done, total: None,
) -> RenewReport:
    """Do what was planned, with a model that is needed where there is a `start`. Until it is done the store
    is as it was. Raises `StoreError`, `ConfigError`, `DoesNotFit` and `VectorIndexError`.
    """
    if plan.start is None or loaded is None:
        return RenewReport(store, plan, None, settle(store, plan.earlier, whole=True))
    with memory_errors():
        done = replaced(
            loaded, plan.earlier, plan.tokens, plan.documents, store, "renew", progress, whole=True
        )
    return RenewReport(store, plan, done, done.discarded)
