"""Continuous batching: an answer is that of `Engine.answer`, whoever else is answered; and nobody starves."""

import gc
import random
import time
import weakref

import pytest
import torch

from offload_decode.common.errors import ConfigError, ContextEnds, StoreDamaged
from offload_decode.engine import grounded
from offload_decode.engine.batching import run_turns
from offload_decode.engine.engine import Engine
from offload_decode.server import answer_text
from offload_decode.server import service as service_module
from offload_decode.server.requests import (
    Busy,
    Delta,
    Ended,
    Generation,
    Prompted,
    TimedOut,
    TooLarge,
)
from offload_decode.server.sequences import RunningRequest
from offload_decode.server.service import ChatRequest, CompletionRequest
from tests.server.conftest import TEXTS, Letters, Listener, ask
from tests.server.test_catalog import until
from tests.tiny import let_models_write

QUESTIONS = ("What is the colour of thing 3?", "Who jumps?", "Why", "Name the number of thing 11, please.")


def complete(service, model, prompt, most, **more):
    listener = Listener()
    asked = CompletionRequest("id", model, Generation(max_tokens=most), prompt=prompt, **more)
    service.complete(asked, listener)
    return listener.all()


@pytest.fixture(scope="module")
def answer(shelf):
    """Tokens of `Engine.answer`, from an engine of its own."""
    engines: dict[tuple[object, ...], Engine] = {}
    loaded = None

    def answered(store, question, tokens=12, selector="topk", **options):
        nonlocal loaded
        key = (store, selector, *sorted(options.items()))
        if key not in engines:
            path, options = shelf / "stores" / f"{store}.kv", options or {"budget": "24"}
            engines[key] = Engine.open(path, loaded, selector=selector, options=options)
            loaded = engines[key].loaded
        return list(engines[key].answer(question, tokens).tokens)

    return answered


def test_answers_are_those_of_the_engine_whoever_else_is_answered(service, answer):
    asked = [
        (store, question, 4 + 3 * number, selector, options)
        for number, question in enumerate(QUESTIONS)
        for store in TEXTS
        for selector, options in (
            ("topk", {"budget": "24"}),
            ("dense", {}),
            ("quest", {"budget": "32"}),
            ("h2o", {"budget": "64"}),
        )
    ]
    random.Random(0).shuffle(asked)
    listeners = []
    for store, question, tokens, selector, options in asked:
        listeners.append(ask(service, store, question, tokens, selector=selector, options=options))
        time.sleep(0.005)  # so that they join while others are being answered
    for listener, (store, question, tokens, selector, options) in zip(listeners, asked, strict=True):
        heard = listener.all()
        assert heard.error is None
        assert heard.tokens[0] == answer(store, question, tokens, selector, **options), (store, selector)
    assert not any(map(service.scheduler.uses, TEXTS))


def test_a_bare_model_answers_as_generate(service, shelf):
    loaded = service.loaded_models.model(service.catalog.entry("book"))
    ids = torch.tensor([[1, *range(70, 100)]])
    with torch.inference_mode():
        plain = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False
        )
    heard = complete(service, "model", ids[0].tolist(), 9)
    assert heard.tokens[0] == plain[0, ids.shape[1] :].tolist()


def test_several_answers_to_one_question_differ_by_their_draws_alone(service, answer):
    same = ask(service, n=3).all()
    assert same.tokens[0] == same.tokens[1] == same.tokens[2] == answer("book", QUESTIONS[0])
    drawn = [
        ask(service, n=2, generation=Generation(max_tokens=12, temperature=2.0, seed=5)).all()
        for _ in range(2)
    ]
    assert drawn[0].tokens == drawn[1].tokens
    assert drawn[0].tokens[0] != drawn[0].tokens[1]


def test_the_prompts_log_probabilities_are_the_models(service, shelf):
    engine = Engine.open(shelf / "stores" / "book.kv", selector="dense")
    tokens = list(range(70, 100))
    heard = complete(service, "book", tokens, 0, selector="dense", prompt_logprobs=2)
    whole = torch.tensor([[*engine.store.tokens.tolist(), *tokens]])
    with torch.inference_mode():
        expected = engine.loaded.model(whole).logits[0].log_softmax(-1)
    stored = engine.prefix.length
    scores = heard.scores
    assert [one.token for one in scores] == tokens
    assert scores[0].logprob is None
    for place, one in enumerate(scores[1:], start=stored):
        best = expected[place].topk(2)
        assert one.logprob == pytest.approx(float(expected[place, one.token]), abs=1e-4)
        assert [token for token, _ in one.top] == best.indices.tolist()
    assert heard.answers[0].finish == "length"


