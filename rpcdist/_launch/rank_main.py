"""The main function of a process: it prepares itself as `multiprocessing` does, calls the function, and reports.

The parent starts `python -c BOOTSTRAP` with a `Task` at its standard input. The process ties itself to its parent
before it imports the user's program, so a parent that is killed at any time leaves no process behind.
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import pickle
import runpy
import select
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import spawn
from types import ModuleType
from typing import Any, Final, NoReturn

from rpcdist._launch.reports import Exited, Raised, RankCall, Ready, Report, Returned, frame, report_of_exception
from rpcdist.errors import ConfigError
from rpcdist.private_files import note_failure

# The path comes first, because this package may be importable only with the `sys.path` of the parent's program.
BOOTSTRAP: Final = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from rpcdist._launch.rank_main import main; main()"
)

_PR_SET_PDEATHSIG: Final = 1  # from <sys/prctl.h>


@dataclass(frozen=True, slots=True)
class Task:
    """The message that a process gets from its parent."""

    rank: int
    parent_pid: int
    report_fd: int
    preparation: dict[str, Any]  # for `multiprocessing.spawn`: the main module, the path, the working directory
    call: RankCall  # the function and its arguments after the rank


def main() -> None:
    """Runs the task from standard input; exits with code 1 if it fails."""
    task: Task = pickle.load(sys.stdin.buffer)
    _end_with_parent(task.parent_pid)
    _close_standard_input()
    _close_in_forked_children(task.report_fd)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a pipe, whose reader shows each line at once
    rank_pid = os.getpid()
    report = _run(task)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the function may have replaced or closed them
            stream.flush()  # before the report, since after a failure the parent ends this process
    drop_unread_output()  # the interpreter would report at its end what it cannot write
    if os.getpid() != rank_pid:
        _end_forked_child(report)
    _write(task.report_fd, frame(report))  # not closed, as it must end with the process
    if not isinstance(report, Returned):
        sys.exit(1)


class MissingGuard(ConfigError, SystemExit):
    """The main module starts processes whenever it is imported. The parent's program ends with this one line."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text


def check_not_importing_main(what: str) -> None:
    """Raises `MissingGuard` while this process is only importing the main module of its parent, to find a function."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__") != "__mp_main__":
            frame = frame.f_back
        raise MissingGuard(
            f"{frame.f_code.co_filename}, line {frame.f_lineno}: put this call of {what} under "
            '`if __name__ == "__main__":`, since each new process imports this file'
        )


def _run(task: Task) -> Report:
    try:
        return Returned(_call(task))
    except BaseException as error:
        if isinstance(error, Exception):
            note_failure(error)
        return report_of_exception(error)


def _call(task: Task) -> bytes:
    process = multiprocessing.current_process()
    process._inheriting = True  # type: ignore[attr-defined]  # multiprocessing then refuses to start processes
    try:
        spawn.prepare(task.preparation)
        if (name := task.preparation.get("init_main_from_name", "")).endswith(".__main__"):
            _import_main_of_package(name)
    finally:
        del process._inheriting  # type: ignore[attr-defined]
    function, args = task.call.load()
    _write(task.report_fd, frame(Ready()))
    return task.call.dump_result(function(task.rank, *args))


def _import_main_of_package(name: str) -> None:
    """Imports `package.__main__` of `python -m package`, which `spawn.prepare` leaves out."""
    main = ModuleType("__mp_main__")
    main.__dict__.update(runpy.run_module(name, run_name="__mp_main__", alter_sys=True))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main


def _end_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process when its parent ends in any way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before
        os._exit(1)


def _close_standard_input() -> None:
    """Closes standard input, as in a process of `multiprocessing`, since the terminal belongs to the parent."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin = open(0, closefd=False)


def _close_in_forked_children(report_fd: int) -> None:
    """Closes the pipe in forked children (of a `DataLoader`, for example), which would hide the end of the rank."""
    os.set_inheritable(report_fd, False)
    still_open = [report_fd]  # closed only once, as the number may belong to another file in a grandchild

    def close() -> None:
        while still_open:
            os.close(still_open.pop())

    os.register_at_fork(after_in_child=close)


def drop_unread_output() -> bool:
    """Redirects stdout and stderr of this process to nowhere if they are pipes that nobody reads any more.

    Otherwise the interpreter would report the data that it cannot write at its end. Returns whether there was one.
    """
    unread = []
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # not a file, as in a notebook, or closed, or None
            output = select.poll()
            output.register(stream.fileno(), 0)
            if output.poll(0):
                unread.append(stream.fileno())
    with open(os.devnull, "wb") as nowhere:
        for descriptor in unread:
            os.dup2(nowhere.fileno(), descriptor)
    return bool(unread)


def takes_output(descriptor: int) -> bool:
    """Whether a page can be written without waiting, or the attempt raises an error."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


def report_end(text: str) -> None:
    """Prints a line to stderr, unless that would wait for a reader: the program must end even if that is stopped."""
    has_room = True
    with suppress(OSError, ValueError, AttributeError):  # not a file, or closed, or None
        has_room = takes_output(sys.stderr.fileno())
    if has_room:
        with suppress(OSError):  # after SIGHUP the terminal is gone
            print(text, file=sys.stderr)


def _end_forked_child(report: Report) -> NoReturn:
    """Ends a forked child that has left the function. It is not a rank, so it ends without a report."""
    if isinstance(report, Raised):
        print(report.traceback, file=sys.stderr, end="")
    sys.exit(report.code if isinstance(report, Exited) else isinstance(report, Raised))


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
