"""Runs programs as users do, in sessions of their own, so that whatever they leave running can be found."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

from rpcdist.testing.limits import UNIT_S

__all__ = [
    "LIMIT_S",
    "STOP_LIMIT_S",
    "assert_no_process_left",
    "environment",
    "read_until",
    "run",
    "session_members",
    "start",
    "without_notices",
]

# Limits of what hangs, not of what is slow: most of a run is importing torch in every process, and other tests run too.
LIMIT_S = 1000 * UNIT_S  # of a whole run, which takes 10 to 20 s on two idle cores
STOP_LIMIT_S = 100 * UNIT_S  # between Ctrl-C and the end, which takes 1 s


def environment() -> dict[str, str]:
    """Ours, without what a launcher may have left there."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in launcher}


def run(*command: str | Path, cwd: Path | None = None, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, in a session of its own; kills the session when that takes too long."""
    with start(*command, cwd=cwd) as process:
        out, errors = process.communicate(timeout=limit_s)
        assert_no_process_left(process.pid)
    return subprocess.CompletedProcess(list(map(str, command)), process.returncode, out, without_notices(errors))


def without_notices(errors: str) -> str:
    """The output of a program on stderr, without the line of a `LocalCluster` that starts slowly on a busy machine."""
    return "".join(line for line in errors.splitlines(keepends=True) if "still waiting until these have" not in line)


@contextmanager
def start(*command: str | Path, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        list(map(str, command)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment(),
        cwd=cwd,
    )
    try:
        yield process
    finally:
        for member in session_members(process.pid):
            member.kill()
        process.communicate(timeout=LIMIT_S)


def session_members(session: int) -> list[psutil.Process]:
    """The living processes of a session: children stay in it also when their parent is gone."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def assert_no_process_left(session: int, limit_s: float = STOP_LIMIT_S) -> None:
    _, alive = psutil.wait_procs(session_members(session), timeout=limit_s)
    assert not alive, f"still running: {alive}"


def read_until(stream: IO[str], text: str) -> str:
    """Lines up to the first that contains `text`."""
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"the output ended without {text!r}:\n{''.join(lines)}")
