"""Real processes for the tests of stores: small scripts whose output is read line by line."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

__all__ = ["Script", "free_port", "until"]

LIMIT_S = 60.0


class Script:
    """A Python program of its own; use it in a `with` block, which kills what still runs.

    Args:
        code: the program; indentation does not matter.
        arguments: what it finds in `sys.argv[1:]`.
        environment: variables that differ from this process's; None removes one.
    """

    def __init__(self, code: str, *arguments: object, environment: dict[str, str | None] | None = None) -> None:
        variables: dict[str, str | None] = {**os.environ, **(environment or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", textwrap.dedent(code), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={name: value for name, value in variables.items() if value is not None},
            cwd="/",
        )
        self.output = ""
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="script output", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def line(self, limit_s: float = LIMIT_S) -> str:
        """The next line of output; fails when there is none."""
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            raise AssertionError(f"no line within {limit_s} s after:\n{self.output}") from None
        self.output += line
        assert line, f"the script ended; its output:\n{self.output}"
        return line.strip()

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Waits for the end; returns the status, with all that was printed in `output`."""
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the script did not end within {limit_s} s; its output:\n{self.output}") from None
        self._reader.join(LIMIT_S)
        while not self._lines.empty():
            self.output += self._lines.get()
        return status

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], bool], what: str, limit_s: float = 20.0) -> None:
    """Waits for something that another process causes and that gives no event here."""
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, f"not within {limit_s} s: {what}"
        time.sleep(0.005)
