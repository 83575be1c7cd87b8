"""`offload-decode mcp`: stores as tools of the Model Context Protocol."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Literal

import typer

from offload_decode.cli import options as opts
from offload_decode.cli.limits import AskOptions
from offload_decode.cli.options import a_path, on_this_machine, with_groups
from offload_decode.cli.serve import GRACE_S, Host, KeyFile, Keys, Port, access_of, announce
from offload_decode.common.errors import ConfigError


@with_groups
def mcp(
    options: AskOptions,
    stores: Annotated[
        list[str],
        opts.argument(
            "STORES",
            "Stores, and folders of stores, where new stores are picked up automatically.",
            autocompletion=opts.stores,
        ),
    ],
    transport: Annotated[
        Literal["stdio", "http"],
        typer.Option(help="Speak over standard input and output, or listen at http://HOST:PORT/mcp."),
    ] = "stdio",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: Keys = None,
    api_key_file: KeyFile = None,
    max_new_tokens: opts.MaxNewTokens = 1024,
) -> None:
    """Let assistants ask stores, as tools of the Model Context Protocol.

    The tools are `ask` (an answer with citations), `search_passages` and `list_corpora`. Over stdio the
    client starts this command itself; --host, --port and keys are for --transport http.
    """
    places = [on_this_machine(a_path(store)) for store in stores]
    try:
        from offload_decode.server.http.mcp import create_app, create_server
    except ModuleNotFoundError as error:
        needs = "this command needs packages of its own: pip install 'offload-decode[mcp,server]'"
        raise ConfigError(needs) from error

    from offload_decode.cli.compiling import announce_compiling, exit_on_bus_error
    from offload_decode.planning.caps import apply_caps
    from offload_decode.server import metrics
    from offload_decode.server.catalog import Catalog
    from offload_decode.server.http.app import address_of, bind, is_loopback, listen
    from offload_decode.server.requests import Settings
    from offload_decode.server.service import Service

    settings = Settings(options.config, options.caps, max_tokens=max_new_tokens, read_only=True)
    access = access_of(api_key or [], api_key_file, [], host, is_loopback(host))
    bound = bind(host, port) if transport == "http" else None
    metrics.configure()
    apply_caps(options.caps, options.config.device)
    announce_compiling()
    exit_on_bus_error()
    with closing(Service(Catalog(places, options.config.model, options.config.adapter), settings)) as service:
        service.preload()
        if bound is None:
            create_server(service).run("stdio")
        else:
            announce(f"{address_of(bound)}/mcp", bool(access.keys) or is_loopback(host), "ask")
            listen(create_app(service, access), bound, GRACE_S, service.close)
