"""llama.cpp beside the engine, in a process of the Python that has `llama-cpp-python`: `Llama`.

Its context is filled with the keys and values of a store through a file of its own state (`llama_state.py`),
for to run 131,072 tokens would take it hours. The layout is taken from a state that this very process saved,
which must come out as it was when it is read and written again.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import llama_state
from benchmarks.llama_gguf import paired
from offload_decode.errors import ConfigError
from offload_decode.kernels.rows import tensor_view
from offload_decode.store.base import Store

WORKER = Path(__file__).with_name("llama_worker.py")
F16 = 1  # ggml's number of the type
ROOM = 256  # tokens behind the stored ones
GET = "make a virtual environment, install llama-cpp-python there, and give its python with --llama"


class Llama:
    """A context of llama.cpp for `tokens` stored ones and some more; `with` ends the process. ConfigError
    where it does not start.
    """

    def __init__(self, python: Path, gguf: Path, tokens: int, threads: int, flash: bool, log: Path):
        context = -(-(tokens + ROOM) // ROOM) * ROOM
        # How the engine's own threads wait is no setting of others.
        own = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        command = [python, WORKER, gguf, context, threads, int(flash)]
        with open(log, "wb") as noted:
            try:
                self._process = subprocess.Popen(
                    list(map(str, command)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=noted,
                    text=True,
                    env=own,
                )
            except OSError as error:
                raise ConfigError(f"llama.cpp is left out, for {python} does not start: {GET}") from error
        self._log = log
        self.about = self._answer()

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()

    def ask(self, name: str, **arguments: Any) -> dict[str, Any]:
        """What a method of `llama_worker.Worker` returns."""
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]
        return self._answer()

    def logits(self, tokens: list[int], folder: Path) -> np.ndarray:
        """Logits `[V]` after tokens behind what is there, which are taken back."""
        there = self.ask("told")["length"]
        self.ask("run", tokens=tokens, logits=str(folder / "logits"))
        self.ask("crop", length=there)
        return np.fromfile(folder / "logits", "<f4")

    def generated(self, token: int, count: int) -> list[tuple[float, dict[str, float]]]:
        """Seconds of greedy steps behind what is there, after two that are not counted."""
        return [(seconds, {}) for seconds in self.ask("steps", token=token, count=count + 2)["seconds"][2:]]

    def form(self, folder: Path) -> llama_state.Form:
        """The layout of its states, seen in one of three tokens; the context is empty before and after."""
        saved, again = folder / "few.state", folder / "again.state"
        self.ask("run", tokens=[1, 2, 3])
        self.ask("save", path=str(saved))
        self.ask("crop", length=0)
        found = llama_state.read(saved)
        rows = {"keys": found.keys, "values": found.values}
        llama_state.write(again, found.form, 3, lambda kind, layer: rows[kind][layer])
        if saved.read_bytes() != again.read_bytes() or found.positions.tolist() != [0, 1, 2]:
            raise ValueError("llama.cpp's state of three tokens is not written again as it was")
        return found.form

    def fill(self, store: Store, folder: Path) -> None:
        """All tokens of a store, in half precision, as keys and values of the context."""
        form, tokens = self.form(folder), store.manifest.n_tokens
        shape = store.manifest.shape
        expected = len(shape.layers), shape.kv_heads * shape.head_dim, F16, F16
        found = form.layers, form.channels, form.key_type, form.value_type
        assert found == expected, f"llama.cpp's cache is {found}, the store's would be {expected}"
        path = folder / "filled.state"
        llama_state.write(path, form, tokens, lambda kind, layer: halves(store, kind, layer))
        told = self.ask("load", path=str(path))
        assert told == {"bytes": path.stat().st_size, "length": tokens}, f"llama.cpp took {told}"
        path.unlink()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise ConfigError(f"llama.cpp is left out, for its process ended ({' '.join(said)}): {GET}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def halves(store: Store, kind: str, layer: int) -> llama_state.Rows:
    """Keys, with channels in llama.cpp's order, or values of a layer, `[N, Hkv · D]` in float16."""
    rows = store.keys if kind == "keys" else store.values
    parts = [tensor_view(rows(layer, head)) for head in range(store.manifest.shape.kv_heads)]
    if kind == "keys":
        parts = [paired(part) for part in parts]
    whole: llama_state.Rows = torch.cat([part.half() for part in parts], dim=1).numpy()
    return whole
