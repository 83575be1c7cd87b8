"""Real answers over the wire: a tiny model, its stores, and the clients that people use."""

import json
import math

import httpx
import pytest
import torch
from openai import OpenAI

from offload_decode.engine.engine import Engine
from offload_decode.prefill_jobs.collect import collect
from offload_decode.prefill_jobs.job import Maker, Settings
from offload_decode.server.http.app import create_app
from tests.cli.conftest import run
from tests.server.http.conftest import listening

QUESTIONS = ("What is the colour of thing 3?", "Who jumps?")


@pytest.fixture
def url(service):
    with listening(create_app(service)) as address:
        yield address


@pytest.fixture
def client(url):
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def test_a_chat_is_what_the_engine_answers(client, shelf):
    engine = Engine.open(shelf / "stores" / "book.kv", selector="topk", options={"budget": "24"})
    for question in QUESTIONS:
        told = engine.answer(question, 12)
        asked = {"model": "book", "messages": [{"role": "user", "content": question}], "max_tokens": 12}
        answer = client.chat.completions.create(**asked)
        assert answer.choices[0].message.content == told.text
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 12)
        assert answer.usage.prompt_tokens_details.cached_tokens >= engine.prefix.length
        chunks = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == told.text
        response = client.responses.create(model="book", input=question, max_output_tokens=12)
        assert response.output_text == told.text


def test_a_question_of_the_command_line_is_answered_as_without_a_server(url, shelf):
    budget = ("-o", "budget=24", "-o", "crossover=no")  # the server of this test was not started by a command
    asked = [QUESTIONS[0], "--max-new-tokens", "12", *budget]
    here = run("ask", shelf / "stores" / "book.kv", *asked)
    there = run("ask", "book", *asked, "--server", url)
    assert (there.code, there.out) == (0, here.out)


def test_a_text_that_ends_at_once_is_scored_up_to_its_end_token(serve, shelf):
    service = serve()
    loaded = service.loaded_models.model(service.catalog.entry("book"))
    prompt = list(range(70, 80))
    with torch.inference_mode():
        likeliest = int(loaded.model(torch.tensor([prompt])).logits[0, -1].argmax())
    loaded.model.generation_config.eos_token_id = likeliest
    with listening(create_app(service)) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        (choice,) = client.completions.create(
            model="model", prompt=prompt, echo=True, logprobs=1, max_tokens=1
        ).choices
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.token_logprobs) == len(prompt) + 1


@pytest.mark.slow
def test_lm_eval_scores_and_asks(url, service, tmp_path):
    """`lm-eval`'s clients, with the tokenizer of the server: what they sum is what the model says."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")
    from lm_eval.tasks import TaskManager

    rows = [
        {"q": "Thing 3 is", "choices": [" number 9", " a car"], "label": 0},
        {"q": "The lazy", "choices": [" number", " dog"], "label": 1},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    choose = {
        "task": "choose",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
        **shared,
    }
    write = {
        "task": "write",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
        **shared,
    }

    def samples(client, path, tasks, **more):
        told = lm_eval.simple_evaluate(
            model=client,
            model_args={"base_url": f"{url}/v1/{path}", "max_retries": 1, **more},
            tasks=tasks,
            apply_chat_template="chat" in client,
            bootstrap_iters=0,
            task_manager=TaskManager(include_defaults=False),
        )
        return [sample["resps"] for task in told["samples"].values() for sample in task]

    scored = samples("local-completions", "completions", [choose], model="model", num_concurrent=2)
    loaded = service.loaded_models.model(service.catalog.entry("model"))
    tokenizer = loaded.known_tokenizer
    for row, both in zip(rows, scored, strict=True):
        for choice, ((said, greedy),) in zip(row["choices"], both, strict=True):
            before = tokenizer.encode(row["q"], add_special_tokens=False)
            after = tokenizer.encode(choice, add_special_tokens=False)
            with torch.inference_mode():
                known = loaded.model(torch.tensor([before + after])).logits[0].log_softmax(-1)
            rows_of = known[len(before) - 1 : -1]
            assert math.isclose(
                said, float(rows_of.gather(1, torch.tensor(after)[:, None]).sum()), abs_tol=1e-2
            )
            assert greedy == (rows_of.argmax(-1).tolist() == after)
    for client, path in (
        ("local-completions", "completions"),
        ("local-chat-completions", "chat/completions"),
    ):
        written = samples(client, path, [write], model="book")
        assert all(isinstance(text, str) and text for ((text,),) in written)


def test_stores_that_answer_together_are_told_in_every_shape(serve, shelf):
    with listening(create_app(serve())) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        question, more = QUESTIONS[0], {"together": ["book", "notes"], "join": "product"}
        asked = {"model": "book", "messages": [{"role": "user", "content": question}], "max_tokens": 6}
        whole = client.chat.completions.create(**asked, extra_body=more)
        *_, last = client.chat.completions.create(**asked, extra_body=more, stream=True)
        response = client.responses.create(
            model="book", input=question, max_output_tokens=6, instructions="Answer.", extra_body=more
        )
        message = httpx.post(f"{url}/v1/messages", json=asked | more, timeout=60).json()
        stream = httpx.post(f"{url}/v1/messages", json=asked | more | {"stream": True}, timeout=60).text
        for told in (whole.model_extra, last.model_extra, response.model_extra, message):
            assert [one["document"] for one in told["joined"]["documents"]] == ["book", "notes"]
            assert sum(one["share"] for one in told["joined"]["documents"]) == pytest.approx(1)
            assert (told["joined"]["join"], told["joined"]["exact"]) == ("product", False)
            assert "Joined by product from 2 documents" in told["warnings"][-1]
        assert len(response.model_extra["warnings"]) == 2, "the system message is told of too"
        assert "Joined by product" in stream
        assert not client.chat.completions.create(**asked).model_extra.get("joined")
        for wrong, param in (({"n": 2}, "n"), ({"join": "vote"}, "join"), ({"together": 0}, "together")):
            refused = httpx.post(f"{url}/v1/chat/completions", json=asked | more | wrong, timeout=60)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        scored = {"model": "book", "prompt": "It", **more}
        assert httpx.post(f"{url}/v1/completions", json=scored, timeout=60).status_code == 400


def test_a_collection_is_a_model_by_its_name(serve, shelf, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "red.txt").write_text("The colour of this thing is red. " * 4)
    maker = Maker(str(shelf / "model"), Settings())
    collect(str(tmp_path / "texts"), tmp_path / "colours.collection", maker)
    with listening(create_app(serve(tmp_path / "colours.collection"))) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        found = {one.id: one.model_extra for one in client.models.list().data}
        assert found["colours.collection"]["documents"] == 1
        assert found["colours.collection"]["tokens"] > 0
        asked = {"messages": [{"role": "user", "content": "Is it red?"}], "max_tokens": 4}
        answer = client.chat.completions.create(model="colours.collection", **asked)
        assert answer.model_extra["joined"]["documents"][0]["document"] == "red.txt"
        *written, last = client.chat.completions.create(model="colours.collection", stream=True, **asked)
        assert (
            "".join(part.choices[0].delta.content or "" for part in written)
            == answer.choices[0].message.content
        )
        assert last.choices[0].delta.content is None
        assert last.model_extra["joined"] == answer.model_extra["joined"]
        assert httpx.get(f"{url}/v1/stores").json()["data"] == []
        assert httpx.get(f"{url}/v1/stores/colours.collection").status_code == 404
