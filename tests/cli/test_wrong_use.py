"""What no command can use is refused at once, with exit code 2 where the use was wrong; nothing waits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload_decode.cli.options import byte_count, token_count
from offload_decode.common.errors import ConfigError
from offload_decode.models.checkpoint import read_config
from tests.cli.conftest import MAIN, done, refused
from tests.cli.test_batch import refused_batch
from tests.processes import apart

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


def test_deeply_nested_questions_are_refused(store, questions, tmp_path):
    for depth in (101, 900):
        nested = "[" * depth + "]" * depth
        questions.write_text(f'{{"question": "Why?", "more": {nested}}}\n')
        assert "nested too deeply" in refused_batch(store, questions, tmp_path / "out")
        assert not (tmp_path / "out").exists()


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


def test_a_command_ends_silently(store):
    asked = ["ask", str(store), "Why?", "--max-new-tokens", "1"]
    assert apart(MAIN, *asked).returncode == 0  # from here on its loops are compiled
    ran = apart(MAIN, *asked)
    assert (ran.returncode, ran.stderr) == (0, "")
