"""The OpenAPI document is true: requests made from it, right and wrong ones, are answered as it says."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from offload_decode.server.http.app import create_app
from tests.server.fakes import FakeService

schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(FakeService()))
# Fields that are right one by one may not go together, such as a prompt and messages.
UNTOLD = [positive_data_acceptance]
QUICK = settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])


def test_the_document_names_every_route_that_clients_use():
    named = {operation.ok().label for operation in schema.get_all_operations()}
    assert named >= {
        "GET /health",
        "GET /v1/models",
        "GET /v1/models/{name}",
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "POST /v1/messages",
        "POST /v1/messages/count_tokens",
        "POST /tokenize",
        "POST /detokenize",
        "GET /tokenizer_info",
    }


@schemathesis.hook
def map_body(context: object, body: Any) -> Any:
    """Of names that could be models', most are none: then nothing beyond the name would be looked at."""
    if isinstance(body, dict) and isinstance(body.get("model"), str) and 0 < len(body["model"]) <= 512:
        return body | {"model": "book"}
    return body


@schema.parametrize()
@QUICK
def test_requests_are_answered_as_the_document_says(case):
    case.call_and_validate(excluded_checks=UNTOLD)


@pytest.mark.slow
@schema.parametrize()
@settings(QUICK, max_examples=300)
def test_many_requests_are_answered_as_the_document_says(case):
    case.call_and_validate(excluded_checks=UNTOLD)
