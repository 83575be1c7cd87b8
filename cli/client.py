"""Ask a running `serve` through the `openai` package: no model is loaded here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self
from urllib.parse import urlsplit

from offload_decode.cli import output
from offload_decode.cli.limits import AskOptions
from offload_decode.cli.options import EVERYDAY, a_path, option
from offload_decode.common.errors import ConfigError, OffloadDecodeError

if TYPE_CHECKING:
    from openai import APIStatusError

    from offload_decode.engine.conversation import Sampler
    from offload_decode.types import CitedDocument

KEY = "OFFLOAD_DECODE_API_KEY"
CONNECT_S = 10.0
QUIET_S = 60.0  # the server sends a sign of life every few seconds
TRIES = 30
LONGEST_WAIT_S = 60
_SHOWN = 10
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


class ServerError(OffloadDecodeError):
    """The server cannot be reached, or does not answer."""


class ServerBusy(ServerError):
    """The server may answer in `retry_s` seconds."""

    def __init__(self, message: str, retry_s: int):
        super().__init__(message)
        self.retry_s = retry_s


class ServerAddress(NamedTuple):
    """A server's URL and key."""

    url: str
    key: str | None = None


@dataclass(frozen=True)
class AnswerOptions:
    """How an answer is generated; `cite`: report what it attended to; `check`: how far dense attention
    agrees; `least`: of what is grounded less, say that it is not in the text.
    """

    selector: str
    options: Mapping[str, object]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    cite: bool = False
    check: bool = False
    least: float | None = None

    @property
    def sampler(self) -> Sampler:
        from offload_decode.engine.conversation import Sampler

        return Sampler(self.temperature, self.top_p, self.seed)

    @property
    def how(self) -> tuple[Sampler, bool, bool]:
        """The last arguments of `Engine.answer`."""
        return self.sampler, self.cite, self.check


class Served(NamedTuple):
    """A store's name at the server, its model, and its number of tokens."""

    name: str
    model: str
    tokens: int


