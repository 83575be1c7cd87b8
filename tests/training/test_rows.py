"""Training rows hold what they ask for, count only answers, and never draw what evaluation draws."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from offload_decode import demo_models
from offload_decode.evals.tasks import words
from training import curriculum, documents, needles
from training.curriculum import FACTS, STAGES, Mixer, Stage
from training.fillers import Fillers
from training.items import ALTERNATIVES, Item, alternatives, inside, listed, turning
from training.rows import REST, Rows, settled

LENGTH = 512
TEXT = "Some people walked slowly over the hills before evening. They sang about stones and water.\n" * 400


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_models.path("demo"), local_files_only=True)


@pytest.fixture(scope="module")
def fillers(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Fillers:
    return Fillers(
        tokenizer, {"hills": TEXT}, tmp_path_factory.mktemp("fillers") / "fillers.npz", 0, made=20_000
    )


@pytest.fixture(scope="module")
def rows(tokenizer: Any, fillers: Fillers) -> Rows:
    return Rows(tokenizer, fillers)


def answered(tokenizer: Any, row: Any) -> list[tuple[str, str]]:
    """All that stands before each answer, and the answer."""
    counted = np.flatnonzero(row.weights > REST)
    ends = [i for i in counted if row.tokens[i] == tokenizer.eos_token_id]
    found, start = [], 0
    for end in ends:
        first = next(i for i in counted if i >= start)
        found.append((tokenizer.decode(row.tokens[1:first]), tokenizer.decode(row.tokens[first:end])))
        start = end + 1
    return found


@pytest.mark.parametrize("kind", FACTS)
def test_an_answer_is_made_of_words_of_the_text_before_it(tokenizer: Any, rows: Rows, kind: str) -> None:
    rng = random.Random(kind)
    asked = 0
    for _ in range(4):
        row = rows.row(rng, LENGTH, kind)
        assert len(row.tokens) == len(row.weights) == len(row.background) == LENGTH
        assert row.tokens[0] == tokenizer.bos_token_id
        assert not (row.background & (row.weights > 0)).any()
        for before, answer in answered(tokenizer, row):
            asked += 1
            # The statement around a value is learned; every name, number and code must be read.
            for word in re.findall(r"[A-Za-z]*\d\w*|[A-Z]{3,}", answer.split(": ")[-1]):
                if kind == "suite" and re.fullmatch(r"\d\d?", word):  # counted, not read
                    continue
                if not re.search(rf"(?:^|\s){re.escape(word)}\.", answer):
                    assert word in before, (word, answer)
    assert asked >= 4


def test_background_answers_nothing(tokenizer: Any, rows: Rows) -> None:
    row = rows.row(random.Random(3), LENGTH, "needles")
    text = tokenizer.decode(row.tokens[row.background])
    assert "magic" not in text


def test_words_of_evaluation_are_never_drawn(rows: Rows) -> None:
    assert not set(rows.names.known) & set(words.EVERY["eval"])
    rng = random.Random(0)
    drawn = {part for _ in range(2000) for part in re.findall(r"[a-z]+", rows.names.key(rng).lower())}
    assert drawn & set(words.EVERY["train"])
    assert not drawn & set(words.EVERY["eval"])


def test_a_rival_is_another_key_that_shares_much(rows: Rows) -> None:
    rng = random.Random(1)
    keys = [rows.names.keys(rng, 6) for _ in range(50)]
    assert all(len(set(group)) == 6 for group in keys)


@pytest.mark.parametrize("rotary", [False, True])
def test_a_batch_depends_on_seed_and_step_alone(tokenizer: Any, fillers: Fillers, rotary: bool) -> None:
    stage = Stage("all", {256: 0.5, 512: 0.5}, {"phrases": 0.2, "needles": 0.4, "plain": 0.4}, far=1e5)
    one, other = (Mixer(tokenizer, fillers, rotary, seed=5) for _ in range(2))
    one.batch(3, stage, one.drawn(3, stage))
    first, second, third = (
        m.batch(i, stage, m.drawn(i, stage)) for m, i in ((one, 4), (other, 4), (other, 5))
    )
    for mine, same in zip(first[:-1], second[:-1], strict=True):
        np.testing.assert_array_equal(mine, same)
    assert first.tokens.shape != third.tokens.shape or not np.array_equal(first.tokens, third.tokens)


def test_processes_that_train_together_draw_other_rows_of_one_length(
    tokenizer: Any, fillers: Fillers
) -> None:
    stage = Stage("all", {256: 0.5, 512: 0.5}, {"needles": 0.5, "plain": 0.5}, tokens=2048)
    mixers = [Mixer(tokenizer, fillers, False, seed=5, rank=rank) for rank in (0, 1)]
    for step in range(4):
        one, other = (mixer.drawn(step, stage, 0.5) for mixer in mixers)
        assert {len(row.tokens) for row in one} == {len(row.tokens) for row in other}
        assert sum(len(row.tokens) for row in one) == 1024
        assert not any(np.array_equal(a.tokens, b.tokens) for a in one for b in other)


def test_words_that_are_not_common_stand_for_more_in_the_last_layer(rows: Rows, tokenizer: Any) -> None:
    most, more = 0.0, 0
    for seed in range(6):
        row = rows.row(random.Random(seed), LENGTH, "common")
        crowd = curriculum.crowded(np.random.default_rng(seed), row)
        at = np.flatnonzero(row.ends)
        times = np.bincount(row.ends)[row.ends[at]]
        assert not crowd[at[times == times.max()]].any()
        # Nor do a common word's other tokens; what stands between words is of none.
        common = {int(row.so_far[i - back]) for i in at[times == times.max()] for back in (0, 1)} - {0}
        inside = np.isin(row.so_far, list(common))
        assert not crowd[inside].any()
        more += int(inside.sum() - (times == times.max()).sum())
        assert (crowd[at[0] : at[-1] + 1][row.so_far[at[0] : at[-1] + 1] == 0] > 0).all()
        rest = crowd[at[times < times.max()]]
        assert len(set(rest)) == 1
        assert 0 < rest[0] <= np.log(curriculum.CROWD)
        assert not crowd[: at[0]].any()
        assert not crowd[at[-1] + 1 :].any(), "what asks is no longer"
        most = max(most, rest[0])
    assert most > 1
    assert more > 0, "words of several tokens"
    for kind in ("coded", "needles"):
        row = rows.row(random.Random(1), LENGTH, kind)
        assert not curriculum.crowded(np.random.default_rng(1), row).any()


def test_facts_that_nothing_is_asked_of_make_no_row(rows: Rows) -> None:
    """As where the one field of every document has a value too long to be asked for."""
    history = "Post-History: " + ", ".join(["01-Jan-2020"] * 20)
    assert len(history) > documents.LONGEST_ASKED
    assert (
        rows.fitted(random.Random(1), [Item([f"Document: a\n\n{history}\n"], [])], 256, "documents") is None
    )


def test_titles_and_writers_are_lines_short_and_long(rows: Rows) -> None:
    """As in real headers, where a title may have twelve words and a writer none but a name."""
    rng = random.Random(3)
    for drawn in (documents.headline, documents.writer):
        made = [drawn(rng, rows.names) for _ in range(300)]
        assert all(line and line == " ".join(line.split()) for line in made)
        sizes = [len(tokens) for tokens in rows.encode(made)]
        assert max(sizes) >= 4 * min(sizes)
        assert max(map(len, made)) <= documents.LONGEST_ASKED


def test_targets_are_the_tokens_behind_the_picked_ones(tokenizer: Any, fillers: Fillers) -> None:
    mixer = Mixer(tokenizer, fillers, False, seed=1)
    batch = mixer.batch(0, STAGES[-2], mixer.drawn(0, STAGES[-2]))
    rows_, columns = np.nonzero(batch.weights)
    np.testing.assert_array_equal(
        batch.targets[rows_, columns], batch.tokens[rows_, batch.picked[rows_, columns] + 1]
    )


def test_far_keys_are_of_other_rows_and_stand_for_as_many_tokens(tokenizer: Any, fillers: Fillers) -> None:
    stage = Stage("far", {512: 1.0}, {"plain": 1.0}, far=1e5, tokens=16 * 512)
    mixer = Mixer(tokenizer, fillers, False, seed=2)
    rng = random.Random(0)
    rows = [mixer.rows.row(rng, 512, "plain") for _ in range(16)]
    index, bias = curriculum.distractors(np.random.default_rng(1), rows, stage.far)
    filler, facts = slice(0, curriculum.FAR_KEYS), slice(curriculum.FAR_KEYS, None)
    for part, pool, most in (
        (filler, [row.background for row in rows], 1e5),
        (facts, [row.facts for row in rows], curriculum.MOST_FACTS),
    ):
        assert np.concatenate(pool)[index[part]].all()
        stands_for = np.exp(bias[:, part].astype(np.float64))
        for i, mine in enumerate(stands_for):
            assert not mine[index[part] // 512 == i].any()
            assert mine.sum() == 0 or 300 <= mine.sum() * (1 + 1e-6) <= 1.001 * most
        assert (stands_for.sum(1) > 0).any()


def test_what_is_counted_meets_no_other_text(rows: Rows) -> None:
    row = rows.row(random.Random(2), LENGTH, "coded")
    assert not row.far
    assert not row.facts.any()


def test_places_of_a_rotary_row_go_on_by_one_but_for_a_few_gaps() -> None:
    places, far = curriculum.spread(np.random.default_rng(0), 4, 512, 32)
    steps = np.diff(places, axis=1)
    assert (steps >= 1).all()
    assert (steps > 1).sum() <= 4 * 3
    assert far.max() <= places.min()


def test_a_run_starts_from_folders_of_text(tmp_path: Path) -> None:
    from training import corpus

    (tmp_path / "one.txt").write_text(TEXT)
    assert corpus.folder_texts([tmp_path]) == {"one": TEXT}


def test_what_a_list_may_say_next_is_what_it_has_not_said() -> None:
    parts = [np.array(p) for p in ([5, 6], [5, 7], [8])]
    #                           .  5  6  .  5  7  .  8
    said = listed(0, np.array([1, 5, 6, 1, 5, 7, 1, 8]), parts)
    found = alternatives(said)
    assert inside(said).tolist() == [False, True, True, False, True, True, False, True]
    assert turning(said).tolist() == [False, False, False, True, False, False, True, False]
    assert found.shape == (8, ALTERNATIVES)
    assert [sorted(set(row.tolist()) - {-1}) for row in found] == [[], [8], [7], [], [8], [], [], []]
    with pytest.raises(ValueError, match="cut otherwise"):
        listed(0, np.array([1, 5, 6]), [np.array([6, 5])])


def test_a_token_is_settled_by_the_two_before_it_as_long_as_nothing_else_came_behind_them() -> None:
    #                       0  1  2  3  4  5  6  7  8  9 10 11
    found = settled(np.array([1, 2, 3, 9, 1, 2, 3, 1, 2, 4, 1, 2]), np.zeros(12, int))
    assert found.nonzero()[0].tolist() == [6]
    assert not settled(np.array([1, 2, 3, 1, 2, 4, 1, 2, 3]), np.zeros(9, int)).any()
    # What another branch tells is not seen; what stands before all of them is.
    branches = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
    found = settled(np.array([1, 2, 3, 4, 5, 6, 4, 5, 6, 3]), branches)
    assert not found.any()
    assert settled(np.array([1, 2, 3, 9, 1, 2, 3]), np.array([0, 0, 0, 1, 1, 1, 1]))[-1]


@pytest.mark.parametrize("kind", ["values", "common", "coded"])
def test_every_part_of_a_list_is_accepted_where_it_may_come_first(
    tokenizer: Any, rows: Rows, kind: str
) -> None:
    rng = random.Random(kind)
    seen = 0
    for row in [rows.row(rng, 1024, kind) for _ in range(6)]:
        for at, other in np.argwhere(row.others >= 0):
            seen += 1
            # A part that is yet to come in the same answer begins, or goes on, with it.
            end = at + int(np.argmax(row.tokens[at:] == tokenizer.eos_token_id))
            assert row.others[at, other] in row.tokens[at + 1 : end]
            assert row.others[at, other] != row.tokens[at]
    assert seen > 6


def test_to_end_a_list_counts_as_much_as_to_go_on(rows: Rows) -> None:
    seen = 0
    for seed in range(12):
        for kind in ("values", "common"):
            row = rows.row(random.Random(seed), LENGTH, kind)
            for said in row.lists:
                turns = np.flatnonzero(turning(said)) + said.start
                end = said.start + said.size
                assert len({float(w) for w in row.weights[turns]}) <= 1
                assert (row.weights[turns] == row.weights[end]).all(), "the token that ends the answer"
                seen += len(turns)
    assert seen > 60


def test_a_chain_is_hinted_at_where_its_facts_end(rows: Rows, tokenizer: Any) -> None:
    found = 0
    for seed in range(20):
        row = rows.row(random.Random(seed), LENGTH, "tracking")
        assert (row.hints[:, 1] < 0).all(), "one fact tells a link"
        for at in np.flatnonzero(row.hints[:, 0] >= 0):
            assert row.hints[at, 0] < at
            link = tokenizer.decode(row.tokens[at : at + 1]).strip()
            told = re.search(
                r"VAR (\w+) = (\d{5}|VAR [A-Z]+)$", tokenizer.decode(row.tokens[: row.hints[at, 0] + 1])
            )
            assert told is not None, "the hint is where a fact ends"
            assert told[1].startswith(link), "which tells this link"
            assert row.guided[at]
            found += 1
    assert found > 40


def test_a_key_is_hinted_at_where_the_question_is_about_to_name_it(rows: Rows, tokenizer: Any) -> None:
    found = twice = 0
    for seed in range(60):
        rng = random.Random(seed)
        row = rows.fitted(rng, [needles.needles(rng, rows.names, 4)], LENGTH, "needles")
        for at in np.flatnonzero((row.hints >= 0).any(1)) if row else ():
            for hint in row.hints[at][row.hints[at] >= 0]:
                assert row.tokens[hint + 1] == row.tokens[at]
                before = tokenizer.decode(row.tokens[: hint + 1])
                assert re.search(r"(s for|,|, and)$", before), "a list of keys"
                assert "special magic" in before.splitlines()[-1], "which is the question's"
                found += 1
            twice += (row.hints[at] >= 0).all()
    assert found > 40
    assert twice, "a question and the beginning of its answer both name the keys"


@pytest.mark.parametrize("kind", ["common", "coded"])
def test_counted_words_are_led_to_in_any_order_and_what_is_between_them_is_not(rows: Rows, kind: str) -> None:
    seen = 0
    for seed in range(6):
        row = rows.row(random.Random(seed), LENGTH, kind)
        for number, said in enumerate(row.lists):
            turned = row.reordered(number, list(range(len(said.parts)))[::-1])
            for one, its in ((row, said), (turned, turned.lists[number])):
                answer = slice(its.start, its.start + its.size)
                assert (one.origins[answer] == one.tokens[answer]).all()
                guided = one.guided[its.start : its.start + its.size]
                assert (guided == inside(its)).all()
                seen += len(its.starts)
    assert seen > 12


def test_identifiers_stand_among_others_of_their_kind(rows: Rows, tokenizer: Any) -> None:
    row = rows.row(random.Random(0), 1024, "identifiers")
    assert tokenizer.decode(row.tokens).count("One of the special magic uuids for") >= 5


def test_a_batch_tells_where_the_parts_of_each_list_begin(tokenizer: Any, fillers: Fillers) -> None:
    stage = Stage("lists", {512: 1.0}, {"values": 1.0}, tokens=4 * 512)
    mixer = Mixer(tokenizer, fillers, False, seed=3)
    drawn = mixer.drawn(0, stage)
    batch = mixer.batch(0, stage, drawn)
    for row, opens in zip(drawn, batch.opens, strict=True):
        told = {(number, said.start + at) for number, said in enumerate(row.lists, 1) for at in said.starts}
        assert {(int(opens[at]), int(at)) for at in np.flatnonzero(opens)} == told
    assert (batch.opens > 0).sum() > 4


def test_words_of_a_list_are_numbered_where_they_end(rows: Rows, tokenizer: Any) -> None:
    seen = 0
    for kind in ("common", "coded"):
        for seed in range(3):
            row = rows.row(random.Random(seed), LENGTH, kind)
            called: dict[int, str] = {}
            for at in np.flatnonzero(row.ends):
                first = at - int(np.argmax(row.tokens[at::-1] == row.origins[at]))
                word = tokenizer.decode(row.tokens[first : at + 1]).strip()
                assert called.setdefault(int(row.ends[at]), word) == word
                seen += 1
            assert len(set(called.values())) == len(called), "each word has one number"
            inside_list = slice(np.flatnonzero(row.ends)[0], np.flatnonzero(row.ends)[-1] + 1)
            assert (row.origins[inside_list][row.ends[inside_list] == 0] == -1).all()
    assert seen > 100


def test_a_value_belongs_to_its_documents_name_and_an_answer_to_the_name_in_its_question(
    rows: Rows, tokenizer: Any
) -> None:
    held = said = 0
    for seed in range(12):
        row = rows.row(random.Random(seed), 1024, "documents")
        names: dict[str, set[str]] = {"text": set(), "question": set()}
        for at, first, last in row.belongs:
            assert first <= last <= at
            telling = tokenizer.decode(row.tokens[first : last + 1]).strip()
            shared = r"(pep-|rfc-|doc|note-|chapter-)\d.*|.*\.(txt|md|rst)"
            assert not re.fullmatch(shared, telling), "without what many names have"
            line = tokenizer.decode(row.tokens[: last + 1]).splitlines()[-1].strip()
            assert line.endswith(telling)
            name = telling
            if row.facts[at]:
                start = line.removesuffix(telling).removeprefix("Document: ").removeprefix("# ")
                assert start in ("", "pep-", "rfc-", "doc", "note-", "chapter-"), "the line that names it"
                field = tokenizer.decode(row.tokens[first : at + 1]).splitlines()[-1]
                assert re.match(r"[A-Z][\w-]*: \S", field)
                names["text"].add(name)
                held += 1
            else:
                assert row.weights[at + 1] > 0
                names["question"].add(name)
                said += 1
        missing = names["question"] - names["text"]
        assert len(missing) <= 1, "a document at the very start is left out"
    assert held > 200
    assert said > 100


def test_to_end_answers_to_several_questions_counts_as_much_as_to_go_on(rows: Rows, tokenizer: Any) -> None:
    found = 0
    for seed in range(40):
        rng = random.Random(seed)
        row = rows.fitted(rng, [needles.needles(rng, rows.names, 4)], LENGTH, "needles")
        if row is None:
            continue
        begun = np.flatnonzero((row.hints >= 0).any(1))
        if len(begun):
            end = begun[-1] + int(np.argmax(row.tokens[begun[-1] :] == tokenizer.eos_token_id))
            assert tokenizer.decode(row.tokens[end - 1]) == "."
            assert row.weights[end - 1] == 1
            assert (row.weights[begun[1:] - 1] == 1).all(), "the comma before another key"
            found += 1
    assert found > 8
