"""The engine of this machine: ranks are processes that this one starts.

A `RankProcess` is one of them, with its reports and output.
"""

from __future__ import annotations

import ast
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from multiprocessing import spawn
from typing import IO, Any

from rpcdist._launch.job_plan import RankPlan
from rpcdist._launch.output import JobOutput, WorkerOutput
from rpcdist._launch.rank_main import BOOTSTRAP, Task
from rpcdist._launch.reports import Event, ProcessEnded, RankCall, Ready, Report, take_reports
from rpcdist._launch.supervisor import StopSignals
from rpcdist.deadline import Deadline
from rpcdist.errors import ConfigError, on_error, raised_as
from rpcdist.time_limits import CLOSE_LIMIT_S, LONGEST_WAIT_S, SIGNAL_CHECK_INTERVAL_S

_READ_BYTES = 1 << 20


class RankProcess:
    """The parent's side of one rank's process.

    Args:
        popen: the process, the leader of its own process group.
        reports: the read end of its pipe; owned by this object.
    """

    def __init__(self, rank: int, popen: subprocess.Popen[bytes], reports: int, output: WorkerOutput) -> None:
        self.rank = rank
        self._popen = popen
        self._reports = reports
        self._output = output
        self._received = bytearray()
        self.has_ended = False
        self.streams: dict[str, IO[bytes]] = {}
        for name, stream in (("stdout", popen.stdout), ("stderr", popen.stderr)):
            assert stream is not None  # they are pipes
            os.set_blocking(stream.fileno(), False)
            self.streams[name] = stream

    def fileno(self) -> int:
        """A descriptor that is readable when the rank has written or ended."""
        return self._reports

    def read(self) -> list[Ready | Report]:
        """Returns the complete reports that have arrived; sets `has_ended` at the end. Call it when readable."""
        data = os.read(self._reports, _READ_BYTES)
        self.has_ended = not data
        self._received += data
        return take_reports(self._received)

    def copy_output(self, name: str) -> bool:
        """Copies the available output of `stdout` or `stderr`; returns False if it ends or is not read any more."""
        try:
            data = os.read(self.streams[name].fileno(), _READ_BYTES)  # more than a pipe holds
        except BlockingIOError:
            return True
        try:
            if data:
                self._output.write(name, data)
        except BrokenPipeError:
            return False
        return bool(data)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process alone."""
        with suppress(ProcessLookupError):
            os.kill(self._popen.pid, number)

    def kill_group(self) -> None:
        """Kills the process and its children. It must not have been reaped, since its id could have been reused."""
        with suppress(ProcessLookupError, PermissionError):  # the second: on macOS, for a group of dead processes
            os.killpg(self._popen.pid, signal.SIGKILL)

    def reap(self, limit_s: float) -> int | None:
        """Returns its return code as in `subprocess`; None if it has not ended within `limit_s` seconds."""
        try:
            return self._popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Copies the rest of the output, and closes the pipes; children that still live cannot write any more."""
        with ExitStack() as closed:
            closed.callback(os.close, self._reports)
            closed.callback(self._output.close)
            for name, stream in self.streams.items():
                closed.callback(stream.close)
                self.copy_output(name)


def start_rank(rank: int, call: RankCall, environment: Mapping[str, str], output: WorkerOutput) -> RankProcess:
    reports, report_fd = os.pipe()
    try:
        task = Task(rank, os.getpid(), report_fd, _preparation(rank, call), call)
        *python, _program, _mark = spawn.get_command_line()  # with this interpreter's options, as in `multiprocessing`
        # A file instead of a pipe, because writing to a pipe would wait for the process to read.
        with tempfile.TemporaryFile() as file:
            file.write(pickle.dumps(task.preparation["sys_path"]) + pickle.dumps(task))
            file.seek(0)
            popen = subprocess.Popen(
                [*python, BOOTSTRAP],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=dict(environment),
                pass_fds=(report_fd,),
                process_group=0,  # so that Ctrl-C in a terminal reaches only the parent, which ends all ranks
            )
    except BaseException:
        os.close(reports)
        raise
    finally:
        os.close(report_fd)
    return RankProcess(rank, popen, reports, output)


def _preparation(rank: int, call: RankCall) -> dict[str, Any]:
    """Returns the data that `multiprocessing` passes to a spawned process, mainly how to import the main module."""
    with raised_as(
        ConfigError, "the current folder of this process was deleted; call os.chdir first", FileNotFoundError
    ):
        preparation: dict[str, Any] = spawn.get_preparation_data(f"rank{rank}")
    preparation["authkey"] = bytes(preparation["authkey"])  # its own type refuses to be pickled
    if call.by_value:  # in a notebook or under `python -`, the main module has no file
        preparation.pop("init_main_from_path", None)
        preparation.pop("init_main_from_name", None)
        return preparation
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name == "__main__" and spec.origin is not None and _is_guarded(spec):
        # A folder or a zip file, which `multiprocessing` knows by this name, and then does not import.
        del preparation["init_main_from_name"]
        preparation["init_main_from_path"] = os.path.dirname(os.path.abspath(spec.origin))
    elif spec is not None and spec.name.endswith(".__main__") and not _is_guarded(spec):
        del preparation["init_main_from_name"]
    return preparation


