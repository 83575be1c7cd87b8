"""What a repair after an edit loses: `python -m benchmarks.approximate_repair MODEL --text FILE --edits N`.

A made-up sentence is put into a stretch of a text, taken out of it, or given another name; "refer" is the
last with a next sentence, unchanged, that refers to the name. What stands before the edit keeps its keys and
values, what was edited is run, and what stands behind is repaired:

* stale: nothing is, not even the edit; the control;
* reuse: old values, and old keys rotated to where they stand now;
* first 10 %, first 25 %: so, and the first tokens behind the edit are run again;
* largest deviation 25 %: so, and the tokens that are farthest from exact get their exact KV. Nobody has that
  without running everything: it is what a choice of tokens could reach.

Each is given the tokens that follow in the file and, behind a question about the sentence, those that the
exact KV of the new text answers with. Agreement is how often its likeliest next token is that of the exact
KV; KL is of the next token's probabilities to the exact ones in the text that follows, in nats. A fact is
right if a way's own answer has the new name and not the old, and counts where the exact KV has it right.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from benchmarks.common import option_parser, table
from benchmarks.compact import PLACES
from offload_decode.common.errors import ConfigError, UnsupportedModel
from offload_decode.evals.fidelity import agreement
from offload_decode.evals.tasks import words
from offload_decode.hf.compat import cache_name
from offload_decode.models.loading import LoadedModel, load

KINDS = "insert", "delete", "replace", "refer"
STALE, REUSE, LARGEST = "stale", "reuse", "largest deviation 25 %"
FIRST = {"first 10 %": 0.1, "first 25 %": 0.25}
WAYS = STALE, REUSE, *FIRST, LARGEST
HEADS = "way", "agreement of forced tokens", "KL", "agreement within answers", "facts right"
TOLD = "The keeper of the {thing} is {name}. "
REFERS = "Every evening the keeper feeds {count} geese behind the chapel. "
QUESTION = "\n\nQuestion: Who is the keeper of the {thing}?\nAnswer: The keeper of the {thing} is"
REFERRED = "\n\nQuestion: Who feeds {count} geese every evening?\nAnswer: The {count} geese are fed by"
FOLLOWING, ANSWER, CHUNK = 128, 8, 256  # tokens: that follow and are forced, of an answer, of a pass
MIDDLE = 0.3, 0.6  # between these shares of a stretch it is edited
TOLERANCE = 1e-3  # of rotated keys, to the largest

Judged = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], bool]
"""Logits `[T, V]` by the exact KV and a way, of the text that follows and of an answer; is the fact right?"""


@dataclass(frozen=True)
class Edit:
    """A text before and after, what follows it, a question, and its answer before and after, or empty."""

    kind: str
    before: str
    after: str
    following: str
    question: str
    old: str
    new: str

    def right(self, answer: str) -> bool:
        return self.new in answer and not (self.old and self.old in answer)


def edits(text: str, number: int, characters: int) -> Iterator[Edit]:
    """As many, the kinds in turn, in stretches of so many characters that are spread over the text.

    Raises `ConfigError` where the text is too short, or no sentence ends where a stretch is to be edited.
    """
    draw, needed = random.Random(7), characters + 8 * FOLLOWING
    if len(text) < needed:
        raise ConfigError(f"the text has {len(text):,} characters, and a stretch takes {needed:,}: give more")
    for one in range(number):
        begin = one * (len(text) - needed) // max(1, number - 1)
        stretch, following = text[begin : begin + characters], text[begin + characters : begin + needed]
        at = int(draw.uniform(*MIDDLE) * characters)
        end = re.compile(r"[.!?]\s+|\n\s*\n").search(stretch, at)
        if end is None:
            raise ConfigError(f"no sentence ends behind character {begin + at:,} of the text: give another")
        thing = draw.choice(PLACES)
        old, new = words.distinct(lambda: words.made_up(draw).capitalize(), 2)
        kind, count = KINDS[one % len(KINDS)], draw.randint(11, 99)
        old, new = "" if kind == "insert" else old, "" if kind == "delete" else new
        told, question = (TOLD + REFERS, REFERRED) if kind == "refer" else (TOLD, QUESTION)
        said = (told.format(thing=thing, name=name, count=count) if name else "" for name in (old, new))
        before, after = (stretch[: end.end()] + own + stretch[end.end() :] for own in said)
        yield Edit(kind, before, after, following, question.format(thing=thing, count=count), old, new)


class Placed(DynamicLayer):  # type: ignore[misc]  # transformers is Any to mypy
    """A layer of KV `[2, Hkv, N, D]` into which new tokens are written at `rows`."""

    def __init__(self, kv: Tensor, rows: Tensor):
        super().__init__()
        self.kv, self.rows, self.is_initialized = kv, rows, True

    def update(self, keys: Tensor, values: Tensor, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        self.kv[..., self.rows, :] = torch.cat([keys, values])
        return self.kv[:1], self.kv[1:]


@torch.no_grad()
def run(loaded: LoadedModel, kv: Tensor, tokens: Sequence[int], rows: Tensor) -> tuple[Tensor, Tensor]:
    """Run tokens, at least one, at `rows` of KV `[layers, 2, Hkv, N, D]`, where each sees what stands before;
    the last rows may lie beyond the KV. Logits `[T, V]` of the last pass, and the KV with that of the tokens.
    """
    kv = torch.nn.functional.pad(kv, (0, 0, 0, max(0, int(rows[-1]) + 1 - kv.shape[-2]))).clone()
    for part in range(0, len(tokens), CHUNK):
        at = rows[part : part + CHUNK]
        logits = loaded.model(
            input_ids=torch.tensor([tokens[part : part + CHUNK]]),
            position_ids=at[None],
            attention_mask=(torch.arange(kv.shape[-2]) <= at[:, None])[None, None],
            **{cache_name(loaded.model): Cache(layers=[Placed(own, at) for own in kv])},
        ).logits[0]
    return logits, kv


def behind(loaded: LoadedModel, kv: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`run` behind the last of `kv`."""
    return run(loaded, kv, tokens, torch.arange(kv.shape[-2], kv.shape[-2] + len(tokens)))


