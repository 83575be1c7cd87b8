"""Whatever goes wrong is one sentence with the way out and the right exit code; never a traceback."""

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offload_decode import demo_models
from offload_decode.cli.options import byte_count, token_count
from offload_decode.common.errors import ConfigError
from offload_decode.engine.engine import Engine
from offload_decode.models.checkpoint import read_config
from offload_decode.prefill_jobs.job import Settings, prefill
from offload_decode.store.reader import KVStore
from tests.cli.conftest import MAIN, PROGRAM, done, refused, run, write_lines
from tests.cli.test_batch import refused_batch
from tests.processes import apart
from tests.tiny import saved_model, tiny_tokenizer

LIGHT = "import sys; import offload_decode.cli.main; print(*sys.modules)"
HEAVY = {"torch", "transformers", "numpy", "zarr", "faiss", "numba", "rich", "lxml"}


def test_a_store_that_is_not_there(tmp_path):
    none = tmp_path / "no.kv"
    for command in (["ask", none, "q"], ["chat", none], ["inspect", none], ["verify", none]):
        told = refused(1, *command)
        assert "There is no store at" in told
        assert "offload-decode prefill" in told


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["ask", "q"], ["chat"], ["index"]])
def test_a_folder_a_file_and_the_root_are_no_stores(home, command):
    for path in (home / "model", home / "corpus.txt", "/"):
        assert "is not a KV store" in refused(1, command[0], path, *command[1:])


def test_a_half_written_store_is_refused_and_finished_by_the_same_command(home, tmp_path):
    out, corpus, model = tmp_path / "s.kv", home / "corpus.txt", home / "model"

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "prefill" and done:
            raise KeyboardInterrupt

    settings = Settings(options={"chunk": 64})
    with pytest.raises(KeyboardInterrupt):
        prefill(str(corpus), model=str(model), out=out, settings=settings, progress=interrupt)
    assert "(64 of 530 tokens)" in refused(1, "ask", out, "q")
    ran = done("prefill", corpus, "--model", model, "--out", out, "-o", "chunk=64")
    assert "resumed after 64" in ran.err
    done("verify", out)


def test_another_model_and_another_tokenizer(store, tmp_path):
    other, same = saved_model(tmp_path / "other", seed=1), saved_model(tmp_path / "same")
    assert "open the store with" in refused(1, "ask", store, "q", "--model", other)
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"unk_token": "<pad>"})
    tokenizer.save_pretrained(same)
    assert "tokenizer" in refused(1, "ask", store, "q", "--model", same)


def test_a_model_that_cannot_be_loaded(home, tmp_path):
    (tmp_path / "empty").mkdir()
    corpus = home / "corpus.txt"
    told = refused(1, "prefill", corpus, "--model", tmp_path / "empty", "--out", tmp_path / "s")
    assert f"give {demo_models.QUOTED}, a folder, a .gguf file, or a transformers id" in told
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["-s", "nonsense"], "unknown selector 'nonsense'; known are: dense"),
        (["-o", "bugdet=3"], "has no option 'bugdet'; it has: budget"),
        (["-o", "budget"], "not of the form key=value"),
        (["-o", "budget=many"], "a count like 1024, a share like 2%"),
        (["-o", "budget=150%"], "a share is from 0% to 100%"),
        (["--temperature", "inf"], "0 or more and finite"),
        (["--device-cache", "0GiB"], "is no size"),
        (["-o", "index=nonsense"], "no index kind 'nonsense'"),
        (["-o", "index=faiss-hnsw"], "offload-decode index"),
        (["--top-p", "7"], "top_p"),
        (["--device", "abacus"], "unknown device 'abacus'"),
        (["--device", "cpu:3"], "unknown device 'cpu:3'"),
        (["--model", ""], "the model is empty"),
    ],
)
def test_options_that_cannot_be_used(store, args, told):
    assert told in refused(2, "ask", store, "q", *args)


