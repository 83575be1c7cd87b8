"""Where `ask` attends to stored tokens, and how it estimates the unselected ones."""

import pytest

from tests.cli.conftest import json_of, refused, run


def test_the_answer_says_where_it_was_attended_to(store):
    told = json_of("ask", store, "What is the colour of thing 3?", "--attend", "host", "--device", "cpu")
    assert told["placement"] == {"attend": "host", "measured": []}
    assert set(told["stats"]["attended"]) == {"host"}
    assert told["stats"]["bus_bytes"] == 0
    assert told["loading_s"] > 0
    ran = run("ask", store, "What is the colour of thing 3?", "--stats", "--device", "cpu")
    assert "100% on the host" in ran.err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--attend", "device"), "attend=device needs a device beside the host"),
        (("--device-cache", "2GiB"), "a device cache needs a device beside the host"),
        (("--device-cache", "much"), "is no size"),
        (("--attend", "gpu"), "choose one of: auto, host, device, pinned"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(store, options, told):
    assert told in refused(2, "ask", store, "q", "--device", "cpu", *options)


@pytest.mark.gpu
@pytest.mark.parametrize("attend", ["host", "device", "pinned", "auto"])
def test_every_placement_gives_the_same_answer_on_a_card(store, attend):
    question = ("ask", store, "What is the colour of thing 3?", "--max-new-tokens", "4")
    expected = json_of(*question, "--device", "cpu")["answer"]
    cache = () if attend in ("host", "pinned") else ("--device-cache", "1MiB")
    told = json_of(*question, "--device", "cuda", "--attend", attend, *cache)
    assert told["answer"] == expected
    assert bool(told["placement"]["measured"]) == (attend == "auto")
    assert told["stats"]["bus_bytes"] > 0
    if attend == "device":
        assert told["stats"]["cache_hits"] + told["stats"]["cache_misses"] > 0


ASK = ("What is the colour of thing 3?", "--max-new-tokens", "4", "-o", "budget=5")


def test_a_sampled_tail_states_its_error(store):
    assert run("ask", store, *ASK, "-o", "tail=clusters").err == "", "which has none to state"
    ran = run("ask", store, *ASK, "-o", "tail=sample:32")
    assert (ran.code, ran.err.count("\n")) == (0, 1)
    assert "uncertain by" in ran.err
    assert "% (standard error, mean)" in ran.err
    told = json_of("ask", store, *ASK, "-o", "tail=sample:32")
    assert told["options"]["tail"] == "sample:32"
    assert 0 < told["stats"]["tail_error"] < 1
    assert f"{told['stats']['tail_error']:.2%}" in ran.err  # the draws are the same


def test_a_wrong_estimate_is_refused(store):
    assert "off, auto, clusters or sample" in refused(2, "ask", store, *ASK, "-o", "tail=mean")
    for size in ("70000", "1" + 30 * "0"):
        assert "from 2 to 65536" in refused(2, "ask", store, *ASK, "-o", f"tail=sample:{size}")


def test_everything_is_attended_to_where_that_is_faster_unless_a_search_is_asked_for(store, crossover):
    for options, dense in ((), True), (("-o", "index=flat"), False), (("-o", "crossover=no"), False):
        told = json_of("ask", store, "Who?", "--max-new-tokens", "2", "-o", "budget=7", *options)
        assert ("attends" in told["search"]) == dense
        assert (told["stats"]["selected"] == told["stats"]["rows"] * told["stored_tokens"]) == dense
