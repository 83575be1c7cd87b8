"""`python -m offload_decode.cli.reference` writes the commands' help texts into docs/commands.md."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

from typer.main import get_command

from offload_decode.cli.main import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
BEGIN, END = "<!-- help:begin -->", "<!-- help:end -->"
WIDTH = 100
_BLOCK = re.compile(f"{BEGIN}.*?{END}", re.DOTALL)


def reference() -> str:
    """Every command's `--help`, as Markdown: a heading and a block each."""
    names = [[command.name or ""] for command in app.registered_commands]
    for group in app.registered_groups:
        assert group.typer_instance is not None
        names += [
            [group.name or "", command.name or ""] for command in group.typer_instance.registered_commands
        ]
    parts = []
    for name in [[], *names]:
        call = " ".join(["offload-decode", *name])
        parts.append(f"## {' '.join(name) or call}\n\n```text\n$ {call} --help\n{_help(*name)}\n```")
    return "\n\n".join(parts)


def with_reference(page: str) -> str:
    """`page` with the text between its markers replaced; it must have one pair of markers."""
    assert len(_BLOCK.findall(page)) == 1, f"the page has one block {BEGIN} … {END}"
    block = f"{BEGIN}\n{reference()}\n{END}"
    return _BLOCK.sub(lambda _: block, page)


def _help(*command: str) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        get_command(app).main(
            [*command, "--help"], prog_name="offload-decode", standalone_mode=False, terminal_width=WIDTH
        )
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())


if __name__ == "__main__":
    PAGE.write_text(with_reference(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
