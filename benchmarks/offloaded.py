"""transformers' own cache that lies in host memory, where a GPU is at hand: every step moves all of it."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from benchmarks.layers import Float32, Layer
from benchmarks.traffic import Traffic
from benchmarks.ways import BASELINE, Maker, Way
from offload_decode.common.rows import encodings

LAYERS = 2  # alike: while one attends, the other's keys and values are on their way


def offloaded(layer: Layer) -> Maker:
    """`DynamicCache(offloading=True)` and torch's fused attention on the device, in float16."""
    device = torch.device("cuda")
    cache = DynamicCache(offloading=True)
    keys, values = (
        torch.stack([torch.from_numpy(encodings.decode(own)).half() for own in side])[None]
        for side in (layer.keys, layer.values)
    )
    for number in range(LAYERS):
        cache.update(keys.to(device), values.to(device), number)
    last = [side[:, :, -1:].to(device) for side in (keys, values)]
    size = keys.nbytes + values.nbytes

    def step(rows: Float32) -> Float32:
        query = torch.from_numpy(rows).to(device, torch.float16)[None]
        for number in range(LAYERS):
            # A step adds a token to every layer, here the last one once more; judged is what was there.
            found, weighed = cache.update(*last, number)
            stored = found[:, :, : layer.length], weighed[:, :, : layer.length]
            attend = torch.nn.functional.scaled_dot_product_attention
            out = attend(query, *stored, scale=layer.scaling)
        torch.cuda.synchronize()
        return out[0].float().cpu().numpy()

    def at(_: int) -> Way:
        return Way(
            "transformers' offloaded cache, float16",
            BASELINE,
            len(layer.keys),
            0.0,
            "",
            step,
            None,
            lambda rows: Traffic(size, 0),
            layers=LAYERS,
        )

    return at
