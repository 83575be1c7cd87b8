"""Queries are turned as RoPE turns them, means keep the sums of keys, ties count against a document, and both
ways of ranking are fused.
"""

import torch

from benchmarks.choosing import PARAPHRASES, asked, means, place, shares, turned, ways


def test_scores_of_turned_queries_are_those_of_rotary_positions():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    theta = torch.tensor(100.0)

    def at(place: int, vector: torch.Tensor) -> torch.Tensor:
        angles = place * theta ** (-torch.arange(4) / 4)
        both = torch.cat([angles, angles])[None, None]
        return apply_rotary_pos_emb(vector, vector, both.cos(), both.sin())[0]

    stored = at(3, key)
    expected = (at(60, query) * stored).sum()
    torch.testing.assert_close((turned(at(9, query), 51, theta) * stored).sum(), expected, atol=1e-5, rtol=0)


def test_means_are_of_all_keys_and_of_every_key_where_there_are_as_many():
    keys = torch.randn(40, 8)
    centres, sizes = means(keys, 4)
    torch.testing.assert_close((centres * sizes.exp()[:, None]).sum(0), keys.sum(0), atol=1e-4, rtol=0)
    centres, sizes = means(keys, 40)
    torch.testing.assert_close(centres, keys)
    assert not sizes.any()


def test_the_shares_of_all_documents_are_one():
    sums = torch.randn(5, 3, 7)
    torch.testing.assert_close(shares(sums, [(0, 4), (4, 7)]).sum(1), torch.ones(2, 3))


def test_ties_count_against_a_document():
    scores = torch.tensor([0.1, 0.5, 0.5, 0.3])
    assert int(place(scores, [1])) == 2
    assert int(place(scores, [0, 3])) == 3, "the better of two that are right"


def test_ways_order_by_words_by_heads_and_by_both():
    words, heads = torch.tensor([0.0, 3.0, 2.0, 1.0]), torch.tensor([0.9, 0.1, 0.8, 0.2])
    orders = {way: own.argsort(descending=True).tolist() for way, own in ways(words, [heads] * 3)}
    assert orders["BM25"] == [1, 2, 3, 0]
    assert orders["heads, 8 means"] == [0, 2, 3, 1]
    assert orders["BM25 and heads, every key"][0] == 2, "second in both"
    assert orders["BM25 and heads, every key"][-1] == 0, "no word of the question"


def test_questions_know_their_documents(tmp_path):
    peps = [line.split()[0] for line in PARAPHRASES.read_text("utf-8").splitlines()]
    assert len(peps) == len(set(peps)) == 74
    for number, pep in enumerate(peps):
        (tmp_path / pep).write_text(f"PEP: {number}\nTitle: Of number\n  {number}\nStatus: Final\n\nBody")
    sources = {f"{number:03}.txt": pep for number, pep in enumerate(peps)}
    every = asked(sources, tmp_path)
    named = [one for one in every if one.kind == "titles"]
    assert all(
        one.text == f"Which proposal is about Of number {int(next(iter(one.right))[:3])}?" for one in named
    )
    assert sum(one.kind == "paraphrases" for one in every) == 74
    assert all(len(one.right) == 1 for one in every)
