"""The engine of this machine: ranks are processes that this one starts."""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rpcdist._launch.output import JobOutput
from rpcdist._launch.rank_process import RankProcess, start_rank
from rpcdist._launch.reports import Event, ProcessEnded, RankCall, Ready
from rpcdist._launch.supervisor import StopSignals
from rpcdist.deadline import Deadline
from rpcdist.time_limits import CLOSE_LIMIT_S, LONGEST_WAIT_S


@dataclass(frozen=True, slots=True)
class RankTask:
    """The task of a rank's process: `name` is that of its worker, `variables` are its environment."""

    name: str
    call: RankCall
    variables: Mapping[str, str]


class LocalRanks:
    """See `RankEngine`. `pause` may be called on any thread, all else on one."""

    def __init__(self, tasks: Mapping[int, RankTask], wake: StopSignals | int, output: JobOutput) -> None:
        self._tasks = tasks
        self._output = output
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake, selectors.EVENT_READ)
        self._processes: list[RankProcess] = []
        self._reported: set[RankProcess] = set()
        self._looked_at: float | None = None
        self._reaping = threading.Lock()  # nobody is reaped while it is held: the process id could be another's

    def start(self, rank: int, attempt: int) -> None:
        task = self._tasks[rank]
        output = self._output.open(task.name, attempt)
        try:
            process = start_rank(rank, task.call, task.variables, output)
        except BaseException:
            output.close()
            raise
        with self._reaping:
            self._processes.append(process)
        self._selector.register(process, selectors.EVENT_READ, (process, None))
        for name, stream in process.streams.items():
            self._selector.register(stream, selectors.EVENT_READ, (process, name))

    def reports(self, limit_s: float) -> list[tuple[int, Event]]:
        alive_at = self._looked_at or time.monotonic()
        ready = self._selector.select(min(limit_s, LONGEST_WAIT_S))
        self._looked_at = time.monotonic()
        events: list[tuple[int, Event]] = []
        for key, _ in ready:
            if key.data is None:
                continue  # woken
            process, stream = key.data
            if process not in self._processes:
                continue  # its end was seen just now, and the rest of its output taken in
            if stream is None:
                events += [(process.rank, event) for event in self._read(process, alive_at)]
            elif not process.copy_output(stream):
                self._unregister(key.fileobj)
        return events

    def pause(self) -> None:
        """Stops all where they are until `end`, so that none of them notices what this process closes meanwhile."""
        with self._reaping:
            for process in self._processes:
                if not process.has_ended:
                    process.pause()

    def end(self) -> None:
        """Asks the processes that still run to end, waits, kills them; then reaps all.

        They are paused while they are asked: none sees the others die, and complains, before its own signal comes.
        """
        running = [process for process in self._processes if not process.has_ended]
        for process in running:
            process.pause()
        for process in running:
            process.terminate()
        for process in running:
            process.resume()
        self._wait_for_ends(running, Deadline.after(CLOSE_LIMIT_S))
        for process in running:
            process.kill_group()
            self._reap(process)
        self._selector.close()

    def running(self) -> list[int]:
        """The ranks whose processes have not ended."""
        with self._reaping:
            return [process.rank for process in self._processes if not process.has_ended]

    def _read(self, process: RankProcess, alive_at: float) -> Sequence[Event]:
        reports = process.read()
        if any(not isinstance(report, Ready) for report in reports):
            self._reported.add(process)
        if not process.has_ended:
            return reports
        if process not in self._reported:
            process.kill_group()  # before it is reaped
        return [*reports, ProcessEnded(self._reap(process), alive_at)]

    def _reap(self, process: RankProcess) -> int | None:
        """The return code of a process that ends now; its output is complete then."""
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

    def _wait_for_ends(self, processes: Sequence[RankProcess], deadline: Deadline) -> None:
        """Waits until all have ended, and reads their output meanwhile, so that none waits for a full pipe."""
        while not (all(process.has_ended for process in processes) or deadline.expired()):
            for key, _ in self._selector.select(deadline.remaining_s()):
                if key.data is None:
                    self._selector.unregister(key.fileobj)
                    continue
                process, stream = key.data
                if stream is None:
                    process.read()
                    if process.has_ended:
                        self._selector.unregister(key.fileobj)
                elif not process.copy_output(stream):
                    self._selector.unregister(key.fileobj)
