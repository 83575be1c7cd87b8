"""A group's options are the command's own: shown, parsed and refused like any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from offload_decode.cli.options import From, with_groups


@dataclass(frozen=True)
class Paint:
    colour: str
    coats: int


def paint(
    colour: Annotated[str, typer.Option("-c", help="What it is painted with.")] = "red",
    coats: Annotated[int, typer.Option(min=1)] = 2,
) -> Paint:
    return Paint(colour, coats)


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()

    @made.command()
    @with_groups
    def fence(
        name: Annotated[str, typer.Argument()],
        how: Annotated[Paint, From(paint)],
        times: Annotated[int, typer.Option()] = 1,
    ) -> None:
        """Paint a fence."""
        print(name, how, times)

    return made


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["garden"], f"garden {Paint('red', 2)} 1"),
        (["garden", "-c", "blue", "--times", "3"], f"garden {Paint('blue', 2)} 3"),
        (["--coats", "1", "garden"], f"garden {Paint('red', 1)} 1"),
    ],
)
def test_a_command_takes_what_the_group_makes_of_its_options(app, arguments, printed):
    assert CliRunner().invoke(app, arguments).stdout.strip() == printed


def test_the_options_of_a_group_are_checked_and_stand_where_the_group_does(app):
    assert CliRunner().invoke(app, ["garden", "--coats", "0"]).exit_code == 2
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert "Paint a fence." in shown
    assert "What it is painted with." in shown
    assert shown.index("--coats") < shown.index("--times")
