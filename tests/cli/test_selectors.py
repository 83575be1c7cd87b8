"""`offload-decode selectors` shows every selector with what a reader chooses by."""

import dataclasses
import inspect

import pytest

from offload_decode.selectors import registry
from offload_decode.selectors.registry import declared
from tests.cli.conftest import imported, json_of, run


def test_every_selector_is_listed_with_paper_cost_and_memory():
    listed = json_of("selectors")["selectors"]
    assert [one["name"] for one in listed] == registry.names()
    for one in listed:
        assert one["paper"].startswith("https://") or one["name"] == "random", one["name"]
        assert all(one[fact].strip() for fact in ("method", "reads", "holds")), one["name"]
        assert one["options"].keys() >= {"budget", "schedule", "dense_layers"}


def test_the_text_has_a_block_for_each_selector():
    out = run("selectors").out
    for name in registry.names():
        kind = registry.get(name)
        assert f"\n{name}: " in "\n" + out
        assert kind.paper in out
        assert kind.reads in out


@pytest.mark.parametrize("name", registry.names())
def test_declarations_read_from_source_equal_the_class(name):
    """Class variables and the defaults of options are literals, so that a list needs no imports."""
    told, kind = declared(name), registry.get(name)
    assert (told.name, told.paper, told.reads) == (kind.name, kind.paper, kind.reads)
    assert (told.holds, told.remembers) == (kind.holds, kind.remembers)
    assert told.method == inspect.cleandoc(kind.__doc__).partition("\n\n")[0].replace("\n", " ")
    defaults = [(field.name, field.default) for field in dataclasses.fields(kind.options_type)]
    assert list(told.options.items()) == defaults


def test_listing_skips_slow_imports():
    _, modules = imported("selectors")
    assert "typer" in modules
    assert not {"torch", "transformers", "numba", "zarr", "numpy"} & modules
