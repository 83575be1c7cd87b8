"""lm-eval gets from stores what its own model of transformers gives it, where nothing is left out."""

import random
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch

from offload_decode.common.errors import ConfigError
from tests.tiny import saved_model, tiny_tokenizer

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
pytest.importorskip("accelerate", reason="lm-eval's own model needs accelerate")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload_decode.models.fingerprints import find_tokenizer
from offload_decode.prefill_jobs.lm_eval import answers as stores
from offload_decode.prefill_jobs.lm_eval.model import NAME, OffloadDecodeLM

SMALL = {"device": "cpu", "min_prefix": 32, "question_tokens": 8, "prefill_chunk": 16}
DENSE, ALL = {"selector": "dense"}, {"selector": "topk", "budget": "100%", "batch_size": 3}
_RNG = random.Random(0)


def text(length):
    return "".join(_RNG.choice("abcdefgh ijk.\n") for _ in range(length))


DOCUMENT, OTHER = text(180), text(140)
PAIRS = [
    *((f"{DOCUMENT}Which?", choice) for choice in (" a", " bc", " bd", " none of them")),
    *((f"{DOCUMENT}And which one {number}? ", "y") for number in range(2)),
    (OTHER, "q"),
    (f"{OTHER}  ", "z"),
    ("too short to store", "yes"),
    ("", "from nothing"),
    ("<s>begun", " already"),
]
GREEDY = [
    (f"{DOCUMENT}A", {"until": ["\n"], "max_gen_toks": 9}),
    (f"{DOCUMENT}B", {"until": [], "max_gen_toks": 7, "do_sample": False, "temperature": 0.0}),
    (OTHER, {"until": "k", "max_gen_toks": 8}),
    ("short", {"until": ["q"], "max_gen_toks": 5, "repetition_penalty": 1.3}),
]


def ask(lm, kind, arguments):
    requests = [Instance(kind, {}, own, number) for number, own in enumerate(arguments)]
    return getattr(lm, kind)(requests, disable_tqdm=True)


def scored(lm, pairs=PAIRS):
    return ask(lm, "loglikelihood", pairs)


def written(lm, requests=GREEDY):
    return ask(lm, "generate_until", requests)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def theirs(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    return lambda **given: HFLM(model, tokenizer=AutoTokenizer.from_pretrained(folder), **given)


@pytest.fixture(scope="module")
def ours(folder, tmp_path_factory):
    """Makes models that share their stores, unless they are told otherwise."""
    shared = {"stores": str(tmp_path_factory.mktemp("stores"))}
    return lambda **given: OffloadDecodeLM(str(folder), **(SMALL | shared | given))


def close(found, wanted):
    return found == pytest.approx(wanted, abs=2e-3, rel=1e-4)


@pytest.mark.parametrize(
    ("given", "chosen"), [({}, DENSE), ({"max_length": 90}, ALL), ({"add_bos_token": False}, ALL)]
)
def test_log_likelihoods_and_greedy_flags_are_those_of_the_plain_model(ours, theirs, given, chosen):
    plain, stored = theirs(**given), ours(**given, **chosen)
    # What greedy decoding writes is among the continuations, or no flag would be set.
    greedy = written(plain, GREEDY[:2])
    pairs = PAIRS + [(context, answer) for (context, _), answer in zip(GREEDY, greedy, strict=False)]
    wanted = scored(plain, pairs)
    found = scored(stored, pairs)
    assert close([score for score, _ in found], [score for score, _ in wanted])
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]


def test_windows_are_stored_with_the_rest(tmp_path):
    folder = saved_model(tmp_path, "gemma2")
    plain = HFLM(AutoModelForCausalLM.from_pretrained(folder), tokenizer=tiny_tokenizer())
    stored = OffloadDecodeLM(str(folder), **SMALL, **ALL)
    wanted = scored(plain)
    found = scored(stored)
    assert close([score for score, _ in found], [score for score, _ in wanted])


@pytest.mark.parametrize("given", [{}, {"max_length": 70}])
def test_rolling_log_likelihoods_are_those_of_the_plain_model(ours, theirs, given):
    texts = [(DOCUMENT,), ("",), ("ab",), (OTHER + DOCUMENT,)]
    wanted = ask(theirs(**given), "loglikelihood_rolling", texts)
    found = ask(ours(selector="dense", **given), "loglikelihood_rolling", texts)
    assert close(found, wanted)


