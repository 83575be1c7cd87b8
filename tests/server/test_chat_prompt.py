"""Messages to tokens: those of the engine's own conversations, for every kind of tokenizer."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_decode.engine.engine import Engine
from offload_decode.models.loading import wrap
from offload_decode.models.prompt import encode, encode_text, prompt_for
from offload_decode.prefill_jobs.corpus import TextDocument, encode_corpus
from offload_decode.prefill_jobs.job import prefill_texts
from offload_decode.server.chat_prompt import chat_tokens, completion_tokens, keep_answer, text_ids
from offload_decode.server.messages import arguments_of, read_messages
from offload_decode.server.prefix_cache import AnswerTokens
from offload_decode.server.requests import WrongField
from tests.models.tokenizers import KINDS, tokenizer_of
from tests.tiny import tiny_model

CHAT = (
    "<s>{% if tools %}[tools]{{ tools | tojson }}[/tools]\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<call>{{ c.function | tojson }}{% endfor %}{% endif %}"
    "{{ m.content }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SPACED = CHAT.replace("{{ m.content }}", "{{ ' ' if m.role == 'assistant' }}{{ m.content | trim }}")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT
UNSEEN = CHAT.replace("messages %}[", "messages if m.role in ('user', 'assistant') %}[")
IN_PARTS = CHAT.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def called(*names, **arguments):
    calls = [
        {"id": f"call{i}", "type": "function", "function": {"name": n, "arguments": json.dumps(arguments)}}
        for i, n in enumerate(names)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def answered(text):
    return {"role": "tool", "tool_call_id": "call0", "content": text}


class Fake:
    """As much of a loaded model as prompts need."""

    def __init__(self, kind="byte level", template=None):
        self.known_tokenizer = tokenizer_of(kind, "added", template)
        self.prompt = prompt_for(self.known_tokenizer)
        self.tokenizer_hash = ""
        self.model = self

    def get_input_embeddings(self):
        return self

    @property
    def num_embeddings(self):
        return len(self.known_tokenizer)

    def text(self, tokens):
        return self.known_tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("template", [None, CHAT, SPACED], ids=["plain", "chat", "spaced"])
@pytest.mark.parametrize("kind", ["byte level", "prepend", "llama 3"])
def test_turns_have_the_tokens_of_the_engines_conversation(kind, template, tmp_path):
    tokenizer = tokenizer_of(kind, "added", template)
    loaded = wrap(tiny_model(vocab_size=len(tokenizer)), tokenizer)
    prefill_texts(loaded, [TextDocument("d", "The lamp burns low.")], tmp_path / "store")
    engine = Engine.open(tmp_path / "store", loaded, selector="dense")
    messages, answer_tokens = [], AnswerTokens()
    for question in (" Who wrote it? ", "What burns?", "And </s> then?"):
        messages.append(user(question))
        logits = engine.ask(question)
        assert chat_tokens(loaded, True, messages, None, answer_tokens, "book") == engine.tokens
        answer = list(engine.generate(logits, 6))
        engine.extend([])
        told = said(engine.decode(answer))
        keep_answer(loaded, messages, told, answer, answer_tokens, "book")
        messages.append(told)


kinds = pytest.mark.parametrize("kind", KINDS)
templates = pytest.mark.parametrize("template", [None, CHAT], ids=["plain", "chat"])
texts = st.text(st.sampled_from("aeo .,\n(1_é字🙂<"), max_size=10).filter(str.strip)


@kinds
@templates
@given(corpus=texts, question=texts, answer=texts, following=texts)
@settings(max_examples=10, deadline=None)
def test_turns_that_are_not_known_are_encoded_as_one(kind, template, corpus, question, answer, following):
    loaded = Fake(kind, template)
    tokenizer, prompt = loaded.known_tokenizer, loaded.prompt
    question, answer, following = (text.strip() for text in (question, answer, following))
    stored, *_ = encode_corpus(tokenizer, prompt, [TextDocument("d", corpus)])
    tail = chat_tokens(loaded, True, [user(question), said(answer), user(following)])
    if template:
        corpus = corpus.rstrip() + prompt.join.gap
        turns = [user(corpus + question), said(answer), user(following)]
        whole = encode(tokenizer, rendered(tokenizer, turns))
    else:
        turns = f"{question}\nAnswer: {answer}{prompt.join.gap}Question: {following}\nAnswer:"
        text = f"{corpus.rstrip()}{prompt.join.gap}Question: {turns}"
        whole = text_ids(loaded, text)
    assert [*stored.tolist(), *tail] == whole


def rendered(tokenizer, messages, **more):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)


@kinds
def test_without_a_store_the_template_puts_the_messages(kind):
    loaded = Fake(kind, CHAT)
    messages = [{"role": "system", "content": "Be brief."}, user("Who? "), said("He."), user("Why?")]
    expected = encode(loaded.known_tokenizer, rendered(loaded.known_tokenizer, messages))
    assert chat_tokens(loaded, False, messages) == expected


@kinds
def test_without_a_template_the_form_is_plain(kind):
    loaded = Fake(kind)
    tokens = chat_tokens(loaded, False, [user("Who? "), said("The keeper."), user("Why?")])
    gap = loaded.prompt.join.gap
    text = f"Question: Who?\nAnswer: The keeper.{gap}Question: Why?\nAnswer:"
    assert tokens == text_ids(loaded, text)


@pytest.mark.parametrize("template", [None, CHAT, SPACED], ids=["plain", "chat", "spaced"])
@pytest.mark.parametrize("stored", [True, False])
def test_known_answers_keep_their_tokens(stored, template):
    loaded, answer_tokens = Fake("byte level", template), AnswerTokens()
    question = user("Who?")
    odd = [token for letter in "lamp" for token in encode_text(loaded.known_tokenizer, letter)]
    assert odd != encode_text(loaded.known_tokenizer, "lamp")
    keep_answer(loaded, [question], said("lamp"), odd, answer_tokens, "book")
    asked = chat_tokens(loaded, stored, [question])
    tokens = chat_tokens(
        loaded, stored, [question, said(" lamp\n"), user("Why?")], None, answer_tokens, "book"
    )
    assert tokens[: len(asked) + len(odd)] == asked + odd
    for scope, first in (("cook", "Who?"), ("book", "Whom?")):
        others = [user(first), said("lamp"), user("Why?")]
        anew = chat_tokens(loaded, stored, others, None, answer_tokens, scope)
        assert anew == chat_tokens(loaded, stored, others)
        assert len(anew) < len(tokens) + (first == "Whom?")


def test_an_answer_that_is_cut_short_is_not_noted():
    loaded, answer_tokens = Fake(), AnswerTokens()
    tokens = encode_text(loaded.known_tokenizer, "the lamp END")
    keep_answer(loaded, [user("Who?")], said("the lamp"), tokens, answer_tokens, "")
    messages = [user("Who?"), said("the lamp"), user("Why?")]
    assert chat_tokens(loaded, True, messages, None, answer_tokens) == chat_tokens(loaded, True, messages)


def test_spellings_are_bounded_and_the_oldest_go_first():
    loaded, answer_tokens = Fake(), AnswerTokens(most_tokens=8)
    for name in ("a", "b", "c"):
        tokens = encode_text(loaded.known_tokenizer, "lamp")
        keep_answer(loaded, [user(name)], said("lamp"), [*tokens][:4], answer_tokens, "")
    known = [answer_tokens.of("", read_messages([user(name), said("lamp")]))[0] for name in ("a", "b", "c")]
    assert known[-1] is not None
    assert sum(len(tokens) for tokens in known if tokens) <= 8


@pytest.mark.parametrize(
    ("content", "answer", "told", "shown"),
    [
        ("{{ (m.content.split('.') | last) }}", "I think. lamp", "think", False),
        ("{{ '(so) ' if m.role == 'assistant' }}{{ m.content }}", "lamp", "(so) lamp", True),
    ],
)
def test_known_answers_stand_as_the_template_writes_them(content, answer, told, shown):
    """Reasoning that it leaves out of earlier turns does not come back in the answer's own tokens."""
    loaded, answer_tokens = Fake(template=CHAT.replace("{{ m.content }}", content)), AnswerTokens()
    tokens = encode_text(loaded.known_tokenizer, answer)
    keep_answer(loaded, [user("Who")], said(answer), tokens, answer_tokens, "")
    messages = [user("Who"), said(answer), user("Why")]
    assert (told in loaded.text(chat_tokens(loaded, False, messages, None, answer_tokens))) == shown


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_messages(stored, role):
    loaded = Fake(template=CHAT)
    tokens = chat_tokens(loaded, stored, [{"role": role, "content": "Be brief."}, user("Who?")])
    text = loaded.text(tokens)
    gap = "" if loaded.prompt.join.stored else loaded.prompt.join.gap
    alone = "<s>[system]Be brief.[user]Who?[assistant]"
    assert text == (f"{gap}Be brief.\n\nWho?[assistant]" if stored else alone)
    later = [user("Who?"), said("He."), {"role": role, "content": "Be long."}, user("Why?")]
    behind = loaded.text(chat_tokens(loaded, True, later))
    assert behind.endswith("He.</s>[user]Be long.\n\nWhy?[assistant]")


