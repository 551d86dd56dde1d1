"""A worker process that a test calls, kills, stops and resumes.

    worker = pool.start("a")
    worker.run(my_module.prepare, 3)          # waits for the result; raises what the function raised
    pending = worker.begin(my_module.train)   # does not wait
    worker.kill()                             # SIGKILL
    pending.error(WorkerEnded)

Functions are pickled by name, so define them at the top level of a module that the worker can import. A `Worker`
belongs to one thread of the test's process.

[Note: the fork server] Workers are forked from a server process that has imported torch and rpcdist, and does nothing
else: importing torch takes two seconds, forking takes milliseconds. Forking is safe there, because the server never
starts a thread. It is Python's own `multiprocessing` fork server, so there is one in a test process, and it lives until
that process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from rpcdist.testing import _child
from rpcdist.testing.limits import END_LIMIT_S, LIMIT_S, STACKS_LIMIT_S, eventually, wait_until_stopped

_modules = ["__main__", "torch", "torch.utils.data", "rpcdist.rpc", "rpcdist.collectives.tcp", "rpcdist.autograd"]
_modules += ["rpcdist.transport._tls.job_authority", "rpcdist.collectives._stores.file_store", "uvloop"]  # init_rpc's
_context = multiprocessing.get_context("forkserver")


def preload(*modules: str) -> None:
    """Makes the fork server import these modules as well; has no effect once the first worker has started.

    Use it for modules of the workers that take long to import. Their import must not start a thread.
    """
    _modules.extend(modules)


def server_pid() -> int:
    """The id of the process from which workers are forked; starts it if necessary. It outlives every test."""
    _context.set_forkserver_preload(_modules)
    given = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # OpenMP reads it once, when the server imports torch; workers share few cores
    try:
        forkserver.ensure_running()
    finally:
        if given is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = given
    pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # there is no public way
    return pid


OUTPUT_TAIL_CHARS = 8000

T = TypeVar("T")


class WorkerEnded(Exception):
    """The process ended before it finished a request."""


class WorkerTimeout(AssertionError):
    """A worker did not answer within the limit; the text has the stacks of its threads."""


class Pending(Generic[T]):
    """A call that a worker is making."""

    def __init__(self, worker: Worker, number: int, what: str) -> None:
        self.worker = worker
        self._number = number
        self._what = what

    def result(self, limit_s: float = LIMIT_S) -> T:
        """Waits for the call, and returns its result. Call it once.

        Raises:
            BaseException: the function's error, with the worker's traceback as a note.
            WorkerEnded: the process has ended.
            WorkerTimeout: the function did not return within the limit. It continues on the worker.
        """
        value: T = self.worker._outcome(self._number, self._what, limit_s)
        return value

    def error(self, kind: type[BaseException] = Exception, limit_s: float = LIMIT_S) -> Any:
        """Waits for the call, and returns the exception that it raised, which must be a `kind`."""
        try:
            value = self.result(limit_s)
        except kind as exc:
            return exc
        raise AssertionError(f"{self._what} returned {value!r}, but {kind.__name__} was expected")

    def done(self) -> bool:
        """Whether `result` returns or raises without waiting."""
        return self.worker._answered(self._number, 0.0)


class Worker:
    """A process that calls functions for a test, one after the other, on its main thread.

    Args:
        name: the name in messages, and of its RPC worker if it joins a job.
        environment: the whole environment of the process.
        output: the file that receives its stdout and stderr.

    Attributes:
        pid: the process id.
        stopped: whether `stop` was called, and `resume` not yet.
    """

    def __init__(self, name: str, environment: Mapping[str, str], output: Path) -> None:
        self.name = name
        self.stopped = False
        self._output = output
        self._num_begun = 0
        self._num_answered = 0
        self._outcomes: dict[int, tuple[bool, bytes]] = {}  # as `_child` sends them
        server_pid()  # starts the server
        self._connection, theirs = _context.Pipe()
        _limit_waits(self._connection)
        lifeline, self._lifeline = _context.Pipe(duplex=False)
        arguments = (theirs, lifeline, str(output), dict(environment))
        self._process = _context.Process(target=_child.serve, args=arguments, name=f"worker {name}")
        self._process.start()
        theirs.close()
        lifeline.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        _running.add(self)

    def __repr__(self) -> str:
        return f"<Worker {self.name}, process {self.pid}>"

    # ------------------------------------------------------------ calls

    def begin(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Pending[T]:
        """Makes the worker call a function, and does not wait for the call.

        Raises:
            WorkerTimeout: a stopped or busy worker did not take arguments that are too large for the pipe.
        """
        self._num_begun += 1
        packed = _child.pack((function, args, kwargs))
        what = f"{self.name}: {getattr(function, '__qualname__', function)}"
        try:
            self._connection.send_bytes(_child.pack((self._num_begun, packed)))
        except (BrokenPipeError, ConnectionResetError):
            pass  # `result` says that the process has ended
        except BlockingIOError:
            raise WorkerTimeout(f"{what}: {self!r} did not take {len(packed)} bytes of arguments in time") from None
        return Pending(self, self._num_begun, f"{what}{args}")

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Makes the worker call a function, and waits for the result."""
        return self.begin(function, *args, **kwargs).result()

    def is_idle(self, within_s: float) -> bool:
        """Whether the worker finishes all its calls within `within_s`."""
        try:
            return self._answered(self._num_begun, within_s)
        except WorkerEnded:
            return True

    # ------------------------------------------------------------ the process

    @property
    def alive(self) -> bool:
        """Whether the process runs, or is stopped."""
        return self._process.is_alive()

    def kill(self) -> None:
        """Sends SIGKILL, and waits until the process is gone. Does nothing if it has ended already."""
        if self.alive:  # otherwise another process may have its number by now
            with contextlib.suppress(ProcessLookupError):  # it has ended since then
                os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal and does not wait."""
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Sends SIGSTOP, and waits until the process has stopped. To other workers it looks like a host that hangs."""
        os.kill(self.pid, signal.SIGSTOP)
        self.stopped = True
        self.wait_until_stopped()

    def wait_until_stopped(self, limit_s: float = LIMIT_S) -> None:
        """Waits until the process has stopped, even if another process stopped it."""
        wait_until_stopped(self.pid, limit_s)

    def resume(self) -> None:
        """Sends SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)
        self.stopped = False

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Waits for the end of the process; returns its exit code, or minus the signal that ended it."""
        self._process.join(limit_s)
        code = self._process.exitcode
        if code is None:
            raise WorkerTimeout(f"{self!r} still runs after {limit_s} s\n{self.stacks()}")
        return code

    def end(self, limit_s: float = END_LIMIT_S) -> None:
        """Ends the process: an idle one exits, a busy or stopped one gets SIGKILL after the limit. Idempotent.

        Forked children that hold inherited descriptors are killed.
        """
        if self._connection.closed:
            return
        self._connection.close()
        if self._process.exitcode is None and not self.stopped:
            self._process.join(limit_s)
        if self._process.exitcode is None:
            self.kill()
        _running.discard(self)
        self._lifeline.close()
        self._process.close()

    # ------------------------------------------------------------ output

    def output(self, since_bytes: int = 0) -> str:
        """The output of the process on stdout and stderr, except the first `since_bytes`."""
        with contextlib.suppress(FileNotFoundError), self._output.open("rb") as file:
            file.seek(since_bytes)
            return file.read().decode(errors="replace")
        return ""

    def num_output_bytes(self) -> int:
        """The number of bytes that the process has written so far."""
        return self._output.stat().st_size if self._output.exists() else 0

    def stacks(self) -> str:
        """The stacks of its threads, in the format of `faulthandler`."""
        if not self._writes_stacks():
            return "(the process has only just been started)"
        before = self.num_output_bytes()
        os.kill(self.pid, signal.SIGUSR1)
        with contextlib.suppress(AssertionError):  # then the output so far is shown; the main thread's stack comes last
            eventually(lambda: self.output(before).endswith(" in <module>\n"), "the stacks", STACKS_LIMIT_S)
        return self.output(before)

    def _writes_stacks(self) -> bool:
        """Whether the process handles SIGUSR1 already; otherwise the signal would end it."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        return bool(caught >> (signal.SIGUSR1 - 1) & 1)

    # ------------------------------------------------------------ answers

    def _answered(self, number: int, limit_s: float) -> bool:
        """Whether the outcome of a request has come, or comes within the limit. They come in the order of requests."""
        limit = time.monotonic() + limit_s
        while self._num_answered < number:
            if not wait([self._connection, self._process.sentinel], max(0.0, limit - time.monotonic())):
                return False
            self._receive()
        return True

    def _receive(self) -> None:
        """Reads one outcome from the connection, which is readable unless the process has ended.

        The end of the process counts, not the end of the connection: a forked child of the worker may hold that open.
        """
        try:
            if not self._connection.poll():
                raise EOFError
            number, *outcome = _child.unpack(self._connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise WorkerEnded(f"{self!r} has ended, with status {self.wait()}") from None
        except BlockingIOError:  # a stopped process, or a dead one whose child holds the connection
            raise WorkerTimeout(f"{self!r} stopped in the middle of an answer") from None
        self._num_answered = number
        self._outcomes[number] = outcome

    def _outcome(self, number: int, what: str, limit_s: float) -> Any:
        try:
            answered = self._answered(number, limit_s)
        except WorkerEnded as exc:
            raise WorkerEnded(f"{what}: {exc}\n{self._tail()}") from None
        if not answered:
            raise WorkerTimeout(f"{what} did not return within {limit_s} s\n{self.stacks()}\n{self._tail()}")
        has_failed, packed = self._outcomes.pop(number)
        value = _child.unpack(packed)
        if has_failed:
            error, trace = value
            error.add_note(f"In {self!r}:\n{trace}")
            raise error
        return value

    def _tail(self) -> str:
        return f"output of {self!r}:\n{self.output()[-OUTPUT_TAIL_CHARS:]}"


def _limit_waits(connection: Connection[Any, Any]) -> None:
    """Has the kernel end a read or write that makes no progress for `LIMIT_S`, with a `BlockingIOError`."""
    limit = struct.pack("ll", int(LIMIT_S), int(LIMIT_S % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


_running: Final[set[Worker]] = set()


def _kill_at_exit() -> None:
    """Kills workers at the exit of a process that did not end them; otherwise it would wait for them forever."""
    for worker in _running:
        worker._lifeline.close()


atexit.register(_kill_at_exit)


def wait_for_any(pending: Iterable[Pending[Any]], limit_s: float = LIMIT_S) -> list[Pending[Any]]:
    """Waits until at least one of several workers' calls has ended; returns the ended ones, none after the limit."""
    waiting = list(pending)
    limit = time.monotonic() + limit_s
    while not (ended := [one for one in waiting if _has_ended(one)]):
        ends: list[Connection[Any, Any] | int] = []
        for one in waiting:
            ends += [one.worker._connection, one.worker._process.sentinel]
        if not wait(ends, max(0.0, limit - time.monotonic())):
            return []
    return ended


def _has_ended(pending: Pending[Any]) -> bool:
    try:
        return pending.done()
    except WorkerEnded:
        return True
