"""Train the demo model from nothing: `python -m training.train --out DIR`.

Tokenizer, curriculum and export in one command. A run that was stopped goes on from its last checkpoint;
the batches of a step depend on the seed and the step alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, PreTrainedModel

from training import corpus, curriculum, network, tokenizer
from training.curriculum import STAGES, Batch, Stage

WARMUP = 50
CHECKPOINT_SECONDS = 180
LOG_STEPS = 25

Accuracy = dict[str, tuple[float, int]]  # for each kind of row: right tokens, of how many


def forward(model: PreTrainedModel, batch: Batch, softening: float) -> tuple[torch.Tensor, Accuracy]:
    """Weighted cross-entropy, and for each kind of row how many tokens that count were right, of how many."""
    tokens = torch.from_numpy(batch.tokens)
    weights = torch.from_numpy(batch.weights)[:, 1:]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=tokens, use_cache=False, softening=softening).last_hidden_state
        hidden = hidden[:, :-1]
        rows, columns = torch.nonzero(weights, as_tuple=True)
        logits = F.linear(hidden[rows, columns], model.lm_head.weight).float()
    target, weight = tokens[rows, columns + 1], weights[rows, columns]
    losses = F.cross_entropy(logits, target, reduction="none")
    loss = (losses * weight).sum() / weight.sum()
    right = (logits.argmax(-1) == target)[weight >= 0.5].numpy()
    rows_of = rows[weight >= 0.5].numpy()
    accuracy: Accuracy = {}
    for index, kind in enumerate(batch.kinds):
        mine = right[rows_of == index]
        total, count = accuracy.get(kind, (0.0, 0))
        accuracy[kind] = (total + float(mine.sum()), count + len(mine))
    return loss, accuracy


def learning_rate(stage: Stage, step: int, done: int) -> float:
    """Warm-up at the very start; linear from the stage's first rate to its last over its steps."""
    share = min(1.0, done / stage.steps)
    return (stage.rate[0] + (stage.rate[1] - stage.rate[0]) * share) * min(1.0, (step + 1) / WARMUP)


def export(model: PreTrainedModel, words: Any, folder: Path) -> None:
    """Write what `from_pretrained` loads: half-precision weights that the config turns back to float32."""
    folder.mkdir(parents=True, exist_ok=True)
    half = network.create(model.config).half()
    half.load_state_dict(model.state_dict())
    half.generation_config.do_sample = False
    half.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    settings = json.loads((folder / "config.json").read_text())
    settings["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    tokenizer.save(words, folder)


class Run:
    """One training run: model, optimizers, and how far it is; all that a checkpoint holds."""

    def __init__(self, out: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.out, self.seed = out, seed
        prose = corpus.cached(out / "corpus.json", seed)
        if not (out / "tokenizer").exists():
            tokenizer.save(tokenizer.train(prose[:1500]), out / "tokenizer")
        self.words = AutoTokenizer.from_pretrained(out / "tokenizer")
        special = (self.words.bos_token_id, self.words.eos_token_id, self.words.pad_token_id)
        self.model = network.create(network.config(len(self.words), *special))
        self.optimizers = network.optimizers(self.model)
        self.mixer = curriculum.Mixer(self.words, prose)
        self.state: dict[str, Any] = {"step": 0, "stage": 0, "done": 0, "seconds": 0.0}
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint, weights_only=True)
            self.model.load_state_dict(saved["model"])
            for optimizer, kept in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
            self.state = saved["state"]

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def save(self) -> None:
        """Beside, then renamed."""
        part = self.checkpoint.with_suffix(".part")
        kept = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save({"model": self.model.state_dict(), "optimizers": kept, "state": self.state}, part)
        os.replace(part, self.checkpoint)

    def step(self, stage: Stage) -> tuple[float, Accuracy]:
        """Draw a batch and learn from it."""
        number = self.state["step"]
        batch = self.mixer.batch(np.random.default_rng((self.seed, number)), stage)
        loss, accuracy = forward(self.model, batch, stage.softening[number % len(stage.softening)])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(stage, number, self.state["done"])
            optimizer.step()
            optimizer.zero_grad()
        self.state["step"] += 1
        self.state["done"] += 1
        return loss.item(), accuracy

    def train(self, stopped: threading.Event) -> bool:
        """Go through the stages, logging and saving; whether the end was reached before `stopped` was set."""
        saved_at = noted_at = time.time()
        recent: deque[tuple[float, Accuracy]] = deque(maxlen=50)
        with (self.out / "log.jsonl").open("a") as log:
            while self.state["stage"] < len(STAGES):
                stage = STAGES[self.state["stage"]]
                recent.append(self.step(stage))
                if self.state["step"] % LOG_STEPS == 0:
                    now = time.time()
                    self.state["seconds"] += now - noted_at
                    noted_at = now
                    means = averages(recent)
                    print(json.dumps({"stage": stage.name} | self.state | means), file=log, flush=True)
                    known = len(recent) == recent.maxlen
                    if self.state["done"] >= stage.steps or (
                        known and means.get(stage.watch, 0) >= stage.goal
                    ):
                        self.state |= {"stage": self.state["stage"] + 1, "done": 0}
                        recent.clear()
                if stopped.is_set() or self.state["done"] == 0 or time.time() - saved_at > CHECKPOINT_SECONDS:
                    self.save()
                    saved_at = time.time()
                if stopped.is_set():
                    return False
        return True


def averages(recent: Collection[tuple[float, Accuracy]]) -> dict[str, float]:
    """Mean loss, and for each kind of row the share of right tokens."""
    means = {"loss": round(sum(loss for loss, _ in recent) / len(recent), 4)}
    for kind in sorted({kind for _, accuracy in recent for kind in accuracy}):
        pairs = [accuracy[kind] for _, accuracy in recent if kind in accuracy]
        means[kind] = round(sum(right for right, _ in pairs) / max(1, sum(count for _, count in pairs)), 3)
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoint, log and export")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--export", type=Path, help="folder of the finished model (default: OUT/model)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    stopped = threading.Event()
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, lambda *_: stopped.set())
    run = Run(options.out, options.seed)
    if run.train(stopped):
        export(run.model, run.words, options.export or options.out / "model")


if __name__ == "__main__":
    main()