@pytest.mark.parametrize("template", [NO_SYSTEM, UNSEEN])
def test_a_template_that_knows_no_system_has_the_user_say_it(template):
    loaded = Fake(template=template)
    tokens = chat_tokens(loaded, False, [{"role": "system", "content": "Be brief."}, user("Who?")])
    assert loaded.text(tokens) == "<s>[user]Be brief.\n\nWho?[assistant]"


@pytest.mark.parametrize("stored", [True, False])
def test_parts_of_a_message_and_messages_of_a_role_are_joined(stored):
    loaded = Fake(template=SPACED)
    parts = [{"type": "text", "text": "Who "}, {"type": "text", "text": "is it?"}]
    joined = chat_tokens(loaded, stored, [user(parts), user("Say."), said("")])
    assert joined == chat_tokens(loaded, stored, [user("Who is it?\n\nSay.")])


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("template", [None, CHAT, SPACED, IN_PARTS])
def test_an_answer_that_was_begun_goes_on(stored, template):
    loaded = Fake(template=template)
    asked = loaded.text(chat_tokens(loaded, stored, [user("Who?")]))
    begun = loaded.text(chat_tokens(loaded, stored, [user("Who?"), said("The lamp")]))
    assert begun.startswith(asked)
    assert begun.removeprefix(asked).strip() == "The lamp"


