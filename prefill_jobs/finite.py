"""NaN and infinity, of damaged weights or an overflow, stop a prefill before their chunk is committed.

What each layer gives and keeps is seen by its least and its largest number: one pass over it, a thousandth of
the layer's time, and nothing waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload_decode.common.errors import ModelError
from offload_decode.models.layer_streaming import layers_of
from offload_decode.models.loading import LoadedModel

_PLAIN = (torch.float16, torch.bfloat16, torch.float32)


class Extremes:
    """The least and the largest numbers of the layers of a model, as it runs inside of the context."""

    def __init__(self, loaded: LoadedModel):
        self._loaded, self._layers = loaded, layers_of(loaded.model)
        self._seen: list[tuple[int, Tensor]] = []

    def __enter__(self) -> Self:
        self._hooks = [
            layer.register_forward_hook(partial(self._after, number))
            for number, layer in enumerate(self._layers)
        ]
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    def see(self, layer: int, *parts: Tensor) -> None:
        """Note numbers of a layer."""
        self._seen += [(layer, torch.stack(torch.aminmax(part.detach())).float()) for part in parts]

    def see_last(self, hidden: Tensor, logits: bool) -> None:
        """Note the last hidden state `[1, T, H]`, and on demand the last token's logits."""
        self.see(len(self._layers), hidden)
        output = self._loaded.model.get_output_embeddings()
        # Some bare models, such as Llama 4's, give logits.
        takes = getattr(output, "in_features", 0) == hidden.shape[-1]
        if logits and takes and not self._loaded.streamed:
            with torch.inference_mode():
                self.see(len(self._layers), output(hidden[:, -1:]))

    def take(self) -> tuple[list[int], Tensor]:
        """The layers that were seen, and their extremes `[n, 2]`; they are forgotten here."""
        seen, self._seen = self._seen, []
        return [layer for layer, _ in seen], torch.stack([extremes for _, extremes in seen])

    def check(self, layers: list[int], extremes: NDArray[np.float32]) -> None:
        """Raise `ModelError` with the first layer whose numbers are not finite."""
        broken = [layer for layer, own in zip(layers, extremes, strict=True) if not np.isfinite(own).all()]
        if not broken:
            return
        first = min(broken)
        where = f"layer {first}" if first < len(self._layers) else "what follows the last layer"
        if damaged := next(_damaged(self._loaded.model), None):
            why = f"the weight {damaged} holds NaN or infinity, so fetch the checkpoint again"
        elif self._loaded.dtype == "float16":
            why = "they are too large for float16, so give --dtype bfloat16 or float32"
        else:
            why = "fetch the checkpoint again, or take another"
        raise ModelError(f"{where} of the model gives numbers that are not finite: {why}")

    def _after(self, layer: int, module: Any, given: Any, hidden: Any) -> None:
        self.see(layer, hidden if isinstance(hidden, Tensor) else hidden[0])


def _damaged(model: Any) -> Iterator[str]:
    """The names of weights that are not finite; packed ones are not looked into."""
    for name, weight in model.named_parameters():
        plain = weight.dtype in _PLAIN and type(weight) is torch.nn.Parameter and weight.numel()
        if plain and not torch.isfinite(torch.stack(torch.aminmax(weight.detach()))).all():
            yield name
