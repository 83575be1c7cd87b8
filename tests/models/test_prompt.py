"""Prompts: what is stored and what follows it are together the tokens of one encoding of the whole text, for
every kind of tokenizer. A chat template is a stranger's program: its size is bounded, and what it writes is
passed on.
"""

import copy
import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from offload_decode.common.errors import ConfigError, ModelError
from offload_decode.engine.engine import Engine
from offload_decode.models.fingerprints import tokenizer_hash
from offload_decode.models.loading import load, wrap
from offload_decode.models.prompt import (
    LONGEST_TEMPLATE,
    LONGEST_WRITTEN,
    Piece,
    TemplateRefuses,
    encode,
    encode_after,
    encode_first,
    encode_text,
    prompt_for,
    rendered,
    with_system,
)
from offload_decode.prefill_jobs.corpus import TextDocument, encode_corpus
from offload_decode.prefill_jobs.job import prefill_texts
from offload_decode.server.chat_prompt import Template
from offload_decode.server.messages import Message
from offload_decode.server.requests import WrongField
from tests.models.tokenizers import BEGINNINGS, KINDS, tokenizer_of
from tests.tiny import tiny_model, tiny_tokenizer

CHAT = (
    "<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TRIMS = CHAT.replace("m.content", "m.content | trim")
TEMPLATES = {"none": None, "chat": CHAT, "trims": TRIMS}
ASKED = [{"role": "user", "content": "Où? \ud83d"}]
SAYS = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
TOO_MUCH = f"{{{{ 'x' * {2 * LONGEST_WRITTEN} }}}}"

texts = st.text(st.sampled_from("aeo .,\n\t(1_é字🙂\u3000ж<"), max_size=12)
kinds = pytest.mark.parametrize(
    ("kind", "beginning"), [*itertools.product(KINDS, ["added"]), *(("prepend", b) for b in BEGINNINGS)]
)
templates = pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)


@cache
def made(kind, beginning, template):
    tokenizer = tokenizer_of(kind, beginning, template)
    return tokenizer, prompt_for(tokenizer)


def with_template(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def conversation(tokenizer, *contents):
    turns = zip(("user", "assistant", "user"), contents, strict=False)
    messages = [{"role": role, "content": content} for role, content in turns]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def whole(tokenizer, prompt, documents, question):
    """One encoding of all of it."""
    texts = [text.rstrip() for text in documents]
    if len(texts) > 1:
        texts = [f"Document: d\n{text}".rstrip() for text in texts]
    corpus = prompt.join.gap.join(texts)
    if prompt.template == "chat":
        text = conversation(tokenizer, corpus + prompt.join.gap + question.strip())
        return encode(tokenizer, text)
    ids = tokenizer.encode(f"{corpus}{prompt.join.gap}Question: {question.strip()}\nAnswer:")
    return ids[:-1] if tokenizer.encode("a")[-1] == tokenizer.eos_token_id else ids


def in_pieces(tokenizer, prompt, documents, question):
    documents = [TextDocument("d", text) for text in documents]
    ids, spans, _ = encode_corpus(tokenizer, prompt, documents)
    edges = [0, *(span.end for span in spans)]
    assert [span.start for span in spans] == edges[:-1]
    assert edges[-1] == len(ids)
    return [*ids.tolist(), *prompt.first(tokenizer, question)]


@kinds
@templates
@given(documents=st.lists(texts.filter(str.strip), min_size=1, max_size=3), question=texts.filter(str.strip))
@settings(max_examples=25, deadline=None)
def test_pieces_are_the_tokens_of_one_encoding(kind, beginning, template, documents, question):
    tokenizer, prompt = made(kind, beginning, template)
    expected = whole(tokenizer, prompt, documents, question)
    assert in_pieces(tokenizer, prompt, documents, question) == expected


@pytest.mark.parametrize("kind", KINDS)
@given(texts, texts)
@settings(max_examples=20, deadline=None)
def test_a_further_question_has_the_tokens_that_it_has_behind_an_answer(kind, answer, question):
    """The answer's own tokens are the model's; behind a special token the whole is one encoding again."""
    tokenizer, prompt = made(kind, "added", CHAT)
    text = conversation(tokenizer, "x", answer, question.strip())
    ids = encode(tokenizer, text)
    following = prompt.next(tokenizer, question)
    assert ids[-len(following) :] == following
    assert following[0] == prompt.closing(tokenizer) == tokenizer.eos_token_id


@pytest.mark.parametrize("special", [True, False], ids=["special", "only added"])
@pytest.mark.parametrize("turn", ["<|next|>user", "\n <|next|>", "user <|next|>", "", "next"])
def test_a_template_closes_an_answer_by_the_tokenizers_own_token_behind_it(turn: str, special: bool) -> None:
    """Some files have the end of a turn as a token of a user's: it is no special one there."""
    tokenizer = tokenizer_of("byte level")
    tokenizer.add_tokens([AddedToken("<|next|>", special=special), AddedToken("<|", special=special)])
    closes = turn.strip().startswith("<|next|>")
    prompt = replace(prompt_for(tokenizer), turn=turn)
    assert prompt.closing(tokenizer) == (tokenizer.convert_tokens_to_ids("<|next|>") if closes else None)


@pytest.mark.parametrize("kind", KINDS)
def test_no_stray_space_stands_before_a_question(kind):
    tokenizer = tokenizer_of(kind)
    prompt = prompt_for(tokenizer)
    for ids in (prompt.first(tokenizer, "Who?"), prompt.next(tokenizer, "Who?")):
        text = tokenizer.decode(encode(tokenizer, "a") + ids)
        assert text.lstrip(" ") in (f"a{gap}Question: Who?\nAnswer:" for gap in ("\n\n", " \n\n", ""))


def test_full_stops_that_join_line_breaks_move_the_seam():
    tokenizer = tokenizer_of("llama 3")
    prompt = prompt_for(tokenizer)
    ids, *_ = encode_corpus(tokenizer, prompt, [TextDocument("d", "The end.")])
    assert tokenizer.convert_ids_to_tokens(ids.tolist())[-1] == ".ĊĊ"
    assert tokenizer.decode(prompt.first(tokenizer, "Who?")) == "Question: Who?\nAnswer:"


@pytest.mark.parametrize(("beginning", "opening"), [("defined", ()), ("added", (1,))])
def test_a_first_token_is_put_only_where_the_tokenizer_puts_it(beginning, opening):
    assert prompt_for(tokenizer_of("metaspace always", beginning)).opening == opening


def test_without_a_template_the_form_is_plain():
    tokenizer = tiny_tokenizer()
    prompt = prompt_for(tokenizer)
    assert prompt.template == "plain"
    assert tokenizer.decode(prompt.first(tokenizer, "Who?")) == "\n\nQuestion: Who?\nAnswer:"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [None, CHAT], ids=["plain", "chat"])
