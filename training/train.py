"""Train a demo model from nothing: `python -m training.train --model demo --out DIR --text FOLDER`.

Tokenizer, curriculum, decay and export in one command. A run that was stopped goes on from its last
checkpoint; the rows of a step depend on the seed, the step and the number of processes alone. Several
processes share each step's tokens: `torchrun --standalone --nproc-per-node 2 -m -- training.train ...`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedModel

from training import corpus, curriculum, network, tokenizer
from training.curriculum import STAGES, Batch, Stage, Steps
from training.favourites import favourites_first
from training.fillers import Fillers
from training.forward import Trainee
from training.guidance import LED
from training.rows import Row
from training.sharing import Team
from training.sharpen import FACTORS, losses, sharpen

WARMUP = 50
DECAY = 0.2  # share of all tokens over which the rate falls to nothing
CHECKPOINT_SECONDS = 180
LOG_STEPS = 25
COMPILED = 256  # shorter windows are not worth the compiler's time
LAST_STEP = 10**9
AGAIN = "several"  # where a finished model goes on: it copies and finds, and has lists to learn
GUIDANCE = (0.3, 0.3, 0.3, 1.0, 0.3, 0.5)  # weights of what is missed of what is led to, beside the loss
SHARPENED_BY = 6  # batches
GPU_TIMES = 8  # as many tokens a step on a GPU

Losses = list[float]  # cross-entropy, and what attention misses of where it is led, in the order of LED
Accuracy = dict[str, tuple[float, int]]  # for each kind of row: right tokens, of how many


def averages(recent: Collection[tuple[Losses, Accuracy]]) -> dict[str, float]:
    """Mean loss, and for each kind of row the share of right tokens."""
    means = {}
    for i, name in enumerate(("loss", *LED)):
        means[name] = round(sum(both[i] for both, _ in recent) / len(recent), 4)
    for kind in sorted({kind for _, accuracy in recent for kind in accuracy}):
        pairs = [accuracy[kind] for _, accuracy in recent if kind in accuracy]
        means[kind] = round(sum(right for right, _ in pairs) / max(1, sum(count for _, count in pairs)), 3)
    return means


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

    def __init__(
        self,
        name: str,
        out: Path,
        texts: list[Path],
        seed: int,
        tokens: float,
        workers: int,
        start: Path | None,
    ) -> None:
        torch.manual_seed(seed)
        self.out, self.budget, self.workers = out, tokens, workers
        self.team = Team()
        self.device = self.team.device
        # Emulated where the processor has no such instructions, and then several times slower than float32.
        self.half = self.device == "cuda" or torch.cpu._is_avx512_bf16_supported()
        with self.team.in_turn():
            found = corpus.cached(out / "corpus.json", texts, seed)
            if not (out / "tokenizer").exists():
                words = (
                    AutoTokenizer.from_pretrained(start)
                    if start
                    else tokenizer.train(tokenizer.samples(found))
                )
                tokenizer.save(words, out / "tokenizer")
            self.words = AutoTokenizer.from_pretrained(out / "tokenizer")
            fillers = Fillers(self.words, found, out / "fillers.npz", seed)
        special = (self.words.bos_token_id, self.words.eos_token_id, self.words.pad_token_id)
        self.model = network.create(network.config(name, len(self.words), *special))
        if start and not self.checkpoint.exists():
            finished = type(self.model).from_pretrained(start, dtype=torch.float32)
            self.model.load_state_dict(finished.state_dict())
        self.trainee = Trainee(self.model).to(self.device)
        self.compiled = torch.compile(self.trainee, dynamic=False)
        self.optimizers = network.optimizers(self.model)
        self.mixer = curriculum.Mixer(self.words, fillers, name == "demo-rope", seed, self.team.rank)
        stage = [stage.name for stage in STAGES].index(AGAIN) if start else 0
        self.state: dict[str, Any] = {"step": 0, "stage": stage, "done": 0, "tokens": 0, "seconds": 0.0}
        if self.checkpoint.exists():
            self.load(self.checkpoint)
        if self.state["tokens"] < (1 - DECAY) * tokens and self.state.pop("decaying", False):
            self.load(self.constant)

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    @property
    def constant(self) -> Path:
        """The last checkpoint before the rate fell: a run that is given more tokens goes on from there."""
        return self.out / "constant.pt"

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        saved = torch.load(path, weights_only=True, map_location=self.device)
        self.model.load_state_dict(saved["model"])
        for optimizer, kept in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.state = saved["state"]

    def save(self, path: Path) -> None:
        """Beside, then renamed; the first process does it for all."""
        if not self.team.first:
            return
        part = path.with_suffix(".part")
        kept = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save({"model": self.model.state_dict(), "optimizers": kept, "state": self.state}, part)
        os.replace(part, path)

    def rate(self) -> float:
        """Warm-up, a constant rate, and a linear fall to nothing at the end of the budget."""
        left = 1 - self.state["tokens"] / self.budget
        rate = STAGES[self.state["stage"]].rate
        share: float = min(1.0, (self.state["step"] + 1) / WARMUP, max(0.0, left) / DECAY)
        return rate * share

    def rows(self, stage: Stage) -> Iterator[list[Row]]:
        """The stage's rows from the next step on."""
        times = GPU_TIMES if self.device == "cuda" else 1 / self.team.size
        loader = DataLoader(
            Steps(self.mixer, stage, times),
            batch_size=None,
            sampler=range(self.state["step"], LAST_STEP),
            num_workers=self.workers,
            collate_fn=lambda rows: rows,
        )
        return iter(loader)

    def step(self, stage: Stage, rows: list[Row]) -> tuple[Losses, Accuracy]:
        """Learn from a step's rows."""
        step = self.state["step"]
        softening = stage.softening[step % len(stage.softening)]
        with torch.autocast(self.device, torch.bfloat16, enabled=self.half):
            rng = np.random.default_rng((self.mixer.seed, step, 2))
            rows = favourites_first(rng, rows, self.trainee, softening, self.device)
        batch = self.mixer.batch(step, stage, rows)
        network_ = self.compiled if batch.tokens.shape[1] >= COMPILED else self.trainee
        arrays = batch.tensors(self.device)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.half):
            softened = torch.tensor(softening, device=self.device)
            loss, led, right = network_(*arrays, softened, self.words.eos_token_id)
        (loss + led @ torch.tensor(GUIDANCE, device=self.device)).backward()
        self.team.average(weight.grad for weight in self.model.parameters())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        rate = self.rate()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        self.state["step"] += 1
        self.state["done"] += 1
        self.state["tokens"] += batch.tokens.size * self.team.size
        return [loss.item(), *led.tolist()], measured(batch, right.cpu())

    def best_factor(self) -> float:
        """The factor on the full layers' scores that suits rows with many tokens behind them best."""
        stage = replace(STAGES[-1], windows={1024: 1.0})
        steps = range(LAST_STEP, LAST_STEP + SHARPENED_BY)
        batches = [self.mixer.batch(i, stage, self.mixer.drawn(i, stage)) for i in steps]
        found = losses(self.trainee.cpu(), batches, self.words.eos_token_id)
        return FACTORS[found.index(min(found))]

    def train(self, stopped: threading.Event) -> bool:
        """Go through the stages, logging and saving; whether the end was reached before `stopped` was set."""
        saved_at = noted_at = time.time()
        recent: deque[tuple[Losses, Accuracy]] = deque(maxlen=50)
        with (self.out / "log.jsonl" if self.team.first else Path(os.devnull)).open("a") as log:
            rows = self.rows(STAGES[self.state["stage"]])
            while self.state["tokens"] < self.budget:
                if self.state["tokens"] >= (1 - DECAY) * self.budget and "decaying" not in self.state:
                    self.save(self.constant)
                    self.state["decaying"] = True
                stage = STAGES[self.state["stage"]]
                recent.append(self.step(stage, next(rows)))
                if self.state["step"] % LOG_STEPS == 0:
                    now = time.time()
                    self.state["seconds"] += now - noted_at
                    noted_at = now
                    means = averages(recent)
                    print(json.dumps({"name": stage.name} | self.state | means), file=log, flush=True)
                    known = len(recent) == recent.maxlen and means.get(stage.watch, 0) >= stage.goal
                    if self.team.any(known) or 0 < stage.steps <= self.state["done"]:
                        self.state |= {"stage": self.state["stage"] + 1, "done": 0}
                        rows = self.rows(STAGES[self.state["stage"]])
                        recent.clear()
                stop = self.team.any(stopped.is_set())
                if stop or time.time() - saved_at > CHECKPOINT_SECONDS:
                    self.save(self.checkpoint)
                    saved_at = time.time()
                if stop:
                    return False
        return True


