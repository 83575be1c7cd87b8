"""`offload-decode selectors` shows every selector with what a reader chooses by."""

import json

from offload_decode.selectors import registry
from tests.cli.conftest import run


def test_every_selector_is_listed_with_paper_cost_and_memory():
    listed = json.loads(run("selectors", "--json").out)["selectors"]
    assert [one["name"] for one in listed] == registry.names()
    for one in listed:
        assert one["paper"].startswith("https://") or one["name"] == "random", one["name"]
        assert all(one[fact].strip() for fact in ("method", "reads", "holds")), one["name"]
        assert one["options"].keys() >= {"budget", "schedule", "dense_layers"}


def test_people_read_one_block_a_selector():
    out = run("selectors").out
    for name in registry.names():
        kind = registry.get(name)
        assert f"\n{name}: " in "\n" + out
        assert kind.paper in out
        assert kind.reads in out
