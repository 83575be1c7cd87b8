"""The names under which stores are kept, to be found again by whoever needs the same one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from offload_decode.models.loading import LoadedModel
from prefill_jobs.job import Settings


def kept_name(loaded: LoadedModel, settings: Settings, *of: object) -> str:
    """A file's name, by the model, how it is prefilled, and what it is `of` (a text or tokens, and whatever
    else shapes what is stored of them): plain JSON values.
    """
    model = [loaded.weights_hash, loaded.config_hash, loaded.tokenizer_hash, loaded.dtype, loaded.weights]
    said = json.dumps([*of, model, asdict(settings)], sort_keys=True, default=dict)
    return f"{hashlib.sha256(said.encode()).hexdigest()[:32]}.kv"
