"""Commands of the command line in processes that are killed at a step of the file system.

A process takes seconds to import what a command needs. So one process, the `Runner`'s, imports it all once
and forks a child for every run: `python -m tests.prefill_jobs.killing`, a JSON object a line both ways.
Where the system allows it, it lives among mounts of its own, so that it can have small disks that nobody
else sees and that are gone with it.
"""

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHUNK_ROWS = 256
"""Rows of a chunk file in forked runs, so that a head of a small store has several."""

PAGE = 4096
"""Bytes by which small disks fill up."""

_MOUNT = "mount -t tmpfs tmpfs /mnt"
_NAMESPACES = (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"])


def prefill(corpus: Path, model: Path | str, store: Path | str, *more: str) -> list[str]:
    """The arguments of a prefill in many small steps."""
    return ["prefill", str(corpus), "--model", str(model), "--out", str(store), *(more or ("-o", "chunk=16"))]


def index(store: Path, kind: str) -> list[str]:
    """The arguments of an index build."""
    return ["index", str(store), "--kind", kind, "--k", "20"]


@dataclass(frozen=True)
class Ran:
    """How a run ended: -9 as its code where it was killed; and its steps of the file system."""

    code: int
    out: str
    err: str
    steps: int

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


class Runner:
    """Runs commands in forks of a process that has everything imported, until it is closed."""

    def __init__(self) -> None:
        prefix = next((each for each in _NAMESPACES if _works([*each, "sh", "-c", _MOUNT])), None)
        self.has_disks = prefix is not None
        """Whether `small_disk` works here."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
        self._process = subprocess.Popen(
            [*(prefix or []), sys.executable, "-m", __spec__.name],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        *commands: list[str],
        kill_at: int = 0,
        limit: int = 0,
        memory: int = 0,
        stdout: str = "",
    ) -> Ran:
        """Run commands one after another until one fails.

        Before or in the middle of the step `kill_at` the process is killed. No file grows past `limit` bytes,
        where it is given, and the process by no more than `memory`; `stdout` is where standard output goes,
        "-" for closed.
        """
        return Ran(**self._ask({name: value for name, value in locals().items() if name != "self"}))

    def small_disk(self, folder: Path, size: str) -> Path:
        """Mount a disk of `size` at `folder`; returns where this process sees it."""
        folder.mkdir()
        self._ask({"mount": ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]})
        return Path(f"/proc/{self._process.pid}/root", *folder.parts[1:])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


class Job:
    """A prefill and index builds into one folder, which are killed and run again.

    `commands` makes them for a folder; their prefill comes first, and its store is called store.kv.
    """

    def __init__(self, runner: Runner, folder: Path, commands: Callable[[Path], list[list[str]]]) -> None:
        self.runner, self.folder = runner, folder
        self.store = folder / "store.kv"
        self.commands = commands
        self._commands = commands(folder)
        self.clear()
        alone = [runner.run(command) for command in self._commands]
        assert not any(ran.code for ran in alone), alone
        self.whole = tree(folder)
        self.clear()
        self.steps = self.resume().steps  # one process needs a few less of them than several

    def clear(self) -> None:
        """Begin anew."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()

    def run(self, **how: Any) -> Ran:
        """The commands that are left: a store that is published is not prefilled again."""
        return self.runner.run(*self._commands[int(self.store.exists()) :], **how)

    def resume(self) -> Ran:
        """The same commands again, to their end."""
        partial = self.store.with_name("store.kv.partial")
        if self.store.exists() and partial.exists():  # the prefill then has nothing left to do but to tidy up
            refused = self.runner.run(self._commands[0])
            assert refused.code == 0 or "exists already" in refused.err, refused
        ran = self.run()
        assert ran.code == 0, ran
        return ran

    def is_whole(self) -> bool:
        """Whether the folder holds, bit for bit, what an unbroken run leaves, and nothing else."""
        return tree(self.folder) == self.whole


class Disk:
    """A disk of `size` bytes at `folder`; `seen` is where this process sees it."""

    def __init__(self, runner: Runner, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.seen = runner.small_disk(folder, str(size))

    def leave(self, room: int) -> None:
        """Fill the disk but for `room` bytes."""
        free = os.statvfs(self.seen).f_bavail * PAGE
        with open(self.seen / "ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - room)

    def free(self) -> None:
        """Remove what `leave` filled it with."""
        (self.seen / "ballast").unlink()

    def used(self) -> int:
        """Bytes in use."""
        state = os.statvfs(self.seen)
        return (state.f_blocks - state.f_bfree) * PAGE

    def empty(self) -> None:
        """Remove everything."""
        for path in sorted(self.seen.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


def kill_at_steps(job: Job, steps: Iterable[int], again: Callable[[], int] = lambda: 0) -> list[int]:
    """Kill a job, begun anew, at each of these changes of the file system; those whose end was another. What
    is left is killed at the step that `again` says, until that is 0 or it comes to its end before.
    """
    spoilt = []
    for step in steps:
        job.clear()
        ran = job.run(kill_at=step)
        assert ran.killed, f"it has no step {step}: {ran}"
        while ran.killed and (further := again()):
            ran = job.run(kill_at=further)
        job.resume()
        if not job.is_whole():
            spoilt.append(step)
    return spoilt


def told(ran: Ran) -> str:
    """The one sentence of a run that failed."""
    assert (ran.code, ran.out) == (1, ""), ran
    assert ran.err.startswith("error: "), ran
    assert ran.err.count("\n") == 1, ran
    assert "unexpected" not in ran.err, ran
    return ran.err


def tree(folder: Path) -> dict[str, bytes]:
    """Every file and empty folder under `folder`, by its path, with its bytes."""
    found = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found |= {path: b"" for path in folder.rglob("*") if path.is_dir() and not any(path.iterdir())}
    return {str(path.relative_to(folder)): content for path, content in found.items()}


def _works(command: list[str]) -> bool:
    found = shutil.which(command[0])
    return bool(found) and not subprocess.run(command, capture_output=True, check=False).returncode


# What follows runs in the Runner's process and in its children.


def _serve() -> None:
    _import_all()
    steps = mmap.mmap(-1, 8)
    for line in sys.stdin:
        request = json.loads(line)
        if "mount" in request:
            subprocess.run(request["mount"], check=True)
            answer: dict[str, Any] = {}
        else:
            answer = _fork(request, steps)
        print(json.dumps(answer), flush=True)


def _import_all() -> None:
    import importlib

    import torch

    torch.set_num_threads(1)
    for module in ("zarr", "numba", "transformers.models.gemma2"):
        importlib.import_module(module)
    ours = """cli.main prefill_jobs.job prefill_jobs.append prefill_jobs.indexing cli.compiling kv.indexes
        engine.engine prefill_jobs.buckets prefill_jobs.collect indexes.clusters.index"""
    for module in ours.split():
        importlib.import_module(f"offload_decode.{module}")
    from offload_decode.indexes.registry import load_libraries
    from offload_decode.store import layout

    load_libraries()
    layout.CHUNK_TOKENS = CHUNK_ROWS


def _fork(request: dict[str, Any], steps: mmap.mmap) -> dict[str, Any]:
    steps[:] = bytes(8)
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        child = os.fork()
        if not child:
            _be_the_child(request, steps, out.fileno(), err.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    count = int.from_bytes(steps[:], "little")
    return {"code": code, "out": texts[0], "err": texts[1], "steps": count}


def _be_the_child(request: dict[str, Any], steps: mmap.mmap, out: int, err: int) -> None:
    import resource

    from offload_decode.cli.main import main
    from offload_decode.common.memory import limit_memory, own_memory

    code = 70
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(request["stdout"], os.O_WRONLY) if len(request["stdout"]) > 1 else out, 1)
        os.dup2(err, 2)
        if request["stdout"] == "-":
            os.close(1)
            sys.stdout = None  # type: ignore[assignment]  # as Python has it where file 1 is closed
        if request["limit"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"],) * 2)
        if request["memory"]:
            limit_memory(own_memory() + request["memory"])
        _count(steps, request["kill_at"])
        code = 0
        for command in request["commands"]:
            sys.argv = ["offload-decode", *command]
            try:
                main()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            except Exception:  # noqa: BLE001 (as Python ends where nobody catches it)
                traceback.print_exc()
                code = 1
            if code:
                break
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError:
        code = 120  # as Python ends where it cannot flush standard output
    finally:
        os._exit(code)


def _count(steps: mmap.mmap, kill_at: int) -> None:
    """Count the changes of the file system, by any thread; die before, or halfway in, that of `kill_at`.

    Those of the user's cache are not counted: what is remembered there is written by the first run alone.
    """
    cache = os.environ["XDG_CACHE_HOME"]
    changes = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    made: set[str] = set()

    def step() -> bool:
        count = int.from_bytes(steps[:], "little") + 1
        steps[:] = count.to_bytes(8, "little")
        return count == kill_at

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], str | os.PathLike) and str(arguments[0]).startswith(cache):
            return
        if event == "os.mkdir":
            # zarr's threads try the same folders, as often as chance has it: once is a change.
            folder = os.fspath(arguments[0])
            if folder in made or os.path.exists(folder) or not os.path.exists(os.path.dirname(folder)):
                return
            made.add(folder)
        if event in ("os.rmdir", "os.rename"):
            made.discard(os.fspath(arguments[0]))
        opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & writes
        if (opened or event in changes) and step():
            os.kill(os.getpid(), signal.SIGKILL)

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        if step():
            real(descriptor, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(descriptor, data, offset)

    real = os.pwrite
    os.pwrite = pwrite
    sys.addaudithook(on_event)


if __name__ == "__main__":
    _serve()
