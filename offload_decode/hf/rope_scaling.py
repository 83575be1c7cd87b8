"""Texts longer than those of the training, by scaling RoPE: `--rope yarn:4`, as vLLM and llama.cpp have it.

`linear` divides positions (arXiv 2306.15595), `dynamic` and `yarn` change frequencies by how often they turn
within the length of the training (NTK-aware scaling; YaRN, arXiv 2309.00071). Each is transformers' own.
"""

import math
from typing import Any

from offload_decode.common.errors import ConfigError
from offload_decode.hf.positions import rope_parameters

KINDS = ("yarn", "linear", "dynamic")
_MOST = 128.0  # times the length of the training


def parse_rope(rope: str) -> tuple[str, float]:
    """The kind and the factor of `kind:factor`. Raises `ConfigError`."""
    kind, _, stated = rope.partition(":")
    try:
        factor = float(stated)
    except ValueError:
        factor = math.nan
    if kind not in KINDS or not 1 < factor <= _MOST:
        raise ConfigError(
            f"rope '{rope[:40]}' is none: give {', '.join(KINDS[:-1])} or {KINDS[-1]} with how many times "
            f"the length of the training is wanted, such as yarn:4 (up to {_MOST:g})"
        )
    return kind, factor


def scale_rope(config: Any, rope: str) -> None:
    """Let the text config scale its RoPE; layers with windows that rotate in a way of their own stay as they
    are. Raises `ConfigError` where `rope` is none, or the model has no RoPE, or scales it already.
    """
    kind, factor = parse_rope(rope)
    own = scalable(config)
    if "rope_theta" not in own:
        raise ConfigError(
            "this model's positions are not those of RoPE, or not scaled by it: leave --rope out"
        )
    if (there := own.get("rope_type") or "default") != "default":
        raise ConfigError(f"this model scales its RoPE already ({there}): leave --rope out")
    length = config.max_position_embeddings
    trained = {"original_max_position_embeddings": length} if kind == "yarn" else {}
    state_rope(config, rope_type=kind, factor=factor, **trained)


def scalable(config: Any) -> dict[str, Any]:
    """The RoPE parameters of a text config's layers that see everything."""
    held = rope_parameters(config)
    by_layer = any(isinstance(one, dict) for one in held.values())
    return dict(held.get("full_attention") or {}) if by_layer else held


def state_rope(config: Any, **stated: Any) -> None:
    """Change some parameters of these layers in the config."""
    held, changed = rope_parameters(config), {**scalable(config), **stated}
    config.rope_parameters = {**held, "full_attention": changed} if "full_attention" in held else changed
