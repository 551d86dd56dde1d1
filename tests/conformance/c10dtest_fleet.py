"""Runs one of torch's tests of collectives and DDP: its ranks are forked from this process, which has imported all.

Each test has a session of its own. Its first process forks one process for each rank and waits for them; when the limit
passes, or a rank fails and the others do not end soon after, all processes of the session are killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import re
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from parent_death import end_with_parent
from rpctest_fleet import GRACE_S, Outcome

__all__ = ["preload", "prepare", "run_test"]

# The exit code of a rank when the test raised, or when something around it did.
_FAILED = 10
_POLL_S = 0.05
# How long the ranks may take to write their stacks.
_STACKS_S = 2.0
# Of what a rank wrote: stacks are long, and begin with where it was.
_OUTPUT_CHARS = 8000


def preload() -> None:
    """Imports what torch's own harness needs and takes seconds; before `prepare`, as it needs torch's own names."""
    import torch._dynamo.test_case
    import torch.testing._internal.distributed.multi_threaded_pg  # noqa: F401


def prepare(peer: str) -> Any:
    """Imports the tests into this process, with what takes the place of Gloo; once in a process.

    Args:
        peer: `torch` for Gloo itself, `compat` for rpcdist in the place of torch.distributed, or `backend` for torch's
            groups on rpcdist.
    """
    import c10dtest_source

    if peer == "compat":
        import rpcdist.compat

        rpcdist.compat.install()
    elif peer == "backend":
        import rpcdist.collectives.torch_backend
    return c10dtest_source.load("rpcdist" if peer == "backend" else "gloo")


def run_test(tests: ModuleType, test: str, ranks: int, limit_s: float) -> Outcome:
    """Runs a test on so many ranks.

    Args:
        tests: from `prepare`.
        test: a method of its `_DistTestBase`.
        ranks: how many processes.
        limit_s: seconds after which the test counts as hung.
    """
    method = getattr(tests.DistributedTest._DistTestBase, test)
    if getattr(method, "__unittest_skip__", False):
        return Outcome(test, "skipped", 0.0, method.__unittest_skip_why__)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="c10dtest_") as name:
        folder = Path(name)
        for each in ("barrier", "test_dir", "init_dir"):
            (folder / each).mkdir()
        sys.stdout.flush()
        sys.stderr.flush()
        session = os.fork()
        if session == 0:
            _lead_session(tests, test, ranks, folder)
        outcome = _judge(tests, test, folder, _wait(session, folder, ranks, limit_s))
    outcome.seconds = time.monotonic() - began
    return outcome


# ---------------------------------------------------------------- in the process that runs all tests


def _wait(session: int, folder: Path, ranks: int, limit_s: float) -> list[int | None]:
    """Waits for the end of all ranks, and kills those that go on: with what each exited, None for one that did not."""
    descriptor = os.pidfd_open(session)
    limit = time.monotonic() + limit_s
    ended = False
    while not ended and (left := limit - time.monotonic()) > 0:
        ended = bool(select.select([descriptor], [], [], min(_POLL_S, left))[0])
        if any(status not in (0, None) for status in _statuses(folder, ranks)):
            limit = min(limit, time.monotonic() + GRACE_S)
    statuses = _statuses(folder, ranks)
    if not ended:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(session, signal.SIGABRT)  # faulthandler writes the stacks
        select.select([descriptor], [], [], _STACKS_S)  # the session ends after its ranks
    os.close(descriptor)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)
    os.waitpid(session, 0)
    return statuses


def _statuses(folder: Path, ranks: int) -> list[int | None]:
    """With what each rank exited; None for one that did not."""
    files = [folder / f"status{rank}" for rank in range(ranks)]
    return [int(file.read_text() or 0) if file.exists() else None for file in files]


def _judge(tests: ModuleType, test: str, folder: Path, statuses: list[int | None]) -> Outcome:
    """torch's rule: a test whose ranks all exit with 0 passed; a code of rank 0 may say that it is skipped."""
    skips = {skip.exit_code: skip.message for skip in tests.TEST_SKIPS.values()}
    if all(status == 0 for status in statuses):
        return Outcome(test, "passed", 0.0)
    outputs = [(folder / f"output{rank}").read_text(errors="replace") for rank in range(len(statuses))]
    if statuses[0] in skips and all(status == statuses[0] for status in statuses):
        said = re.search(r"for following reason: (.*)", outputs[0])
        return Outcome(test, "skipped", 0.0, said[1] if said else skips[statuses[0]])
    bad = [status for status in statuses if status not in (0, None)]
    kind = "timeout" if not bad else "crashed" if any(status < 0 for status in bad) else "failed"
    parts = []
    for rank, status in enumerate(statuses):
        how = "did not end" if status is None else f"exit status {status}"
        parts.append(f"--- rank {rank}: {how} ---\n{outputs[rank][-_OUTPUT_CHARS:]}")
    return Outcome(test, kind, 0.0, "\n".join(parts))


# ---------------------------------------------------------------- in the first process of the session


def _lead_session(tests: ModuleType, test: str, ranks: int, folder: Path) -> None:
    """Forks the ranks, writes down how each ends, and exits."""
    try:
        os.setsid()
        end_with_parent()
        signal.signal(signal.SIGABRT, lambda *_: None)  # is for the ranks, which would end with this process
        os.environ |= {
            "WORLD_SIZE": str(ranks),
            "TEMP_DIR": str(folder),
            "MASTER_ADDR": "127.0.0.1",
        }
        vars(tests)["INIT_METHOD"] = f"file://{folder}/init_dir/shared_init_file"  # it was read from the environment
        (folder / "rendezvous").touch()
        running = {_start_rank(tests, test, rank, folder): rank for rank in range(ranks)}
        while running:
            process, status = os.wait()
            rank = running.pop(process)
            written = folder / f"written{rank}"
            written.write_text(str(os.waitstatus_to_exitcode(status)))
            written.rename(folder / f"status{rank}")
    finally:
        os._exit(0)


def _start_rank(tests: ModuleType, test: str, rank: int, folder: Path) -> int:
    process = os.fork()
    if process == 0:
        status = _FAILED
        try:
            end_with_parent()
            signal.signal(signal.SIGABRT, signal.SIG_DFL)
            status = _run_rank(tests, test, rank, folder)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return process


def _run_rank(tests: ModuleType, test: str, rank: int, folder: Path) -> int:
    """The body of a rank, in its own process; returns its exit code."""
    output = os.open(folder / f"output{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(2)
    logging.getLogger("c10dtest_helpers").addHandler(logging.StreamHandler())  # says why a test is skipped
    ours, theirs = multiprocessing.Pipe()
    code: object = 0
    try:
        _test_class(tests)._run(rank, test, str(folder / "rendezvous"), theirs)
    except SystemExit as exc:
        code = exc.code
    except BaseException:
        traceback.print_exc()
        return _FAILED
    print(*_received(ours), sep="\n", file=sys.stderr)
    return code if isinstance(code, int) else 0 if code is None else 1


def _received(pipe: Connection) -> Iterator[Any]:
    """The report of torch's harness: the traceback of a test that failed."""
    with contextlib.suppress(EOFError):
        while pipe.poll():
            yield pipe.recv()


def _test_class(tests: Any) -> Any:
    class TestOfRank(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc]  # Any
        pass

    return TestOfRank
