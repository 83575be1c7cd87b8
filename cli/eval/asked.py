"""What evaluations are asked for on the command line: texts, selectors with options, budgets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offload_decode.config import parse_options, split_pairs
from offload_decode.errors import ConfigError
from offload_decode.evals.contender import Contender

if TYPE_CHECKING:
    from offload_decode.evals.haystack import Haystack
    from offload_decode.selection.selector import SelectorOptions


def read_haystack(text: str | None) -> Haystack:
    """The text to hide facts in; None: the Python documentation topics."""
    from offload_decode.evals.haystack import Haystack, python_topics
    from prefill_jobs.corpus import read_corpus

    if text is None:
        return python_topics()
    documents, _ = read_corpus(text)
    return Haystack(Path(text).name, "\n\n".join(document.text for document in documents))


def checked_selector(selector: str, options: Mapping[str, str]) -> SelectorOptions:
    """The parsed options: what the selector would refuse after the first prefill is refused before it."""
    import indexes.registry
    from offload_decode.selectors.registry import get

    if (kind := index_of(options)) is not None:
        indexes.registry.get(kind)
    return parse_options(get(selector).options_type, options, f"selector '{selector}'")


def index_of(options: Mapping[str, str]) -> str | None:
    """The kind that is asked for by name."""
    from offload_decode.kv.head_indexes import AUTO

    kind = options.get("index", AUTO)
    return None if kind == AUTO else kind


def read_contenders(given: Sequence[str]) -> list[Contender]:
    """Selectors as users write them, `quest:page_size=32,metadata=int8`, each once."""
    contenders = []
    for text in given:
        name, _, options = text.partition(":")
        # A value may be a list itself: a comma parts two options only where a name follows it.
        pairs = re.split(r",(?=\w+=)", options) if options else []
        contenders.append(Contender(name, split_pairs(pairs)))
    labels = [contender.label for contender in contenders]
    if repeated := [label for label in labels if labels.count(label) > 1]:
        raise ConfigError(f"selector '{repeated[0]}' is given twice")
    return contenders
