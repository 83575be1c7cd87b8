"""The README shows the commands' real help."""

from __future__ import annotations

from pathlib import Path

from cli.readme import BEGIN, END, reference, with_reference

from cli.main import app

README = Path(__file__).parents[2] / "README.md"


def test_the_reference_holds_every_commands_help() -> None:
    shown = reference()
    for command in app.registered_commands:
        assert (
            f"$ offload-decode {command.name} --help\nUsage: offload-decode {command.name} [OPTIONS]" in shown
        )


def test_the_block_is_replaced_and_nothing_else() -> None:
    renewed = with_reference(f"above\n{BEGIN}\nold\n{END}\nbelow")
    assert renewed == f"above\n{BEGIN}\n{reference()}\n{END}\nbelow"


def test_the_readme_is_up_to_date() -> None:
    text = README.read_text(encoding="utf-8")
    assert with_reference(text) == text, "run `python -m cli.readme`"
