"""Conditions say which documents are meant."""

from typing import Any

import pytest

from offload_decode.collections.collection import Condition
from offload_decode.collections.journal import Entry
from offload_decode.common.errors import ConfigError

METADATA: dict[str, Any] = {
    "author": "Ada [ed.]", "year": 1999, "share": 0.5, "draft": True, "none": None, "date": "2024-05-31",
    "a field": "x",
}  # fmt: skip
ENTRY = Entry("2024/report.txt", "0" * 64, "", 1, METADATA)

HOLDS = [
    "name=2024/*", "name=2024/report.txt", "name!=2023/*", "name>2023", "author=Ada*", "author!=Bob",
    "year=1999", "year = 1999.0", "year>=1999", "year<2e3", "year!=2000", "share<=0.5", "share>.4",
    "draft=true", "draft!=false", "none=null", "date>=2024-05-01", "date<2024-06", "a field=x",
]  # fmt: skip
FAILS = [
    "name=2023/*", "name=report.txt", "author=ada*", "author=Ada [[]ed.", "year=2000", "year>1999", "year=x",
    "year<x", "share>0.5", "draft=1", "draft>0", "none<1", "missing=x", "missing!=x", "missing<x",
]  # fmt: skip


@pytest.mark.parametrize("text", HOLDS)
def test_it_holds(text):
    assert Condition.parse(text).holds(ENTRY)


@pytest.mark.parametrize("text", FAILS)
def test_it_does_not_hold(text):
    assert not Condition.parse(text).holds(ENTRY)


@pytest.mark.parametrize("text", ["", "name", "=x", "year 1999", "!=x"])
def test_what_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="is no condition"):
        Condition.parse(text)