def exact_kv(loaded: LoadedModel, tokens: Sequence[int]) -> Tensor:
    """The KV of a text, `[layers, 2, Hkv, N, D]`; raises `UnsupportedModel` where layers keep none such."""
    rotary, shape = getattr(loaded.model.base_model, "rotary_emb", None), loaded.shape
    whole = len(shape.full_layers) == len(shape.layers) and not shape.latent
    if not (whole and hasattr(rotary, "inv_freq") and shape.head_dim == shape.value_dim):
        raise UnsupportedModel("not all layers keep rotated keys of all tokens: take a Llama or Qwen")
    return behind(loaded, torch.empty(len(shape.layers), 2, shape.kv_heads, 0, shape.head_dim), tokens)[1]


def moved(loaded: LoadedModel, kv: Tensor, by: int) -> Tensor:
    """The keys rotated to positions `by` further on, which may be negative."""
    angles = by * loaded.model.base_model.rotary_emb.inv_freq.double()
    cos, sin = (torch.cat([own, own]).float() for own in (angles.cos(), angles.sin()))
    keys, rest = kv[:, 0, ..., : len(cos)], kv[:, 0, ..., len(cos) :]
    first, second = keys.chunk(2, -1)
    rotated = torch.cat([keys * cos + torch.cat([-second, first], -1) * sin, rest], -1)
    return torch.stack([rotated, kv[:, 1]], 1)


def shared(old: Sequence[int], new: Sequence[int]) -> tuple[int, int]:
    """How many tokens are the same at the beginning, and of the rest at the end."""
    least = min(len(old), len(new))
    start = next((i for i in range(least) if old[i] != new[i]), least)
    end = next((i for i in range(least - start) if old[-1 - i] != new[-1 - i]), least - start)
    return start, end


