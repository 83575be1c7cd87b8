"""`ask` skips slow imports, and loops that are compiled are announced once."""

import copy
import os
import re
from pathlib import Path

import pytest
from transformers.utils.import_utils import fetch__all__

from offload_decode.common.fast_import import LatePattern, last_list
from offload_decode.hf import shape, user_cache
from tests.cli.conftest import imported, run
from tests.processes import apart

NEVER = {
    "accelerate.commands.launch",
    "boto3",
    "datasets",
    "fastapi",
    "matplotlib",
    "pandas",
    "rich",
    "scipy.linalg",
    "scipy.optimize",
    "sklearn",
    "sympy",
    "torch._dynamo.convert_frame",
    "torch._inductor",
    "torch.distributed.tensor",
    "zarr",
}
GIVING_WAY = """
from offload_decode.hf import shape, verify
from offload_decode.common.fast_import import skip_slow_imports
skip_slow_imports()
import torch, transformers.modeling_utils
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
assert torch._dynamo.disable(len) is len and torch.compiler.disable()(len) is len
with TransformGetItemToIndex():
    pass
import torch._dynamo.config, sys
assert torch._dynamo.config.recompile_limit and torch._dynamo.__file__.endswith("_dynamo/__init__.py")
assert sys.modules["torch._dynamo"] is torch._dynamo
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).sum() == 4
"""

LATE = """
import re
from offload_decode.common.fast_import import LatePattern, skip_slow_imports
skip_slow_imports()
import transformers.core_model_loading
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
transforms = get_checkpoint_conversion_mapping("mixtral")
assert transforms
late = [own.compiled_sources for own in transforms]
assert all(type(pattern) is LatePattern for pattern in late)
assert not any("_compiled" in vars(pattern) for pattern in late), "nothing was asked yet"
for pattern in late:
    own = re.compile(pattern.pattern)
    assert dict(pattern.groupindex) == dict(own.groupindex)
    assert pattern.search("nothing of theirs") is None
"""


def test_ask_skips_slow_imports_and_answers_the_same(store, monkeypatch):
    monkeypatch.setattr(user_cache, "_known", {})
    monkeypatch.setattr(shape, "_LONG_S", -1.0)  # write the user cache, as the first process does
    here = run("ask", store, "Which colour?", "--max-new-tokens", "4")
    printed, modules = imported("ask", store, "Which colour?", "--max-new-tokens", "4")
    assert printed == here.out
    assert "transformers.modeling_utils" in modules
    assert sorted(modules & NEVER) == []


def test_a_store_is_inspected_without_torch(store):
    printed, modules = imported("inspect", store)
    assert "tokens" in printed
    assert sorted(modules & {"torch", "transformers"}) == []


@pytest.mark.parametrize("program", [pytest.param(GIVING_WAY, marks=pytest.mark.slow), LATE])
def test_slow_imports_happen_for_the_compiler_and_patterns_at_first_use(program):
    ran = apart(program)
    assert ran.returncode == 0, ran.stderr


COMPILING = """
from offload_decode.cli.compiling import announce_compiling
announce_compiling()
announce_compiling()
import numpy as np
from numba import njit
njit(lambda: 1)()  # not one of ours
from offload_decode.indexes.clusters.search import _candidates_for
for k in (5, np.int32(5)):
    _candidates_for(k)
"""


def test_compiling_is_announced_once(tmp_path):
    first, again = (apart(COMPILING, env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}) for _ in range(2))
    assert first.stderr.startswith("compiling the loops")
    assert (first.stderr.count("\n"), again.returncode, again.stderr) == (1, 0, "")


LEAVING = """
import atexit, os, sys, threading, time
from offload_decode.cli import main as program
class Tools:  # as from Python 3.12 on
    def get_tool(self, number):
        return "cProfile" if number == 2 else None
def late():
    time.sleep(0.2)
    print("a thread ended")
def main():
    {thread}
    atexit.register(print, "at the exit")
    print("answered")
    sys.exit({code})
program.main = main
os._exit, leave = lambda code: (print("left", flush=True), leave(code)), os._exit
program.console()
"""


@pytest.mark.parametrize(
    ("thread", "code", "told", "ended"),
    [
        ("", "3", ["answered", "at the exit", "left"], 3),
        ("threading.Thread(target=late).start()", "0", ["answered", "a thread ended", "at the exit"], 0),
        ("", "'a message'", ["answered", "at the exit"], 1),
        ("sys.setprofile(lambda *_: None)", "0", ["answered", "at the exit"], 0),
        ("sys.monitoring = Tools()", "0", ["answered", "at the exit"], 0),
    ],
)
def test_a_process_leaves_at_once_where_nothing_is_lost_by_it(thread, code, told, ended):
    ran = apart(LEAVING.format(thread=thread, code=code))
    assert (ran.stdout.split("\n")[:-1], ran.returncode) == (told, ended), ran.stderr


GARBAGE = """
import gc
from offload_decode.cli import main as program
program._collect_little_garbage()
assert gc.get_threshold()[0] == 1_000_000
gc.collect()
print(*gc.get_threshold(), len(gc.callbacks))
"""


def test_garbage_is_looked_for_as_usual_after_the_first_time():
    assert apart(GARBAGE).stdout.split() == ["50000", "20", "20", "0"]


def test_a_late_pattern_is_the_pattern():
    late, pattern = LatePattern(r"(?P<layer>layers\.\d+)\.w", re.IGNORECASE), r"(?P<layer>layers\.\d+)\.w"
    for own in (late, copy.copy(late), copy.deepcopy(late)):
        found = own.search("model.LAYERS.3.w")
        assert found is not None
        assert found.group("layer") == "LAYERS.3"
        assert (own.pattern, own.groupindex) == (pattern, {"layer": 1})
    with pytest.raises(re.error):
        LatePattern("(").search("")


def test_a_file_of_transformers_exports_the_same_names_read_from_its_last_list_on():
    import transformers

    files = sorted(Path(transformers.__file__).parent.glob("models/[a-c]*/*.py"))
    assert len(files) > 100
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert fetch__all__(last_list(text)) == fetch__all__(text), file
