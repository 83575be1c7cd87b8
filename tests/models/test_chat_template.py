"""A chat template is a stranger's program: its size is bounded, and what it writes is passed on."""

from __future__ import annotations

from typing import Any

import pytest

from offload_decode.common.errors import ModelError
from offload_decode.models.prompt import (
    LONGEST_TEMPLATE,
    LONGEST_WRITTEN,
    TemplateRefuses,
    prompt_for,
    rendered,
)
from offload_decode.server.chat_prompt import Template
from offload_decode.server.messages import Message
from offload_decode.server.requests import WrongField
from tests.tiny import tiny_tokenizer

ASKED = [{"role": "user", "content": "Où? \ud83d"}]
SAYS = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
TOO_MUCH = f"{{{{ 'x' * {2 * LONGEST_WRITTEN} }}}}"


def tokenizer(template: str) -> Any:
    made = tiny_tokenizer()
    made.chat_template = template
    return made


def test_it_writes_what_the_library_writes() -> None:
    known = tokenizer(SAYS)
    for messages in (ASKED, [{"role": "user", "content": "x" * 1_000_000}]):
        assert rendered(known, messages) == known.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('not you') }}", "not you"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{% for %}", "Expected an expression"),
        ("{% for a in range(999999) %}{% endfor %}", "Range too big"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "zero"),
    ],
)
def test_a_template_that_fails_says_why(template: str, says: str) -> None:
    with pytest.raises(TemplateRefuses, match=says):
        rendered(tokenizer(template), ASKED)


def test_a_template_that_is_or_writes_too_much_is_refused() -> None:
    with pytest.raises(ModelError, match="writes more than 65,536 characters"):
        rendered(tokenizer(TOO_MUCH + SAYS), ASKED)
    with pytest.raises(ModelError, match="has more than 1,048,576 characters"):
        rendered(tokenizer("x" * LONGEST_TEMPLATE + SAYS), ASKED)
    echoes = tokenizer("{{ messages[0]['content'] * 3 }}")
    assert len(rendered(echoes, [{"role": "user", "content": "x" * LONGEST_WRITTEN}])) == 3 * LONGEST_WRITTEN


def test_a_prompt_and_a_server_say_so() -> None:
    with pytest.raises(ModelError, match="writes more than"):
        prompt_for(tokenizer(TOO_MUCH + SAYS))
    template = Template(tokenizer("{% if messages[1] %}" + TOO_MUCH + "{% endif %}" + SAYS))
    assert template.rendered([Message("user", "Who?")]) == "<Who?>"
    with pytest.raises(WrongField, match="writes more than"):
        template.rendered([Message("user", "Who?"), Message("assistant", "I.")])
