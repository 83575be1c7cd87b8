"""A running `serve`, asked by the `openai` package: no model is loaded here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import urlsplit

import typer

from offload_decode.cli import output
from offload_decode.cli.options import a_path
from offload_decode.common.errors import ConfigError, OffloadDecodeError

if TYPE_CHECKING:
    from openai import APIStatusError

    from offload_decode.cli.limits import Asking
    from offload_decode.types import CitedDocument

KEY = "OFFLOAD_DECODE_API_KEY"
CONNECT_S = 10.0
QUIET_S = 60.0  # the server says every few seconds that it is still there
TRIES = 30
LONGEST_WAIT_S = 60
_SHOWN = 10
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


class ServerError(OffloadDecodeError):
    """The server cannot be reached, or does not answer."""


class ServerBusy(ServerError):
    """It may answer in `retry_s` seconds."""

    def __init__(self, message: str, retry_s: int):
        super().__init__(message)
        self.retry_s = retry_s


@dataclass(frozen=True)
class Reached:
    """Where a server is, and the key that it asks for."""

    url: str
    key: str | None = None


@dataclass(frozen=True)
class Manner:
    """How an answer is to be written; `cite`: say what it attended to."""

    selector: str
    options: Mapping[str, object]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    cite: bool = False


@dataclass(frozen=True)
class Served:
    """A name of the server, the model that answers under it, and how many tokens are stored."""

    name: str
    model: str
    tokens: int


@dataclass
class Received:
    """What has come of an answer to `prompt` tokens, `cached` of them stored or remembered: `tokens` so far.
    `stats` and `citations` as the server tells them, at the end.
    """

    text: str = ""
    finish: str = ""
    tokens: int = 0
    prompt: int = 0
    cached: int = 0
    stats: Mapping[str, Any] | None = None
    citations: list[Any] | None = None

    @property
    def cited(self) -> list[CitedDocument]:
        """What the answer attended to."""
        from offload_decode.types import CitedDocument, CitedSpan

        try:
            return [
                CitedDocument(one["name"], one["share"], tuple(CitedSpan(**span) for span in one["spans"]))
                for one in self.citations or []
            ]
        except (TypeError, KeyError) as error:
            raise ServerError("the server's citations cannot be read: it is of another release") from error

    def describe(self, seconds: float) -> str:
        """What an answer cost, for people."""
        return output.facts(
            [
                ("prompt", f"{self.prompt:,} tokens, {self.cached:,} of them stored or remembered"),
                ("answer", output.count(self.tokens, "token")),
                ("time", f"{seconds:.2f} s"),
            ]
        )


def reaching(
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask the server there (`serve`), where STORE is one of its names; nothing is loaded here.",
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"File whose first line is the server's key; or set {KEY}.",
            parser=a_path,
            show_default=False,
        ),
    ] = None,
) -> Reached | None:
    """The options of a command that may ask a server."""
    if server is None:
        if api_key_file is not None:
            raise ConfigError("--api-key-file holds a server's key: give the server too, with --server URL")
        return None
    parts = urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{server!r} is not the URL of a server: give one like http://127.0.0.1:8000")
    key = os.environ.get(KEY) if api_key_file is None else _first_line(api_key_file)
    return Reached(server.rstrip("/").removesuffix("/v1"), key)


def check_left_to_server(how: Asking) -> None:
    """Raise `ConfigError` for an option of the machine that answers, which is another."""
    config = how.config
    given = {
        "--model": config.model is not None,
        "--weights": config.weights != "auto",
        "--device": config.device != "auto",
        "--attend": config.attend != "auto",
        "--device-cache": config.device_cache != 0,
        "--gpu-memory": how.gpu_memory is not None,
        "--ram": how.ram is not None,
    }
    if named := [name for name, there in given.items() if there]:
        raise ConfigError(
            f"{named[0]} is settled where the server runs: give it to `serve`, not with --server"
        )


class Server:
    """A client of a server, for any number of threads; used as a context manager."""

    def __init__(self, reached: Reached):
        from openai import DefaultHttpxClient, Omit, OpenAI, Timeout

        self.url = reached.url
        # The server's key is ours: nothing of OpenAI's own goes there.
        unsent = ["OpenAI-Organization", "OpenAI-Project", *([] if reached.key else ["Authorization"])]
        self._headers: dict[str, str | Omit] = {name: Omit() for name in unsent}
        try:
            # A proxy has a loopback of its own.
            proxied = urlsplit(self.url).hostname not in _LOOPBACK
            http = DefaultHttpxClient(trust_env=proxied, follow_redirects=False)
            self._client = OpenAI(
                api_key=reached.key or "none",
                base_url=f"{self.url}/v1",
                timeout=Timeout(QUIET_S, connect=CONNECT_S, pool=None),
                max_retries=0,  # of all failures: `stream` tries again only where the server is busy
                http_client=http,
            )
        except ValueError as error:
            raise ConfigError(f"{self.url!r} is not the URL of a server ({error})") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def served(self, store: str) -> Served:
        """What the server calls a store: STORE as it was given, or its folder's name without `.kv`.

        Raises `ConfigError` with the names that there are, or `ServerError`.
        """
        with self._failures():
            page = self._client.models.list(extra_headers=self._headers)
            listed: list[dict[str, Any]] = [one.to_dict() for one in page.data]
            served = [
                Served(str(one["id"]), str(one.get("root") or ""), int(one.get("tokens") or 0))
                for one in listed
            ]
        known = {one.name: one for one in served}
        for name in (store, Path(store).name, Path(store).name.removesuffix(".kv")):
            if name in known:
                return known[name]
        names = ", ".join(sorted(known)[:_SHOWN]) + (", …" if len(known) > _SHOWN else "")
        raise ConfigError(f"the server at {self.url} has no {store}: it has {names or 'nothing yet'}")

    def stream(
        self,
        name: str,
        messages: list[Any],
        manner: Manner,
        received: Received,
        stopped: Event | None = None,
    ) -> Iterator[str]:
        """Yield the answer to a conversation piece by piece; `received` holds what has come.

        Waits where the server is busy. Closed early, the server stops. Raises `ConfigError`, or
        `ServerError`, also when `stopped` is set.
        """
        stopped = stopped or Event()
        for left in reversed(range(TRIES)):
            if stopped.is_set():
                break
            try:
                for piece in self._streamed(name, messages, manner, received):
                    if stopped.is_set():
                        break
                    yield piece
            except ServerBusy as busy:
                if not left or received.text:
                    raise
                stopped.wait(min(max(busy.retry_s, 1), LONGEST_WAIT_S))
            else:
                if not stopped.is_set():
                    return
        raise ServerError("not asked, because an earlier question failed")

    def _streamed(self, name: str, messages: list[Any], manner: Manner, received: Received) -> Iterator[str]:
        ours = {"selector": manner.selector, "options": dict(manner.options), "citations": manner.cite}
        with (
            self._failures(),
            self._client.chat.completions.create(
                model=name,
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                max_tokens=manner.max_new_tokens,
                temperature=manner.temperature,
                top_p=manner.top_p,
                seed=manner.seed,
                extra_body=ours,
                extra_headers=self._headers,
            ) as chunks,
        ):
            for chunk in chunks:
                if piece := _taken(chunk.to_dict(), received):
                    received.text += piece
                    yield piece
        if not received.finish:
            raise self._broken()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """What goes wrong inside, as our errors."""
        import openai

        try:
            yield
        except openai.APIStatusError as error:
            raise self._refusal(error) from error
        except openai.APITimeoutError as error:
            if "Connect" in type(error.__cause__).__name__:
                raise self._absent() from error
            raise ServerError(f"the server at {self.url} said nothing for {QUIET_S:.0f} s") from error
        except openai.APIConnectionError as error:
            cause = type(error.__cause__).__name__
            raise (self._absent() if cause == "ConnectError" else self._broken()) from error
        except (openai.APIResponseValidationError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise self._stranger() from error
        except openai.APIError as error:  # told in the stream
            said = _sentence(error.body) or "the server failed while it answered; its log says why"
            raise ServerError(said) from error

    def _refusal(self, error: APIStatusError) -> OffloadDecodeError:
        status, said = error.status_code, _sentence(error.body)
        if status == 401:
            return ConfigError(f"the server at {self.url} asks for a key: give --api-key-file, or set {KEY}")
        if not said:
            return self._stranger()
        waits = error.response.headers.get("Retry-After", "")
        if status in (429, 503) and waits.isdecimal():
            return ServerBusy(said, int(waits))
        return ConfigError(said) if 400 <= status < 500 and status != 429 else ServerError(said)

    def _absent(self) -> ServerError:
        return ServerError(
            f"no server answers at {self.url}: start one with `offload-decode serve STORE`, or give the URL "
            "that it shows"
        )

    def _broken(self) -> ServerError:
        return ServerError(f"the answer of {self.url} broke off: ask again")

    def _stranger(self) -> ServerError:
        return ServerError(f"what answers at {self.url} is no server of offload-decode: check the URL")


def _taken(chunk: dict[str, Any], received: Received) -> str:
    """Note what a chunk tells, and return its text."""
    if usage := chunk.get("usage"):
        received.tokens = int(usage.get("completion_tokens") or 0)
        received.prompt = int(usage.get("prompt_tokens") or 0)
        received.cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    received.stats = chunk.get("stats") or received.stats
    received.citations = chunk.get("citations") or received.citations
    for choice in chunk["choices"]:
        received.finish = choice.get("finish_reason") or received.finish
        return str(choice["delta"].get("content") or "")
    return ""


def _sentence(body: Any) -> str:
    match body:
        case {"message": str(message)}:
            return output.one_line(message)
    return ""


def _first_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            lines = file.read(1 << 16).decode("ascii").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the key in {path} cannot be read: give a text file with it") from error
    if not lines[0].strip():
        raise ConfigError(f"{path} holds no key: its first line is to be it")
    return lines[0].strip()


def asked(question: str) -> list[dict[str, str]]:
    """A conversation that a question begins."""
    return [{"role": "user", "content": question}]


def report(
    server: Server, served: Served, question: str, manner: Manner, received: Received
) -> dict[str, Any]:
    """An answer for programs: of what `ask --json` tells, all that a server does."""
    return {
        "question": question,
        "answer": received.text.strip(),
        "tokens": received.tokens,
        "finish": received.finish,
        **({"citations": received.citations or []} if manner.cite else {}),
        "selector": manner.selector,
        "options": manner.options,
        "store": served.name,
        "model": served.model,
        "stored_tokens": served.tokens,
        "server": server.url,
        "prompt_tokens": received.prompt,
        "cached_tokens": received.cached,
        **({} if received.stats is None else {"stats": received.stats}),
    }