@pytest.mark.parametrize(("given", "chosen"), [({}, ALL), ({"max_length": 90}, DENSE)])
def test_answers_are_those_of_the_plain_model(ours, theirs, given, chosen):
    plain = theirs(**given)
    # One by one: among others of its batch, a context would be padded.
    wanted = [written(plain, [own])[0] for own in GREEDY]
    found = written(ours(**given, **chosen))
    assert found == wanted


def test_a_sampled_answer_is_that_of_the_plain_model_from_the_same_seed(ours, theirs):
    own = [(OTHER, {"do_sample": True, "temperature": 0.7, "top_k": 9, "max_gen_toks": 12})]
    answers = []
    for model in (theirs(), ours(selector="dense")):
        torch.manual_seed(5)
        answers += written(model, own)
    assert answers[0] == answers[1]


def test_the_selector_applies_to_stored_tokens_and_not_to_short_requests(ours):
    exact, sparse = (
        scored(ours(selector=name, **more)) for name, more in (("dense", {}), ("topk", {"budget": 1}))
    )
    differ = [not close(one[0], other[0]) for one, other in zip(exact, sparse, strict=True)]
    assert differ == [True] * 8 + [False] * 3


def test_results_come_in_the_order_of_their_requests(ours):
    lm, order = ours(selector="topk", budget=9), list(range(len(PAIRS)))
    random.Random(1).shuffle(order)
    straight = scored(lm)
    shuffled = scored(lm, [PAIRS[n] for n in order])
    assert shuffled == [straight[n] for n in order]


def test_a_prefix_is_stored_once_and_found_again_by_a_later_run(ours, tmp_path, monkeypatch):
    kept = {"selector": "topk", "budget": 9, "stores": str(tmp_path / "stores")}
    first = scored(ours(**kept))
    names = sorted(path.name for path in (tmp_path / "stores").glob("*.kv"))
    assert len(names) == 2  # of the document, and of the other one

    def refuse(*_, **__):
        pytest.fail("it is there already")

    monkeypatch.setattr(stores, "prefill_tokens", refuse)
    again = ours(**kept)
    assert scored(again) == first
    assert again.get_model_info()["offload_decode"]["requests"]["behind_stores"] == 8


def test_interrupted_prefill_resumes(ours, tmp_path):
    lm = ours(stores=str(tmp_path))
    prefix = torch.arange(3, 100).int().numpy()

    def interrupt(done):
        if done >= 48:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), lm._stores.behind(prefix, 10, interrupt):
        pytest.fail("it is not whole")
    told = []
    with lm._stores.behind(prefix, 10, told.append) as conversation:
        assert conversation.length == len(prefix)
    assert told[0] >= 32


def test_stores_of_other_settings_have_other_names(ours):
    prefix = torch.arange(3, 100).int().numpy()
    others = [{}, {"kv": "int8"}, {"prefill": "window"}, {"prefill_chunk": 32}]
    names = [ours(**more)._stores._name(given, 9) for more in others for given in (prefix, prefix[1:])]
    assert len(set(names)) == len(names)
    assert ours()._stores._name(prefix, 9) == ours(**ALL)._stores._name(prefix, 70) == names[0]


def test_results_are_cached_as_they_come(ours):
    lm, cached = ours(), []
    lm.cache_hook.add_partial = lambda *entry: cached.append(entry)
    found = scored(lm, PAIRS[:3])
    answers = written(lm, GREEDY[:1])
    wanted = [("loglikelihood", pair, score) for pair, score in zip(PAIRS, found, strict=False)]
    assert sorted(cached[:3]) == sorted(wanted)
    assert cached[3:] == [("generate_until", GREEDY[0], answers[0])]


