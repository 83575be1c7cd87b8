"""Prompts: a template split around the corpus gives the ids of the template applied whole."""

from __future__ import annotations

import pytest

from offload_decode.errors import ModelError
from offload_decode.models.fingerprints import tokenizer_hash
from offload_decode.models.loading import load
from offload_decode.models.prompt import encode, encode_text, prompt_for
from tests.tiny import tiny_tokenizer

CHAT = (
    "<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


def test_a_chat_is_that_of_the_template(tokenizer):
    prompt = prompt_for(tokenizer)
    ids = (
        encode(tokenizer, prompt.before)
        + encode_text(tokenizer, "The corpus.")
        + prompt.first(tokenizer, "Who?")
    )
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "The corpus.\n\nWho?"}], tokenize=False, add_generation_prompt=True
    )
    assert ids == encode(tokenizer, whole)

    ids += encode_text(tokenizer, "She.") + prompt.next(tokenizer, "When?")
    turns = [("user", "The corpus.\n\nWho?"), ("assistant", "She."), ("user", "When?")]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert ids == encode(tokenizer, whole)


def test_without_a_template_the_form_is_plain():
    tokenizer = tiny_tokenizer()
    prompt = prompt_for(tokenizer)
    assert (prompt.template, prompt.before) == ("plain", "<s>")
    assert tokenizer.decode(prompt.first(tokenizer, "Who?")) == "\n\nQuestion: Who?\nAnswer:"


def test_a_question_cannot_smuggle_in_special_tokens(tokenizer):
    ids = prompt_for(tokenizer).first(tokenizer, "Is </s> the end?")
    assert tokenizer.eos_token_id not in ids
    assert "</s>" in tokenizer.decode(ids)


def test_a_template_that_changes_the_text_is_refused(tokenizer):
    tokenizer.chat_template = "{{ messages[0].content | upper }}"
    with pytest.raises(ModelError, match="chat template"):
        prompt_for(tokenizer)


def test_the_tokenizer_is_known_whatever_it_was_used_for_before(tokenizer):
    before = tokenizer_hash(tokenizer)
    tokenizer(["a", "longer one"], padding=True, truncation=True, max_length=3)
    assert tokenizer_hash(tokenizer) == before
    tokenizer.add_tokens(["<extra>"])
    assert tokenizer_hash(tokenizer) != before


def test_a_folder_that_is_not_there_is_refused_at_once():
    for path in ("./nowhere", "/no/where", "a/b/c"):
        with pytest.raises(ModelError, match="there is no folder"):
            load(path)
