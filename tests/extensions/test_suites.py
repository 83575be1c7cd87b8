"""The suites can fail: each promise that is broken is found by the test that states it."""

import inspect
from pathlib import Path

import numpy as np
import pytest

from offload_decode.indexes.base import VectorIndex
from offload_decode.prefill_jobs.methods.base import Method
from offload_decode.selectors.base import Selector
from offload_decode.testing import IndexContract, MethodContract, SelectorContract, index_contract
from offload_decode.testing.stores import of_parameter
from tests.extensions import wrong
from tests.extensions.installing import install

STORE = (50, 4, 2)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, by entry points."""
    bases = {"selectors": Selector, "indexes": VectorIndex, "prefill_methods": Method}
    classes = {attribute: own for attribute, own in vars(wrong).items() if isinstance(own, type)}
    groups = {
        group: {
            own.name: f"tests.extensions.wrong:{attribute}"
            for attribute, own in classes.items()
            if issubclass(own, base) and own.__module__ == wrong.__name__ and "name" in vars(own)
        }
        for group, base in bases.items()
    }
    install(tmp_path / "site", monkeypatch, "wrong", groups)


def refuses(suite: object, test: str, **given: object) -> None:
    """A test of the suite fails, and by what it states: any other error is none of it."""
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(suite, test)(**given)


SELECTORS = [
    ("too-many", "test_ids_are_valid_unique_and_within_the_budget", {"budget": "7"}),
    ("too-few", "test_every_head_keeps_to_a_budget_of_its_own", {}),
    ("repeats", "test_ids_are_valid_unique_and_within_the_budget", {"budget": "7"}),
    ("beyond", "test_ids_are_valid_unique_and_within_the_budget", {"budget": "7"}),
    ("below", "test_ids_are_valid_unique_and_within_the_budget", {"budget": "7"}),
    ("leaves-one-out", "test_a_budget_of_everything_is_dense_attention", {"budget": "100%"}),
    ("made-up-scores", "test_scores_are_the_inner_products", {}),
    ("drawn", "test_the_same_question_is_given_the_same_tokens", {}),
    ("never-resets", "test_the_same_question_is_given_the_same_tokens", {}),
    ("forgets-fork", "test_a_fork_goes_on_from_here_and_goes_its_own_way", {}),
    ("shares-fork", "test_a_fork_goes_on_from_here_and_goes_its_own_way", {}),
    ("chooses-together", "test_a_row_that_chooses_by_itself_chooses_the_same_alone", {}),
]


@pytest.mark.parametrize(("name", "test", "given"), SELECTORS, ids=str)
def test_a_wrong_selector_is_refused(name: str, test: str, given: dict[str, str]) -> None:
    refuses(type("Suite", (SelectorContract,), {"name": name})(), test, store=of_parameter(STORE), **given)


def test_a_selector_that_reads_a_device_with_numpy_is_refused() -> None:
    suite = type("Suite", (SelectorContract,), {"name": "reads-the-device"})()
    with pytest.raises(TypeError, match="numpy cannot read"):
        suite.test_on_a_device_it_chooses_what_it_chooses_on_the_host(of_parameter(STORE))


@pytest.mark.parametrize("name", ["first", "turns"])
@pytest.mark.parametrize(("_", "test", "given"), SELECTORS, ids=str)
def test_a_right_selector_is_not(name: str, _: str, test: str, given: dict[str, str]) -> None:
    suite = type("Suite", (SelectorContract,), {"name": name})()
    try:
        getattr(suite, test)(store=of_parameter(STORE), **given)
    except pytest.skip.Exception:
        assert "scores" in test or name == "turns", "it says nothing of scores, or that its rows go together"


@pytest.mark.parametrize(
    ("name", "test", "given"),
    [
        ("repeats", "test_hits_are_well_formed", {"rows": 7, "k": 16}),
        ("beyond", "test_hits_are_well_formed", {"rows": 7, "k": 3000}),
        ("not-all", "test_all_keys_are_found_at_k_equal_n", {}),
        ("estimates", "test_scores_are_inner_products_with_the_stored_keys", {"dtype": np.float32}),
        ("guesses", "test_recall_floor", {"draw": "near_queries"}),
        ("drawn", "test_a_loaded_index_answers_as_the_saved_one", {"dtype": np.float32}),
        ("trusts", "test_index_of_other_keys_is_refused", {}),
        ("trusts", "test_damage_to_any_file_is_refused", {}),
        ("boasts", "test_stated_bytes_equal_those_of_a_built_index", {"dim": 32}),
        ("boasts", "test_stated_reads_grow_with_keys_and_queries_up_to_all_keys", {}),
    ],
    ids=str,
)
def test_a_wrong_index_is_refused(name: str, test: str, given: dict, tmp_path: Path) -> None:
    suite = type("Suite", (IndexContract,), {"kind": name})()
    given = {key: getattr(index_contract, value) if key == "draw" else value for key, value in given.items()}
    fixtures = {
        "keys": index_contract.shared_keys(),
        "index": suite.cls.build(index_contract.shared_keys(), k=16),
        "tmp_path": tmp_path,
        "dtype": "float32",
    }
    wanted = inspect.signature(getattr(suite, test)).parameters
    refuses(suite, test, **{one: given.get(one, fixtures.get(one)) for one in wanted})


@pytest.mark.parametrize(
    ("name", "test"),
    [
        ("repeats", "test_ids_are_of_earlier_tokens_and_unique"),
        ("beyond", "test_ids_are_of_earlier_tokens_and_unique"),
        ("too-many", "test_a_budget_is_a_count_or_a_share_of_what_came_before"),
        ("drawn", "test_the_same_chunk_is_given_the_same_tokens"),
        ("remembers", "test_the_same_chunk_is_given_the_same_tokens"),
        ("remembers", "test_interrupted_and_resumed_is_the_same_bytes"),
        ("leaves-one-out", "test_a_budget_of_everything_is_dense_prefill_bit_for_bit"),
    ],
)
def test_a_wrong_method_is_refused(name: str, test: str, tmp_path: Path) -> None:
    suite = type("Suite", (MethodContract,), {"name": name})()
    if "share" in test:
        refuses(suite, test, budget="5", sizes=(5, 5))
    else:
        refuses(suite, test, **({"tmp_path": tmp_path} if "bit" in test or "bytes" in test else {}))