def test_a_long_question_runs_in_parts_while_others_are_answered(serve, monkeypatch):
    service = serve()
    # The least that prompts may take of a step:
    monkeypatch.setattr("offload_decode.server.scheduler.STEP_S", 0.0)
    short = ask(service, "book", QUESTIONS[0], 120)
    short.until(Delta)
    long = ask(service, "notes", "Why? " * 200, 2)
    long.until(Prompted)
    assert short.events.qsize() >= 5  # tokens came while it was being read
    assert long.all().error is None
    assert short.all().error is None


@pytest.mark.parametrize(("selector", "most"), [("h2o", 64), ("snapkv", 1000)])
def test_prompts_of_several_groups_share_the_time_of_a_step(serve, monkeypatch, selector, most):
    class Known(dict):
        def get(self, *_):
            return 1 / 64

        def __setitem__(self, *_):
            pass

    service, steps, passes = serve(), [], []
    monkeypatch.setattr("offload_decode.server.scheduler.STEP_S", 1.0)  # 64 tokens
    monkeypatch.setattr(service.scheduler, "_pace", Known())
    run, step = run_turns, service.scheduler._step

    def counted(turns):
        passes.extend(len(turn.tokens) for turn in turns if len(turn.tokens) > 1)
        return run(turns)

    def one_step():
        passes.clear()
        step()
        steps.append(sum(passes))

    monkeypatch.setattr("offload_decode.server.scheduler.run_turns", counted)
    monkeypatch.setattr(service.scheduler, "_step", one_step)
    short = ask(service, "book", QUESTIONS[0], 10_000)
    short.until(Delta)
    steps.clear()
    asked = [ask(service, "notes", f"{n} Why? " * 60, 2, selector=selector) for n in range(4)]
    assert all(one.all().error is None for one in asked)
    short.ticket.cancel()
    assert 0 < max(steps) <= most


def test_a_cancelled_request_frees_its_memory(service):
    listener = ask(service, tokens=5000)
    listener.until(Delta)
    (running,) = service.scheduler._running
    held = weakref.ref(running.conversation.cache)
    del running
    listener.ticket.cancel()
    listener.ticket.cancel()
    until(lambda: not service.scheduler._running and gc.collect() >= 0 and held() is None)
    assert ask(service).all().error is None


def test_a_finished_request_is_freed_without_the_garbage_collector(service, monkeypatch):
    """Who asked holds the ticket, and the request tells who asked: without a collector both would stay."""
    made, begin = [], RunningRequest.__init__
    monkeypatch.setattr(
        RunningRequest, "__init__", lambda own, *given: made.append(weakref.ref(own)) or begin(own, *given)
    )
    assert ask(service).all().error is None  # whatever is set up once
    gc.collect()
    gc.disable()
    try:
        assert ask(service).all().error is None
        until(lambda: made[-1]() is None)
    finally:
        gc.enable()


def test_a_request_cancelled_at_its_end_is_not_left_running(service):
    class Leaving(Listener):
        def __call__(self, event):
            super().__call__(event)
            if isinstance(event, Ended):
                self.ticket.cancel()

    listener = Leaving()
    asked = CompletionRequest("id", "book", Generation(max_tokens=50), prompt="Why")
    listener.ticket = service.complete(asked, listener)
    listener.until(Ended)
    until(lambda: b'num_requests_running{model_name="book"} 0.0' in service.metrics.text())


def test_a_text_is_too_long_before_its_tokens_are_counted(serve, monkeypatch):
    service, messages = serve(max_prompt=10), [{"role": "user", "content": "word " * 100}]
    for prompts in ("chat_tokens", "completion_tokens", "text_ids"):
        monkeypatch.setattr(f"offload_decode.server.service.{prompts}", None)
    for too_long in (
        lambda: service.chat(ChatRequest("id", "book", messages=messages), None),
        lambda: service.complete(CompletionRequest("id", "book", prompt="word " * 100), None),
        lambda: service.tokenize("book", "word " * 100),
        lambda: service.tokenize("book", messages=messages),
    ):
        with pytest.raises(TooLarge, match="at most 160 characters"):
            too_long()


def test_too_much_is_refused(serve):
    service = serve(max_running=1, max_waiting=1, max_prompt=400)
    first = ask(service, tokens=3000)
    first.until(Delta)
    second = ask(service)
    with pytest.raises(Busy, match="waiting already"):
        ask(service)
    with pytest.raises(TooLarge, match="takes 400"):
        ask(service, question="Why? " * 200)
    with pytest.raises(TooLarge, match="2 answers at once, and this server writes 1"):
        ask(service, n=2)
    first.ticket.cancel()
    assert second.all().error is None


