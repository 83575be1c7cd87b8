"""LoRA adapters: as PEFT answers with them, part of what a model and a store are, and refused by name."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from offload_decode.common.errors import ConfigError, ModelError, StoreMismatch
from offload_decode.engine.engine import Engine
from offload_decode.models import adapters
from offload_decode.models.block_layers import BlockLinear
from offload_decode.models.loading import LoadedModel, load
from offload_decode.prefill_jobs.job import prefill_tokens
from offload_decode.store.reader import KVStore
from tests.models import few_bits
from tests.tiny import ADAPTED, plain_lora, random_ids, saved_model, text_model

CALL = [40, 41, 42]
SPREAD = 0.3
Q = ADAPTED


def lora(folder: Path, sizes: dict[str, Any] | None = None, **settings: Any) -> Path:
    """A random LoRA for `saved_model`, or a tiny Llama of other sizes, written by PEFT."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **settings}
    model = peft.get_peft_model(text_model(**sizes or {}), peft.LoraConfig(task_type="CAUSAL_LM", **given))
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, SPREAD)
    model.save_pretrained(folder)
    return folder


def peft_model(base: Path, folder: Path) -> Any:
    """The same two as PEFT loads them."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(model, folder).eval()


def stored(folder: Path, loaded: LoadedModel, tokens: Any = None) -> KVStore:
    prefill_tokens(loaded, random_ids(90, 1) if tokens is None else tokens, [], folder)
    return KVStore.open(folder)


def generated(engine: Engine, question: list[int], count: int = 12) -> list[int]:
    return list(engine.generate(engine.extend(question), count))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("models") / "base")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {r"layers.\d.self_attn.v_proj": 3},
        },
        {"target_modules": "all-linear"},
    ],
    ids=["plain", "patterns", "all"],
)
def test_logits_behind_a_store_are_those_of_peft(base, tmp_path, settings):
    folder = lora(tmp_path / "lora", **settings)
    store = stored(tmp_path / "store", load(str(base), "cpu", adapter=str(folder)))
    engine = Engine.open(store, config=None, selector="dense")  # which finds both again
    question = [5, 6, 7, 8]
    whole = torch.tensor([[*store.tokens.tolist(), *question]])
    with torch.inference_mode():
        expected = peft_model(base, folder)(whole).logits[0, -1]
        without = load(str(base), "cpu").model(whole).logits[0, -1]
    got = engine.extend(question)
    assert (got - expected).abs().max() < 1e-4 < (without - expected).abs().max()


@pytest.fixture(scope="module")
def base_store(base: Path, tmp_path_factory: pytest.TempPathFactory) -> KVStore:
    return stored(tmp_path_factory.mktemp("stores") / "base", load(str(base), "cpu"))


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An activated LoRA."""
    return lora(tmp_path_factory.mktemp("adapters") / "called", alora_invocation_tokens=CALL)


def beside(engine: Engine, base: Path, folder: Path, ids: list[int], count: int = 12) -> list[int]:
    """What PEFT's own generate answers to the stored tokens and these."""
    whole = torch.tensor([[*engine.store.tokens.tolist(), *ids]])
    given = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answer = peft_model(base, folder).generate(
        input_ids=whole, attention_mask=torch.ones_like(whole), **given
    )
    return answer[0, whole.shape[1] :].tolist()


def test_an_activated_adapter_answers_from_its_bases_store_as_peft_generates(base, base_store, called):
    engine = Engine.open(base_store, selector="dense", adapter=str(called))
    question = [5, 6, 7, 8, *CALL, 9, 10]
    expected = beside(engine, base, called, question)
    got = generated(engine.fork(), question)
    plain = generated(Engine.open(base_store, selector="dense"), question)
    assert got == expected != plain


def test_what_comes_before_a_later_invocation_runs_again_without_the_adapter(base, base_store, called):
    engine = Engine.open(base_store, selector="dense", adapter=str(called))
    first, second = [5, 6, *CALL, 7], [11, 12, *CALL, 13]
    said = generated(engine, first, 6)
    asked = [*first, *said, *second]
    expected = beside(engine, base, called, asked)
    assert generated(engine.fork(), second) == expected
    going_on = beside(engine, base, called, [*first, *said, 11, 12])
    assert generated(engine.fork(), [11, 12]) == going_on, "without another one, the earlier one holds"


