"""Perplexity behind a store is that of the plain model on the same tokens, wherever the store ends."""

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from offload_decode.common.errors import ConfigError
from offload_decode.evals import runs
from offload_decode.evals.contender import Contender
from offload_decode.evals.haystack import Haystack
from offload_decode.evals.perplexity import NLL, Perplexity, PerplexityPlan, behind_store
from offload_decode.evals.runs import Record, Results
from offload_decode.models.loading import LoadedModel
from offload_decode.prefill_jobs.append import GrowingStore
from offload_decode.prefill_jobs.job import Settings
from tests.tiny import eager, text_model, tiny_tokenizer

TEXT = " ".join(f"Thing {number} weighs {number * number} grams." for number in range(30))
CHUNK = 20
CONTENDERS = tuple(
    Contender(name, {"budget": budget})
    for name, budget in (("topk", "100%"), ("topk", "4"), ("h2o", "8"), ("quoka", "8"))
)
PLAN = PerplexityPlan(Haystack("text", TEXT), (90,), CONTENDERS, 2, CHUNK, (30, 1000))


def evaluation(loaded: LoadedModel, plan: PerplexityPlan, folder: Path) -> Perplexity:
    # Chunks that end where no store does, so that growing runs some tokens again.
    return Perplexity(loaded, plan, GrowingStore(loaded, folder, 1000, Settings(options={"chunk": 16})))


def measured(loaded: LoadedModel, plan: PerplexityPlan, folder: Path) -> Results:
    return runs.run(evaluation(loaded, plan, folder), loaded, folder / "run.jsonl")