def test_an_empty_question(store):
    assert "the question is empty" in refused(2, "ask", store, "  ")
    assert "the question is empty" in refused(2, "ask", store, "-", stdin="\n")


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["ask"],
        ["ask", "store"],
        ["ask", "store", "q", "--max-new-tokens", "0"],
        ["ask", "store", "q", "--nonsense"],
        ["ask", "store", "q", "--seed", "99999999999999999999"],
        ["chat", "store", "--seed", "-1"],
        ["prefill", "corpus", "--out", "s"],
        ["prefill", "corpus", "--model", "m", "--out", "s", "--query-samples", "many"],
        ["index"],
    ],
)
def test_wrong_use_shows_the_usage(args):
    ran = run(*args)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("Usage: ")


def test_corpora_that_cannot_be_read(home, tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.7")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    for corpus, told in (
        (tmp_path / "missing", "there is no corpus at"),
        (tmp_path / "a.pdf", "convert it to text first"),
        (tmp_path / "empty.txt", "it holds no text"),
        (tmp_path / "folder", "it has no files"),
        ("-", "holds no text"),
    ):
        args = (corpus, "--model", home / "model", "--out", tmp_path / "s")
        assert told in refused(1, "prefill", *args, stdin="")


def test_a_store_is_never_overwritten(home, store):
    args = ["prefill", home / "corpus.txt", "--model", home / "model", "--out"]
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    ran = done(*args, store)
    assert "kept, it is there already" in ran.err
    assert "of another prefill" in refused(1, *args, store, "-o", "chunk=8")
    assert before == {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    assert "exists already" in refused(1, *args, home / "corpus.txt")
    assert "exists already" in refused(1, *args, home)


@pytest.mark.parametrize("inside", ["sub.kv", "layers/sub.kv", ""])
def test_nothing_is_written_into_a_store(home, store, inside):
    ran = run("prefill", home / "corpus.txt", "--model", home / "model", "--out", f"{store}/{inside}")
    assert ran.code == 1
    assert "is a store itself" in ran.err
    done("verify", store)


@pytest.mark.parametrize("out", ["", ".", "a/.."])
def test_an_out_that_names_no_store_is_refused(home, out):
    told = refused(2, "prefill", home / "corpus.txt", "--model", home / "model", "--out", out)
    assert "names no store" in told


def test_an_index_that_cannot_be_built(store, monkeypatch):
    assert "the kinds are clusters" in refused(2, "index", store, "--kind", "nonsense")
    assert "recall must be" in refused(2, "index", store, "--kind", "flat", "--recall", "0")
    monkeypatch.setitem(sys.modules, "hnswlib", None)
    monkeypatch.delitem(sys.modules, "offload_decode.indexes.hnswlib", raising=False)  # an earlier import
    assert "pip install" in refused(1, "index", store, "--kind", "hnswlib")


def _fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(Engine, "open", fail)


def test_an_unexpected_error_says_how_to_see_more(store, monkeypatch):
    _fails_with(monkeypatch, ArithmeticError("first line\nsecond line"))
    told = refused(1, "ask", store, "q")
    assert told == (
        "error: unexpected ArithmeticError: first line second line; "
        "set OFFLOAD_DECODE_DEBUG=1 to see where it comes from"
    )


def test_debugging_shows_the_traceback(store):
    ran = apart(MAIN, "ask", store, "", env={**os.environ, "OFFLOAD_DECODE_DEBUG": "1"})
    assert ran.returncode == 2
    assert "Traceback" in ran.stderr
    assert ran.stderr.splitlines()[-1].startswith("error: the question is empty")


def test_errors_of_the_system_are_sentences(store, monkeypatch):
    _fails_with(monkeypatch, OSError(28, "No space left on device", "s.kv"))
    assert refused(1, "ask", store, "q") == "error: s.kv: No space left on device"
    _fails_with(monkeypatch, MemoryError())
    assert "out of memory: free some" in refused(1, "ask", store, "q")


def test_a_folder_that_may_not_be_opened_is_not_a_missing_one(tmp_path, monkeypatch):
    """root may open every folder, and so the system's answer is made up."""
    real = os.stat

    def stat(path, *args, **how):
        if str(path).startswith(f"{tmp_path}/shut/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *args, **how)

    (tmp_path / "shut").mkdir()
    monkeypatch.setattr(os, "stat", stat)
    for command in (["inspect"], ["verify"], ["index"], ["ask", "Who?", "--all"]):
        told = refused(1, command[0], tmp_path / "shut", *command[1:])
        assert told == f"error: {tmp_path}/shut may not be opened: change its permissions, or ask its owner"


def test_a_limit_of_open_files_is_a_sentence(store, monkeypatch):
    def fail(*_):
        lacking = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise RuntimeError("Cannot close a running event loop") from lacking

    monkeypatch.setattr(KVStore, "open", fail)
    assert "allow more (ulimit -n 1024)" in refused(1, "inspect", store)


def test_interpreted_loops_are_refused_at_the_start(store):
    ran = apart(MAIN, "ask", store, "q", env={**os.environ, "NUMBA_DISABLE_JIT": "1"})
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error: NUMBA_DISABLE_JIT is set")
    assert len(ran.stderr.splitlines()) == 1


def test_control_c_is_one_line(store, monkeypatch):
    _fails_with(monkeypatch, KeyboardInterrupt())
    ran = run("ask", store, "q")
    assert (ran.code, ran.out, ran.err) == (130, "", "interrupted\n")


def test_a_closed_pipe_is_no_error_to_report(store):
    ours, theirs = os.pipe()
    os.close(ours)
    command = [*PROGRAM, "inspect", str(store)]
    try:
        ran = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(theirs)
    assert (ran.returncode, ran.stderr) == (1, "")


def test_help_comes_at_once_and_without_heavy_imports():
    for args in (["--help"], ["-h"], ["ask", "-h"], ["--version"]):
        done(*args)
    loaded = set(apart(LIGHT).stdout.split())
    assert "typer" in loaded
    assert not HEAVY & loaded

    def seconds() -> float:
        began = time.perf_counter()
        assert apart(MAIN, "--help").returncode == 0
        return time.perf_counter() - began

    assert min(seconds() for _ in range(3)) < 1


def test_the_installed_command_and_the_package_run_as_a_module_are_this_one():
    command = shutil.which("offload-decode", path=str(Path(sys.executable).parent))
    assert command is not None
    for program in ([command], [sys.executable, "-m", "offload_decode"]):
        ran = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True)
        assert ran.stdout.startswith("offload-decode ")


@pytest.mark.parametrize(
    ("command", "url"),
    [
        *((["inspect", "URL"], url) for url in ("s3://bucket/a/s.kv", "gs://bucket/s.kv", "file:///no/s.kv")),
        (["ask", "URL", "q"], "file:///no/s.kv"),  # only a collection is asked where it is
        (["batch", "URL", "--questions", "QUESTIONS", "--out", "OUT"], "file:///no/s.kv"),
    ],
)
def test_a_store_in_a_bucket_is_to_be_pulled_first(command, url, tmp_path):
    questions, out = write_lines(tmp_path / "q.jsonl", {"question": "q"}), tmp_path / "a.jsonl"
    named = {"URL": url, "QUESTIONS": str(questions), "OUT": str(out)}
    told = refused(2, *(named.get(part, part) for part in command))
    assert f"{url} is in a bucket" in told
    assert f"offload-decode pull {url} s.kv" in told
    assert not out.exists()


LONG = "9" * 5000
QUESTIONS = [{"question": "Why?"}]


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_answers_go_to_a_regular_file(store, questions, tmp_path, kind):
    """A pipe would keep its reader waiting, and /dev/zero never end: earlier answers are read first."""
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
    elif kind == "pipe":
        os.mkfifo(out)
    else:
        out = Path("/dev/null")
    told = refused_batch(store, questions, out)
    expected = f"{out} is a folder: give --out a file in it" if kind == "folder" else "is not a regular file"
    assert expected in told


def test_answers_that_cannot_be_written_are_refused_before_the_work(store, questions, tmp_path):
    loop, dead = tmp_path / "loop", tmp_path / "dead"
    loop.symlink_to(loop)
    dead.symlink_to(tmp_path / "no" / "where")
    assert "symbolic links" in refused_batch(store, questions, loop)
    assert "there is no folder" in refused_batch(store, questions, dead)
    assert "too long" in refused_batch(store, questions, tmp_path / ("n" * 300))


@pytest.mark.parametrize("out", ["s3://", "gs:///", "file://"])
def test_a_url_without_a_bucket_is_no_folder_of_this_machine(home, tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    told = refused(2, "prefill", home / "corpus.txt", "--model", home / "model", "--out", out)
    assert "is not the URL of a store" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command",
    [
        ["prefill", "", "--model", "MODEL", "--out", "s"],
        ["prefill", "FOLDER", "--model", "MODEL", "--out", "s", "--glob", ""],
        ["prefill", "FOLDER", "--model", "MODEL", "--out", "s", "--exclude", ""],
        ["prefill", "FOLDER", "--model", "MODEL", "--out", "s", "--workers", ""],
        ["prefill", "FOLDER", "--model", "MODEL", "--out", "s", "--staging", ""],
        ["ask", "", "q"],
        ["inspect", ""],
        ["verify", ""],
        ["index", ""],
        ["batch", "", "--questions", "q", "--out", "o"],
        ["batch", "STORE", "--questions", "", "--out", "o"],
        ["batch", "STORE", "--questions", "q", "--out", ""],
        ["pull", "file:///folder/s.kv", ""],
        ["push", "", "file:///folder/s.kv"],
        ["demo", "--out", ""],
    ],
)
def test_an_empty_text_names_nothing(home, command):
    """An empty path is not the folder that one happens to be in."""
    named = {"MODEL": home / "model", "FOLDER": home, "STORE": home / "store.kv"}
    refused(2, *(named.get(part, part) for part in command))


@pytest.mark.parametrize(
    ("read", "text", "told"),
    [
        *((byte_count, text, "is no size") for text in (LONG, f"{LONG}GiB", "99999999999TiB")),
        *((token_count, text, "is no number of tokens") for text in (LONG, "9999999999M")),
    ],
)
def test_sizes_and_counts_that_no_machine_has(read, text, told):
    with pytest.raises(ConfigError, match=told) as refusal:
        read(text)
    assert len(str(refusal.value)) < 120


@pytest.mark.parametrize("kind", ["file", "pipe", "dead link"])
def test_a_model_that_is_no_folder_is_not_looked_for_elsewhere(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    match kind:
        case "file":
            model.touch()
        case "pipe":
            os.mkfifo(model)
        case _:
            model.symlink_to("nowhere")
    with pytest.raises(Exception, match=r"^there is no folder model: give"):
        read_config("model")


def test_a_folder_without_a_config_is_named_once(tmp_path):
    with pytest.raises(Exception, match=r"config\.json") as refusal:
        read_config(str(tmp_path))
    assert str(refusal.value).count(str(tmp_path)) == 1
    assert "Errno" not in str(refusal.value)


@pytest.mark.parametrize("corpus", ["/dev/zero", "missing"])
def test_a_corpus_that_cannot_be_read_is_refused_before_a_library_is_loaded(corpus):
    script = (
        "import sys\nfrom offload_decode.cli.main import app\n"
        f"try:\n    app(['prefill', '{corpus}', '--model', 'demo', '--out', 's'])\n"
        "except SystemExit as left:\n    print(left.code, 'torch' in sys.modules)"
    )
    ran = apart(script)
    assert ran.stdout == "1 False\n", ran.stderr
    assert ran.stderr.startswith("error: ")
    assert ran.stderr.count("\n") == 1


def test_a_demo_goes_into_a_folder(questions):
    assert "is not a folder" in refused(2, "demo", "--out", questions)


def test_a_closed_standard_input_holds_nothing(store):
    command = f"exec {sys.executable} -c 'from offload_decode.cli.main import main; main()' ask {store} - <&-"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error: the question is empty")


def test_links_that_lead_nowhere_stop_no_inspection(copy):
    store = copy("s.kv")
    done("index", store, "--kind", "flat")
    folder = store.with_name("s.kv.indexes") / "flat"
    (folder / "dead").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    ran = done("inspect", store)
    assert "flat" in ran.out


def test_a_command_says_nothing_as_it_ends(store):
    asked = ["ask", str(store), "Why?", "--max-new-tokens", "1"]
    assert apart(MAIN, *asked).returncode == 0  # from here on its loops are compiled
    ran = apart(MAIN, *asked)
    cut = "The answer was cut at 1 token: --max-new-tokens N allows more.\n"
    assert (ran.returncode, ran.stderr) == (0, cut)
