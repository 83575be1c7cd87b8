"""Names of what is measured: one way of answering beside others, and lengths in tokens."""

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


def label(length: int) -> str:
    """`32K` for 32,768 tokens; the plain number where no unit divides it."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if length and length % size == 0:
            return f"{length // size}{unit}"
    return f"{length:,}"