@pytest.mark.parametrize("stored", [True, False])
def test_a_template_that_takes_parts_alone_is_given_them(stored):
    parts, plain = Fake(template=IN_PARTS), Fake(template=CHAT)
    messages = [user("Who?"), said("He."), user("Why?")]
    assert chat_tokens(parts, stored, messages) == chat_tokens(plain, stored, messages)


def test_an_answer_can_open_the_chat():
    loaded = Fake(template=CHAT)
    gap = loaded.prompt.gap[1]
    text = loaded.text(chat_tokens(loaded, True, [said("Hello."), user("Who?")]))
    assert text == f"{gap}[assistant]Hello.</s>[user]Who?[assistant]"


@pytest.mark.parametrize("smuggled", ["</s>", "a</s>b<s>", "<pad></s> é"])
@pytest.mark.parametrize("stored", [True, False])
@templates
def test_special_tokens_in_messages_are_letters(stored, template, smuggled):
    loaded = Fake(template=template)
    plain = [user("x"), said("x"), user("x")]
    spelled = [user(smuggled), said(smuggled), user(smuggled)]
    if template:
        plain += [called("look", it="x"), answered("x")]
        spelled += [called("look", it=smuggled), answered(smuggled)]
    counts = [
        [tokens.count(special) for special in range(3)]
        for tokens in (chat_tokens(loaded, stored, messages) for messages in (plain, spelled))
    ]
    assert counts[0] == counts[1]
    assert smuggled.strip() in loaded.text(chat_tokens(loaded, stored, spelled))


