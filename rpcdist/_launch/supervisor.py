"""Runs the processes of a job: starts them, listens to their reports, and ends them all whatever happens."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Mapping, Sequence

from rpcdist._launch.progress import Outcome, Progress
from rpcdist._launch.rank_call import RankCall
from rpcdist._launch.rank_process import RankProcess, start_rank
from rpcdist._launch.stop_signals import StopSignals
from rpcdist.deadline import Deadline
from rpcdist.time_limits import (
    LAUNCH_CAUSE_LIMIT_S,
    LAUNCH_EXIT_LIMIT_S,
    LAUNCH_KILL_LIMIT_S,
    LAUNCH_TERMINATE_LIMIT_S,
    SELECT_LIMIT_S,
)

__all__ = ["end_processes", "rank_variables", "run_job", "take_in"]


def run_job(
    call: RankCall, world_size: int, variables: Mapping[str, str], deadline: Deadline, stop: StopSignals
) -> Outcome | signal.Signals:
    """Starts the ranks and waits for the outcome; when this returns or raises, all processes have ended."""
    progress = Progress(range(world_size), deadline.at, LAUNCH_CAUSE_LIMIT_S, LAUNCH_EXIT_LIMIT_S)
    processes: list[RankProcess] = []
    try:
        for rank in range(world_size):
            processes.append(start_rank(rank, call, rank_variables(variables, rank)))
        return _wait(processes, progress, stop)
    finally:
        end_processes(processes)


def rank_variables(variables: Mapping[str, str], rank: int) -> dict[str, str]:
    """The environment of one rank, with the variables of all."""
    return {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def _wait(processes: Sequence[RankProcess], progress: Progress, stop: StopSignals) -> Outcome | signal.Signals:
    with selectors.DefaultSelector() as selector:
        selector.register(stop, selectors.EVENT_READ)
        for process in processes:
            selector.register(process, selectors.EVENT_READ, process)
        looked_at = time.monotonic()
        while not (outcome := stop.received or progress.outcome(time.monotonic())):
            wait_s = progress.next_deadline() - time.monotonic()
            ready = selector.select(max(0.0, min(wait_s, SELECT_LIMIT_S)))
            alive_at, looked_at = looked_at, time.monotonic()
            for key, _ in ready:
                if key.fileobj is not stop and not take_in(key.data, progress, alive_at, looked_at):
                    selector.unregister(key.fileobj)
        return outcome


def take_in(process: RankProcess, progress: Progress, alive_at: float, now: float) -> bool:
    """Takes in what a rank has written; returns False when that was the end of its pipe."""
    for report in process.read():
        progress.reported(process.rank, report, now)
    if not process.has_ended:
        return True
    if not progress.has_reported(process.rank):
        process.kill_group()  # before it is reaped
    progress.ended(process.rank, process.reap(LAUNCH_KILL_LIMIT_S), alive_at, now)
    return False


def end_processes(processes: Sequence[RankProcess]) -> None:
    """Ends the processes that still run: asks, waits, kills; then reaps all.

    They are paused while they are asked: nobody sees the others die, and complains of it, before its own signal comes.
    """
    running = [process for process in processes if not process.has_ended]
    for process in running:
        process.pause()
    for process in running:
        process.terminate()
    for process in running:
        process.resume()
    _wait_for_ends(running, Deadline.after(LAUNCH_TERMINATE_LIMIT_S))
    for process in running:
        process.kill_group()
    for process in processes:
        process.reap(LAUNCH_KILL_LIMIT_S)
        process.close()


def _wait_for_ends(processes: Sequence[RankProcess], deadline: Deadline) -> None:
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(process, selectors.EVENT_READ, process)
        while selector.get_map() and not deadline.expired():
            for key, _ in selector.select(deadline.remaining_s()):
                rank_process: RankProcess = key.data
                rank_process.read()
                if rank_process.has_ended:
                    selector.unregister(rank_process)
