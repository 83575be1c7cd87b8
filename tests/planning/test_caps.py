"""Caps are checked before and enforced while a job runs, and what a prefill has committed outlives them."""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from offload_decode.cli.errors import sentence
from offload_decode.common.errors import ConfigError, DoesNotFit
from offload_decode.common.memory import OUT_OF_MEMORY, total_memory
from offload_decode.config import EngineConfig
from offload_decode.models.size_estimate import estimate_size
from offload_decode.planning.caps import (
    Caps,
    admit_question,
    apply_caps,
    check_ask,
    check_prefill,
    kv_of,
    planned_ask,
    size,
)
from offload_decode.planning.plan import CUDA_BYTES, Machine, Medium
from offload_decode.selectors.budgets import PASS_TOKENS, WHOLE_QUESTION
from offload_decode.store.format import Manifest, stored_types
from tests.planning.estimates import llama_8b
from tests.processes import apart

MIB, GIB = 1 << 20, 1 << 30
HELD = 300 * MIB
CPU = EngineConfig(device="cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA holds memory on Linux alone")


def manifest(kv: str = "auto", tokens: int = 100_000) -> Manifest:
    shape = estimate_size("demo").shape
    return Manifest(
        model_id="demo", model_config_hash="", weights_hash="", tokenizer_hash="", dtype="float32",
        shape=shape, rope={}, n_tokens=tokens, token_hash="", prefill={"method": "dense"},
        kv=stored_types(kv, "float32", shape),
    )  # fmt: skip


def asking(model, config, caps, index="flat"):
    return check_ask(planned_ask(model, manifest(), config, caps, HELD, index=index), caps)


