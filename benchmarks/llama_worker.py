"""llama.cpp, for `llama_beside.py`: a program of its own, in the Python that has `llama-cpp-python`.

`python llama_worker.py GGUF CONTEXT THREADS FLASH` (0 or 1) loads the model and then does what each line of
JSON on stdin asks for, answering each with a line on stdout. It imports nothing of this project, which that
Python need not have.
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
import time
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as llama
import numpy as np

BATCH = 8  # tokens of a pass: buffers for attention grow with them, and only single tokens are timed


class Worker:
    """A model and a context of one sequence."""

    def __init__(self, path: str, context: int, threads: int, flash: bool):
        llama.llama_backend_init()
        weights = llama.llama_model_default_params()
        weights.n_gpu_layers = 0
        self.model = llama.llama_model_load_from_file(path.encode(), weights)
        given = llama.llama_context_default_params()
        given.n_ctx, given.n_batch, given.n_ubatch, given.n_seq_max = context, BATCH, BATCH, 1
        given.n_threads = given.n_threads_batch = threads
        given.flash_attn_type = int(flash)
        self.context = llama.llama_init_from_model(self.model, given)
        assert self.context, "llama.cpp made no context"
        self.memory = llama.llama_get_memory(self.context)
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))

    def run(self, tokens: list[int], logits: str = "") -> dict[str, Any]:
        """Tokens behind what is there; the logits after the last go to the file `logits`, if one is named."""
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        failed = llama.llama_decode(self.context, llama.llama_batch_get_one(ids, len(tokens)))
        assert not failed, f"llama_decode says {failed}"
        last = np.ctypeslib.as_array(llama.llama_get_logits_ith(self.context, -1), (self.vocabulary,))
        if logits:
            last.astype("<f4").tofile(logits)
        return {"next": int(last.argmax())}

    def steps(self, token: int, count: int) -> dict[str, Any]:
        """Seconds of each of `count` greedy steps behind what is there; they are taken back."""
        length = self.length()
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            token = self.run([token])["next"]
            seconds.append(time.perf_counter() - began)
        self.crop(length)
        return {"seconds": seconds}

    def crop(self, length: int) -> dict[str, Any]:
        """Only the first tokens stay."""
        assert llama.llama_memory_seq_rm(self.memory, 0, length, -1)
        return {"length": self.length()}

    def save(self, path: str) -> dict[str, Any]:
        """The sequence as a file."""
        nothing = (ctypes.c_int32 * 1)()
        return {"bytes": llama.llama_state_seq_save_file(self.context, path.encode(), 0, nothing, 0)}

    def load(self, path: str) -> dict[str, Any]:
        """The sequence that a file holds, in place of what is there."""
        nothing, count = (ctypes.c_int32 * 1)(), ctypes.c_size_t()
        read = llama.llama_state_seq_load_file(
            self.context, path.encode(), 0, nothing, 1, ctypes.byref(count)
        )
        assert read, "llama.cpp refused the state"
        return {"bytes": read, "length": self.length()}

    def length(self) -> int:
        """Tokens that are there."""
        return int(llama.llama_memory_seq_pos_max(self.memory, 0)) + 1

    def told(self) -> dict[str, Any]:
        """Tokens that are there, what runs, and the most memory that it held, maps included."""
        return {
            "length": self.length(),
            "version": llama_cpp.__version__,
            "system": llama.llama_print_system_info().decode(),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def main() -> None:
    path, *numbers = sys.argv[1:]
    context, threads, flash = map(int, numbers)
    worker = Worker(path, context, threads, bool(flash))
    print(json.dumps(worker.told()), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(worker, name)(**arguments)), flush=True)


if __name__ == "__main__":
    main()