def test_tools_stand_where_the_template_puts_them_or_ahead_of_the_first_question():
    loaded = Fake(template=CHAT)
    told = f"[tools]{json.dumps(TOOLS)}[/tools]"
    alone = loaded.text(chat_tokens(loaded, False, [user("Who?")], TOOLS))
    assert alone == f"<s>{told}\n[user]Who?[assistant]"
    system = {"role": "system", "content": "Be brief."}
    behind = loaded.text(chat_tokens(loaded, True, [system, user("Who?")], TOOLS))
    assert behind == f"{loaded.prompt.gap[1]}Be brief.\n\n{told}\n\nWho?[assistant]"


@pytest.mark.parametrize("stored", [True, False])
def test_calls_of_tools_stand_as_the_template_puts_them(stored):
    loaded, answer_tokens = Fake(template=CHAT), AnswerTokens()
    messages = [user("Where?"), called("look", at="é"), answered("It is here.")]
    text = loaded.text(chat_tokens(loaded, stored, messages, TOOLS))
    asked = loaded.text(chat_tokens(loaded, stored, messages[:1], TOOLS))
    arguments = '{"arguments": {"at": "é"}, "name": "look"}'
    assert text.startswith(asked)
    rest = text.removeprefix(asked).replace('{"name": "look", "arguments": {"at": "é"}}', arguments)
    assert rest == f"<call>{arguments}</s>[tool]It is here.[assistant]"
    # As it was generated:
    odd = encode_text(loaded.known_tokenizer, '<call> {"name":"look"}')
    keep_answer(loaded, messages[:1], messages[1], odd, answer_tokens, "")
    known = chat_tokens(loaded, stored, messages, TOOLS, answer_tokens)
    begin = chat_tokens(loaded, stored, messages[:1], TOOLS)
    assert known[: len(begin) + len(odd)] == begin + odd
    assert loaded.text(known[len(begin) + len(odd) :]) == "</s>[tool]It is here.[assistant]"
    # And so is a whole further turn behind it.
    further = [*messages, said("Here."), user("Why?")]
    assert chat_tokens(loaded, stored, further, TOOLS, answer_tokens)[: len(known)] == known


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("before", [[], [called("look")]])
def test_what_came_of_a_call_is_the_users_turn(stored, before):
    """Without a word of the user's, as in Anthropic's form; a template may look for one."""
    looks = (
        "{% if 'user' not in (messages | map(attribute='role')) %}{{ raise_exception('no user') }}{% endif %}"
    )
    loaded = Fake(template=looks + CHAT)
    text = loaded.text(chat_tokens(loaded, stored, [*before, answered("It is here.")]))
    assert text.endswith("[tool]It is here.[assistant]")
    assert text.count("<call>") == len(before)


def test_a_template_may_name_the_day():
    loaded = Fake(template=CHAT.replace("<s>", "<s>It is today.</s>"))
    loaded.prompt = prompt_for(tokenizer_of("byte level", "added", CHAT.replace("<s>", "<s>Before.</s>")))
    messages = [user("Where?"), called("look"), answered("Here.")]
    text = loaded.text(chat_tokens(loaded, True, messages))
    assert text.startswith(f"{loaded.prompt.gap[1]}Where?[assistant]<call>")


def test_older_and_partial_forms_of_messages_are_read():
    call = {"id": "call0", "type": "function", "function": {"name": "look", "arguments": ""}}
    dictionary = {"id": "call1", "type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}
    older = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}
    read = read_messages(
        [
            user("Who?"),
            {"role": "assistant", "content": None},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            user("Why?"),
            {"role": "assistant", "content": None, "tool_calls": [call, dictionary]},
            {"role": "tool", "tool_call_id": "call0", "content": None},
            older,
            {"role": "function", "name": "look", "content": "It is."},
        ]
    )
    assert [one.role for one in read] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    assert (read[1].text, read[3].calls[0].arguments, read[4].text) == ("No.", "{}", "")
    assert arguments_of(read[3].calls[1]) == {"at": "é"}
    assert read[6].answers == read[5].calls[0].id


THINKS = CHAT.replace(
    "add_generation_prompt %}", "add_generation_prompt %}{{ '(no)' if enable_thinking is false }}"
)


@pytest.mark.parametrize("stored", [False, True])
def test_variables_of_the_template_stand_where_it_puts_them(stored):
    loaded = Fake(template=THINKS)
    plain = chat_tokens(loaded, stored, [user("Who?")])
    without = chat_tokens(loaded, stored, [user("Who?")], options={"enable_thinking": False})
    assert loaded.text(without) != loaded.text(plain)
    assert loaded.text(without).replace("(no)", "") == loaded.text(plain)


