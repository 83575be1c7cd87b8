"""The commands that documentation shows, and whether the command line understands them."""

import re
import shlex
from functools import cache
from typing import Any

import typer

from offload_decode.cli.main import app


def shell_lines(text: str) -> list[list[str]]:
    """The commands of the ```sh blocks of a Markdown text, in words."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def understood(arguments: list[str]) -> dict[str, Any]:
    """What the command line makes of `arguments`, without running it; raises where it refuses them."""
    group = _commands()
    context, rest, name = group.make_context("offload-decode", list(arguments)), list(arguments), ""
    while hasattr(group, "resolve_command"):
        name, group, rest = group.resolve_command(context, rest)
        context = group.make_context(name, list(rest), parent=context)
    return {"command": name, **context.params}


@cache
def _commands() -> Any:
    return typer.main.get_command(app)
