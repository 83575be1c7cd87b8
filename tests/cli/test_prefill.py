"""`offload-decode prefill` of several corpora, into a bucket, and on workers, as a user meets it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from offload_decode.planning.caps import kv_of
from offload_decode.prefill_jobs.job import Maker, PrefillReport
from offload_decode.prefill_jobs.many import Job
from offload_decode.store.reader import KVStore
from tests.cli.conftest import done, json_of, refused, run
from tests.tiny import plain_lora, saved, text_model


@pytest.fixture
def prefill(home: Path) -> list[str | Path]:
    return ["prefill", home / "corpus.txt", "--model", home / "model"]


def test_several_corpora_are_reported_with_their_failures(home, prefill, tmp_path):
    (tmp_path / "more.md").write_text("# More\n\ntext")
    args = [*prefill, tmp_path / "missing.txt", tmp_path / "more.md", "--out", tmp_path / "out"]
    ran = run(*args)
    assert (ran.code, ran.out) == (1, "")
    assert f"\nerror: {tmp_path / 'missing.txt'}: there is no corpus at " in ran.err
    assert ran.err.endswith("2 made, 1 failed\n")
    assert KVStore.open(tmp_path / "out" / "more.kv").manifest.n_tokens > 0
    again = run(*args, "--json", "-q")
    assert again.code == 1
    assert again.err.startswith("error: "), "failures are never silent"
    assert again.err.count("\n") == 1
    told = json.loads(again.out)
    assert [(store["corpus"], store["kept"]) for store in told["stores"]] == [
        (str(home / "corpus.txt"), True),
        (str(tmp_path / "more.md"), True),
    ]
    assert told["stores"][0]["store"] == str(tmp_path / "out" / "corpus.kv")
    assert [(failure["corpus"], failure["store"]) for failure in told["failures"]] == [
        (str(tmp_path / "missing.txt"), str(tmp_path / "out" / "missing.kv"))
    ]
    assert "kept, it is there already" in run(*args).err


def test_a_trailing_slash_makes_out_a_folder(prefill, tmp_path):
    ran = done(*prefill, "--out", f"{tmp_path}/out/")
    assert "1 made" in ran.err
    assert (tmp_path / "out" / "corpus.kv").is_dir()
    again = done(*prefill, "--out", tmp_path / "out" / "corpus.kv")
    assert "kept, it is there already" in again.err


def test_a_prefill_goes_straight_into_a_bucket(home, prefill, tmp_path):
    url = f"file://{tmp_path}/bucket/a.kv"
    ran = done(*prefill, "--out", url, "--staging", tmp_path / "staging", "--json")
    told = json.loads(ran.out)
    assert told["store"] == url
    assert told["pushed"]["files"] > 0
    assert f"offload-decode pull {url} STORE" in ran.err
    pulled = tmp_path / "pulled.kv"
    done("pull", url, pulled)
    assert KVStore.open(pulled).store_digest == KVStore.open(home / "store.kv").store_digest
    again = [*prefill, "--out", url, "--staging", tmp_path / "staging"]
    assert "kept, it is there already" in run(*again).err
    assert "of another prefill" in refused(1, *again, "-o", "chunk=8")


def test_stores_on_a_store(home, store, prefill, tmp_path):
    """Several corpora at once; asked, inspected, verified and kept as others are."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} is a text about {name}. " * 9)
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    on = ["prefill", *texts, *prefill[2:], "--on", store, "--out", tmp_path]
    assert "2 made" in done(*on).err
    assert "2 kept" in done(*on).err
    told = json_of("inspect", tmp_path / "a.kv")
    base = {"path": str(store.resolve()), "tokens": KVStore.open(store).manifest.seam, "now": "as it was"}
    assert told["begins_as"] == [base]
    assert [one["name"] for one in told["documents"]] == ["corpus.txt", "a.txt"]
    assert f"begins as  {store.resolve()}, its first" in done("inspect", tmp_path / "a.kv").out
    assert "is whole" in done("verify", tmp_path / "a.kv").out
    assert json_of("ask", tmp_path / "a.kv", "What?", "--max-new-tokens", "2")["answer"]
    told = refused(1, *prefill, "--on", tmp_path / "none.kv", "--out", tmp_path / "c.kv")
    assert f"There is no store at {tmp_path}/none.kv" in told
    told = refused(2, *prefill, "--on", store, "--out", tmp_path / "c.kv", "--kv", "int8", "-o", "chunk=8")
    assert told.endswith("is made as that one was: leave out -o, --kv")
    assert "pull it first" in refused(2, *prefill, "--on", "s3://b/a.kv", "--out", tmp_path / "c.kv")


