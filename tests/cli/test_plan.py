"""`plan` says what fits, proposes what does, and the other commands refuse what does not."""

import json
import re

import pytest

from offload_decode.cli import output
from offload_decode.cli.options import byte_count
from offload_decode.common.errors import ConfigError
from offload_decode.models.size_estimate import estimate_size
from tests.cli.conftest import done, json_of, refused, run, write_lines
from tests.models import few_bits
from tests.planning.estimates import llama_8b

ROOMY = ("--gpu", "none", "--ram", "64GiB", "--disk", "1TB")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 << 30),
        ("16G", 16 << 30),
        ("64GB", 64 * 10**9),
        ("512mb", 512 * 10**6),
        ("1.5 TiB", 3 << 39),
        ("1024", 1024),
        ("10KiB", 10240),
    ],
)
def test_sizes_as_people_write_them(text, size):
    assert byte_count(text) == size


@pytest.mark.parametrize("text", ["", "much", "16GX", "-1GiB", "0", "0.1", "GiB", "1e9", "16 Gi B"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="is no size"):
        byte_count(text)


def test_a_plan_that_fits(home):
    ran = done("plan", "--model", home / "model", "--tokens", "128K", *ROOMY)
    assert "131,072 tokens" in ran.out
    assert "It fits" in ran.out
    assert "It can be prefilled here." in ran.out
    told = json_of("plan", "--model", home / "model", "--tokens", "128K", *ROOMY)
    moved = {name: size for name, size in told["proposed"]["traffic"].items() if size}
    assert moved.keys() == {"weights", "scanned", "gathered"}
    printed = ("weights read", "keys scanned", "rows gathered")
    for name, size in zip(printed, moved.values(), strict=True):
        assert re.search(f"^{name} +{re.escape(output.size(size))} a token$", ran.out, re.MULTILINE)


def test_a_scaled_rope_is_planned_for(home):
    asked = ("plan", "--model", home / "model", "--tokens", "128K", *ROOMY)
    assert "positions" not in done(*asked).out
    told = done(*asked, "--rope", "dynamic:4").out
    assert "rotated as in a text of 131,584 tokens (dynamic RoPE)" in told
    assert "rope 'dynamic' is none" in refused(2, *asked, "--rope", "dynamic")


def test_a_chunk_is_chosen_for_a_gpu_unless_it_is_told(home):
    given = ["plan", "--model", home / "model", "--tokens", "1M", "--ram", "64GiB", "--disk", "1TB", "--json"]
    for gpu, more, chunk in (
        ("none", (), 512),
        ("24GiB", (), 32_768),
        ("24GiB", ("--chunk", "2K"), 2048),
        ("24GiB", ("--chunk", "auto"), 32_768),
    ):
        told = json.loads(run(*given, "--gpu", gpu, *more).out)
        assert told["asked"]["request"]["chunk"] == chunk


def test_a_proposal_can_be_asked_for_as_it_is_printed(home):
    whole = json_of("plan", "--model", home / "model", "--tokens", "1M", *ROOMY)
    assert whole["asked"]["fits"]
    assert whole["asked"] == whole["proposed"]
    disk = next(part["bytes"] for part in whole["asked"]["ask"] if part["name"] == "store")
    tight = ["plan", "--model", home / "model", "--tokens", "1M", "--gpu", "none", "--ram", "64GiB"]
    tight += ["--disk", str(disk * 3 // 4)]
    ran = done(*tight)
    line = next(line for line in ran.out.splitlines() if line.startswith("It does not fit. This does: "))
    again = done(*tight, *line.partition(": ")[2].split())
    assert "It fits" in again.out


def test_where_nothing_fits_the_nearest_that_would_is_named(home):
    ran = run("plan", "--model", home / "model", "--tokens", "1M", "--gpu", "none", "--ram", "64GiB",
              "--disk", "30MB", "--json")  # fmt: skip
    assert ran.code == 1
    found = json.loads(ran.out)
    assert found["proposed"] is None
    most, least = found["most_tokens"], found["least_machine"]
    assert most["fits"]
    settings = most["changes"]
    assert 0 < settings["tokens"] < 1 << 20
    done("plan", "--model", home / "model", "--tokens", "1M", "--gpu", "none", "--ram",
                 str(least["ram"] + (64 << 20)), "--disk", str(least["disk"]))  # fmt: skip


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--tokens", "many"), "is no number of tokens"),
        (("--tokens", "1M", "--ram", "lots"), "is no size"),
        (("--tokens", "1M", "--kv", "int2"), "kv 'int2'"),
        (("--tokens", "1M", "--weights", "int2"), "weights 'int2'"),
        (("--tokens", "1M", "-s", "h2o"), "selector 'h2o'"),
        (("--tokens", "1M", "-o", "error=2"), "error '2'"),
        (("--tokens", "1M", "-o", "recall=1"), "no option 'recall'"),
        (("--tokens", "1M", "-o", "page_size=many"), "page_size"),
    ],
)
def test_wrong_use_is_named(home, args, says):
    assert says in refused(2, "plan", "--model", home / "model", *args)


def test_a_model_that_is_not_there_is_named():
    assert refused(1, "plan", "--model", "/nowhere", "--tokens", "1M").count("/nowhere") == 1


def test_what_cannot_fit_is_refused_before_anything_is_loaded(store, tmp_path):
    questions = write_lines(tmp_path / "q.jsonl", {"question": "q"})
    batch = ("batch", store, "--questions", questions, "--out", tmp_path / "a.jsonl", "-q")
    assert "--ram allows 1 GiB" not in run("ask", store, "q", "--max-new-tokens", "1").err
    # This process holds more already: the sentence comes before the limit, so that no test is held to it.
    assert "--ram allows 100 MiB: with --weights int4" in refused(1, "ask", store, "q", "--ram", "100MiB")
    assert "--ram allows 100 MiB" in refused(1, "chat", store, "--ram", "100MiB")
    assert "holds" in refused(2, *batch, "--ram", "100MiB")


@pytest.mark.parametrize("command", ["ask", "chat"])
def test_a_cap_on_a_gpu_that_is_not_used_is_wrong_use(store, command):
    question = ["q"] if command == "ask" else []
    wrong = refused(2, command, store, *question, "--device", "cpu", "--gpu-memory", "4GiB")
    assert "runs on the CPU" in wrong


def test_an_8b_model_for_a_card_of_16_gib(monkeypatch):
    from offload_decode.models import size_estimate as estimates

    monkeypatch.setattr(estimates, "estimate_size", lambda *_: llama_8b())
    args = ("--gpu", "16GiB", "--ram", "64GiB", "--disk", "200GB")
    ran = done("plan", "--model", "8b", "--tokens", "1M", *args)
    assert "It does not fit. This does: --weights int8" in ran.out
    assert "each token reads up to" in ran.out
    assert "They would stay in memory with --kv int4-values" in ran.out


def test_a_gguf_file_is_planned_in_its_blocks(tmp_path):
    file = few_bits.gguf(tmp_path / "tiny")
    told = run("plan", "--model", file, "--tokens", "16K", *ROOMY)
    assert told.code == 0, told.err
    found = estimate_size(str(file))
    size, table = found.packed, found.vocabulary * found.hidden
    assert 0.8 < size / file.stat().st_size <= 1
    assert f"weights      GGUF {output.size(size)}, bfloat16 " in told.out
    plan = json_of("plan", "--model", file, "--tokens", "16K", *ROOMY)
    parts = {part["name"]: part["bytes"] for part in plan["asked"]["ask"]}
    assert table == found.embeddings > 0, "its rows are looked up, and the others stay on the disk"
    assert parts["weights (GGUF)"] == size - round(size / found.parameters * table)
