"""The small trained models that ship with the project: they find facts in long texts and do nothing else."""

from pathlib import Path

NAMES = ("demo",)
QUOTED = " or ".join(f"'{name}'" for name in NAMES)


def path(name: str) -> Path:
    """The folder of one of `NAMES`, for `from_pretrained`: weights, tokenizer and card."""
    return Path(__file__).parent / name
