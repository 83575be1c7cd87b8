"""Texts longer than those of the training, by scaling RoPE: `--rope yarn:4`, as vLLM and llama.cpp have it.

`linear` divides positions (arXiv 2306.15595), `dynamic` and `yarn` change frequencies by how often they turn
within the length of the training (NTK-aware scaling; YaRN, arXiv 2309.00071). Each is transformers' own.
"""

import math
import warnings
from typing import Any, NamedTuple

from offload_decode.common.errors import ConfigError, OffloadDecodeWarning
from offload_decode.hf.positions import CONTEXT, rope_parameters

KINDS = ("yarn", "linear", "dynamic")
_MOST = 128.0  # times the length of the training


class Trained(NamedTuple):
    """The `length` of texts that a model was trained for, with its scaling, and the one that `--rope` starts
    from: 0 where it is not known, and where `--rope` is not possible.
    """

    length: int = 0
    unscaled: int = 0

    def note(self, tokens: int) -> str:
        """A sentence on a text of so many tokens that is too long with a usual question and answer; empty for
        others.
        """
        whole = tokens + min(CONTEXT, self.length // 8)
        if not self.length or whole <= self.length:
            return ""
        times = 2 ** math.ceil(math.log2(whole / (self.unscaled or self.length)))
        scaled = f"prefill with --rope yarn:{times}, " if self.unscaled and times <= _MOST else ""
        return (
            f"{tokens:,} tokens with a question and an answer are more than the {self.length:,} that the "
            f"model was trained for, and answers may be wrong: {scaled}take another model, or a shorter text"
        )

    def tell(self, tokens: int) -> None:
        """Warn of such a text."""
        if note := self.note(tokens):
            warnings.warn(OffloadDecodeWarning(note), stacklevel=3)


UNKNOWN = Trained()


def trained_of(config: Any, rope: str = "") -> Trained:
    """What a text config states, where `rope` is how it was scaled on demand (`scale_rope`). Positions that
    are not RoPE's end with their table, or nowhere.
    """
    own, length = scalable(config), getattr(config, "max_position_embeddings", None)
    if "rope_theta" not in own or not isinstance(length, int) or length < 1:
        return UNKNOWN
    kind, factor = own.get("rope_type") or "default", own.get("factor") or 1
    if rope:
        return Trained(int(length * parse_rope(rope)[1]), length)
    if kind == "yarn":
        original = own.get("original_max_position_embeddings") or length
        return Trained(max(length, int(original * factor)))
    # Gemma 3, whose layers rotate in several ways, states the whole.
    if kind == "dynamic" or (kind == "linear" and own == rope_parameters(config)):
        return Trained(int(length * factor))
    return Trained(length, length if kind == "default" else 0)


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
