"""The peer of a method call: an actor of Ray, in the interpreter of a virtual environment of its own.

Ray is no dependency of this project, and its own dependencies need not fit ours: `python -m venv` somewhere else, and
`pip install` what `REQUIREMENT` says.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

from _cases import Metrics, Row
from _pairs import PairFailed

__all__ = ["REQUIREMENT", "ROW", "Actor", "open_actor", "version"]

REQUIREMENT = "ray==2.60.0"
ROW = Row("method of an object elsewhere, p50", "", "p50", "us", 1e6, {"local": 0.15}, stretch=0.1)
PROGRAM = Path(__file__).with_name("_ray_actor.py")
START_TIMEOUT_S, MEASURE_TIMEOUT_S, END_TIMEOUT_S = 120.0, 120.0, 30.0


class Actor:
    """The process that drives an actor; it reads orders from its standard input, one a line."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def measure(self, effort: float) -> Metrics:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{effort}\n".encode())
        self._process.stdin.flush()
        metrics: Metrics = json.loads(self.answer(MEASURE_TIMEOUT_S))
        return metrics

    def answer(self, timeout_s: float) -> bytes:
        """The next line that it writes."""
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], timeout_s)[0]:
            raise PairFailed(f"the process with Ray did not answer within {timeout_s:.0f} s")
        if not (line := output.readline()):
            raise PairFailed(f"the process with Ray ended; its interpreter needs `pip install {REQUIREMENT}`")
        return line


@contextlib.contextmanager
def open_actor(python: str, *program: str) -> Iterator[Actor]:
    """Starts Ray and an actor with the interpreter `python`; ends both in any case.

    Args:
        python: the interpreter.
        program: another program than `PROGRAM`, of this folder, and its arguments.
    """
    name, *arguments = program or (PROGRAM.name,)
    process = subprocess.Popen(
        [python, str(PROGRAM.with_name(name)), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        actor = Actor(process)
        actor.answer(START_TIMEOUT_S)
        yield actor
    finally:
        process.stdin.close()  # it ends with its orders
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_TIMEOUT_S)
        process.stdout.close()


def version(python: str) -> str:
    """The version of Ray that an interpreter has."""
    try:
        command = [python, "-c", "import importlib.metadata as m; print(m.version('ray'))"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        raise PairFailed(f"{python} is no interpreter with Ray ({exc}): `pip install {REQUIREMENT}` there") from exc
    return found.stdout.strip()