def test_the_staging_folder_is_in_the_users_cache(prefill, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done(*prefill, "--out", f"file://{tmp_path}/a.kv")
    assert list((tmp_path / "cache" / "offload-decode" / "staging").iterdir()) == []


def test_a_store_finds_the_adapter_that_it_was_made_with(prefill, store, tmp_path):
    folder = plain_lora(tmp_path / "lora")
    done(*prefill, "--adapter", folder, "--out", tmp_path / "s")
    ask = ("ask", tmp_path / "s", "Who?", "--max-new-tokens", "2")
    assert json_of(*ask)["adapter"] == str(folder)
    assert f"adapter {folder}" in run("inspect", tmp_path / "s").out
    moved = folder.rename(tmp_path / "moved")
    assert f"there is no folder {folder}: give --adapter" in refused(1, *ask)
    assert json_of(*ask, "--adapter", moved)["adapter"] == str(moved)
    assert "was prefilled without an adapter" in refused(1, "ask", store, "Who?", "--adapter", moved)
    (tmp_path / "more.txt").write_text("More text.")
    done("append", tmp_path / "s", tmp_path / "more.txt", "--adapter", moved)


@pytest.mark.parametrize("kv", ["int8", "int4-values"])
def test_how_keys_and_values_are_stored(prefill, tmp_path, kv):
    done(*prefill, "--out", tmp_path / "s", "--kv", kv)
    assert kv_of(KVStore.open(tmp_path / "s").manifest) == kv


def test_ask_and_inspect_say_how_the_store_was_made(prefill, store, tmp_path):
    done(*prefill, "--out", tmp_path / "s", "--method", "quoka", "--kv", "int8")
    asked = run("ask", tmp_path / "s", "Who?", "--max-new-tokens", "2")
    assert "approximate: prefilled with quoka (" in asked.err
    assert "budget=25%" in asked.err
    assert "keys are int8" in asked.err
    told = json_of("ask", tmp_path / "s", "Who?", "--max-new-tokens", "2")
    assert (told["prefill"]["method"], told["kv"]["keys"]) == ("quoka", "int8-rows")
    assert "quoka" in run("inspect", tmp_path / "s").out
    assert "approximate" not in run("ask", store, "Who?", "--max-new-tokens", "2").err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--kv", "int3"], "unknown kv 'int3'"),
        (["--method", "magic"], "unknown prefill method 'magic'"),
        (["-o", "chunk=many"], "chunk must be int"),
        (["--worker-count", "2"], "--workers ray"),
        (["--workers", "dask"], "ray://HOST:PORT"),
        (["--workers", "ray"], "offload-decode[ray]"),
        (["--gpu-memory", "8GiB", "--device", "cpu"], "caps a GPU"),
        (["--ram", "lots"], "lots"),
        (["--weights", "int3"], "choose one of: auto, full, streamed, int8, int4"),
        (["--model", ""], "the model is empty"),
        (["--dtype", "float8"], "unknown dtype 'float8'"),
        (["--glob", "*.md"], "apply to folders, and none is given"),
        (["--exclude", "x"], "apply to folders, and none is given"),
        (["--follow-links"], "apply to folders, and none is given"),
    ],
)
def test_wrong_use_is_told_before_the_work(prefill, tmp_path, more, told, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert told in refused(2, *prefill, "--out", tmp_path / "s", *more)
    assert not list(tmp_path.iterdir())


def test_what_cannot_fit_is_refused(prefill, tmp_path):
    assert "--ram" in refused(1, *prefill, "--out", tmp_path / "s", "--ram", "1MiB")
    assert not list(tmp_path.iterdir())


def test_workers_get_the_options(prefill, tmp_path, monkeypatch):
    from offload_decode.prefill_jobs.on_ray import jobs as ray_jobs
    from offload_decode.prefill_jobs.on_ray.workers import Cluster

    given: dict[str, Any] = {}

    def workers(jobs: list[Job], cluster: Cluster, maker: Maker, **how: Any) -> dict[Job, PrefillReport]:
        given.update(how, jobs=jobs, cluster=cluster, settings=maker.settings)
        return {jobs[0]: PrefillReport("a.kv", 10, 1, (), 0, 1.0, 10.0, 100, 1000)}

    monkeypatch.setattr(ray_jobs, "prefill_on_ray", workers)
    more = ["--workers", "ray", "--worker-count", "3", "--ram", "1GiB", "--kv", "int8", "-o", "chunk=8"]
    done(*prefill, "--out", tmp_path / "a.kv", *more, "--staging", tmp_path)
    assert [job.store for job in given["jobs"]] == [str(tmp_path / "a.kv")]
    assert (given["cluster"].workers, given["cluster"].caps.ram) == (3, 2**30)
    assert (given["settings"].kv, given["settings"].chunk) == ("int8", 8)
    assert given["staging"] == tmp_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "corpus"
    (made / "docs").mkdir(parents=True)
    for name in ("a.md", "b.txt", "docs/c.md", "docs/d.md"):
        (made / name).write_text(f"text of {name}")
    (made / ".gitignore").write_text("d.md\n")
    (tmp_path / "outside.txt").write_text("text from elsewhere")
    (made / "link.txt").symlink_to(tmp_path / "outside.txt")
    return made


def test_patterns_choose_files_and_skipped_ones_are_named(home, folder, tmp_path):
    patterns = ("--glob", "*.md", "--glob", "*.txt", "--exclude", "b.*")
    args = ["prefill", folder, "--model", home / "model", *patterns]
    ran = done(*args, "--out", tmp_path / "s.kv", "--json")
    assert [one.name for one in KVStore.open(tmp_path / "s.kv").documents] == ["a.md", "docs/c.md"]
    assert json.loads(ran.out)["skipped"] == [
        {"name": "b.txt", "reason": "--exclude names it"},
        {"name": "docs/d.md", "reason": "a .gitignore names it"},
        {"name": "link.txt", "reason": "it is a link to a file"},
    ]
    # What nobody asked to leave out comes first.
    assert (
        "skipped 3 files: link.txt (it is a link to a file); b.txt (--exclude names it); docs/d.md" in ran.err
    )
    assert "--follow-links follows symbolic links" in ran.err
    done(*args, "--out", tmp_path / "f.kv", "--follow-links")
    assert "link.txt" in [one.name for one in KVStore.open(tmp_path / "f.kv").documents]


NOTED = "![plot](data:image/png;base64,iVBORw0KGgo=) text"
"""Of a Markdown file: something is left out of it."""


def test_what_was_left_out_of_documents_is_told(home, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(7):
        (folder / f"{number}.md").write_text(NOTED)
    args = ["prefill", folder, "--model", home / "model", "--out", tmp_path / "s.kv", "--json"]
    for _ in ("made", "kept"):
        ran = done(*args)
        told = [line for line in ran.err.splitlines() if "left out" in line]
        assert told == [f"{number}.md: left out: 1 embedded file" for number in range(5)]
        assert "\nand 2 more (--json lists them)\n" in ran.err
        notes = json.loads(ran.out)["notes"]
        assert notes == [{"name": f"{n}.md", "note": "left out: 1 embedded file"} for n in range(7)]
    several = done("prefill", *folder.glob("[01].md"), "--model", home / "model", "--out", tmp_path / "more/")
    assert several.err.count("left out: 1 embedded file") == 2
    (folder / "8.md").write_text(NOTED)
    told = done("append", tmp_path / "s.kv", folder).err
    assert told.count("left out") == 1, "those that are there already were told of"
    assert "8.md: left out: 1 embedded file" in told


def test_several_corpora_share_the_rules(home, folder, tmp_path):
    folder = folder.rename(tmp_path / "texts")
    args = ["prefill", folder, home / "corpus.txt", "--model", home / "model", "--glob", "*.md"]
    done(*args, "--out", tmp_path / "out")
    assert [one.name for one in KVStore.open(tmp_path / "out" / "texts.kv").documents] == [
        "a.md",
        "docs/c.md",
    ]
    assert (tmp_path / "out" / "corpus.kv").is_dir()


def test_a_store_and_a_device_are_no_corpora(home, store, tmp_path):
    for corpus, told in ((store, "is a KV store or belongs to one"), ("/dev/zero", "is not a regular file")):
        assert told in refused(1, "prefill", corpus, "--model", home / "model", "--out", tmp_path / "s")


def test_a_length_that_rotation_depends_on_is_chosen_and_kept_to(home, tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    saved(text_model(max_position_embeddings=512, rope_parameters=rope), tmp_path / "model")
    given = ["prefill", home / "corpus.txt", "--model", tmp_path / "model", "--out", tmp_path / "store"]
    done(*given, "--context", "1K")
    tokens = json_of("inspect", tmp_path / "store")["manifest"]["n_tokens"]
    assert f"rotated as in a text of {tokens + 1024:,} tokens" in run("inspect", tmp_path / "store").out
    assert f"{tokens + 512:,} tokens" in run("plan", "--model", tmp_path / "model", "--tokens", tokens).out
    assert "kept" in run(*given, "--context", "1024").err
    assert "of another --context" in refused(1, *given)
    long = refused(2, "ask", tmp_path / "store", "x" * 1024, "--max-new-tokens", "1")
    assert "larger --context" in long
    answer = json_of("ask", tmp_path / "store", "x" * 1000, "--max-new-tokens", 100)
    assert answer["tokens"] < 25
    assert answer["finish"] == "length"


def test_a_text_longer_than_the_model_was_trained_for_is_noted_by_every_command(home, tmp_path):
    model = saved(text_model(max_position_embeddings=256), tmp_path / "model")
    given = ["prefill", home / "corpus.txt", "--model", model]
    short, long = tmp_path / "short.kv", tmp_path / "long.kv"
    told = done(*given, "--out", short).err
    tokens = json_of("inspect", short)["manifest"]["n_tokens"]
    note = f"{tokens:,} tokens with a question and an answer are more than the 256 that the model was trained"
    way = f"prefill with --rope yarn:{2 ** (-(-(tokens + 32) // 256) - 1).bit_length()}, "
    shown = [
        told,
        done("inspect", short).out,
        json_of("inspect", short)["note"],
        run("plan", "--model", model, "--tokens", tokens).out,
        done("ask", short, "What?", "--max-new-tokens", "1").err,
    ]
    assert all(text.count(note) == text.count(way) == 1 for text in shown)
    shown = [done(*given, "--out", long, "--rope", "yarn:128").err, done("inspect", long).out]
    assert not any("was trained for" in text for text in shown)
    assert json_of("inspect", long)["note"] is None


def test_a_store_of_another_rope_is_told_by_the_option_that_was_given(home, tmp_path):
    given = ["prefill", home / "corpus.txt", "--model", home / "model", "--out", tmp_path / "d.kv"]
    done(*given)
    said = refused(1, *given, "--rope", "yarn:4")
    assert "of another --rope" in said
    assert not any(other in said for other in ("hash", "--context"))
