"""Programs of several processes: started, told, killed, and whether anything of them is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.processes import wait_for

__all__ = ["Tree", "engine_process", "start_error", "start_tree"]

_ENGINE = str(Path(__file__).with_name("engine_process.py"))
_MARK = "KVSTORE_TEST_TREE"
_SHARED_MEMORY = Path("/dev/shm")


class Tree:
    """A program and all that it has started, known by a variable of the environment that they inherit.

    Attributes
    ----------
    popen : Popen
        The program itself.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._log = log
        self._shared = set(_SHARED_MEMORY.iterdir())
        name, _, value = self._mark.partition("=")
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                command,
                env={**os.environ, **environment, name: value},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    def line(self) -> Any:
        """The next line that the program prints as JSON; whatever else is on stdout is skipped."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            try:
                return json.loads(line)
            except ValueError:
                continue
        raise AssertionError(f"it has ended:\n{self.log[-6000:]}")

    def ask(self, order: str) -> Any:
        """What the program answers to a line."""
        self.tell(order)
        return self.line()

    def tell(self, order: str) -> None:
        """Give the program a line; its answer is the next :meth:`line`."""
        assert self.popen.stdin is not None
        print(order, file=self.popen.stdin, flush=True)

    @property
    def log(self) -> str:
        """What all of it wrote to stderr."""
        return self._log.read_text(errors="replace")

    def living(self) -> dict[int, str]:
        """Processes of the tree that have not ended -> their command lines."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                if self._is_ours(folder):
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ").strip()
        return {pid: command for pid, command in found.items() if command}

    def _is_ours(self, folder: Path) -> bool:
        """By its session, or by its environment: one starts sessions of its own, another writes its title
        over the environment."""
        if os.getsid(int(folder.name)) == self.popen.pid:
            return True
        return self._mark.encode() in (folder / "environ").read_bytes().split(b"\0")

    def leftovers(self) -> list[Path]:
        """Files in shared memory that were not there when the program started."""
        return sorted(set(_SHARED_MEMORY.iterdir()) - self._shared)

    def await_end(self, timeout: float = 30.0) -> None:
        """Return when no process of the tree is left; AssertionError with those that are."""
        try:
            wait_for(lambda: not self.living(), timeout)
        except AssertionError:
            raise AssertionError(f"still running: {self.living()}") from None

    def kill(self) -> None:
        """End all of it."""
        for pid in self.living():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def start_tree(command: Sequence[str], log: Path, **environment: str) -> Iterator[Tree]:
    """A running program; killed at the end of the block."""
    tree = Tree(command, log, environment)
    try:
        yield tree
    finally:
        tree.kill()


@contextmanager
def engine_process(
    model: Path, log: Path, extra: dict[str, Any] | None, *, ranks: int = 1, **options: Any
) -> Iterator[Tree]:
    """An engine whose scheduler and workers are processes, once it is ready."""
    if ranks > 1:
        options["tensor_parallel_size"] = ranks
    binding = "|".join(map(str, range(ranks)))
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if ranks > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = binding
    with start_tree([sys.executable, _ENGINE, _told(model, extra, options)], log, **environment) as tree:
        assert tree.line() == "ready"
        yield tree


def start_error(model: Path, extra: dict[str, Any], **options: Any) -> str:
    """What an engine says that does not start; in its own process, for vLLM does not clean up after it."""
    done = subprocess.run(
        [sys.executable, _ENGINE, _told(model, extra, options)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


def _told(model: Path, extra: dict[str, Any] | None, options: dict[str, Any]) -> str:
    return json.dumps({"model": str(model), "extra": extra, "options": options})
