"""How lm-eval's releases up to 0.4.13 come to know the model, which read no entry points of models yet.

Later ones read the group `lm_eval.models`. Until then this function is an entry point of `torch.backends`,
which torch calls whenever it is imported, and lm-eval imports torch to set the seed before it looks its
models up.
"""

from __future__ import annotations

import sys
from importlib import import_module

NAME = "offload-decode"
TARGET = "prefill_jobs.lm_eval.model:OffloadDecodeLM"


def register() -> None:
    """Tell lm-eval of the model, where lm-eval is there; the model is imported when it is asked for."""
    if "lm_eval" not in sys.modules:
        return
    import_module("lm_eval.models")  # its own come first, or it takes its registry for filled
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)
