"""`launch`: starts a process per rank, waits for all of them, and ends all when one fails."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Final, TypeVar, TypeVarTuple

from rpcdist._launch.outcome_errors import error_of, interrupted
from rpcdist._launch.placement import placement_from_environment
from rpcdist._launch.progress import Succeeded
from rpcdist._launch.rank_call import load_result, pickle_call
from rpcdist._launch.rank_main import check_not_importing_main
from rpcdist._launch.rendezvous_port import held_port, job_variables
from rpcdist._launch.stop_signals import StopSignals
from rpcdist._launch.supervisor import run_job
from rpcdist.deadline import Deadline
from rpcdist.errors import ConfigError
from rpcdist.own_shortage import check_can_start, names_shortage

__all__ = ["launch"]

_OWN_VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def launch(
    function: Callable[[int, *Ts], T],
    args: tuple[*Ts] = (),  # type: ignore[assignment]  # the default for functions of the rank alone
    *,
    workers: int,
    join_timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    master_port: int = 0,
) -> list[T]:
    """Calls a function in `workers` new processes of this machine, and returns the results in the order of ranks.

    Each process is a rank: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set before it imports
    anything, so `init_rpc(name)` and `init_process_group()` need no more arguments. As with every way to spawn
    processes, the call must be under `if __name__ == "__main__":`, since each process imports the main module.

    Under torchrun, srun or mpirun, or another launcher of several processes, nothing is started: the function is called
    in this process with its rank, and the list has this one result. `join_timeout_s`, `env` and `master_port` are then
    the launcher's business.

    When a rank fails, all others are ended, and the error names the rank that failed first. Ctrl-C and SIGTERM, which
    the ranks get as SIGTERM, end all ranks. No rank outlives this process, even if that is killed (on Linux).

    Args:
        function: called with the rank and `args`. It goes by reference, so define it at the top of a module; in a
            notebook, and under `python -c` and `python -`, functions and classes of the main module go by value.
        args: the other arguments of the function, pickled.
        workers: number of processes, and the world size.
        join_timeout_s: limit for the whole job in seconds; None for no limit.
        env: environment variables of the new processes, beside those of this process.
        master_port: port for the rendezvous; 0 takes a free one, and keeps it from other programs until the end.

    Returns:
        What the function returned on rank 0, 1 and so on; the results travel pickled.

    Raises:
        ProcessFailed: a rank raised an exception, or its process ended without returning; the text has its traceback.
        DeadlineExceeded: the job did not end within `join_timeout_s`.
        ConfigError: an argument is wrong, the port is in use, or the launcher's WORLD_SIZE is not `workers`.
        SerializationError: the function or its arguments, or a result here, cannot be pickled.
        TransportError: this process has too few descriptors, or too little memory, to start the others.
        OSError: a process cannot be started for another reason.
        SystemExit: a rank called `sys.exit` with this code (not 0); there is no guard, and the text has the line where
            it belongs; or 130 after Ctrl-C, and 143 after SIGTERM. That of Ctrl-C is a `KeyboardInterrupt` as well, and
            at a prompt or in a notebook nothing but that.
    """
    _check(workers, join_timeout_s, env or {})
    placement = placement_from_environment()
    if placement is not None:
        if placement.world_size != workers:
            raise ConfigError(
                f"workers={workers}, but the launcher started WORLD_SIZE={placement.world_size} processes: pass as "
                "many workers, or start one process"
            )
        return [function(placement.rank, *args)]
    call = pickle_call(function, args)
    check_can_start("launch")
    with names_shortage("launch"), StopSignals() as stop, held_port(master_port) as port:
        variables = {**os.environ, **(env or {}), **job_variables(workers, port)}
        outcome = run_job(call, workers, variables, Deadline.after(join_timeout_s), stop)
    if isinstance(outcome, Succeeded):
        return [load_result(rank, result) for rank, result in enumerate(outcome.results)]
    if outcome == signal.SIGINT:
        raise interrupted()
    if isinstance(outcome, signal.Signals):
        print("terminated", file=sys.stderr)
        raise SystemExit(128 + outcome)
    raise error_of(outcome, workers, join_timeout_s)


def _check(workers: int, join_timeout_s: float | None, env: Mapping[str, str]) -> None:
    check_not_importing_main("launch")
    if workers < 1:
        raise ConfigError(f"workers must be at least 1, not {workers}")
    if join_timeout_s is not None and not join_timeout_s > 0:
        raise ConfigError(f"join_timeout_s must be above 0, not {join_timeout_s:g}; None means no limit")
    if clash := sorted(set(env).intersection(_OWN_VARIABLES)):
        raise ConfigError(f"env must not have {', '.join(clash)}: `launch` sets it for each process")
