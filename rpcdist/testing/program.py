"""A Python program in an interpreter of its own, whose output a test reads line by line.

For what a `Worker` cannot show: how a program starts and ends, what it prints, and which status it ends with.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping

from rpcdist.testing.limits import LIMIT_S

__all__ = ["Program", "free_port"]


class Program:
    """A Python program; the end of the `with` block kills it if it still runs.

    Args:
        code: the source; common indentation does not matter.
        arguments: what it finds in `sys.argv[1:]`.
        environment: variables that differ from this process's; None removes one.

    Attributes:
        output: the lines that `line` has returned, and all of them after `end`.
        process: its process.
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
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="output of a program", daemon=True)
        self._reader.start()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def line(self, limit_s: float = LIMIT_S) -> str:
        """Waits for the next line of output; fails when none comes."""
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            raise AssertionError(f"no line within {limit_s} s after:\n{self.output}") from None
        self.output += line
        assert line, f"the program ended; its output:\n{self.output}"
        return line.strip()

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Waits for the end of the program; its status, or minus the signal that ended it."""
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the program did not end within {limit_s} s; its output:\n{self.output}") from None
        self._reader.join(LIMIT_S)
        while not self._lines.empty():
            self.output += self._lines.get()
        return status

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self.process.send_signal(number)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")


def free_port() -> int:
    """A TCP port of this host on which nobody listens at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