def measured(batch: Batch, right: torch.Tensor) -> Accuracy:
    """For each kind of row how many of the tokens that count in full were right, of how many."""
    accuracy: Accuracy = {}
    counted = torch.as_tensor(batch.weights >= 1)
    for kind, mine, true in zip(batch.kinds, counted, right, strict=True):
        total, count = accuracy.get(kind, (0.0, 0))
        accuracy[kind] = (total + int(true[mine].sum()), count + int(mine.sum()))
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=network.MODELS, default="demo")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoint, log and export")
    parser.add_argument(
        "--text", type=Path, nargs="*", default=[], help="folders of text files to read as well"
    )
    parser.add_argument(
        "--start", type=Path, help="a finished model to go on from, where its checkpoints are gone"
    )
    parser.add_argument("--tokens", type=float, default=100, help="millions of tokens in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that draw batches (a few for a GPU)"
    )
    parser.add_argument("--export", type=Path, help="folder of the finished model (default: OUT/model)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    stopped = threading.Event()
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, lambda *_: stopped.set())
    millions = options.tokens * 1e6
    run = Run(
        options.model, options.out, options.text, options.seed, millions, options.workers, options.start
    )
    if run.train(stopped) and run.team.first:
        run.save(run.checkpoint)
        factor = run.best_factor()
        sharpen(run.model, factor)
        print(f"full layers' scores are sharpened by {factor}")
        export(run.model, run.words, options.export or options.out / "model")


if __name__ == "__main__":
    main()
