"""A Python program in its own interpreter, whose output a test reads line by line.

For tests of a program's start, end, output and exit status, which a `Worker` cannot show.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping

from rpcdist.testing.limits import LIMIT_S


class Program:
    """A Python program; the end of the `with` block kills it and the processes that it started, if they still run.

    It leads its own process group, which Ctrl-C in a terminal does not reach.

    Args:
        code: the source; common indentation does not matter.
        arguments: the program's `sys.argv[1:]`.
        environment: variables that differ from this process's; None removes one.

    Attributes:
        output: the lines that `line` has returned; all lines after `end`.
        process: the program's process.
    """

    def __init__(self, code: str, *arguments: object, environment: Mapping[str, str | None] | None = None) -> None:
        variables: dict[str, str | None] = {**os.environ, **(environment or {})}
        self.output = ""
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", textwrap.dedent(code), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={name: value for name, value in variables.items() if value is not None},
            cwd="/",
            process_group=0,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="output of a program", daemon=True)
        self._reader.start()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # the group is empty; otherwise its number is still in use
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)
        self._read_to_the_end(LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def line(self, limit_s: float = LIMIT_S) -> str:
        """Waits for the next line of output; fails if none comes."""
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            raise AssertionError(f"no line within {limit_s} s after:\n{self.output}") from None
        self.output += line
        assert line, f"the program ended; its output:\n{self.output}"
        return line.strip()

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Waits for the end of the program; returns its exit status, or minus the signal that ended it."""
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the program did not end within {limit_s} s; its output:\n{self.output}") from None
        self._read_to_the_end(limit_s)
        return status

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the program."""
        self.process.send_signal(number)

    def _read_to_the_end(self, limit_s: float) -> None:
        """Fails when a process that outlives the program holds its output: closing that would wait for the process."""
        self._reader.join(limit_s)
        while not self._lines.empty():
            self.output += self._lines.get()
        if self._reader.is_alive():
            raise AssertionError(
                f"the program ended with status {self.process.returncode}, and {limit_s} s later another process still "
                f"holds its output, which is:\n{self.output}"
            )

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")


def free_port() -> int:
    """A TCP port of this host that is currently free.

    It is outside the range from which the system chooses, so no connection and no other server gets it before its use.

    Raises:
        OSError: no port can be bound; the text says why.
    """
    errors: list[OSError] = []
    for port in secrets.SystemRandom().sample(range(20_000, 29_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError as exc:
                errors.append(exc)
    raise errors[-1]
