"""Random walks: whatever is done to an engine or a cache, in any order, its logits are those of plain
transformers on the whole sequence; what is wrong is refused, and leaves no trace.
"""

import copy
import random
from functools import cache

import numpy as np
import pytest
import torch

from offload_decode.common.errors import OffloadDecodeError
from offload_decode.engine.engine import Engine
from offload_decode.hf.compat import generate_name, with_cache
from tests.families import PLAIN
from tests.tiny import eager, served_model, text_model, token_store

N, VOCAB = 37, 259
CLOSE = {"atol": 1e-4, "rtol": 0}
SHORT = ["llama-mha", "deepseek_v3", "gemma2", "mistral-sliding", "gpt-oss"]


class World:
    """One family: a store, the model behind it, and plain transformers."""

    def __init__(self, family, folder):
        self.plain = eager(text_model(family=family))
        self.stored = np.random.default_rng(1).integers(3, VOCAB, N).astype(np.int32)
        served = served_model(family)
        store = token_store(folder / "store", served, self.stored, chunk=16)
        self.engine = Engine.open(store, served, options={"budget": "100%"})
        self.model = served.model

    def logits(self, after):
        """`[T, V]` of the tokens after the stored ones."""
        with torch.inference_mode():
            return self.plain(torch.tensor([[*self.stored.tolist(), *after]])).logits[0, N:]

    def check_greedy(self, before, answer):
        """Each token of `answer` is the best one after all before it, up to ties."""
        logits = self.logits([*before, *answer])[len(before) - 1 : -1]
        picked = logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        torch.testing.assert_close(picked, logits.amax(-1), **CLOSE)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    return cache(lambda family: World(family, tmp_path_factory.mktemp(family)))


many = [pytest.param(family, seed, marks=pytest.mark.slow) for family in PLAIN for seed in range(1, 9)]
walks = pytest.mark.parametrize(("family", "seed"), [*((family, 0) for family in SHORT), *many])


def tokens(dice, most):
    return [dice.randrange(3, VOCAB) for _ in range(dice.randint(1, most))]


def words(dice):
    return "".join(dice.choice("abcdefgh ,?") for _ in range(dice.randint(1, 12)))


@walks
def test_an_engine(worlds, family, seed):
    world, dice = worlds(family), random.Random(seed)
    engines = [world.engine.fork()]
    for _ in range(25):
        engine = dice.choice(engines)
        before, pending = list(engine.tokens), list(engine.pending)
        step = dice.choice(["extend", "extend", "ask", "stream", "answer", "many", "fork", "crop", "wrong"])
        if step == "extend":
            given = tokens(dice, 12)
            found, said = engine.extend(given), [*before, *pending, *given]
            torch.testing.assert_close(found, world.logits(said)[-1], **CLOSE)
            assert engine.tokens == said
        elif step == "ask":
            given = engine.question_tokens(question := words(dice))
            expected = world.logits([*before, *pending, *given])[-1]
            torch.testing.assert_close(engine.ask(question), expected, **CLOSE)
        elif step == "stream":
            given = engine.question_tokens(question := words(dice))
            pieces = engine.stream(question, dice.randint(1, 5))
            for _ in zip(range(dice.randint(1, 5)), pieces, strict=False):
                pass  # it may be left before its end
            pieces.close()
            asked = [*before, *pending, *given]
            answer = (engine.tokens + engine.pending)[len(asked) :]
            assert (engine.tokens + engine.pending)[: len(asked)] == asked
            world.check_greedy(asked, answer)
        elif step in ("answer", "many"):
            questions = [words(dice) for _ in range(1 if step == "answer" else dice.randint(1, 4))]
            new, size = dice.randint(1, 4), dice.randint(1, 3)
            one = step == "answer"
            answers = [engine.answer(*questions, new)] if one else engine.answer_many(questions, new, size)
            for question, answer in zip(questions, answers, strict=True):
                asked = [*before, *pending, *engine.question_tokens(question)]
                world.check_greedy(asked, list(answer.tokens))
            assert (engine.tokens, engine.pending) == (before, pending)
        elif step == "fork":
            engines = [*engines, engine.fork()][-3:]
        elif step == "crop":
            kept = dice.randint(0, len(before))
            engine.crop(N + kept)
            assert engine.tokens == before[:kept]
        else:
            with pytest.raises(OffloadDecodeError):
                engine.extend(dice.choice([[[5, 6], [7, 8]], [VOCAB], [-1], [0.5]]))
            assert (engine.tokens, engine.pending) == (before, pending)
        assert engine.length == N + len(engine.tokens)