def test_a_chat_is_written_as_the_plain_model_writes_it(ours, theirs):
    template = "{% for m in messages %}[{{m.role}}]{{m.content}}{% endfor %}"
    template += "{% if add_generation_prompt %}>{% endif %}"
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It"}]
    lm, plain = ours(), theirs()
    lm.tokenizer.chat_template = plain.tokenizer.chat_template = template
    assert lm.apply_chat_template(chat[:1]) == plain.apply_chat_template(chat[:1]) == "[user]Who?>"
    assert lm.apply_chat_template(chat, False) == plain.apply_chat_template(chat, False)
    assert lm.chat_template(True) == template


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"budgt": 3}, "selector 'topk' has no option 'budgt'"),
        ({"selector": "best"}, "unknown selector 'best'"),
        ({"index": "tree"}, "tree"),
        ({"prefill": "fast"}, "unknown prefill method 'fast'"),
        ({"prefill_budget": 3}, "prefill method 'dense' has no option 'budget'"),
        ({"kv": "int2"}, "int2"),
        ({"question_tokens": 0}, "question_tokens must be a whole number of 1 or more, not '0'"),
        ({"batch_size": "auto"}, "batch_size must be a whole number of 1 or more, not 'auto'"),
        ({"stores": __file__}, "is no folder"),
        ({"pretrained": ""}, "pretrained must name a model"),
        ({"add_bos_token": "maybe"}, "add_bos_token must be true or false"),
    ],
)
def test_wrong_arguments_are_refused_before_a_model_is_loaded(given, told):
    with pytest.raises(Exception, match=told) as caught:
        OffloadDecodeLM(**{"pretrained": "no/such/model/anywhere"} | given)
    assert not isinstance(caught.value, TypeError | AssertionError)


@pytest.mark.parametrize("wrong", [{"num_beams": 4}, {"colour": "red"}, {"max_gen_toks": 0}])
def test_generations_that_are_not_done_are_refused(ours, wrong):
    with pytest.raises(ConfigError):
        written(ours(), [("a", wrong)])


def test_a_continuation_that_cannot_be_scored_is_refused(ours):
    with pytest.raises(ConfigError, match="max_length"):
        scored(ours(max_length=5), [("a", "bcdefg")])


def test_user_arguments_win_over_lm_eval_defaults(folder):
    lm = OffloadDecodeLM.create_from_arg_string(
        f"pretrained={folder},min_prefix=40", {"batch_size": "2", "device": "cuda:0", "max_batch_size": None}
    )
    assert (lm.settings.min_prefix, lm.settings.batch_size) == (40, 2)
    assert (lm.device.type == "cuda") == torch.cuda.is_available()


def test_lm_eval_finds_the_model_by_its_name():
    entry_points = tomllib.loads(Path("pyproject.toml").read_text())["project"]["entry-points"]
    module, _, name = entry_points["lm_eval.models"][NAME].partition(":")
    assert getattr(import_module(module), name) is OffloadDecodeLM
    assert get_model(NAME) is OffloadDecodeLM


def test_installing_the_package_loads_nothing_into_other_programs():
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert set(project["entry-points"]) == {"lm_eval.models"}


def test_the_command_of_lm_eval_knows_the_model():
    code = (
        "import sys; sys.argv = ['lm_eval', '--help']; import offload_decode.prefill_jobs.lm_eval.__main__\n"
        f"from lm_eval.api.registry import model_registry; assert {{'hf', '{NAME}'}} <= set(model_registry)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_transformers_finds_the_tokenizer_of_a_name_of_ours(monkeypatch):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", AutoTokenizer.from_pretrained)
    tokenizer = object()
    find_tokenizer("demo", tokenizer)
    assert AutoTokenizer.from_pretrained("demo", trust_remote_code=True) is tokenizer
    with pytest.raises(OSError, match="elsewhere"):
        AutoTokenizer.from_pretrained("./elsewhere", local_files_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["dense", "topk,budget=64"])
def test_chains_and_coded_words_of_ruler_are_found(selector):
    """A model that answers nothing scores 0 in both; the three coded words count one by one."""
    pytest.importorskip("wonderwords", reason="lm-eval's RULER is not installed")
    given = {"model_args": f"pretrained=demo,selector={selector}", "metadata": {"max_seq_lengths": [1024]}}
    found = simple_evaluate(NAME, **given, tasks=["ruler_vt", "ruler_fwe"], limit=4)["results"]
    assert found["ruler_vt"]["1024,none"] >= 0.75
    assert found["ruler_fwe"]["1024,none"] >= 0.5
