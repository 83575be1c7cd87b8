"""What `--model_args` say, checked before the model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from offload_decode.config import EngineConfig, parse_options
from offload_decode.errors import ConfigError
from offload_decode.indexes import registry
from offload_decode.kv.head_indexes import AUTO
from offload_decode.models.checkpoint import WAY_OUT
from offload_decode.prefill_jobs.job import Settings as Prefilling
from offload_decode.selectors.registry import get

_PREFILL = "prefill_"
_NUMBERS = ("min_prefix", "question_tokens", "batch_size", "max_length", "prefix_token_id")


@dataclass(frozen=True)
class Settings:
    """pretrained, device, dtype, weights: the model, as `models.loading.load` takes them. selector: which
    stored tokens a step attends to; every argument that is not named here is an option of it (`budget=64`).
    prefill: the method, with its options as `prefill_chunk=512`; kv: how keys and values are stored. stores:
    the folder in which stores are kept for later runs (None: they are removed after use). min_prefix: the
    shortest prefix that is stored; a request with less is answered by the bare model, exactly.
    question_tokens: the last tokens of each context that are never stored, as a question's would not be.
    batch_size: requests behind one prefix that share a pass. max_length, add_bos_token, prefix_token_id: as
    lm-eval's `hf` takes them.
    """

    pretrained: str
    selector: str = "topk"
    device: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"
    attend: str = "auto"
    prefill: str = "dense"
    kv: str = "auto"
    stores: str | None = None
    min_prefix: int = 1024
    question_tokens: int = 128
    batch_size: int = 1
    max_length: int | None = None
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    prefill_options: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, pretrained: str, given: Mapping[str, Any]) -> Self:
        """From the arguments as lm-eval hands them over. Raises `ConfigError`."""
        own = [
            one.name for one in fields(cls) if one.name not in ("pretrained", "options", "prefill_options")
        ]
        named = {name: value for name, value in given.items() if name in own}
        for name, value in named.items():  # --batch_size comes as text, and a folder named 1 as a number
            if name in _NUMBERS and str(value).isdecimal():
                named[name] = int(value)
            elif name not in _NUMBERS and type(value) is not bool and value is not None:
                named[name] = str(value)
        prefill = {
            name.removeprefix(_PREFILL): value
            for name, value in given.items()
            if name not in own and name.startswith(_PREFILL)
        }
        # lm-eval adds the last two of its own accord; neither has a meaning here.
        ours = {*own, *(_PREFILL + name for name in prefill), "trust_remote_code", "max_batch_size"}
        options = {name: value for name, value in given.items() if name not in ours}
        settings = cls(pretrained, **named, options=options, prefill_options=prefill)
        settings._check()
        return settings

    @property
    def prefilling(self) -> Prefilling:
        """How contexts are prefilled."""
        return Prefilling(self.prefill, self.prefill_options, kv=self.kv)

    @property
    def asking(self) -> EngineConfig:
        """How stores are asked."""
        return EngineConfig(selector=self.selector, options=self.options, attend=self.attend)

    def _check(self) -> None:
        if not isinstance(self.pretrained, str) or not self.pretrained:
            raise ConfigError(f"pretrained must name a model: {WAY_OUT}")
        for name in _NUMBERS:
            value, least = getattr(self, name), 0 if name == "prefix_token_id" else 1
            if value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"{name} must be a whole number of {least} or more, not '{value}'")
        if self.stores is not None and Path(self.stores).exists() and not Path(self.stores).is_dir():
            raise ConfigError(
                f"stores={self.stores} is no folder: name one, which is made where there is none"
            )
        if self.add_bos_token not in (None, True, False):
            raise ConfigError(f"add_bos_token must be true or false, not '{self.add_bos_token}'")
        _ = self.prefilling, self.asking, EngineConfig(weights=self.weights)  # they check themselves
        parse_options(get(self.selector).options_type, self.options, f"selector '{self.selector}'")
        if (kind := str(self.options.get("index", AUTO))) != AUTO:
            registry.get(kind)