def test_a_question_beyond_a_cap_is_refused_with_what_fits():
    model = replace(estimate_size("demo"), parameters=10**9, linear=9 * 10**8)
    with pytest.raises(DoesNotFit, match=r"--ram allows 2 GiB: what fits is --weights int8$"):
        asking(model, CPU, Caps(ram=2 * GIB))
    with pytest.raises(DoesNotFit, match=r"the least, it is --ram \d+MiB$") as refused:
        asking(model, CPU, Caps(ram=GIB // 2))
    least = int(str(refused.value).rpartition(" ")[2].removesuffix("MiB"))
    asking(model, replace(CPU, weights="int4"), Caps(ram=least * MIB))


def test_a_device_cache_counts_as_gpu_memory(monkeypatch):
    def check(gpu, cache, weights="auto"):
        machine = Machine(gpu, 1 << 40, 1 << 50, HELD)
        monkeypatch.setattr("offload_decode.planning.caps.here", lambda device, caps, held: machine)
        model = estimate_size("demo")
        config = EngineConfig(device="cuda", weights=weights, device_cache=cache)
        return asking(model, config, Caps(gpu_memory=gpu))

    assert check(2 * GIB, GIB) == []
    with pytest.raises(DoesNotFit, match=r"device cache 3 GiB.*what fits is without --device-cache$"):
        check(2 * GIB, 3 * GIB)
    with pytest.raises(DoesNotFit, match=r"the least, it is --gpu-memory (\d+)MiB and") as refused:
        check(CUDA_BYTES + MIB, GIB)
    least = int(str(refused.value).rpartition("--gpu-memory ")[2].partition("MiB")[0]) * MIB
    assert least < GIB
    assert check(least, 0, "int4") == []


def test_the_index_that_is_counted_is_the_one_that_is_searched():
    def taken(built, **options):
        config = replace(CPU, options=options)
        with pytest.raises(DoesNotFit) as refused:
            asking(estimate_size("demo"), config, Caps(ram=MIB), index=built)
        return str(refused.value).partition(", and --ram")[0]

    assert taken("clusters") == taken("clusters", index="auto") == taken("flat", index="clusters")
    assert taken("flat") == taken("clusters", index="flat") != taken("clusters")


def test_a_tail_that_does_not_fit_is_refused_with_one_that_does():
    def refused(ram, **options):
        with pytest.raises(DoesNotFit) as refused:
            asking(estimate_size("demo"), replace(CPU, options=options), Caps(ram=ram), index="clusters")
        return str(refused.value)

    listed = refused(MIB, tail="sample")
    assert "unselected tokens" in listed
    assert re.search(r"with .*-s topk -o tail=off, the least, it is --ram \d+MiB$", listed)
    # Of the means that lie beside the built clusters nothing is held.
    assert "unselected tokens" not in refused(MIB, tail="clusters", index="flat")
    need = planned_ask(estimate_size("demo"), manifest(), CPU, Caps(), HELD, index="clusters")
    enough = sum(part.bytes for part in need.asking if part.place is Medium.RAM) + MIB
    asking(estimate_size("demo"), CPU, Caps(ram=enough), index="clusters")
    assert refused(enough, tail="sample").endswith("what fits is -o tail=clusters")


def test_a_prefill_beyond_a_cap_is_refused_with_a_chunk_that_fits():
    model = estimate_size("demo")
    with pytest.raises(DoesNotFit, match=r"what fits is -o chunk=\d+$") as refused:
        check_prefill(model, 8192, "auto", "cpu", Caps(ram=512 * MIB), HELD)
    chunk = int(str(refused.value).rpartition("=")[2])
    check_prefill(model, chunk, "auto", "cpu", Caps(ram=512 * MIB), HELD)


def test_a_prefill_whose_weights_a_gpu_cannot_hold_is_told_to_stream_them(monkeypatch):
    def check(gpu, weights="auto", chunk=None, ram=64 * GIB):
        machine = Machine(gpu, ram, 1 << 50, HELD)
        monkeypatch.setattr("offload_decode.planning.caps.here", lambda device, caps, held: machine)
        monkeypatch.setattr("offload_decode.planning.caps.pick_device", torch.device)
        return check_prefill(llama_8b(), chunk, "auto", "cuda", Caps(gpu_memory=gpu), HELD, weights)

    with pytest.raises(DoesNotFit, match=r"--gpu-memory allows 15 GiB: what fits is --weights streamed$"):
        check(15 * GIB)
    assert check(15 * GIB, "streamed") == []
    with pytest.raises(DoesNotFit, match=r"--gpu-memory allows 15 GiB: what fits is --weights int8$"):
        check(15 * GIB, ram=14 * GIB)
    with pytest.raises(DoesNotFit, match=r"this machine has 12 GiB: what fits is --weights int8$"):
        check(15 * GIB, "streamed", ram=12 * GIB)
    with pytest.raises(DoesNotFit, match="--weights streamed -o chunk=16, the least, it is") as refused:
        check(GIB)
    least = int(re.search(r"--gpu-memory (\d+)MiB", str(refused.value))[1])
    assert least < 4 * 1024, "which is less than int4 takes"
    assert check(least * MIB, "streamed", 16) == []


def test_a_cpu_has_no_weights_streamed():
    with pytest.raises(ConfigError, match="leave --weights out"):
        check_prefill(estimate_size("demo"), None, "auto", "cpu", Caps(), HELD, "streamed")


def test_a_model_larger_than_the_machine_is_refused():
    model = replace(estimate_size("demo"), parameters=10**13)
    with pytest.raises(DoesNotFit, match=r"and this machine has .*: take a smaller model, or a machine"):
        asking(model, CPU, Caps())
    with pytest.raises(DoesNotFit, match=r"and this machine has .*: take a smaller model, or a machine"):
        check_prefill(model, 256, "auto", "cpu", Caps(), HELD)
    quarter = total_memory() // 4  # in float32 it is as large as the machine, in int4 it is not
    model = replace(estimate_size("demo"), parameters=quarter, linear=quarter)
    with pytest.raises(DoesNotFit, match=r"and this machine has .*: what fits is --weights"):
        asking(model, CPU, Caps())


def test_without_a_cap_only_a_note_is_made_of_what_may_be_less(monkeypatch):
    machine = Machine(None, HELD + 64 * MIB, 1 << 50, HELD)
    monkeypatch.setattr("offload_decode.planning.caps.here", lambda device, caps, held: machine)
    notes = asking(estimate_size("demo"), CPU, Caps())
    assert "it may fail, or be slow" in notes[0]


def test_a_model_that_fits_needs_no_note():
    assert asking(estimate_size("demo"), CPU, Caps()) == []


@pytest.mark.parametrize("dtype", ["float8", "", "int4"])
def test_an_unknown_dtype_is_refused(dtype):
    with pytest.raises(ConfigError, match=r"unknown dtype .*choose one of: auto, float16"):
        check_prefill(estimate_size("demo"), 256, dtype, "cpu", Caps(), HELD)


@pytest.mark.parametrize("kv", ["auto", "int8", "int4-values"])
def test_a_store_names_its_kv(kv):
    assert kv_of(manifest(kv)) == kv


def test_caps_that_cannot_be_kept_are_refused():
    with pytest.raises(ConfigError, match="holds"):
        apply_caps(Caps(ram=MIB), "cpu")
    with pytest.raises(ConfigError, match="runs on the CPU"):
        apply_caps(Caps(gpu_memory=GIB), "cpu")


@linux
def test_libraries_are_loaded_before_memory_is_limited():
    """Faiss reserves far more than it uses as it is loaded, and crashes where it does not get that."""
    pytest.importorskip("faiss")
    program = (
        "from offload_decode.common.memory import own_memory;"
        "from offload_decode.planning.caps import Caps, apply_caps;"
        "apply_caps(Caps(ram=own_memory() + (60 << 20)), 'cpu'); import faiss; faiss.IndexHNSWFlat(8, 16)"
    )
    ran = apart(program)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.gpu
def test_a_gpu_cap_is_enforced():
    apply_caps(Caps(gpu_memory=2 * GIB), "cuda")
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
        torch.empty(GIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


HOG = """
from offload_decode.common.fast_import import skip_slow_imports
skip_slow_imports()
import mmap, sys
import numpy as np, torch
from offload_decode.cli.errors import sentence
from offload_decode.common.memory import limit_memory, own_memory
limit_memory(own_memory() + (200 << 20))
with open(sys.argv[1], "r+b") as file:
    file.truncate(1 << 30)
    shared = np.frombuffer(mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
assert shared[:: 1 << 16].sum() == 0  # a map of a store is no memory of the process
held = torch.ones(100 << 18)  # half of it
for more in (lambda: np.ones(150 << 17), lambda: torch.ones(150 << 18)):
    try:
        more()
    except Exception as error:
        print(sentence(error))
"""


@linux
def test_an_allocation_beyond_the_cap_is_a_sentence(tmp_path):
    file = tmp_path / "map"
    file.touch()
    ran = apart(HOG, file)
    said = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stderr
    assert len(said) == 2
    assert all(line.startswith("out of memory: ") for line in said), said


def test_a_longer_question_takes_smaller_passes_and_is_refused_before_it_runs():
    model = llama_8b()

    def admitted(ram, tokens, sequences=1, **config):
        caps = Caps(ram=ram and ram * MIB)
        asked = planned_ask(model, manifest_8b, EngineConfig(device="cpu", **config), caps, HELD)
        return admit_question(asked, caps, tokens, sequences)

    shape = model.shape
    manifest_8b = replace(manifest(), dtype="float16", shape=shape, kv=stored_types("auto", "float16", shape))
    assert admitted(None, 20_000) == PASS_TOKENS
    fits = next(ram for ram in range(16_000, 40_000, 50) if _admits(admitted, ram, 20_000))
    assert admitted(fits, 20_000) < PASS_TOKENS, "the passes shrink before a question is refused"
    with pytest.raises(DoesNotFit, match=r"a question of 40,000 tokens.*--ram allows.*ask a shorter one"):
        admitted(fits, 40_000)
    with pytest.raises(DoesNotFit, match=r"8 questions of up to 20,000 tokens.*--batch-size"):
        admitted(fits, 20_000, 8)
    assert admitted(fits, 100) == PASS_TOKENS, "the usual length was admitted when the store was opened"
    # What a question chooses as a whole does not depend on the memory that there is.
    assert admitted(None, 20_000, selector="quoka") == WHOLE_QUESTION
    with pytest.raises(DoesNotFit):
        admitted(fits, 20_000, selector="quoka")
    with pytest.raises(DoesNotFit, match="this machine has"):
        admitted(None, 50_000_000)
    # A selector may choose for so few tokens together that there are no halves.
    few = planned_ask(model, manifest_8b, CPU, Caps(), HELD)
    few = replace(few, request=replace(few.request, pass_tokens=8))
    assert admit_question(few, Caps(), 20_000) == 8
    with pytest.raises(DoesNotFit, match="this machine has"):
        admit_question(few, Caps(), 50_000_000)


def _admits(admitted, *given):
    try:
        admitted(*given)
    except DoesNotFit:
        return False
    return True


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("can't start new thread"),
        OSError(12, "Cannot allocate memory", "s.kv"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
)
def test_whoever_ran_out_of_memory_it_is_the_same_sentence(error):
    assert sentence(error) == OUT_OF_MEMORY


@pytest.mark.parametrize("error", [OSError(28, "No space"), RuntimeError("no"), ImportError("no module")])
def test_other_errors_are_not_taken_for_it(error):
    assert sentence(error) != OUT_OF_MEMORY


PREFILL = """
from offload_decode.common.fast_import import skip_slow_imports
skip_slow_imports()
import sys
from pathlib import Path
import numpy as np
from offload_decode.common.memory import limit_memory, own_memory
from tests.planning.test_caps import prefilled
held = []
def progress(stage, done, total):
    if done == 0:
        limit_memory(own_memory() + (192 << 20))
    if done > 300:
        try:
            while True:
                held.append(np.ones(64 << 20, np.uint8))
        except MemoryError:
            held.pop()  # room to end in: without any, Python waits for threads that cannot begin
            raise
try:
    prefilled(Path(sys.argv[1]), progress)
except MemoryError:
    print("out of memory")
"""


def prefilled(out, progress=lambda stage, done, total: None):
    """A report of 1,000 tokens through a tiny model, in chunks of 100."""
    from offload_decode.models.loading import wrap
    from offload_decode.prefill_jobs.job import Settings, prefill_tokens
    from offload_decode.types import Document
    from tests.tiny import tiny_model

    tokens = np.random.default_rng(0).integers(3, 131, 1000).astype(np.int32)
    documents, settings = [Document("all", 0, 1000)], Settings(options={"chunk": 100})
    return prefill_tokens(wrap(tiny_model()), tokens, documents, out, settings, progress=progress)


@linux
def test_a_prefill_that_ran_out_of_memory_goes_on_under_a_higher_cap(tmp_path):
    from offload_decode.store.reader import KVStore

    ran = apart(PREFILL, tmp_path / "capped.kv")
    assert (ran.returncode, ran.stdout) == (0, "out of memory\n"), ran.stderr
    assert not (tmp_path / "capped.kv").exists()
    assert prefilled(tmp_path / "capped.kv").resumed_from >= 300
    assert prefilled(tmp_path / "whole.kv").resumed_from == 0
    capped, whole = (KVStore.open(tmp_path / name).store_digest for name in ("capped.kv", "whole.kv"))
    assert capped == whole


@pytest.mark.parametrize(
    ("amount", "shown"),
    [(1000, "1,000 bytes"), (1024, "1 KiB"), (1500 * MIB, "1.46 GiB"), (700 * MIB, "700 MiB")],
)
def test_a_size_has_no_exponent(amount, shown):
    assert size(amount) == shown
