"""Groups of options belong to the command: they are shown, parsed and refused like any other."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from offload_decode.cli.options import EVERYDAY, MODEL, OUTPUT, RETRIEVAL, From, with_groups
from tests.cli.conftest import run


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


@pytest.mark.parametrize("command", ["ask", "chat", "batch"])
def test_help_lists_options_by_panel(command):
    shown = run(command, "--help").out
    panels = ["Arguments", EVERYDAY, RETRIEVAL, MODEL, OUTPUT]
    places = [shown.index(f"\n{panel}:\n") for panel in panels]
    assert places == sorted(places)
    assert "\nOptions:\n" not in shown
    options = {"--max-new-tokens": EVERYDAY, "--selector": RETRIEVAL, "--device D": MODEL, "--help": OUTPUT}
    for option, panel in options.items():
        found = [title for title, place in zip(panels, places, strict=True) if place < shown.index(option)]
        assert found[-1] == panel, option
