"""Lines of a log: one a record, whole, and with nothing in them that looks like another line."""

from __future__ import annotations

import io
import json
import logging

import pytest

from offload_decode.server import metrics


def test_json_lines_hold_the_fields_of_a_request():
    out = io.StringIO()
    metrics.configure("json", out)
    with metrics.logged_request(request_id="r1", route="/v1/models"):
        metrics.log_fields()["status"] = 200
    (said,) = [json.loads(text) for text in out.getvalue().splitlines()]
    assert (said["message"], said["request_id"], said["status"]) == ("request", "r1", 200)
    assert said["seconds"] >= 0
    assert said["time"].endswith("Z")


def test_records_within_a_request_name_it_and_others_do_not():
    out = io.StringIO()
    metrics.configure("json", out)
    with metrics.logged_request(request_id="r1"):
        metrics.LOG.warning("something")
    metrics.LOG.warning("something")
    within, _, outside = [json.loads(text) for text in out.getvalue().splitlines()]
    assert within["request_id"] == "r1"
    assert "request_id" not in outside


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_value_never_becomes_a_line(style):
    out = io.StringIO()
    metrics.configure(style, out)
    with metrics.logged_request(model="book\n2026 error all is lost\x1b[2J\u2028"):
        metrics.LOG.info("a message\nwith a break")
    assert len(out.getvalue().splitlines()) == 2
    assert "\x1b" not in out.getvalue()


def test_text_lines_can_be_read_by_people():
    out = io.StringIO()
    metrics.configure("text", out)
    with metrics.logged_request(request_id="r1", model="my book"):
        pass
    assert ' info request request_id=r1 model="my book" seconds=' in out.getvalue()


def test_uvicorn_says_what_it_says_in_the_same_form_and_libraries_only_warn():
    out = io.StringIO()
    metrics.configure("json", out)
    logging.getLogger("uvicorn.error").info("Started")
    logging.getLogger("httpx").info("chatter")
    assert [json.loads(text)["message"] for text in out.getvalue().splitlines()] == ["Started"]


def test_an_exception_stays_in_its_line():
    out = io.StringIO()
    metrics.configure("json", out)
    try:
        raise ValueError("wrong")
    except ValueError:
        metrics.LOG.exception("failed")
    (said,) = [json.loads(text) for text in out.getvalue().splitlines()]
    assert "ValueError: wrong" in said["exception"]


def test_outside_of_a_request_nothing_is_remembered():
    metrics.log_fields()["model"] = "book"
    assert metrics.log_fields() == {}
