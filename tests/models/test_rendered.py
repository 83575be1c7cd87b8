"""A chat template is a stranger's program: what it may take is bounded, and what it writes is passed on."""

from __future__ import annotations

from typing import Any

import pytest

from offload_decode.errors import ModelError
from offload_decode.models.prompt import prompt_for
from offload_decode.models.rendered import LONGEST, TemplateRefuses, rendered
from server.errors import WrongField
from server.messages import Message
from server.templates import Template
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
