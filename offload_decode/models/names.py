"""Names of ours, for libraries that are told the name of a model and ask transformers for its tokenizer."""

from __future__ import annotations

from typing import Any


def find_tokenizer(name: str, tokenizer: Any) -> None:
    """From here on `AutoTokenizer.from_pretrained(name)` finds `tokenizer`, whatever the name."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained

    def from_pretrained(cls: Any, asked: Any, *more: Any, **how: Any) -> Any:
        return tokenizer if asked == name else found(asked, *more, **how)

    AutoTokenizer.from_pretrained = classmethod(from_pretrained)
