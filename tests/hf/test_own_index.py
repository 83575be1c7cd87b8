"""Behind a stored prefix a model with an indexer of its own attends to the tokens that it chooses without."""

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from offload_decode.attention import index_queries
from offload_decode.attention.index_queries import index_scores
from offload_decode.common.errors import ConfigError, OffloadDecodeWarning, UnsupportedModel
from offload_decode.engine.engine import Engine
from offload_decode.hf.compat import with_cache
from offload_decode.hf.packed_batch import PackedCache, Segment
from offload_decode.models.loading import wrap
from offload_decode.prefill_jobs.chunks import WrittenPrefix
from offload_decode.selectors.own import Own
from offload_decode.store.reader import KVStore
from offload_decode.types import IndexShape
from tests.families import FAMILIES, VOCAB
from tests.tiny import eager, tiny_model, token_store

# Many heads: where all of few give 0, tokens are equally good, and either may be chosen.
SMALL = {"index_topk": 12, "index_n_heads": 16}
CHANGES = {
    "deepseek_v32": {},
    "glm_moe_dsa": {"indexer_types": ["full", "shared", "full"]},
    "axk2": {},
    "hy_v4": {},
    "dots3_note": {},
}
N, ASKED, LAYER = 45, 9, 1
CLOSE = {"atol": 2e-4, "rtol": 0}
IDS = torch.randint(3, VOCAB, (2, N + 20), generator=torch.Generator().manual_seed(1))
IDS[1, :N] = IDS[0, :N]

families = pytest.mark.parametrize("family", [family for family in CHANGES if family in FAMILIES])


def made(family: str, **changes: object) -> torch.nn.Module:
    return tiny_model(family, **{**SMALL, **CHANGES[family], **changes})


def opened(path: Path, family: str, selector: str = "own", kv: str = "auto", **options: object) -> Engine:
    served = wrap(made(family))
    if served.shape.index is None:
        pytest.skip("this transformers keeps the indexer's keys outside the cache")
    if not path.exists():
        token_store(path, served, IDS[0, :N], 16, kv=kv)
    return Engine.open(path, served, selector=selector, options=options)


