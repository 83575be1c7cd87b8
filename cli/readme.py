"""The README's command reference: `python -m cli.readme` writes the real help texts between its markers."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

from typer.main import get_command

from cli.main import app

BEGIN, END = "<!-- help:begin -->", "<!-- help:end -->"
WIDTH = 100
_BLOCK = re.compile(f"{BEGIN}.*?{END}", re.DOTALL)


def reference() -> str:
    """Every command's `--help`, as Markdown."""
    names = [[command.name or ""] for command in app.registered_commands]
    for group in app.registered_groups:
        assert group.typer_instance is not None
        names += [
            [group.name or "", command.name or ""] for command in group.typer_instance.registered_commands
        ]
    helps = [(" ".join(["offload-decode", *name]), _help(*name)) for name in [[], *names]]
    return "\n\n".join(f"```text\n$ {call} --help\n{text}\n```" for call, text in helps)


def with_reference(readme: str) -> str:
    """`readme` with what stands between the markers renewed; it must have them once."""
    assert len(_BLOCK.findall(readme)) == 1, f"the README has one block {BEGIN} … {END}"
    block = f"{BEGIN}\n{reference()}\n{END}"
    return _BLOCK.sub(lambda _: block, readme)


def _help(*command: str) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        get_command(app).main(
            [*command, "--help"], prog_name="offload-decode", standalone_mode=False, terminal_width=WIDTH
        )
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())


if __name__ == "__main__":
    readme = Path(__file__).parent.parent / "README.md"
    readme.write_text(with_reference(readme.read_text(encoding="utf-8")), encoding="utf-8")
