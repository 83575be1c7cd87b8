"""A tiny config of every family: each kind of layer it has, windows and chunks shorter than the prefix of the
exactness suite, and its switches on.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from offload_decode.models.architectures import EXACT
from tests.families import dense, experts, latent, learned, recurrent
from tests.families.common import VOCAB, Family

__all__ = ["FAMILIES", "LISTED", "SERVED", "VOCAB", "config_of", "model_class"]

LISTED: dict[str, Family] = {
    name: family
    for module in (dense, experts, latent, recurrent, learned)
    for name, family in module.FAMILIES.items()
}


def config_of(name: str, **changes: Any) -> Any:
    """The text config of a family with `changes`, taken from its multimodal wrapper's where it has one."""
    from transformers import CONFIG_MAPPING

    model_type, arguments, wrapper = LISTED[name]
    config = CONFIG_MAPPING[model_type](**deepcopy({**arguments, **changes}))
    if wrapper is None:
        return config
    return CONFIG_MAPPING[wrapper](text_config=config.to_dict()).get_text_config()


def model_class(config: Any) -> Any:
    """The causal language model of a text config."""
    import transformers

    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in known:
        return known[type(config)]
    base = type(config).__name__.removesuffix("Config").removesuffix("Text")
    return getattr(transformers, f"{base}ForCausalLM")


def _installed() -> dict[str, Family]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return {
        name: family
        for name, family in LISTED.items()
        if {family.model_type, family.wrapper or family.model_type} <= set(CONFIG_MAPPING_NAMES)
    }


FAMILIES = _installed()
"""The families that the installed transformers has."""

SERVED = [name for name, family in FAMILIES.items() if family.model_type in EXACT]
"""The families that the engine opens today."""
