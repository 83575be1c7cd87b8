"""A chat template is a stranger's program: what it may take is bounded, and what it writes is passed on."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any
from unittest import mock

import pytest

from offload_decode.common.errors import ModelError
from offload_decode.models.prompt import prompt_for
from offload_decode.models.rendered import LONGEST, TemplateRefuses, rendered
from offload_decode.server.chat_prompt import Message, Template
from offload_decode.server.requests import WrongField
from tests.tiny import tiny_tokenizer

ASKED = [{"role": "user", "content": "Où? \ud83d"}]
SAYS = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TOO_MUCH = {
    "a loop without end": ENDLESS,
    "a text of gigabytes": "{{ 'x' * 9999999999 }}",
    "a text that doubles": "{% set n = namespace(x='xx') %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "a number of many digits": "{% set x = 9 ** 99999999 %}",
    "a text that nobody asked for": f"{{{{ 'x' * {2 * LONGEST} }}}}",
}


def tokenizer(template: str) -> Any:
    made = tiny_tokenizer()
    made.chat_template = template
    return made


def test_it_writes_what_the_library_writes() -> None:
    known = tokenizer(SAYS)
    for messages in (ASKED, [{"role": "user", "content": "x" * 1_000_000}]):
        assert rendered(known, messages) == known.apply_chat_template(messages, tokenize=False)


def written_in_a_pool(content: str) -> str:
    return rendered(tokenizer(SAYS), [{"role": "user", "content": content}])


def test_a_worker_of_a_pool_writes_too() -> None:
    """Such processes may start none of multiprocessing's."""
    with get_context("spawn").Pool(1) as pool:
        assert pool.map(written_in_a_pool, ["a", "b"]) == ["<a>", "<b>"]


def test_one_process_writes_many_texts_and_another_template_s_begin_with_another() -> None:
    first, second = tokenizer(SAYS), tokenizer("{{ 'two' }}")
    asked = [[{"role": "user", "content": content}] for content in "abc"]
    forks = []
    with mock.patch("os.fork", side_effect=lambda fork=os.fork: forks.append(fork()) or forks[-1]):
        assert [rendered(first, messages) for messages in asked] == ["<a>", "<b>", "<c>"]
        assert len(forks) == 1
        assert rendered(second, ASKED) == "two"
        first.chat_template = ENDLESS
        with pytest.raises(ModelError, match="takes more than"):
            rendered(first, ASKED)
        assert rendered(second, ASKED) == "two"
    assert len(forks) == 4
    for ended in forks[:3]:
        with pytest.raises(ProcessLookupError):
            os.kill(ended, 0)


def test_texts_are_written_after_one_another_whichever_thread_asks() -> None:
    known = tokenizer(SAYS)
    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(lambda i: rendered(known, [{"role": "user", "content": str(i)}]), range(64)))
    assert said == [f"<{i}>" for i in range(64)]


def test_what_its_parent_closes_is_closed() -> None:
    one, other = socket.socketpair()
    with one:
        assert rendered(tokenizer(SAYS), [{"role": "user", "content": "a"}]) == "<a>"
        other.close()
        one.settimeout(5)
        assert one.recv(1) == b""


def test_what_it_refuses_is_told() -> None:
    with pytest.raises(TemplateRefuses, match="not you"):
        rendered(tokenizer("{{ raise_exception('not you') }}"), ASKED)


@pytest.mark.parametrize("template", TOO_MUCH.values(), ids=TOO_MUCH)
def test_what_takes_too_much_is_ended(template: str) -> None:
    with pytest.raises(ModelError, match="takes more than"):
        rendered(tokenizer(template + SAYS), ASKED)


def test_a_prompt_and_a_server_say_so() -> None:
    with pytest.raises(ModelError, match="takes more than"):
        prompt_for(tokenizer(ENDLESS + SAYS))
    template = Template(tokenizer("{% if messages[1] %}" + ENDLESS + "{% endif %}" + SAYS))
    assert template.rendered([Message("user", "Who?")]) == "<Who?>"
    with pytest.raises(WrongField, match="takes more than"):
        template.rendered([Message("user", "Who?"), Message("assistant", "I.")])