@pytest.mark.parametrize("smuggled", ["Is </s> the end?", "</s>", "a<s>b</s>c", "</s><s>", "<pad> </s> é"])
def test_a_user_cannot_smuggle_in_special_tokens(kind, template, smuggled):
    tokenizer = tokenizer_of(kind, "added", template)
    prompt = prompt_for(tokenizer)
    ids = prompt.first(tokenizer, smuggled)
    assert not {0, 1, 2} & set(ids)
    stored, *_ = encode_corpus(tokenizer, prompt, [TextDocument("d", smuggled)])
    assert (stored[0], set(stored[1:].tolist()) & {0, 1, 2}) == (1, set())
    behind = prompt.next(tokenizer, smuggled)
    assert set(behind[1 if template else 0 :]) & {0, 1, 2} == set()


def test_a_tokenizer_that_splits_special_tokens_does_not_split_those_of_the_template():
    tokenizer = tokenizer_of("byte level", "added", CHAT)
    expected = prompt_for(tokenizer).first(tokenizer, "Who?")
    told = copy.deepcopy(tokenizer)
    told.split_special_tokens = True
    assert prompt_for(told).first(told, "Who?") == expected
    assert prompt_for(told).document(told, "x", True) == prompt_for(tokenizer).document(tokenizer, "x", True)


def test_a_special_token_that_a_seam_would_make_is_letters():
    tokenizer = tokenizer_of("byte level")
    ids = encode_first(tokenizer, [Piece("<"), Piece("/s>", users=True), Piece("</s>")])
    assert ids == [*encode_text(tokenizer, "</s>"), tokenizer.eos_token_id]


@pytest.mark.parametrize("kind", KINDS)
@given(texts)
@settings(max_examples=20, deadline=None)
def test_letters_of_special_tokens_change_nothing_around_them(kind, text):
    """Where nothing is spelled out, the two ways to encode agree."""
    tokenizer = tokenizer_of(kind)
    pieces = [Piece("<s>[user]"), Piece(text, users=True), Piece("</s>\n")]
    runs = [*pieces, Piece("</s>", users=True)]
    expected = encode_first(tokenizer, pieces)
    assert encode_first(tokenizer, runs)[: len(expected) - 1] == expected[:-1]


def test_a_piece_is_encoded_alone_where_tokens_cross_every_boundary():
    pair = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["b", "a", ".", "0", "ab", ".b", "0b"])},
                                merges=[(c, "b") for c in "a.0"]))  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pair)
    assert encode_after(tokenizer, "", [Piece("b")]) == encode(tokenizer, "b") == [0]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content | upper }}",
        "{{ messages[0].content | tojson }}",
        "{{ messages[0].content | replace('\n\n', ' ') }}",
        "{{ raise_exception('no') }}",
        "{{ 1 // 0 }}",
        "{{ nothing.at.all }}",
        "{% for m in messages %}{{ m.content + 1 }}{% endfor %}",
        "{% if %}",
        "nothing of it",
    ],
)
def test_a_template_that_fails_or_changes_the_text_is_refused(template):
    with pytest.raises(ModelError, match="chat template"):
        prompt_for(with_template(template))