class Rows:
    """A cache with the rows that it stands for: `ids [B, S]` of which `shown [B, S]` are no padding."""

    def __init__(self, world, batch):
        self.world = world
        self.cache = world.engine.new_cache()
        self.ids = torch.zeros(batch, 0, dtype=torch.long)
        self.shown = torch.zeros(batch, 0, dtype=torch.bool)

    def more(self, dice, most):
        """New columns, some of them padding wherever it falls, and what tells of them."""
        batch, width = len(self.ids), dice.randint(1, most)
        ids = torch.tensor([[dice.randrange(3, VOCAB) for _ in range(width)] for _ in range(batch)])
        shown = torch.ones(batch, width, dtype=torch.bool)
        if dice.random() < 0.6:
            shown = torch.tensor([[dice.random() < 0.7 for _ in range(width)] for _ in range(batch)])
        return ids, shown

    def given(self, dice, ids, shown):
        """Arguments of a forward pass over the new columns."""
        all_shown = torch.cat([self.shown, shown], dim=1)
        mask = torch.cat([torch.ones(len(ids), N, dtype=torch.bool), all_shown], dim=1)
        named = {"attention_mask": mask.to(dice.choice([torch.bool, torch.long, torch.float32]))}
        if bool(all_shown.all()):
            return dice.choice([named, {}])
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return {**named, "position_ids": positions}

    def add(self, ids, shown):
        self.ids = torch.cat([self.ids, ids], dim=1)
        self.shown = torch.cat([self.shown, shown], dim=1)

    def check(self, logits):
        """Logits `[B, T, V]` of the last T columns."""
        width = logits.shape[1]
        for row, (ids, shown) in enumerate(zip(self.ids, self.shown, strict=True)):
            own = shown[-width:]
            if bool(own.any()):
                expected = self.world.logits(ids[shown].tolist())[-int(own.sum()) :]
                torch.testing.assert_close(logits[row][own], expected, **CLOSE)


def run(rows, dice):
    ids, shown = rows.more(dice, 9)
    given = rows.given(dice, ids, shown)
    with torch.inference_mode(dice.random() < 0.5):
        logits = rows.world.model(ids, **with_cache(rows.world.model, rows.cache), **given).logits
    rows.add(ids, shown)
    rows.check(logits.detach())


def generate(rows, dice):
    ids, shown = rows.more(dice, 6)
    shown[:, -1] = True  # generate goes on from the last column
    mask = torch.cat([torch.ones(len(ids), N, dtype=torch.bool), rows.shown, shown], dim=1)
    new = dice.randint(1, 4)
    given = {"attention_mask": mask.long(), generate_name(): rows.cache, "pad_token_id": 0}
    out = rows.world.model.generate(ids, **given, max_new_tokens=new, do_sample=False)[:, ids.shape[1] :]
    rows.add(ids, shown)
    for row, answer in enumerate(out.tolist()):
        rows.world.check_greedy(rows.ids[row][rows.shown[row]].tolist(), answer)
    rows.add(out[:, :-1], torch.ones(len(out), new - 1, dtype=torch.bool))  # the last one is not run


def crop(rows, dice):
    removed = dice.randint(0, rows.ids.shape[1])
    rows.cache.crop(-removed)
    kept = rows.ids.shape[1] - removed
    rows.ids, rows.shown = rows.ids[:, :kept], rows.shown[:, :kept]


def pick(rows, dice):
    index = torch.tensor([dice.randrange(len(rows.ids)) for _ in range(dice.randint(1, 3))])
    dice.choice([rows.cache.batch_select_indices, rows.cache.reorder_cache])(index)
    rows.ids, rows.shown = rows.ids[index], rows.shown[index]


def repeat(rows, dice):
    rows.cache.batch_repeat_interleave(2)
    rows.ids, rows.shown = (part.repeat_interleave(2, dim=0) for part in (rows.ids, rows.shown))


def copied(rows, dice):
    other = copy.copy(rows)
    other.cache = copy.deepcopy(rows.cache)
    run(other, dice)


def wrong(rows, dice):
    """Each of these leaves something out, and none of them is run."""
    ids, shown = rows.more(dice, 5)
    shown[:, 0] = True
    given = rows.given(dice, ids, shown)
    held = rows.ids.shape[1]
    ways = [
        {"use_cache": False},
        {"position_ids": torch.arange(N + held + 1, N + held + 1 + ids.shape[1])[None]},
        {"attention_mask": torch.ones(len(ids), N + held + ids.shape[1] - 1)},
        {"attention_mask": torch.arange(N + held + ids.shape[1]).expand(len(ids), -1) > 0},
    ]
    if held:
        hidden = torch.cat([torch.ones(len(ids), N, dtype=torch.bool), rows.shown, shown], dim=1)
        hidden[:, N] ^= True
        ways.append({"attention_mask": hidden})
        ways.append({"position_ids": torch.arange(N, N + ids.shape[1])[None], "attention_mask": None})
        if not bool(rows.shown.all()):
            ways.append({"attention_mask": None, "position_ids": None})
    with pytest.raises(OffloadDecodeError):
        rows.world.model(ids, **with_cache(rows.world.model, rows.cache), **{**given, **dice.choice(ways)})
    if held:
        with pytest.raises(OffloadDecodeError):
            rows.world.model(torch.full((len(ids) + 1, 2), 5), **with_cache(rows.world.model, rows.cache))
    assert rows.cache.generated_length == held


@walks
def test_a_cache(worlds, family, seed):
    world, dice = worlds(family), random.Random(seed)
    rows = Rows(world, dice.randint(1, 3))
    for _ in range(22):
        if rows.ids.shape[1] > 60 or not rows.ids.shape[1]:
            rows = Rows(world, dice.randint(1, 3))
            run(rows, dice)
        steps = [run, run, run, generate, generate, crop, pick, copied, wrong, wrong]
        dice.choice(steps if len(rows.ids) > 2 else [*steps, repeat])(rows, dice)
        assert rows.cache.get_seq_length() == N + rows.ids.shape[1]