@pytest.fixture(scope="module")
def continued(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return measured(loaded, PLAN, tmp_path_factory.mktemp("continued"))


SLIDING = dataclasses.replace(PLAN, sliding=True, places=1)


@pytest.fixture(scope="module")
def slid(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return measured(loaded, SLIDING, tmp_path_factory.mktemp("slid"))


def ids() -> list[int]:
    return list(tiny_tokenizer().encode(TEXT))


def plain(tokens: list[int]) -> torch.Tensor:
    """NLL of each token but the first, by transformers alone."""
    model = eager(text_model())
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, :-1].double()
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")


def of(results: Results, way: str, place: int = 0) -> list[Record]:
    return [record for record in results.of(NLL) if (record["way"], record["place"]) == (way, place)]


def test_dense_behind_a_store_is_the_plain_model_at_every_place(continued: Results) -> None:
    first, second = (of(continued, "dense", place) for place in (0, 1))
    whole = ids()
    assert len(first) == len(second) == 1
    assert first[0]["stored_tokens"] == 90
    torch.testing.assert_close(
        torch.tensor(first[0]["nll"]).double(), plain(whole[:111])[90:], atol=2e-5, rtol=0
    )
    # The second place ends where the text does, and begins as a text begins.
    other = [whole[0], *whole[len(whole) - 110 :]]
    torch.testing.assert_close(torch.tensor(second[0]["nll"]).double(), plain(other)[90:], atol=2e-5, rtol=0)


def test_sliding_over_a_growing_store_is_the_plain_model_at_every_position(slid: Results) -> None:
    records = of(slid, "dense")
    assert [record["stored_tokens"] for record in records] == [0, 20, 40, 60, 80]
    assert [record["first"] for record in records] == [1, 21, 41, 61, 81]
    every = torch.tensor([value for record in records for value in record["nll"]]).double()
    torch.testing.assert_close(every, plain(ids()[:90]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("fashion", ["continued", "slid"])
def test_all_of_the_store_is_dense_and_less_is_not(fashion: str, request: pytest.FixtureRequest) -> None:
    results = request.getfixturevalue(fashion)
    for dense, everything, few in zip(
        of(results, "dense"), of(results, "topk:budget=100%"), of(results, "topk:budget=4"), strict=True
    ):
        assert everything["nll"] == pytest.approx(dense["nll"], abs=2e-5)
        assert everything["attended"] == dense["attended"] == dense["stored_tokens"]
        assert few["attended"] == min(4, dense["stored_tokens"])
        if dense["stored_tokens"]:
            assert few["nll"] != pytest.approx(dense["nll"], abs=1e-3)
        else:
            assert few["nll"] == dense["nll"]


def test_a_window_is_the_plain_model_that_sees_no_more(continued: Results) -> None:
    whole = ids()
    seen = [whole[0], *whole[90 - 29 : 111]]
    (short,), (long,) = of(continued, "window:30"), of(continued, "window:1000")
    assert short["nll"] == pytest.approx(plain(seen)[30:].tolist(), abs=2e-5)
    assert long["nll"] == pytest.approx(of(continued, "dense")[0]["nll"], abs=2e-5)
    assert (short["attended"], short["tail_share"]) == (None, None)


def test_counts_are_no_model(slid: Results) -> None:
    """Laplace's rule of succession: of n tokens so far, c of which were this one, (c + 1) / (n + V)."""
    found = [value for record in of(slid, "unigram") for value in record["nll"]]
    whole, vocabulary = ids()[:90], len(tiny_tokenizer())
    wanted = [math.log((n + vocabulary) / (whole[:n].count(token) + 1)) for n, token in enumerate(whole) if n]
    assert found == pytest.approx(wanted, abs=1e-5)
    assert {record["attended"] for record in of(slid, "unigram")} == {None}


def test_no_token_chooses_by_what_comes_after_it(loaded: LoadedModel, tmp_path: Path) -> None:
    """A text that ends otherwise has the same likelihoods until there, whatever the selector."""
    whole = np.array(ids()[:111], np.int32)
    changed = whole.copy()
    changed[100:] = changed[100:][::-1]
    store = GrowingStore(loaded, tmp_path, 1000, Settings())(whole[:90], lambda done: None)
    others = Contender("topk", {"budget": "mass=0.9"}), Contender("snapkv", {"budget": "8"})
    for contender in (*CONTENDERS, *others):
        one, other = (behind_store(loaded, store, contender, tokens[90:]).nll for tokens in (whole, changed))
        assert one[:9] == pytest.approx(other[:9], abs=1e-6), contender.label
        assert one[12:] != pytest.approx(other[12:], abs=1e-3)


def test_the_tails_share_is_what_the_plain_models_attention_gives_it(continued: Results) -> None:
    (record,) = of(continued, "dense")
    model = eager(text_model())
    with torch.inference_mode():
        found = model(torch.tensor([ids()[:111]]), output_attentions=True).attentions
    share = torch.stack([own[0, :, 90:110, 90:].sum(-1) for own in found]).mean()
    assert record["tail_share"] == pytest.approx(float(share), abs=1e-5)
    assert of(continued, "topk:budget=4")[0]["tail_share"] is None


def test_a_run_that_was_killed_goes_on_with_a_store_made_anew(
    loaded: LoadedModel, slid: Results, tmp_path: Path
) -> None:
    lines = slid.path.read_text().splitlines(keepends=True)
    third = next(number for number, line in enumerate(lines) if "behind 60" in line)
    (tmp_path / "run.jsonl").write_text("".join(lines[: third + 1]))
    going_on = evaluation(loaded, SLIDING, tmp_path)
    told: list[tuple[int, int]] = []
    results = runs.run(going_on, loaded, tmp_path / "run.jsonl", lambda *now: told.append(now))
    assert len(results.finished) == results.header.units
    assert told[0] == (40, 80)
    assert told[-1] == (80, 80)
    assert all(done <= then for (done, _), (then, _) in itertools.pairwise(told))
    for before, after in zip(slid.of(NLL), results.of(NLL), strict=True):
        assert after["nll"] == pytest.approx(before["nll"], abs=2e-5)
        assert {**after, "nll": 0} == pytest.approx({**before, "nll": 0})


@pytest.mark.parametrize(
    ("lengths", "places", "sliding"), [((5000,), 1, False), ((700,), 30, False), ((500,), 2, True)]
)
def test_a_text_that_is_too_short_is_refused(
    loaded: LoadedModel, tmp_path: Path, lengths: tuple[int, ...], places: int, sliding: bool
) -> None:
    plan = dataclasses.replace(PLAN, lengths=lengths, places=places, sliding=sliding)
    with pytest.raises(ConfigError, match="take a longer text"):
        evaluation(loaded, plan, tmp_path)


def test_lengths_share_a_store_that_grows(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload_decode.prefill_jobs import append

    def refuse(*_: object) -> None:
        pytest.fail("the store was made anew")

    grown = GrowingStore(loaded, tmp_path, 1000, Settings())
    tokens = np.array(ids()[:90], np.int32)
    grown(tokens[:50], lambda done: None)
    monkeypatch.setattr(append, "prefill_tokens", refuse)
    told: list[int] = []
    store = grown(tokens, told.append)
    assert np.array_equal(store.tokens, tokens)
    assert told[-1] == 90
    assert grown(tokens, told.append).manifest.n_tokens == 90
