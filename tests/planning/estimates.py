"""Outlines of well-known shapes, without their configs."""

from offload_decode.models.size_estimate import SizeEstimate
from offload_decode.types import LayerKind, ModelShape


def llama_8b() -> SizeEstimate:
    """Llama-3-8B: 32 layers, 8 KV heads, D = 128, fp16."""
    hidden, width, layers, vocabulary = 4096, 14336, 32, 128256
    linear = layers * (2 * hidden * hidden + 2 * hidden * 1024 + 3 * hidden * width)
    return SizeEstimate(
        model_id="llama-8b",
        shape=ModelShape.uniform((LayerKind.FULL,) * layers, 32, 8, 128),
        dtype="float16",
        parameters=linear + 2 * vocabulary * hidden + (2 * layers + 1) * hidden,
        linear=linear,
        linear_rows=layers * (2 * hidden + 2 * 1024 + 2 * width + hidden),
        embeddings=vocabulary * hidden,
        experts=0,
        active=1.0,
        hidden=hidden,
        intermediate=width,
        vocabulary=vocabulary,
        layered=linear + 2 * layers * hidden,
        layer=linear // layers + 2 * hidden,
        pinned=layers * (2 * hidden * hidden + 2 * hidden * 1024 + 3 * hidden * 16384 + 2 * hidden),
    )
