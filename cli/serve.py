"""`offload-decode serve`: stores behind the OpenAI API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from offload_decode.cli import options as opts
from offload_decode.cli import output
from offload_decode.cli.client import KEY
from offload_decode.cli.limits import AskOptions
from offload_decode.cli.options import a_path, byte_count, on_this_machine, option, token_count, with_groups
from offload_decode.common.errors import ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from offload_decode.server.http.security import Access
    from offload_decode.server.on_ray import RayReplicas
    from offload_decode.server.requests import Settings

GRACE_S = 5.0

Host = Annotated[str, option("HOST", "Address to listen on.")]
Port = Annotated[int, option("N", "Port; 0 takes a free one.", min=0, max=65535)]
Keys = Annotated[
    list[str] | None,
    option(
        "KEY",
        "Key that clients must give; repeatable. Users of this machine can see it, unlike a file.",
        envvar=KEY,
    ),
]
KeyFile = Annotated[Path | None, option("FILE", "File with a key in each line.", parser=a_path)]


@with_groups
def serve(
    options: AskOptions,
    stores: Annotated[
        list[str] | None,
        opts.argument(
            "STORES",
            "Stores, collections, and folders of these, where new ones are picked up automatically. With "
            "--on ray also URLs of stores in buckets.",
            autocompletion=opts.stores,
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: Keys = None,
    api_key_file: KeyFile = None,
    cors: Annotated[
        list[str] | None,
        option(
            "ORIGIN", "Origin whose pages may ask, such as https://chat.example, or * for any; repeatable."
        ),
    ] = None,
    max_new_tokens: opts.MaxNewTokens = 1024,
    temperature: opts.Temperature = 0.0,
    top_p: opts.TopP = 1.0,
    max_running: Annotated[
        int, option("N", "Maximum number of answers generated at the same time.", min=1)
    ] = 64,
    max_waiting: Annotated[
        int, option("N", "Maximum number of waiting requests; more are refused.", min=0)
    ] = 256,
    max_prompt: Annotated[
        str, option("N", "Maximum tokens of a prompt without the stored ones, such as 32K.")
    ] = "128K",
    max_body: Annotated[str, option("SIZE", "Maximum size of a request body.")] = "32MiB",
    max_upload: Annotated[str, option("SIZE", "Maximum size of a body with documents for a store.")] = "1GiB",
    store_disk: Annotated[
        str | None,
        option("SIZE", "Maximum size of the folder in which stores are made; jobs beyond it are refused."),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Refuse requests that make, extend or delete stores.")
    ] = False,
    memory_for_turns: Annotated[
        str, option("SIZE", "Memory for the prefix cache of conversations.")
    ] = "1GiB",
    deadline: Annotated[float, option("SECONDS", "Maximum duration of a request.", min=0.001)] = 600.0,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Format of the log on stderr, one line per request.")
    ] = "text",
    on: Annotated[
        Literal["ray"] | None,
        typer.Option(help="Answer on the machines of the Ray cluster of RAY_ADDRESS instead of this one."),
    ] = None,
    replicas: Annotated[
        int | None,
        option(
            "N",
            "Servers with --on ray.  [default: one for each GPU, or for each machine without GPUs]",
            min=1,
        ),
    ] = None,
) -> None:
    """Serve stores to OpenAI clients.

    Each store is a model with the store's name, at http://HOST:PORT/v1, and so is each collection, which
    answers from several of its documents; the models of the stores are served too. --max-new-tokens,
    --temperature, --top-p, --selector and --option are defaults for requests.
    """
    places = [(store if on else str(on_this_machine(a_path(store)))) for store in stores or []]
    if replicas is not None and on is None:
        raise ConfigError("--replicas needs --on ray: without it one server runs, on this machine")
    if not places and options.config.model is None:
        raise ConfigError("name a store, or a folder of stores; or a model, with --model, to serve it alone")
    try:
        from offload_decode.server.http.app import address_of, bind, is_loopback, listen
    except ModuleNotFoundError as error:
        needs = "serving needs packages of its own: pip install 'offload-decode[server]'"
        raise ConfigError(needs) from error

    access = access_of(api_key or [], api_key_file, cors or [], host, is_loopback(host))
    bound = bind(host, port)

    from offload_decode.cli.compiling import announce_compiling, exit_on_bus_error
    from offload_decode.planning.caps import apply_caps
    from offload_decode.server import metrics
    from offload_decode.server.catalog import Catalog
    from offload_decode.server.http.app import create_app
    from offload_decode.server.http.front import create_front
    from offload_decode.server.requests import Settings
    from offload_decode.server.service import Service

    settings = Settings(
        config=options.config,
        caps=options.caps,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_new_tokens,
        max_running=max_running,
        max_waiting=max_waiting,
        max_prompt=token_count(max_prompt),
        max_body=byte_count(max_body),
        max_upload=byte_count(max_upload),
        store_disk=None if store_disk is None else byte_count(store_disk),
        read_only=read_only,
        deadline_s=deadline,
        generated_bytes=byte_count(memory_for_turns),
    )
    metrics.configure(log_format)
    guarded = bool(access.keys) or is_loopback(host)
    if on is not None:
        with _on_ray(places, settings, log_format, replicas) as running:
            announce(address_of(bound), guarded)
            listen(create_front(running, access, settings.max_body), bound, GRACE_S)
        return
    apply_caps(options.caps, options.config.device)
    announce_compiling()
    exit_on_bus_error()
    service = Service(
        Catalog([Path(place) for place in places], options.config.model, options.config.adapter), settings
    )
    names = [entry.name for entry in service.catalog.entries()]
    output.note(f"serving {', '.join(names) or 'nothing yet: publish a store'}")
    announce(address_of(bound), guarded)
    service.preload()
    listen(create_app(service, access), bound, GRACE_S, service.close)


def announce(address: str, guarded: bool, may: str = "ask, append and delete") -> None:
    """Say where the server listens, and what that means where anyone may ask."""
    output.note(f"listening on {address}")
    if not guarded:
        output.note(f"warning: anyone who reaches this address can {may}: give --api-key-file")


def _on_ray(
    places: list[str], settings: Settings, log_format: Literal["text", "json"], replicas: int | None
) -> AbstractContextManager[RayReplicas]:
    from offload_decode.prefill_jobs.on_ray.workers import installed

    installed("--on ray")  # its error says what to install; the import below just fails
    from offload_decode.server.on_ray import cache_for, on_ray, plan_for

    plan = plan_for(places, settings, cache_for(places), log_format)
    names = [entry.name for entry in plan.far.values()] + [path.name for path in plan.places]
    output.note(f"starting servers on Ray for {', '.join(names)}")
    return on_ray(plan, replicas)


def access_of(keys: list[str], file: Path | None, origins: list[str], host: str, loopback: bool) -> Access:
    """Who may ask. Raises `ConfigError`."""
    from offload_decode.server.http.security import LOOPBACK, Access, read_keys

    if any(not key.strip() for key in keys):
        raise ConfigError("an empty key admits everybody: give one, or leave --api-key out")
    accepted = (*(key.strip() for key in keys), *(() if file is None else read_keys(file)))
    hosts = LOOPBACK | {host} if loopback and not accepted else frozenset()
    return Access(accepted, tuple(origin.rstrip("/") for origin in origins), hosts)
