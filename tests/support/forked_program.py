"""A program in a worker of a pool, read like a `Program`: for programs that need no interpreter of their own.

A worker is forked from a process that has imported torch, which takes an interpreter two seconds. It outlives its
program until the `with` block kills it, so what a program does at its exit, and in children that it forks, needs a
`Program`.
"""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Mapping
from types import ModuleType

from rpcdist.testing import LIMIT_S, Worker, WorkerEnded, WorkerPool, eventually

__all__ = ["ForkedProgram"]


class ForkedProgram:
    """See `rpcdist.testing.Program`; the end of the `with` block kills it.

    Args:
        pool: starts the worker.
        code: the source; common indentation does not matter.
        arguments: what it finds in `sys.argv[1:]`.
        environment: variables that differ from this process's; None removes one.
    """

    def __init__(
        self, pool: WorkerPool, code: str, *arguments: object, environment: Mapping[str, str | None] | None = None
    ) -> None:
        self._pool = pool
        self.worker: Worker = pool.start("program", environment)
        self._num_read = 0
        self._running = self.worker.begin(run_code, textwrap.dedent(code), [str(argument) for argument in arguments])

    def __enter__(self) -> ForkedProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.kill()
        self._pool.discard(self.worker)

    @property
    def output(self) -> str:
        """Its output so far."""
        return self.worker.output()

    def line(self, limit_s: float = LIMIT_S) -> str:
        """Waits for the next line of output; fails when none comes."""
        eventually(lambda: self._has_line() or self._running.done(), "a line of the program", limit_s)
        assert self._has_line(), f"the program ended; its output:\n{self.output}"
        self._num_read += 1
        return self.output.splitlines()[self._num_read - 1].strip()

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Waits for the end of the program; its status, or minus the signal that ended it."""
        try:
            return self._running.result(limit_s)
        except WorkerEnded:
            return self.worker.wait(limit_s)

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self.worker.signal(number)

    def _has_line(self) -> bool:
        return self.output.count("\n") > self._num_read


def run_code(code: str, arguments: list[str]) -> int:
    """Runs the code as `python -c` does, and returns the status with which it would end; in the worker."""
    sys.argv = ["-c", *arguments]
    os.chdir("/")
    main = sys.modules["__main__"] = ModuleType("__main__")
    status = 0
    try:
        exec(compile(code, "<program>", "exec"), main.__dict__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    return status
