"""How lm-eval's releases up to 0.4.13 come to know the model, which read no entry points of models yet.

Later ones read the group `lm_eval.models`. Until then this function is an entry point of `torch.backends`,
which torch calls whenever it is imported, and lm-eval imports torch to set the seed before it looks its
models up.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version

from packaging.version import Version

NAME = "offload-decode"
TARGET = "prefill_jobs.lm_eval.model:OffloadDecodeLM"
_LEAST = Version("0.4.10")  # earlier ones import torch for their registry, and know no models by name alone


def register() -> None:
    """Tell lm-eval of the model, where lm-eval is there; the model is imported when it is asked for."""
    if "lm_eval" not in sys.modules or Version(version("lm_eval")) < _LEAST:
        return
    import_module("lm_eval.models")  # its own come first, or it takes its registry for filled
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)
