"""What the equivalence check of a model said, for programs that do not load it: kept in the user's cache by
the model's fingerprint and the release of transformers.
"""

from __future__ import annotations

from importlib.metadata import version

from offload_decode.models.remembered import keep, recall


def note(config_hash: str, difference: float) -> None:
    """Keep the largest difference of a check that holds, in standard deviations of the logits."""
    if noted(config_hash) != difference:
        keep(_key(config_hash), repr(difference))


def noted(config_hash: str) -> float | None:
    """What was kept for a model with the transformers that is installed; None where no check was run."""
    try:
        return float(recall(_key(config_hash)) or "")
    except ValueError:
        return None


def _key(config_hash: str) -> str:
    return f"checked {version('transformers')} {version('torch')} {config_hash}"