def _is_guarded(spec: ModuleSpec) -> bool:
    """Whether the main module of a package, a folder or a zip file checks `__name__`, so that it can be imported again.

    Many of these only run the program; then other processes must not import them, and need not.
    """
    source = getattr(spec.loader, "get_source", lambda name: None)(spec.name)
    if source is None:
        return False
    conditions = [part.test for part in ast.parse(source).body if isinstance(part, ast.If)]
    names = [node.id for test in conditions for node in ast.walk(test) if isinstance(node, ast.Name)]
    return "__name__" in names


@dataclass(eq=False)
class LocalRanks:
    """See `RankEngine`. `pause` may be called on any thread, other methods on one thread.

    Args:
        plans: the plans by rank.
        calls: the call of each role, by name.
        common: the environment variables of all ranks.
        wake: a descriptor that ends `reports` while it is readable.
    """

    _plans: Mapping[int, RankPlan]
    _calls: Mapping[str, RankCall]
    _common: Mapping[str, str]
    _wake: StopSignals | int
    _output: JobOutput

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._processes: list[RankProcess] = []
        self._held: dict[str, int] = {}  # streams whose output waits for its reader, with that one's descriptors
        self._reported: set[RankProcess] = set()
        self._looked_at: float | None = None
        self._is_ending = False
        self._reaping = threading.Lock()  # no process is reaped while it is held, since its id could be reused

    def start_rank(self, rank: int, attempt: int) -> None:
        plan = self._plans[rank]
        output = self._output.open(plan.name, attempt)
        with on_error(output.close):
            process = start_rank(rank, self._calls[plan.role.name], {**self._common, **plan.variables}, output)
        with self._reaping:
            self._processes.append(process)
        self._selector.register(process, selectors.EVENT_READ, (process, None))
        self._watch_streams(process)

    def reports(self, limit_s: float) -> list[tuple[int, Event]]:
        alive_at = self._looked_at or time.monotonic()
        ready = self._selector.select(min(limit_s, LONGEST_WAIT_S))
        self._looked_at = time.monotonic()
        events: list[tuple[int, Event]] = []
        for key, _ in ready:
            if key.data is None:
                continue  # woken
            process, stream = key.data
            if process is None:
                for name in self._held:
                    with suppress(BrokenPipeError):  # the next output of a rank gets the error
                        self._output.write_on(name)
                continue
            if process not in self._processes:
                continue  # its end was just seen, and the rest of its output copied
            if stream is None:
                events += [(process.rank, event) for event in self._read(process, alive_at)]
            elif not process.copy_output(stream):
                self._unregister(key.fileobj)
                process.streams.pop(stream).close()  # if the process writes again, it gets the error of a broken pipe
        self._hold_output()
        return events

    def _watch_streams(self, process: RankProcess) -> None:
        for name, stream in process.streams.items():
            if name not in self._held:
                self._selector.register(stream, selectors.EVENT_READ, (process, name))

    def _hold_output(self) -> None:
        """Stops reading the output of the ranks while the reader of this process's own does not read."""
        held = self._output.blocked()
        if held == self._held:
            return
        for descriptor in self._held.values():
            self._unregister(descriptor)
        self._held = held
        for descriptor in set(held.values()):  # both streams may be the same
            self._selector.register(descriptor, selectors.EVENT_WRITE, (None, None))
        for process in self._processes:
            for stream in process.streams.values():
                self._unregister(stream)
            self._watch_streams(process)

    def pause(self) -> None:
        """Stops all processes until `end`, so that they do not notice connections that this process closes."""
        with self._reaping:
            for process in self._processes:
                if not process.has_ended:
                    process.signal(signal.SIGSTOP)

    def end(self) -> None:
        """Asks running processes to end, waits, kills the rest, and reaps all.

        They are paused during the request, so that none sees another die and reports that before its own signal comes.
        Idempotent.
        """
        if self._is_ending:
            return
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
            for process in self._processes:
                process.signal(number)
        stop = self._wake if isinstance(self._wake, StopSignals) else None
        self._selector.unregister(self._wake)
        self._is_ending = self._output.is_ending = True
        deadline = Deadline.after(CLOSE_LIMIT_S)
        while self._processes and not deadline.expired():
            self.reports(deadline.remaining_s())
        for process in list(self._processes):
            process.kill_group()
            self._reap(process)
        self._hold_output()
        while self._held and not self._output.is_unwanted and (stop is None or stop.received is None):
            self.reports(SIGNAL_CHECK_INTERVAL_S)  # as long as `print` would wait
        self._selector.close()

    def _read(self, process: RankProcess, alive_at: float) -> Sequence[Event]:
        reports = process.read()
        if any(not isinstance(report, Ready) for report in reports):
            self._reported.add(process)
        if not process.has_ended:
            return reports
        if self._is_ending or process not in self._reported:
            process.kill_group()  # before it is reaped
        return [*reports, ProcessEnded(self._reap(process), alive_at)]

    def _reap(self, process: RankProcess) -> int | None:
        """Reaps a process that ends now and returns its return code; its output is then complete."""
        with self._reaping:
            returncode = process.reap(CLOSE_LIMIT_S)
            self._processes.remove(process)
        self._unregister(process)
        for stream in process.streams.values():
            self._unregister(stream)
        process.close()
        return returncode

    def _unregister(self, file: object) -> None:
        if file in self._selector.get_map():
            self._selector.unregister(file)  # type: ignore[arg-type]
