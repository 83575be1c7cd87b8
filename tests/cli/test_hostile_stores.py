"""Stores made to harm, as a user meets them: a sentence, and nothing that a terminal takes for a command."""

import json
import os
import sys
import textwrap

import pytest

from offload_decode.common.errors import StoreDamaged, StoreMismatch
from offload_decode.engine.engine import Engine
from offload_decode.models.loading import load
from offload_decode.store import KVStore
from tests.cli.conftest import done, run
from tests.processes import apart
from tests.store.test_refusals import edit, reseal

RED = "\x1b[31m"


def test_escape_sequences_in_a_manifest_are_shown(copy):
    store = copy("evil.kv")
    made = KVStore.open(store).manifest.prefill
    edit(
        store,
        "zarr.json",
        model_id=f"{RED}m\u202e",
        software="s\x9b2J\nforged  line",
        prefill=made | {"method": RED},
    )
    names = store / "documents/names/c.0"
    listed = json.dumps([f"{RED}.txt"])
    metadata = store / "documents/names/zarr.json"
    described = json.loads(metadata.read_text())
    described["shape"] = described["chunk_grid"]["configuration"]["chunk_shape"] = [len(listed)]
    metadata.write_text(json.dumps(described))
    names.write_bytes(listed.encode())
    reseal(store)
    ran = done("inspect", store)
    assert r"\x1b[31mm\u202e" in ran.out
    assert r"s\x9b2J\x0aforged  line" in ran.out
    assert r"\x1b[31m.txt" in ran.out
    told = run("inspect", store, "--json")
    assert json.loads(told.out)["manifest"]["model_id"] == f"{RED}m\u202e"
    asked = run("ask", store, "q")
    assert asked.code == 1
    for text in (ran.out, told.out, asked.out, asked.err):
        assert not {"\x1b", "\x9b", "\u202e"} & set(text)


def test_escape_sequences_in_names_and_errors_are_shown(home, tmp_path):
    folder = tmp_path / f"{RED}folder"
    folder.mkdir()
    for command in (["inspect", folder], ["verify", folder], ["ask", folder, "q"]):
        ran = run(*command)
        assert ran.code == 1
        assert r"\x1b[31mfolder" in ran.err
        assert "\x1b" not in ran.err + ran.out
    (folder / f"bad{RED}.txt").write_bytes(b"\0")
    (folder / "good.txt").write_text("text")
    ran = done("prefill", folder, "--model", home / "model", "--out", tmp_path / "s.kv")
    assert r"bad\x1b[31m.txt" in ran.err
    assert "\x1b" not in ran.err + ran.out


@pytest.mark.parametrize("changes", [{"n_tokens": 10**15}, {"rope": []}, {"model_id": {"a": 1}}], ids=str)
@pytest.mark.parametrize("command", [["inspect"], ["ask", "q"], ["verify"], ["index"], ["inspect", "--json"]])
def test_a_manifest_with_wrong_types_is_a_sentence(copy, command, changes):
    store = copy("wrong.kv")
    edit(store, "zarr.json", **changes)
    ran = run(command[0], store, *command[1:])
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.count("\n") == 1
    assert "unexpected" not in ran.err


def test_a_shape_that_is_not_the_models_is_refused(home, copy):
    store = copy("shape.kv")
    shape = KVStore.open(store).manifest.to_json()["shape"]
    edit(store, "zarr.json", shape=shape | {"query_heads": 2 * shape["query_heads"]})
    with pytest.raises(StoreMismatch, match="another shape"):
        Engine.open(store, load(str(home / "model"), "cpu", "auto"))


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_a_file_that_shrinks_under_an_engine_is_a_sentence(home, copy, kind):
    store = copy("shrinks.kv")
    engine = Engine.open(store, load(str(home / "model"), "cpu", "auto"), options={"budget": "20"})
    engine.answer("Which?", 3)
    layer = engine.store.manifest.shape.full_layers[-1]
    file = store / f"layers/{layer:03d}/{kind}/c.0.0.0"
    # By so little that the page is still there: reading beyond it would end the process.
    os.truncate(file, file.stat().st_size - 8)
    with pytest.raises(StoreDamaged, match="bytes and should have"):
        engine.answer("Which?", 3)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems raise other signals")
@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_file_that_shrinks_while_it_is_read_is_a_sentence(where):
    program = f"""
        import mmap, os, tempfile, threading
        from offload_decode.cli.compiling import exit_on_bus_error
        exit_on_bus_error()
        with tempfile.NamedTemporaryFile() as file:
            file.write(bytes(1 << 16))
            file.flush()
            view = mmap.mmap(file.fileno(), 1 << 16, prot=mmap.PROT_READ)
            os.truncate(file.name, 0)
            if {where == "main"}:
                view[1 << 15]
            reader = threading.Thread(target=lambda: view[1 << 15])
            reader.start()
            reader.join()
            print("still here")
    """
    ran = apart(textwrap.dedent(program))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("error: a file of the store or of its index shrank while it was read")
    assert ran.stderr.count("\n") == 1
