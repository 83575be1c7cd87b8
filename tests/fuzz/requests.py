"""What clients send to a server: an answer, or an error in OpenAI's shape that is not the server's own."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from offload_decode.common.errors import ConfigError
from offload_decode.server.http.app import create_app
from tests.fuzz.edits import Edit, Files, plain
from tests.server.fakes import FakeService

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
BODIES: dict[str, Any] = {
    "v1/chat/completions": {
        "model": "book",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}],
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["x"],
        "seed": 1,
        "n": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [TOOL],
        "response_format": {"type": "text"},
        "stream": False,
        "logit_bias": {"5": 1},
    },
    "v1/completions": {"model": "book", "prompt": "Who?", "max_tokens": 3, "logprobs": 1, "echo": False},
    "v1/responses": {"model": "book", "input": [{"role": "user", "content": "Who?"}], "max_output_tokens": 3},
    "tokenize": {"model": "book", "prompt": "Who?"},
    "detokenize": {"model": "book", "tokens": [5, 6]},
}


class Requests(Files):
    """The bodies of requests, each in a file of the name of its route."""

    def __init__(self, folder: Path) -> None:
        self.client = TestClient(create_app(FakeService()), raise_server_exceptions=True)
        self.client.__enter__()
        for name, body in BODIES.items():
            (folder / name.replace("/", "-")).write_text(json.dumps(body))
        super().__init__(folder, [name.replace("/", "-") for name in BODIES])

    def attempt(self, case: Sequence[Edit]) -> None:
        super().attempt(case)
        for name in {edit.name for edit in case} or self.files:
            file = self.root / name
            body = file.read_bytes() if plain(file) else b""
            answer = self.client.post(
                "/" + name.replace("-", "/"), content=body, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code < 500, (answer.status_code, answer.text[:300])
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
                raise ConfigError("it was refused")

    def must_refuse(self, case: Sequence[Edit]) -> bool:
        return False


TARGETS = {"bodies": Requests}
