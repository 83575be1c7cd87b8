"""What the exactness suite compares: answers from a store with k = N, and transformers' own."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from offload_decode.engine.engine import Engine
from offload_decode.hf.compat import generate_name, with_cache
from offload_decode.hf.shape import claimed_shape
from offload_decode.models import loading
from tests.families import VOCAB
from tests.tiny import eager, tiny_model, token_store

PREFIX, NEW = 45, 6
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
# Neither the prefix nor a window is a multiple of it.
CHUNK = 16


class Case:
    """One family: a plain model to compare with, and an engine over a store of its first `prefix` tokens."""

    def __init__(self, family: str, folder: Path, prefix: int = PREFIX):
        self.prefix = prefix
        self.plain = eager(tiny_model(family))  # older releases' default leaves Gemma 2's soft cap out
        with patch.object(loading, "shape_of", claimed_shape):  # this suite judges for itself
            served = loading.wrap(tiny_model(family))
        self.ids = torch.randint(3, VOCAB, (1, prefix + 40), generator=torch.Generator().manual_seed(1))
        store = token_store(folder / "store", served, self.ids[0, :prefix], CHUNK)
        self.engine = Engine.open(store, served, options={"budget": str(prefix)})

    def question(self, start: int, tokens: int) -> Tensor:
        """Ids `[1, T]` of a text after the prefix."""
        return self.ids[:, self.prefix + start : self.prefix + start + tokens]

    def whole(self, *after: Tensor) -> Tensor:
        """The prefix and what follows it."""
        return torch.cat([self.ids[:, : self.prefix], *after], dim=1)

    def plain_logits(self, ids: Tensor, first: int = 0) -> Tensor:
        """Of all tokens, in one pass without a cache; the first stands at position `first`."""
        positions = torch.arange(first, first + ids.shape[1])[None]
        with torch.inference_mode():
            return self.plain(ids, position_ids=positions).logits  # type: ignore[no-any-return]

    def plain_answer(self, ids: Tensor) -> list[int]:
        """transformers' own greedy answer."""
        out = self.plain.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
        return out[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

    def logits(self, asked: Tensor) -> Tensor:
        """Of every token of a question behind the stored prefix."""
        with torch.inference_mode():
            model, cache = self.engine.loaded.model, self.engine.new_cache()
            return model(asked, **with_cache(model, cache)).logits  # type: ignore[no-any-return]

    def answer(self, asked: Tensor) -> list[int]:
        """The greedy answer through `generate`, of the new ids and a mask that covers the stored ones."""
        return self.ragged_answers([asked])[0]

    def beams(self, asked: Tensor) -> list[int]:
        """The best of three beams, through `generate` with all ids."""
        given = {generate_name(): self.engine.new_cache()}
        return self._best(self.engine.loaded.model, self.whole(asked), **given)

    def plain_beams(self, ids: Tensor) -> list[int]:
        """transformers' own best of three beams."""
        followed = self.plain.config.model_type != "minimax"  # whose states do not follow the beams
        return self._best(self.plain, ids, attention_mask=torch.ones_like(ids), use_cache=followed)

    def _best(self, model: Any, ids: Tensor, **given: Any) -> list[int]:
        out = model.generate(ids, num_beams=3, **GREEDY, **given)
        return out[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

    def ragged_answers(self, rows: list[Tensor]) -> list[list[int]]:
        """The greedy answers to questions of several lengths, padded on the left."""
        most = max(row.shape[1] for row in rows)
        padded = [torch.nn.functional.pad(row, (most - row.shape[1], 0)) for row in rows]
        mask = torch.ones(len(rows), self.prefix + most, dtype=torch.bool)
        for place, row in enumerate(rows):
            mask[place, self.prefix : self.prefix + most - row.shape[1]] = False
        cache = {generate_name(): self.engine.new_cache()}
        out = self.engine.loaded.model.generate(torch.cat(padded), attention_mask=mask, **cache, **GREEDY)
        return out[:, most:].tolist()  # type: ignore[no-any-return]
