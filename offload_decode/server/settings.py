"""What a server is told as it starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from offload_decode.config import EngineConfig
from offload_decode.errors import ConfigError
from offload_decode.planning.caps import Caps


@dataclass(frozen=True)
class Settings:
    """Defaults of requests, and the server's limits. Raises `ConfigError` for what cannot be.

    config: how stores are asked where a request says nothing, and where models run. temperature, top_p,
    max_tokens: of requests that name none. max_running: answers written at the same time; max_waiting:
    requests that wait beyond them, before others are refused. max_prompt: tokens behind the stored ones.
    max_body: bytes of a request. deadline_s: seconds that a request may take. running_bytes: memory for the
    questions and answers that are being worked on; tail_bytes: for turns that are remembered. max_open:
    stores, with a selector each, that are kept open; max_models: models that are held in memory. read_only:
    no store is made, appended to or deleted; max_upload: bytes of the documents of one request.
    """

    config: EngineConfig = field(default_factory=EngineConfig)
    caps: Caps = field(default_factory=Caps)
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 1024
    max_running: int = 64
    max_waiting: int = 256
    max_prompt: int = 131_072
    max_body: int = 32 << 20
    deadline_s: float = 600.0
    running_bytes: int = 4 << 30
    tail_bytes: int = 1 << 30
    max_open: int = 256
    max_models: int = 1
    read_only: bool = False
    max_upload: int = 1 << 30

    def __post_init__(self) -> None:
        for name in (
            "max_tokens",
            "max_running",
            "max_prompt",
            "max_body",
            "deadline_s",
            "running_bytes",
            "max_open",
            "max_models",
            "max_upload",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name.replace('_', '-')} must be more than 0, not {getattr(self, name)}")
        if self.max_waiting < 0 or self.tail_bytes < 0:
            raise ConfigError("how many requests wait, and the memory for turns, must be 0 or more")