def test_variables_that_change_what_is_stored_are_refused_behind_a_store():
    loaded = Fake(template="{{ reasoning_effort }}" + CHAT)
    given = {"options": {"reasoning_effort": "high"}}
    assert "high" in loaded.text(chat_tokens(loaded, False, [user("Who?")], **given))
    with pytest.raises(WrongField, match="ask the model without a corpus"):
        chat_tokens(loaded, True, [user("Who?")], **given)
    for name in ("chat_template", "tokenize", "conversation"):
        with pytest.raises(WrongField, match="no variable of a chat template"):
            chat_tokens(loaded, False, [user("Who?")], options={name: "x"})


WRONG = [
    ("no message of the user", [{"role": "system", "content": "x"}]),
    ("no message of the user", [said("")]),
    ("no content", [user(None)]),
    ("no content", [{"role": "user"}]),
    ("only the assistant", [{**user("x"), "tool_calls": called("look")["tool_calls"]}]),
]


@pytest.mark.parametrize(("say", "messages"), WRONG)
@pytest.mark.parametrize("stored", [True, False])
def test_invalid_messages_are_refused(stored, say, messages):
    with pytest.raises(WrongField, match=say) as refused:
        chat_tokens(Fake(template=CHAT), stored, messages)
    assert refused.value.param == "messages"


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(
    ("template", "messages", "tools", "say"),
    [
        (None, [user("x")], TOOLS, "no chat template"),
        (CHAT.split("{% endif %}", 1)[1], [user("x")], TOOLS, "knows no tools"),
        (UNSEEN, [user("Where?"), called("look"), answered("Here.")], None, "knows no tools"),
    ],
)
def test_tools_that_a_template_would_leave_out_are_refused(stored, template, messages, tools, say):
    with pytest.raises(WrongField, match=say) as refused:
        chat_tokens(Fake(template=template), stored, messages, tools)
    assert refused.value.param == "tools"


def test_the_reason_of_a_template_that_refuses_is_passed_on():
    template = CHAT + "{% if messages | length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}"
    loaded = Fake()
    loaded.known_tokenizer = tokenizer_of("byte level", "added", template)
    loaded.prompt = prompt_for(tokenizer_of("byte level", "added", CHAT))
    with pytest.raises(WrongField, match=r"roles must alternate.*or leave out what it does not know"):
        chat_tokens(loaded, False, [user("x"), said("y"), user("z")])


@kinds
def test_a_raw_prompt_goes_on_with_the_text(kind):
    loaded = Fake(kind)
    tokenizer = loaded.known_tokenizer
    stored, *_ = encode_corpus(tokenizer, loaded.prompt, [TextDocument("d", "The lamp burns.")])
    gap = loaded.prompt.join.gap
    prompt = "Who wrote it? </s> a" if loaded.prompt.join.stored else f"{gap}Who wrote it? </s> a"
    tail = completion_tokens(loaded, True, prompt)
    assert tokenizer.eos_token_id in tail
    assert [*stored.tolist(), *tail] == text_ids(loaded, f"The lamp burns.{gap}Who wrote it? </s> a")
    assert completion_tokens(loaded, False, "x")[0] == tokenizer.bos_token_id
    assert text_ids(loaded, "x", special=False) == completion_tokens(loaded, False, "x")[1:]


@pytest.mark.parametrize("stored", [True, False])
def test_token_ids_are_taken_as_they_are(stored):
    loaded = Fake()
    assert completion_tokens(loaded, stored, [5, 2, 7]) == [5, 2, 7]
    for wrong in ([], [-1], [len(loaded.known_tokenizer)], [True], [1.0], ["x"], [[1]]):
        with pytest.raises(WrongField) as refused:
            completion_tokens(loaded, stored, wrong)
        assert refused.value.param == "prompt"
    with pytest.raises(WrongField):
        completion_tokens(loaded, True, "")
    assert completion_tokens(loaded, stored, "\ud800") == completion_tokens(loaded, stored, "\ufffd")
