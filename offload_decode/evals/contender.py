"""One way of answering that is measured beside others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DENSE = "dense"


@dataclass(frozen=True)
class Contender:
    """A selector with the options that set it apart; `label` names it in tables."""

    selector: str
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """`quest:page_size=32`."""
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.selector}:{options}" if options else self.selector
