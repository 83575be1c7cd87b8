"""A tokenizer.json is tried in a process of its own before a library reads it in this one."""

import hashlib
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from offload_decode.common.errors import ModelError
from offload_decode.hf.user_cache import cached, cached_fingerprint
from offload_decode.models.tokenizer_trial import MEMORY, MOST_TOKENS

_LONGEST_S = 300.0


def check_tokenizer(path: Path) -> None:
    """`ModelError` for a tokenizer.json that a library would make room for without end, or fails on. The same
    content is tried once.
    """

    def digest() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def tried() -> bool:
        if (reason := _reason_against(path)) is not None:
            raise ModelError(f"{path} cannot be used, because {reason}: fetch the checkpoint again")
        return True

    content = cached_fingerprint([path], "sha256", digest)
    cached(["tokenizer.json", version("tokenizers"), content], tried, bool, bool)


def _reason_against(path: Path) -> str | None:
    command = [sys.executable, "-P", "-m", "offload_decode.models.tokenizer_trial", str(path)]
    alone = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # threads reserve memory
    try:
        told = subprocess.run(
            command, env=os.environ | alone, capture_output=True, timeout=_LONGEST_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        told = None
    if told is not None and told.returncode == 0:
        return None
    if told is not None and told.returncode == 1 and told.stdout:
        return told.stdout.decode(errors="replace").strip()
    most = f"{MEMORY >> 30} GiB and two minutes, which are plenty for {MOST_TOKENS:,} tokens"
    return f"reading it and a few lines with it takes more than {most}"