@pytest.mark.parametrize("kept", [2, 3], ids=["before", "into"])
def test_a_conversation_is_cropped_to_where_nothing_invokes_the_adapter(base_store, called, kept):
    engine, question = Engine.open(base_store, selector="dense", adapter=str(called)), [5, 6, *CALL, 7]
    expected = Engine.open(base_store, selector="dense").extend([*question[:kept], 9])
    engine.extend(question)
    engine.crop(engine.prefix.length + kept)
    assert (engine.extend([9]) - expected).abs().max() < 1e-5


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(base_store, called, monkeypatch):
    engine = Engine.open(base_store, selector="dense", adapter=str(called))
    engine.extend([5, 6, *CALL, 7])
    expected, before = engine.fork().extend([8]), list(engine.tokens)
    monkeypatch.setattr(type(engine), "has_run", lambda self, run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.extend([11, *CALL])
    monkeypatch.undo()
    assert engine.tokens == before
    assert (engine.extend([8]) - expected).abs().max() < 1e-5


def test_a_question_that_does_not_invoke_the_adapter_is_refused(base, called, tmp_path):
    loaded = load(str(base), "cpu", adapter=str(called))
    plain = Engine.open(stored(tmp_path / "plain", load(str(base), "cpu")), loaded)
    with pytest.raises(ConfigError, match="the question does not invoke the activated adapter"):
        plain.answer("Who?")
    call = plain.decode(CALL)
    assert plain.answer(f"Who? {call}", 3).tokens
    text = [*random_ids(30, 1).tolist(), *CALL, *random_ids(30, 2).tolist()]
    held = stored(tmp_path / "held", load(str(base), "cpu"), np.array(text, np.int32))
    with pytest.raises(ConfigError, match="only the stored text invokes"):
        Engine.open(held, loaded).answer("Who?")


def test_an_activated_adapter_makes_no_store_and_runs_in_no_loop_of_ones_own(
    base, base_store, called, tmp_path
):
    loaded = load(str(base), "cpu", adapter=str(called))
    assert loaded.weights_hash == base_store.manifest.weights_hash
    with pytest.raises(ConfigError, match="prefill without --adapter"):
        stored(tmp_path / "store", loaded)
    with pytest.raises(ConfigError, match="which a loop of your own does not"):
        Engine.open(base_store, loaded).new_cache()


def test_the_two_models_of_an_activated_adapter_share_their_weights(base, called):
    loaded = load(str(base), "cpu", adapter=str(called))
    adapted = loaded.activated.loaded.model
    other = {weight.data_ptr() for weight in adapted.parameters()}
    assert other == {weight.data_ptr() for weight in loaded.model.parameters()}
    kinds = {type(module) for module in loaded.model.modules()}
    assert adapters.AdaptedLinear not in kinds


def test_stores_of_two_adapters_and_of_the_base_are_told_apart(base, base_store, tmp_path):
    one, two = (
        plain_lora(tmp_path / name, {"lora_alpha": alpha}) for name, alpha in (("one", 4), ("two", 5))
    )
    loaded = [load(str(base), "cpu", adapter=str(folder)) for folder in (one, two)]
    hashes = {base_store.manifest.weights_hash, *(own.weights_hash for own in loaded)}
    assert len(hashes) == 3
    store = stored(tmp_path / "store", loaded[0])
    assert store.manifest.adapter == str(one)
    with pytest.raises(StoreMismatch, match=rf"with the adapter {one}, and this model has the adapter {two}"):
        Engine.open(store, adapter=str(two))
    with pytest.raises(StoreMismatch, match=rf"with the adapter {one}, and this model has none"):
        Engine.open(store, load(str(base), "cpu"))
    with pytest.raises(StoreMismatch, match=r"without an adapter.*Only an activated LoRA"):
        Engine.open(base_store, adapter=str(two))
    moved = one.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match=f"there is no folder {one}: give --adapter"):
        Engine.open(store)
    assert Engine.open(store, adapter=str(moved)).loaded.adapter == str(moved)


def added_by_hooks(model: Any, folder: Path) -> Any:
    """The plain reference: what an adapter of alpha 8 and rank 4 adds to outputs, in torch's own calls."""
    held = load_file(folder / "adapter_model.safetensors")
    for layer in model.base_model.layers:
        vars(layer).pop("forward", None)
    for name, module in model.named_modules():
        if (first := held.get(f"base_model.model.{name}.lora_A.weight")) is not None:
            second = held[f"base_model.model.{name}.lora_B.weight"]

            def add(_: Any, given: Any, out: torch.Tensor, a: Any = first, b: Any = second) -> torch.Tensor:
                return out + 8 / 4 * given[0] @ a.T @ b.T

            assert isinstance(module, BlockLinear)
            module.register_forward_hook(add)
    return model


