"""`ask`: where it attends to stored tokens, how it estimates the unselected ones, and with which weights."""

from pathlib import Path

import pytest

from offload_decode.cli.ask import tell_cut
from offload_decode.engine import crossover as measured
from offload_decode.engine.crossover import Crossover
from tests.cli.conftest import done, json_of, refused, run
from tests.planning.estimates import llama_8b


def test_the_answer_says_where_it_was_attended_to(store):
    told = json_of("ask", store, "What is the colour of thing 3?", "--attend", "host", "--device", "cpu")
    assert told["placement"] == {"attend": "host", "measured": []}
    assert set(told["stats"]["attended"]) == {"host"}
    assert told["stats"]["bus_bytes"] == 0
    assert told["loading_s"] > 0
    ran = run("ask", store, "What is the colour of thing 3?", "--stats", "--device", "cpu")
    assert "100% on the host" in ran.err


def test_the_answer_says_how_far_it_may_be_from_dense_attention(store):
    asked = ("ask", store, "What is the colour of thing 3?", "-o", "error=0.05@0.95", "--max-new-tokens", "3")
    stats = json_of(*asked)["stats"]
    assert stats["tail_rows"] == stats["rows"]
    assert stats["tail_error"] <= 0.05
    assert "kept to in 0.95 of the cases" in run(*asked, "--stats").err
    assert "leave budget= out" in refused(2, *asked, "-o", "budget=64")


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


CUT = "The answer was cut at 4 tokens: --max-new-tokens N allows more.\n"
ASK = ("What is the colour of thing 3?", "--max-new-tokens", "4", "-o", "budget=5")


def test_a_sampled_tail_states_its_error(store):
    assert run("ask", store, *ASK, "-o", "tail=clusters").err == CUT, "which has none to state"
    ran = run("ask", store, *ASK, "-o", "tail=sample:32")
    assert (ran.code, ran.err.count("\n")) == (0, 2)
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


def test_everything_is_attended_to_where_that_is_faster_unless_a_search_is_asked_for(
    store, crossover, monkeypatch
):
    faster = Crossover(300, dense_s=0.1, few=64, few_s=0.2, many=150, many_s=0.3)
    monkeypatch.setattr(measured, "measure", lambda *_: faster)
    for options, dense in ((), True), (("-o", "index=flat"), False), (("-o", "crossover=no"), False):
        told = json_of("ask", store, "Who?", "--max-new-tokens", "2", "-o", "budget=7", *options)
        assert ("attends" in told["search"]) == dense
        assert (told["stats"]["selected"] == told["stats"]["rows"] * told["stored_tokens"]) == dense


@pytest.fixture(scope="module")
def small(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that was prefilled with int8 weights."""
    out = tmp_path_factory.mktemp("weights") / "small.kv"
    made = ("--model", home / "model", "--out", out, "--weights", "int8", "--device", "cpu")
    done("prefill", home / "corpus.txt", *made)
    return out


def test_inspect_and_ask_say_which_weights_prefilled(small, store):
    assert "int8: the keys and values are the quantized model's" in run("inspect", small).out
    assert json_of("inspect", small)["manifest"]["prefill"]["weights"] == "int8"
    assert "quantized" not in run("inspect", store).out
    ask = ("ask", small, "What?", "--max-new-tokens", "2", "--device", "cpu")
    sentence = (
        "The store was prefilled with int8 weights: its keys and values are those of the quantized model"
    )
    assert run(*ask).err.endswith(f"{sentence}.\n")
    assert run(*ask, "--weights", "full").err.endswith(f"{sentence}, and it was asked with full weights.\n")
    assert run(*ask, "--weights", "int4").err.endswith(f"{sentence}, and it was asked with int4 weights.\n")
    assert json_of(*ask)["weights"] == "int8"
    assert "quantized" not in run("ask", store, "What?", "--max-new-tokens", "2").err


def test_a_store_of_other_weights_is_not_the_one_that_is_asked_for(home, small):
    same = ("prefill", home / "corpus.txt", "--model", home / "model", "--device", "cpu", "--out", small)
    assert "kept" in run(*same, "--weights", "int8").err
    assert "weights=int8; asked for is dense" in refused(1, *same)
    assert "weights=int8; asked for is dense chunk=512 weights=int4" in refused(1, *same, "--weights", "int4")


def test_several_corpora_are_prefilled_with_such_weights(home, small, tmp_path):
    made = ("--model", home / "model", "--weights", "int8", "--device", "cpu")
    done("prefill", home / "corpus.txt", *made, "--out", f"{tmp_path}/out/")
    assert "int8: the keys and values" in run("inspect", tmp_path / "out" / "corpus.kv").out


def test_streamed_weights_are_for_a_prefill_on_a_gpu(home, store, tmp_path):
    asked = ("prefill", home / "corpus.txt", "--model", home / "model", "--out", tmp_path / "s.kv")
    cpu = ("--weights", "streamed", "--device", "cpu")
    assert "a CPU reads them where they lie: leave --weights out" in refused(2, *asked, *cpu)
    assert "leave --weights out" in refused(2, "append", store, home / "corpus.txt", *cpu)
    assert "choose one of: auto, full, int8, int4" in refused(2, "ask", store, "What?", *cpu)
    planned = ("plan", "--model", "demo", "--tokens", "20000", "--weights", "streamed")
    assert "leave --weights out" in refused(2, *planned, "--gpu", "none")
    ran = run(*planned, "--gpu", "16GiB")
    assert "prefill: weights (float32, streamed)" in ran.out
    assert "It can be prefilled here with --weights streamed.\n" in ran.out


def test_plan_names_streamed_weights_where_full_ones_do_not_fit(monkeypatch):
    monkeypatch.setattr("offload_decode.models.size_estimate.estimate_size", lambda *_: llama_8b())
    machine = ("--gpu", "16GiB", "--ram", "64GiB", "--disk", "1TB")
    ran = run("plan", "--model", "8B", "--tokens", "128K", *machine)
    said = "It can be prefilled here with --weights int8, or with full weights by --weights streamed."
    assert said in ran.out


def test_plan_counts_the_prefill_with_the_weights_that_are_asked_for(home):
    planned = ("plan", "--model", "demo", "--tokens", "20000", "--gpu", "none", "--ram", "16GiB")
    small = run(*planned, "--weights", "int4").out
    assert "prefill: weights (int4)" in small
    assert "can be prefilled here with --weights int4, or with full weights." in small
    assert "It can be prefilled here.\n" in run(*planned).out


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (("stop", 5, 1), ""),
        (("length", 5, 1), "The answer was cut at 5 tokens: --max-new-tokens N allows more.\n"),
        (("length", 5, 0), "The answer was cut where the model's context ends.\n"),
    ],
)
def test_an_answer_says_what_cut_it(cut, said, capsys):
    tell_cut(*cut)
    assert capsys.readouterr().err == said
