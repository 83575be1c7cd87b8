"""StreamingLLM's tokens, written down."""

import pytest

from offload_decode.common.errors import ConfigError
from offload_decode.testing.selector_contract import SelectorContract
from tests.selectors.memory_cases import MemoryCases


class TestStreaming(SelectorContract, MemoryCases):
    name = "streaming"

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"budget": "7"}, [0, 1, 2, 3, -1, -2, -3]),
            ({"budget": "3"}, [0, 1, 2]),
            ({"budget": "3", "sinks": "1"}, [0, -1, -2]),
            ({"budget": "2", "sinks": "0"}, [-1, -2]),
            ({"budget": "0"}, []),
        ],
        ids=str,
    )
    def test_sinks_come_first_then_the_latest(self, case, options, expected):
        if case.host.length == 1:
            expected = [0][: len(expected)]
        ids = case.make("streaming", **options).select(1, case.queries()).ids
        expected = [token % case.host.length for token in expected]
        assert all(row == expected for row in ids.flatten(0, 1).tolist())
        assert case.host.read == []

    def test_more_sinks_than_tokens_are_all_tokens(self, case):
        ids = case.make("streaming", budget="100%", sinks="1000").select(1, case.queries()).ids
        assert ids[-1, -1].tolist() == list(range(case.host.length))

    def test_negative_sinks_are_refused(self, case):
        with pytest.raises(ConfigError, match="0 or more"):
            case.make("streaming", sinks="-1")