@pytest.mark.parametrize("kind", ["int8", "gguf"])
def test_an_adapter_on_blocks_adds_to_their_products(tmp_path, kind):
    source = few_bits.gguf(tmp_path / "m") if kind == "gguf" else few_bits.plain(tmp_path / "m")
    given = {"dtype": "float32", "weights": "auto" if kind == "gguf" else kind}
    targets = {"target_modules": ["v_proj", "down_proj"], "layers_to_transform": [1]}
    folders = [
        lora(tmp_path / f"lora{number}", few_bits.SIZES, **targets, **more)
        for number, more in enumerate([{}, {"alora_invocation_tokens": CALL}])
    ]
    always, from_a_call = (load(str(source), "cpu", **given, adapter=str(one)) for one in folders)
    plain, other = (load(str(source), "cpu", **given) for _ in range(2))
    expected = added_by_hooks(other.model, folders[0])
    assert all("forward" in vars(layer) for layer in plain.model.base_model.layers), "compiled"
    for count in (1, 4):
        ids = torch.tensor([random_ids(count, 3).tolist()])
        with torch.inference_mode():
            wanted, without = expected(ids).logits, plain.model(ids).logits
            for adapted in (always, from_a_call.activated.loaded):
                assert (
                    (adapted.model(ids).logits - wanted).abs().max() < 1e-3 < (wanted - without).abs().max()
                )
            assert torch.equal(from_a_call.model(ids).logits, without)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "of the type IA3"),
        ({"use_dora": True}, "use_dora=True, which is not served"),
        ({"bias": "all"}, "bias=all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"a_field_of_tomorrow": 3}, "a_field_of_tomorrow=3"),
        ({"r": 3}, "states the rank 3.0 for model.layers.0.self_attn.q_proj, and has 2"),
        ({"lora_alpha": "many"}, "states no alpha"),
        ({"alpha_pattern": {"(a+)+": 3}}, "alpha_pattern"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern=['q_proj']"),
        ({"rank_pattern": "q_proj"}, "rank_pattern=q_proj"),
        ({"use_rslora": "false"}, "use_rslora=false"),
        ({"alora_invocation_tokens": []}, "alora_invocation_tokens that are no tokens"),
    ],
)
def test_what_an_adapter_states_beyond_lora_is_refused_by_name(base, tmp_path, config, message):
    folder = plain_lora(tmp_path / "lora", config)
    with pytest.raises(ModelError, match=re.escape(message)):
        load(str(base), "cpu", adapter=str(folder))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({f"{Q}.lora_A.weight": torch.ones(2, 4)}, "no matrices A and B of one rank"),
        ({f"{Q}.lora_A.weight": torch.ones(2, 4), f"{Q}.lora_B.weight": torch.ones(4, 2)}, "takes 4 numbers"),
        ({f"{Q}.lora_A.weight": torch.ones(2, 4), f"{Q}.lora_B.weight": torch.ones(4, 3)}, "of one rank"),
        ({f"{Q}.lora_magnitude_vector": torch.ones(4)}, "lora_magnitude_vector, which is not served"),
        ({f"{Q}.lora_A.weight": torch.ones(2, 4).int()}, "lora_A.weight, which is not served"),
        (
            {
                name.replace("q_proj", "z_proj"): torch.ones(2, 2)
                for name in (f"{Q}.lora_A.weight", f"{Q}.lora_B.weight")
            },
            "z_proj, which is no linear layer",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(base, tmp_path, weights, message):
    folder = plain_lora(tmp_path / "lora", None, **weights)
    with pytest.raises(ModelError, match=re.escape(message)):
        load(str(base), "cpu", adapter=str(folder))


@pytest.mark.parametrize("folder", ["nowhere", "a\0b", "a" * 5000, __file__])
def test_what_is_no_folder_is_refused_in_a_sentence(folder):
    with pytest.raises(ModelError, match="give --adapter the folder of a LoRA"):
        adapters.read_adapter(folder)


def test_numbers_that_are_not_finite_and_pickled_weights_are_refused(base, tmp_path):
    folder = plain_lora(tmp_path / "lora")
    held = load_file(folder / "adapter_model.safetensors")
    held[f"{Q}.lora_B.weight"][0, 0] = torch.nan
    save_file(held, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="not finite"):
        load(str(base), "cpu", adapter=str(folder))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match="a pickled one is not read"):
        load(str(base), "cpu", adapter=str(folder))