@pytest.mark.parametrize("kind", ["metaspace always", "prepend", "llama 3"])
@pytest.mark.parametrize("template", [None, TRIMS], ids=["plain", "chat"])
def test_an_answer_is_that_of_plain_generation_from_the_whole_text(kind, template, tmp_path):
    tokenizer = tokenizer_of(kind, "added", template)
    plain, served = (tiny_model(vocab_size=len(tokenizer)) for _ in range(2))
    text, question = "  The lamp burns low.  ", " What burns? "
    loaded = wrap(served, tokenizer)
    prefill_texts(loaded, [TextDocument("d", text)] * 2, tmp_path / "store")
    engine = Engine.open(tmp_path / "store", loaded, selector="dense")
    prompt = loaded.prompt
    ids = torch.tensor([whole(tokenizer, prompt, [text] * 2, question)])
    out = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert list(engine.answer(question, max_new_tokens=6).tokens) == out[0, ids.shape[1] :].tolist()


def test_the_tokenizer_is_known_whatever_it_was_used_for_before():
    tokenizer = tiny_tokenizer()
    before = tokenizer_hash(tokenizer)
    tokenizer(["a", "longer one"], padding=True, truncation=True, max_length=3)
    assert tokenizer_hash(tokenizer) == before
    tokenizer.add_tokens(["<extra>"])
    assert tokenizer_hash(tokenizer) != before


def test_a_folder_that_is_not_there_is_refused_at_once():
    for path in ("./nowhere", "/no/where", "a/b/c"):
        with pytest.raises(ModelError, match="there is no folder"):
            load(path)


def test_a_tokenizer_that_gives_up_is_told() -> None:
    """Its regular expression is the checkpoint's own; Rust ends with a panic, which is no Exception."""
    from tokenizers import Regex, pre_tokenizers

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    with pytest.raises(ModelError, match="the tokenizer fails on the text"):
        encode(tokenizer, "x" * 60)


def test_a_template_writes_what_the_library_writes():
    known = with_template(SAYS)
    for messages in (ASKED, [{"role": "user", "content": "x" * 1_000_000}]):
        assert rendered(known, messages) == known.apply_chat_template(messages, tokenize=False)


def test_a_system_message_stands_before_the_corpus_and_changes_nothing_else():
    tokenizer = tokenizer_of("byte level", "added", CHAT)
    plain = prompt_for(tokenizer)
    for text in ("Be brief.", ""):
        given = with_system(tokenizer, plain, text)
        assert given == replace(plain, before=f"<s>[system]{text}[user]")


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT,
        CHAT.replace("messages %}[", "messages if m.role != 'system' %}["),
        CHAT.replace("[assistant]", "[assistant]{% if messages[0].role == 'system' %}!{% endif %}"),
    ],
    ids=["no template", "refused", "left out", "elsewhere too"],
)
def test_a_system_message_that_cannot_stand_there_is_refused(template):
    tokenizer = tokenizer_of("byte level", "added", template)
    with pytest.raises(ConfigError, match="no place for a system message"):
        with_system(tokenizer, prompt_for(tokenizer), "Be brief.")


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
def test_a_template_that_fails_says_why(template, says):
    with pytest.raises(TemplateRefuses, match=says):
        rendered(with_template(template), ASKED)


def test_a_template_that_is_or_writes_too_much_is_refused():
    with pytest.raises(ModelError, match="writes more than 65,536 characters"):
        rendered(with_template(TOO_MUCH + SAYS), ASKED)
    with pytest.raises(ModelError, match="has more than 1,048,576 characters"):
        rendered(with_template("x" * LONGEST_TEMPLATE + SAYS), ASKED)
    echoes = with_template("{{ messages[0]['content'] * 3 }}")
    assert len(rendered(echoes, [{"role": "user", "content": "x" * LONGEST_WRITTEN}])) == 3 * LONGEST_WRITTEN


def test_a_prompt_and_a_server_say_so():
    with pytest.raises(ModelError, match="writes more than"):
        prompt_for(with_template(TOO_MUCH + SAYS))
    template = Template(with_template("{% if messages[1] %}" + TOO_MUCH + "{% endif %}" + SAYS))
    assert template.rendered([Message("user", "Who?")]) == "<Who?>"
    with pytest.raises(WrongField, match="writes more than"):
        template.rendered([Message("user", "Who?"), Message("assistant", "I.")])