@dataclass
class ServerAnswer:
    """The part of an answer that has arrived: `tokens` of it, to a prompt of `prompt` tokens, of which
    `cached` are stored or in the prefix cache. The others come last, as the server sends them; `joined` where
    documents of a collection answered together.
    """

    text: str = ""
    finish: str = ""
    tokens: int = 0
    prompt: int = 0
    cached: int = 0
    stats: Mapping[str, Any] | None = None
    citations: list[Any] | None = None
    grounded: float | None = None
    checked: Mapping[str, Any] | None = None
    joined: Mapping[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def cited(self) -> list[CitedDocument]:
        from pydantic import TypeAdapter, ValidationError

        from offload_decode.types import CitedDocument

        try:
            return TypeAdapter(list[CitedDocument]).validate_python(self.citations or [])
        except ValidationError as error:
            raise ServerError("the server's citations cannot be read: it runs another release") from error

    def fields(self, wanted: AnswerOptions) -> dict[str, object]:
        cited: dict[str, object] = {"citations": list(map(asdict, self.cited))} if wanted.cite else {}
        cited |= {"checked": self.checked} if wanted.check else {}
        if self.joined is not None:
            cited["joined"] = {**self.joined, "notes": self.warnings}
        elif notes := list(self.notes(wanted)):
            cited["warnings"] = notes
        told = {"answer": output.if_grounded(self.text.strip(), self.grounded, wanted.least)}
        return told | {"grounded": self.grounded, "tokens": self.tokens, "finish": self.finish, **cited}

    def notes(self, wanted: AnswerOptions) -> Iterator[str]:
        """What the server remarks, and that it gave no check where one was wanted."""
        yield from self.warnings
        told = any(one.startswith("it was not checked") for one in self.warnings)
        if wanted.check and self.checked is None and not told:
            yield "The answer was not checked: the server runs a release that does not know --check."

    def describe(self, seconds: float) -> str:
        prompt = f"{self.prompt:,} tokens, {self.cached:,} of them stored or cached"
        answer = output.count(self.tokens, "token")
        return output.facts([("prompt", prompt), ("answer", answer), ("time", f"{seconds:.2f} s")])


def server_address(
    server: Annotated[
        str | None,
        option(
            "URL",
            "Ask a running `serve` at this URL, with STORE one of its names; nothing is loaded here.",
            panel=EVERYDAY,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        option(
            "FILE", f"File whose first line is the server's key; or set {KEY}.", parser=a_path, panel=EVERYDAY
        ),
    ] = None,
) -> ServerAddress | None:
    """The options of a command that may ask a server."""
    if server is None:
        if api_key_file is not None:
            raise ConfigError("--api-key-file holds a server's key: give --server URL too")
        return None
    parts = urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{server!r} is not the URL of a server: give one like http://127.0.0.1:8000")
    key = os.environ.get(KEY) if api_key_file is None else _first_line(api_key_file)
    return ServerAddress(server.rstrip("/").removesuffix("/v1"), key)


def check_server_options(options: AskOptions) -> None:
    """Raise `ConfigError` for an option that only `serve` takes, because the model runs there."""
    none_given = AskOptions()
    for name in ("model", "adapter", "weights", "device", "attend", "device_cache", "gpu_memory", "ram"):
        if getattr(options, name) != getattr(none_given, name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is an option of the server: give it to `serve`, not with --server")


class Server:
    """A client of a server, usable from any number of threads; a context manager."""

    def __init__(self, address: ServerAddress):
        from openai import DefaultHttpxClient, Omit, OpenAI, Timeout

        self.url = address.url
        # The key is that of our server: headers of an OpenAI account must not be sent to it.
        unsent = ["OpenAI-Organization", "OpenAI-Project", *([] if address.key else ["Authorization"])]
        self._headers: dict[str, str | Omit] = {name: Omit() for name in unsent}
        try:
            # Through a proxy, localhost would be the proxy's own machine.
            proxied = urlsplit(self.url).hostname not in _LOOPBACK
            http = DefaultHttpxClient(trust_env=proxied, follow_redirects=False)
            self._client = OpenAI(
                api_key=address.key or "none",
                base_url=f"{self.url}/v1",
                timeout=Timeout(QUIET_S, connect=CONNECT_S, pool=None),
                max_retries=0,  # `stream` retries, and only where the server is busy
                http_client=http,
            )
        except ValueError as error:
            raise ConfigError(f"{self.url!r} is not the URL of a server ({error})") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def served(self, store: str) -> Served:
        """Find a store by STORE, or by its folder's name. Raises `ConfigError` with the names there are."""
        with self._failures():
            page = self._client.models.list(extra_headers=self._headers)
            known: dict[str, Served] = {}
            for one in page.data:
                fields: dict[str, Any] = one.to_dict()
                name, model = str(fields["id"]), str(fields.get("root") or "")
                known[name] = Served(name, model, int(fields.get("tokens") or 0))
        for name in (store, Path(store).name, Path(store).name.removesuffix(".kv")):
            if name in known:
                return known[name]
        names = ", ".join(sorted(known)[:_SHOWN]) + (", …" if len(known) > _SHOWN else "")
        raise ConfigError(f"the server at {self.url} has no {store}: it has {names or 'nothing yet'}")

    def stream(
        self,
        name: str,
        messages: list[Any],
        wanted: AnswerOptions,
        answer: ServerAnswer,
        stopped: Event | None = None,
    ) -> Iterator[str]:
        """Yield the answer to a conversation piece by piece, and collect it in `answer`.

        Waits where the server is busy. Closing the iterator cancels the request. Raises `ConfigError`, or
        `ServerError`, also when `stopped` is set.
        """
        stopped = stopped or Event()
        for left in reversed(range(TRIES)):
            if stopped.is_set():
                break
            try:
                for piece in self._streamed(name, messages, wanted, answer):
                    if stopped.is_set():
                        break
                    yield piece
            except ServerBusy as busy:
                if not left or answer.text:
                    raise
                stopped.wait(min(max(busy.retry_s, 1), LONGEST_WAIT_S))
            else:
                if not stopped.is_set():
                    return
        raise ServerError("not asked, because an earlier question failed")

    def _streamed(
        self, name: str, messages: list[Any], wanted: AnswerOptions, answer: ServerAnswer
    ) -> Iterator[str]:
        ours = {"selector": wanted.selector, "options": dict(wanted.options), "citations": wanted.cite}
        ours |= {"check": True} if wanted.check else {}
        ours["separate_reasoning"] = False  # it is a part of the answer without a server
        with (
            self._failures(),
            self._client.chat.completions.create(
                model=name,
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                max_tokens=wanted.max_new_tokens,
                temperature=wanted.temperature,
                top_p=wanted.top_p,
                seed=wanted.seed,
                extra_body=ours,
                extra_headers=self._headers,
            ) as chunks,
        ):
            for chunk in chunks:
                if piece := _text_of(chunk.to_dict(), answer):
                    answer.text += piece
                    yield piece
        if not answer.finish:
            raise self._broken()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        import openai

        try:
            yield
        except openai.APIStatusError as error:
            raise self._refusal(error) from error
        except openai.APITimeoutError as error:
            if "Connect" in type(error.__cause__).__name__:
                raise self._absent() from error
            raise ServerError(f"the server at {self.url} sent nothing for {QUIET_S:.0f} s") from error
        except openai.APIConnectionError as error:
            absent = type(error.__cause__).__name__ == "ConnectError"
            raise (self._absent() if absent else self._broken()) from error
        except (openai.APIResponseValidationError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise self._stranger() from error
        except openai.APIError as error:  # an error event in the stream
            message = _message(error.body) or "the server failed while it answered; its log says why"
            raise ServerError(message) from error

    def _refusal(self, error: APIStatusError) -> OffloadDecodeError:
        status, message = error.status_code, _message(error.body)
        if status == 401:
            return ConfigError(f"the server at {self.url} asks for a key: give --api-key-file, or set {KEY}")
        if not message:
            return self._stranger()
        waits = error.response.headers.get("Retry-After", "")
        if status in (429, 503) and waits.isdecimal():
            return ServerBusy(message, int(waits))
        return ConfigError(message) if 400 <= status < 500 and status != 429 else ServerError(message)

    def _absent(self) -> ServerError:
        start = "start one with `offload-decode serve STORE`, or give the URL that it shows"
        return ServerError(f"no server answers at {self.url}: {start}")

    def _broken(self) -> ServerError:
        return ServerError(f"the answer of {self.url} broke off: ask again")

    def _stranger(self) -> ServerError:
        return ServerError(f"{self.url} is not an offload-decode server: check the URL")


def _text_of(chunk: dict[str, Any], answer: ServerAnswer) -> str:
    """Add the figures of a chunk to `answer`, and return its text."""
    if usage := chunk.get("usage"):
        answer.tokens = int(usage.get("completion_tokens") or 0)
        answer.prompt = int(usage.get("prompt_tokens") or 0)
        answer.cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    answer.stats = chunk.get("stats") or answer.stats
    answer.citations = chunk.get("citations") or answer.citations
    answer.grounded = chunk.get("grounded", answer.grounded)
    answer.checked = chunk.get("checked") or answer.checked
    answer.joined = chunk.get("joined") or answer.joined
    answer.warnings = [str(one) for one in chunk.get("warnings") or answer.warnings]
    for choice in chunk["choices"]:
        answer.finish = choice.get("finish_reason") or answer.finish
        return str(choice["delta"].get("content") or "")
    return ""


def _message(body: Any) -> str:
    message = body.get("message") if isinstance(body, dict) else None
    return output.one_line(message) if isinstance(message, str) else ""


def _first_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            lines = file.read(1 << 16).decode("ascii").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the key in {path} cannot be read: give a text file with it") from error
    if not lines[0].strip():
        raise ConfigError(f"{path} holds no key: put it on the first line")
    return lines[0].strip()


def conversation(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]