def reused(loaded: LoadedModel, kv: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    """The KV of `new` by that of `old`: run where it was edited, and rotated behind."""
    start, end = shared(old, new)
    made, edited = kv[..., :start, :], new[start : len(new) - end]
    if edited:
        made = behind(loaded, made, edited)[1]
    return torch.cat([made, moved(loaded, kv[..., len(old) - end :, :], len(new) - len(old))], -2)


def first_again(loaded: LoadedModel, kv: Tensor, new: Sequence[int], end: int, share: float) -> Tensor:
    """With the first share of the last `end` tokens run again."""
    rows = torch.arange(len(new) - end, len(new) - end + round(share * end))
    return run(loaded, kv, [new[row] for row in rows], rows)[1] if len(rows) else kv


def largest_exact(kv: Tensor, exact: Tensor, end: int, share: float) -> Tensor:
    """With the exact KV of the share of the last `end` tokens that is farthest from it, over all layers."""
    start = kv.shape[-2] - end
    far = (kv - exact)[..., start:, :].square().sum((2, 4))  # [layers, 2, end]
    far /= exact[..., start:, :].square().sum((2, 4)).mean(-1, keepdim=True)
    rows = start + far.sum((0, 1)).topk(round(share * end)).indices
    return kv.index_copy(-2, rows, exact[..., rows, :])


def ways(loaded: LoadedModel, old: Sequence[int], new: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """The exact KV of `new`, and that of each way."""
    stale, exact = exact_kv(loaded, old), exact_kv(loaded, new)
    reuse, end = reused(loaded, stale, old, new), shared(old, new)[1]
    # Keys of the first layer follow from token and position alone.
    if (reuse - exact)[0, 0].abs().max() > TOLERANCE * exact[0, 0].abs().max():
        raise UnsupportedModel("the model's keys cannot be rotated to other positions: take a Llama or Qwen")
    made = {STALE: stale, REUSE: reuse}
    made |= {way: first_again(loaded, reuse, new, end, share) for way, share in FIRST.items()}
    return exact, made | {LARGEST: largest_exact(reuse, exact, end, 0.25)}


def answer(loaded: LoadedModel, kv: Tensor, question: Sequence[int]) -> list[int]:
    """The likeliest tokens, up to an end."""
    said: list[int] = []
    logits, kv = behind(loaded, kv, question)
    while len(said) < ANSWER and (token := int(logits[-1].argmax())) not in loaded.ends:
        said.append(token)
        logits, kv = behind(loaded, kv, [token])
    return said


def judged(loaded: LoadedModel, edit: Edit) -> tuple[str, bool, dict[str, Judged]]:
    """The answer of the exact KV, whether it is right, and what each way makes of the edit."""
    tokenizer = loaded.known_tokenizer
    exact, made = ways(loaded, tokenizer.encode(edit.before), tokenizer.encode(edit.after))
    following = tokenizer.encode(edit.following, add_special_tokens=False)[:FOLLOWING]
    question = tokenizer.encode(edit.question, add_special_tokens=False)
    told = answer(loaded, exact, question)

    def forced(kv: Tensor) -> tuple[Tensor, Tensor]:
        asked = behind(loaded, kv, question + told)[0]
        return behind(loaded, kv, following)[0], asked[-len(told) - 1 :]

    true, found = forced(exact), {}
    for way, kv in made.items():
        text, asked = forced(kv)
        said = tokenizer.decode(answer(loaded, kv, question))
        found[way] = (true[0], text), (true[1], asked), edit.right(said)
    own = tokenizer.decode(told)
    return own, edit.right(own), found


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--edits", type=int, default=16)
    parser.add_argument("--characters", type=int, default=8_000, help="of a stretch of the text")
    options = parser.parse_args()
    loaded = load(options.model, "cpu", "float32", "full")
    loaded.model.set_attn_implementation("sdpa")
    found: list[dict[str, Judged]] = []
    facts: list[dict[str, Judged]] = []
    for edit in edits(options.text.read_text(), options.edits, options.characters):
        own, right, each = judged(loaded, edit)
        print(f"{edit.kind}: '{edit.old}' to '{edit.new}', exact KV: {own!r}", flush=True)
        found.append(each)
        facts += [each] * right
    rows = []
    for way in WAYS:
        following = agreement([each[way][0] for each in found])
        answers = agreement([each[way][1] for each in found])
        known = f"{sum(each[way][2] for each in facts)} of {len(facts)}"
        rows.append([way, f"{following.top1:.2%}", f"{following.kl_mean:.5f}", f"{answers.top1:.2%}", known])
    print(table(HEADS, rows))


if __name__ == "__main__":
    main()