def test_an_answer_that_takes_too_long_is_ended(service):
    heard = ask(service, tokens=100_000, deadline_s=0.3).all()
    assert isinstance(heard.error, TimedOut)
    assert "0.3 seconds" in str(heard.error)


def test_a_store_that_is_damaged_fails_its_own_requests_alone(serve, own, answer):
    service = serve(own)
    good, bad = ask(service, "book", tokens=50), ask(service, "notes", tokens=5000)
    for listener in (good, bad):
        listener.until(Delta)
    for file in (own / "notes.kv" / "layers").glob("*/values/c.*"):
        with file.open("r+b") as handle:
            handle.truncate(file.stat().st_size // 2)
    heard = bad.all()
    assert isinstance(heard.error, StoreDamaged)
    assert good.all().error is None
    assert ask(service).all().tokens[0] == answer("book", QUESTIONS[0])


def test_a_request_that_cannot_begin_fails_alone(service):
    with pytest.raises(ConfigError, match="unknown selector"):
        ask(service, selector="psychic")
    with pytest.raises(ConfigError, match="budget"):
        ask(service, selector="topk", options={"budget": "lots"})
    assert ask(service).all().error is None


def test_a_second_turn_runs_its_own_tokens_alone(service, answer):
    first = ask(service)
    heard = first.all()
    messages = [
        {"role": "user", "content": QUESTIONS[0]},
        {"role": "assistant", "content": heard.text},
        {"role": "user", "content": "Why?"},
    ]
    again = ask(service, messages=messages).all()
    stored = service.loaded_models.get(service.catalog.entry("book")).start.prefix.length
    assert heard.usage.cached == stored
    # All but the last token of the answer have run.
    assert again.usage.cached == heard.usage.prompt + heard.usage.completion - 1
    service.prefix_cache.drop(model="book")
    anew = ask(service, messages=messages).all()
    assert anew.usage.cached == stored
    assert anew.tokens == again.tokens


def test_running_answers_have_a_grace_period_when_the_server_stops(serve):
    service = serve()
    listener, endless = ask(service, tokens=20), ask(service, tokens=100_000)
    endless.until(Delta)
    service.scheduler.close(grace_s=1.0)
    assert listener.all().error is None
    assert isinstance(endless.all().error, Busy)
    with pytest.raises(Busy, match="being stopped"):
        ask(service)


@pytest.mark.parametrize(("stop", "told"), [(("Red", "Blue"), "Blue"), (("Red",), None)])
def test_the_stop_string_of_the_request_that_ended_an_answer_is_told(service, monkeypatch, stop, told):
    let_models_write(monkeypatch, "So: Blue.\n\nQuestion: Why?")
    listener = ask(service, generation=Generation(max_tokens=30, stop=stop))
    while not isinstance(ended := listener.next(), Ended):
        pass
    assert (ended.finish, ended.stop) == ("stop", told)


def test_the_next_question_of_a_model_without_a_template_is_not_shown(service, monkeypatch):
    written = "Blue.\n\nQuestion: Why?"
    let_models_write(monkeypatch, written)
    heard = ask(service, tokens=len(written)).all()
    assert (heard.text, heard.answers[0].finish) == ("Blue.", "stop")
    whole = complete(service, "book", "Colours:", len(written))  # whoever completes a text says where it ends
    assert whole.text == written


def test_an_answer_names_the_passages_it_attended_to(service):
    heard = ask(service, cite=True, n=2, generation=Generation(max_tokens=8, temperature=1.0, seed=1)).all()
    (document,) = heard.citations
    assert document.name == "book.txt"
    assert 0 < document.share <= 1
    for span in document.spans:
        assert span.text in TEXTS["book"]
        assert 0 < span.share <= document.share + 1e-6
    assert not any(kept.prefix.watches for kept in service.prefix_cache._entries), (
        "nor do they go on watching"
    )
    assert ask(service).all().citations is None


def test_an_answer_is_as_grounded_as_that_of_an_engine(service, shelf, monkeypatch):
    monkeypatch.setattr(grounded, "kind_of", lambda config: "any")
    monkeypatch.setitem(grounded.WEIGHTS, "any", grounded.Weights(-0.5, 3.0, 1.0))
    engine = Engine.open(shelf / "stores" / "book.kv", options={"budget": "24"})
    expected = engine.answer("Why is it so?", 20).grounded
    for cite in (False, True):
        heard = ask(service, question="Why is it so?", tokens=20, cite=cite).all()
        assert heard.answers[0].grounded == pytest.approx(expected, abs=1e-4)
    both = ask(service, question="Why is it so?", n=2, tokens=20).all().answers
    assert [one.grounded for one in both.values()] == pytest.approx([expected] * 2, abs=1e-4)


def test_what_is_told_of_an_answer_leaves_out_its_stop_string(service, shelf, monkeypatch):
    monkeypatch.setattr(grounded, "kind_of", lambda config: "any")
    monkeypatch.setitem(grounded.WEIGHTS, "any", grounded.Weights(-0.5, 3.0, 1.0))
    monkeypatch.setattr(answer_text, "Pieces", Letters)
    stop = ask(service, question="Why is it so?", tokens=4).all().text[1:]
    engine = Engine.open(shelf / "stores" / "book.kv", options={"budget": "24"})
    list(engine.generate(engine.ask("Why is it so?"), 4))
    whole = engine.grounded
    engine.evidence.cut(1)
    stopping = Generation(max_tokens=12, stop=(stop,))
    heard = ask(service, question="Why is it so?", generation=stopping, check=True).all()
    assert heard.answers[0].grounded == pytest.approx(engine.grounded, abs=1e-4)
    assert heard.answers[0].grounded != pytest.approx(whole, abs=1e-4)
    assert heard.done.checked.tokens == 1
    # The first token is all that there is to stop at.
    stopping = Generation(max_tokens=12, stop=(heard.text[0],))
    heard = ask(service, question="Why is it so?", generation=stopping, check=True).all()
    assert (heard.text, heard.done.checked) == ("", None)
    assert "it was not checked: it has no tokens" in heard.done.notes


def test_a_failed_request_emits_no_more_events(service, monkeypatch):
    """One of its answers fails: in the same pass others of its answers had their tokens too."""
    take = RunningRequest._take

    def broken(self, one, logits):
        if one.index == 0 and one.tokens:
            raise ValueError("it broke")
        take(self, one, logits)

    monkeypatch.setattr(RunningRequest, "_take", broken)
    listener = ask(service, n=3)
    assert isinstance(listener.all().error, ValueError)
    assert ask(service, question="Why?", tokens=1).all().error is None  # steps go on
    assert listener.events.empty()


@pytest.mark.parametrize("most", [-1, 1_000_000])
def test_an_answer_of_any_length_is_as_long_as_there_is_room_for(serve, most):
    service = serve(running_bytes=300_000)
    heard = ask(service, tokens=most, generation=Generation(max_tokens=most, ignore_end=True)).all()
    assert heard.error is None
    assert heard.answers[0].finish == "length"
    assert 0 < heard.usage.completion < 4096


def test_reasoning_is_told_apart_where_the_template_begins_it(service):
    tokenizer = service.loaded_models.model(service.catalog.entry("model")).known_tokenizer
    tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}<think>{# </think> #}"
    whole = ask(service, "model").all()
    apart = ask(service, "model", separate_reasoning=True).all()
    assert (apart.text, apart.answers[0].reasoning) == ("", whole.text.strip())


def test_a_prompt_that_fills_the_context_is_refused(service):
    with pytest.raises(ContextEnds, match="ends at 4,096"):
        ask(service, question="a" * 5000)


def test_logits_of_a_question_that_runs_whole_count_as_memory(serve):
    service = serve(running_bytes=800_000)
    heard = complete(service, "book", [70] * 300, 0, selector="topk", prompt_logprobs=0)
    assert len(heard.scores) == 300
    with pytest.raises(TooLarge, match="more memory"):
        complete(service, "book", [70] * 300, 0, selector="quoka", prompt_logprobs=0)


def test_a_server_that_is_idle_gives_memory_back_once(serve, monkeypatch):
    given = []
    monkeypatch.setattr("offload_decode.server.scheduler.give_back", lambda: given.append(time.monotonic()))
    monkeypatch.setattr("offload_decode.server.scheduler.IDLE_S", 0.05)
    service = serve()
    assert not given
    for turn in range(2):
        assert ask(service).all().error is None
        time.sleep(0.3)
        assert len(given) == turn + 1


def test_a_chat_of_a_tools_result_alone_is_answered(service, monkeypatch):
    """The model of this test has no template that would write it; nothing else needs a word of the user's."""
    monkeypatch.setattr(service_module, "chat_tokens", lambda *_: [70, 71, 72])
    result = {"role": "tool", "tool_call_id": "c1", "content": "Ada"}
    assert ask(service, messages=[result], tokens=3).all().usage.completion == 3