def expected(model: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Logits after every token, and by layer what its indexer chose, int64 `[T, k]`, in one plain pass."""
    plain, chosen = eager(model), {}
    hooks = [
        module.indexer.register_forward_hook(
            lambda _, args, output, layer=layer: chosen.__setitem__(layer, output[0].long())
        )
        for layer, module in enumerate(own.self_attn for own in plain.model.layers)
        if getattr(module, "indexer", None) is not None
    ]
    with torch.inference_mode():
        logits = plain(ids, **with_cache(plain, DynamicCache(config=plain.config))).logits
    for hook in hooks:
        hook.remove()
    return logits, chosen


def run(engine: Engine, cache: object, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return engine.loaded.model(ids, **with_cache(engine.loaded.model, cache)).logits


@families
def test_answers_are_those_of_the_plain_model(tmp_path, family):
    """A prefill in chunks, a question of several tokens, single tokens, and a second turn."""
    engine, (logits, _) = opened(tmp_path / "store", family), expected(made(family), IDS[:1])
    cache, start = engine.new_cache(), N
    for tokens in (ASKED, 1, 1, 4):
        found = run(engine, cache, IDS[:1, start : start + tokens])
        torch.testing.assert_close(found, logits[:, start : start + tokens], **CLOSE)
        start += tokens


@families
def test_the_tokens_chosen_are_those_that_the_model_chooses(tmp_path, family, monkeypatch):
    _, wanted = expected(made(family), IDS[:1, : N + ASKED])
    asked, choose = {}, Own.choose

    def noted(self, layer, queries, k):
        selection = choose(self, layer, queries, k)
        asked[layer] = queries.index
        return selection

    monkeypatch.setattr(Own, "choose", noted)
    engine = opened(tmp_path / "store", family)
    run(engine, engine.new_cache(), IDS[:1, N : N + ASKED])
    assert set(wanted) <= set(asked)
    for layer, index in asked.items():
        assert index.layer == max(own for own in wanted if own <= layer)
        for token in range(ASKED):
            stored = {one for one in index.ids[token].tolist() if one >= 0}
            generated = {N + one for one in index.seen()[0, 0, token].nonzero()[:, 0].tolist()}
            assert stored | generated == set(wanted[index.layer][N + token].tolist())
            assert len(stored) + len(generated) == SMALL["index_topk"]


@families
def test_a_batch_answers_as_each_of_its_questions_alone(tmp_path, family):
    """Padded on the left, and packed one behind the other: the question, then one more token."""
    model = made(family)
    wanted, short = expected(model, IDS)[0], 4
    engine = opened(tmp_path / "store", family)
    cache, decoder = engine.new_cache(), engine.loaded.model
    mask = torch.ones(2, N + ASKED, dtype=torch.bool)
    mask[1, N : N + ASKED - short] = False
    ids = torch.stack([IDS[0, N : N + ASKED], IDS[1, N : N + ASKED].roll(ASKED - short)])
    given = {"attention_mask": mask, "position_ids": (mask.long().cumsum(-1) - 1)[:, N:]}
    with torch.inference_mode():
        padded = decoder(ids, **with_cache(decoder, cache), **given).logits
    torch.testing.assert_close(padded[0], wanted[0, N : N + ASKED], **CLOSE)
    torch.testing.assert_close(padded[1, -short:], wanted[1, N : N + short], **CLOSE)

    if not engine.loaded.packs:
        return  # Dots 3: its windows hold latents, which it expands itself
    talks, start = [engine.new_cache(), engine.new_cache()], [N, N]
    for tokens in ([ASKED, short], [1, 2]):
        packed = PackedCache([Segment(*one) for one in zip(talks, tokens, strict=True)])
        parts = [IDS[row, start[row] : start[row] + count] for row, count in enumerate(tokens)]
        found = run(engine, packed, torch.cat(parts)[None])[0]
        for row, own in enumerate(torch.split(found, tokens)):
            torch.testing.assert_close(own, wanted[row, start[row] : start[row] + tokens[row]], **CLOSE)
            start[row] += tokens[row]


def test_scores_are_weighted_sums_over_heads_of_what_is_positive():
    """Equation 1 of the paper, also where products are made in parts."""
    vectors, weights, keys = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4), torch.randn(1, 11, 5)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(index_queries, "_PRODUCTS", 50)
        found = index_scores(vectors, weights, keys)
    for batch in range(2):
        for token in range(3):
            for other in range(11):
                products = (vectors[batch, token] @ keys[0, other]).clamp(min=0)
                torch.testing.assert_close(found[batch, token, other], weights[batch, token] @ products)


def test_it_is_the_default_and_another_selector_is_told_of(tmp_path):
    engine = opened(tmp_path / "store", "deepseek_v32", selector="auto")
    assert engine.selector.name == "own"
    with pytest.warns(OffloadDecodeWarning, match="attend to the 12 tokens that an indexer"):
        other = opened(tmp_path / "store", "deepseek_v32", selector="topk")
    assert other.selector.name == "topk"


@pytest.mark.parametrize("method", ["quoka", "window"])
def test_a_prefill_by_a_method_of_ours_is_told_of(tmp_path, method):
    with pytest.warns(OffloadDecodeWarning, match=f"'{method}' chooses instead"):
        token_store(tmp_path / "store", wrap(made("deepseek_v32")), IDS[0, :N], 16, method=method)


def test_a_prefill_that_does_not_see_the_indexer_is_refused(tmp_path, monkeypatch):
    seen = WrittenPrefix.begin

    def without(self, layer, query, scaling, softcap, index=None):
        return seen(self, layer, query, scaling, softcap)

    monkeypatch.setattr(WrittenPrefix, "begin", without)
    with pytest.raises(UnsupportedModel, match="did not see what this model's indexer asks"):
        opened(tmp_path / "store", "deepseek_v32")


def test_a_budget_bounds_the_stored_tokens_among_the_chosen(tmp_path):
    engine = opened(tmp_path / "store", "deepseek_v32", budget="3")
    cache = engine.new_cache()
    run(engine, cache, IDS[:1, N : N + 1])
    heads, stats = engine.loaded.shape.query_heads, cache.prefix.take_stats()
    assert dict.fromkeys(engine.loaded.shape.full_layers, 3 * heads) == stats.by_layer


@pytest.mark.parametrize(
    ("family", "options", "says"),
    [
        ("llama", {}, "needs a model with an indexer of its own"),
        ("deepseek_v32", {"tail": "sample:9"}, "leave tail=sample:9 out"),
        ("deepseek_v32", {"budget": "mass=0.9"}, "leave mass= out"),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path, family, options, says):
    served = wrap(tiny_model(family, **(SMALL if family == "deepseek_v32" else {})))
    path = token_store(tmp_path / "store", served, IDS[0, :N], 16)
    with pytest.raises(ConfigError, match=says):
        Engine.open(path, served, selector="own", options=options)


def test_a_manifest_says_it_and_is_read_again(tmp_path):
    engine = opened(tmp_path / "store", "deepseek_v32")
    shape = KVStore.open(tmp_path / "store").manifest.shape
    assert shape == engine.loaded.shape
    assert shape.index == IndexShape(dim=16, topk=SMALL["index_topk"])
    assert shape.head_dim == 24 + 8 + 16  # the latent, its rotary part, the index key
