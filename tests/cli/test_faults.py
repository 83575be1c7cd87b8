"""Memory that goes away under a reader ends a command with a sentence, whichever thread reads it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="other systems raise other signals")
@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_file_that_shrinks_while_it_is_read_is_a_sentence(where):
    program = f"""
        import mmap, os, tempfile, threading
        from offload_decode.cli.bus_error import exit_on_bus_error
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
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("error: a file of the store or of its index shrank while it was read")
    assert ran.stderr.count("\n") == 1
