"""`launch`: starts a process per rank, waits for all of them, and ends all when one fails."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar, TypeVarTuple

from rpcdist._launch.placement import placement_from_environment
from rpcdist._launch.progress import Died, Failed, Late, Stuck, Succeeded
from rpcdist._launch.rank_main import is_importing_main
from rpcdist._launch.reports import Exited, Raised
from rpcdist._launch.stop_signals import StopSignals
from rpcdist._launch.supervisor import run_job
from rpcdist.deadline import Deadline
from rpcdist.errors import ConfigError, DeadlineExceeded, ProcessFailed, SerializationError
from rpcdist.time_limits import LAUNCH_EXIT_LIMIT_S

__all__ = ["launch"]

_HOST: Final = "127.0.0.1"
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

    Under torchrun, or another launcher that sets RANK and WORLD_SIZE, nothing is started: the function is called in
    this process with the rank of the environment, and the list has this one result. `join_timeout_s`, `env` and
    `master_port` are then the launcher's business.

    When a rank fails, all others are ended, and the error names the rank that failed first. Ctrl-C and SIGTERM, which
    the ranks get as SIGTERM, end all ranks. No rank outlives this process, even if that is killed (on Linux).

    Args:
        function: called with the rank and `args`. It goes by reference: define it at the top of a module.
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
        OSError: a process cannot be started.
        SystemExit: a rank called `sys.exit` with this code (not 0); or 130 after Ctrl-C, and 143 after SIGTERM.
    """
    _check(workers, join_timeout_s, env or {})
    placement = placement_from_environment()
    if placement is not None:
        if placement.world_size != workers:
            raise ConfigError(f"workers={workers}, but the launcher started WORLD_SIZE={placement.world_size}")
        return [function(placement.rank, *args)]
    call = _pickle_call(function, args)
    with StopSignals() as stop, _held_port(master_port) as port:
        variables = {**os.environ, **(env or {}), **_job_variables(workers, port)}
        outcome = run_job(call, workers, variables, Deadline.after(join_timeout_s), stop)
    if isinstance(outcome, Succeeded):
        return [_unpickle_result(rank, result) for rank, result in enumerate(outcome.results)]
    if isinstance(outcome, signal.Signals):
        print("\ninterrupted" if outcome == signal.SIGINT else "terminated", file=sys.stderr)
    raise _error_of(outcome, workers, join_timeout_s)


def _check(workers: int, join_timeout_s: float | None, env: Mapping[str, str]) -> None:
    if is_importing_main():
        raise ConfigError(
            "`launch` was called while a new process imported the main module: put the call under "
            '`if __name__ == "__main__":`'
        )
    if workers < 1:
        raise ConfigError(f"workers must be at least 1, not {workers}")
    if join_timeout_s is not None and not join_timeout_s > 0:
        raise ConfigError(f"join_timeout_s must be above 0, not {join_timeout_s:g}; None means no limit")
    if clash := sorted(set(env).intersection(_OWN_VARIABLES)):
        raise ConfigError(f"env must not have {', '.join(clash)}: `launch` sets it for each process")


def _pickle_call(function: object, args: tuple[object, ...]) -> bytes:
    try:
        return pickle.dumps((function, args))
    except Exception as exc:  # pickle raises many types, and objects may raise any
        raise SerializationError(
            f"{function!r} with {len(args)} arguments cannot be sent to a new process: {exc}. Define the function at "
            "the top of a module, and pass arguments that can be pickled."
        ) from exc


def _unpickle_result(rank: int, result: bytes) -> Any:
    try:
        return pickle.loads(result)
    except Exception as exc:
        raise SerializationError(f"the result of rank {rank} cannot be rebuilt here: {exc}") from exc


@contextmanager
def _held_port(port: int) -> Iterator[int]:
    """A port on which rank 0 can listen, and no other program meanwhile.

    Our socket is bound but does not listen. With SO_REUSEADDR on both sides, the kernel lets a second socket bind and
    listen there, which all servers for rendezvous do, torch's too. But it gives the port to no program that asks for
    any free port, and none that connects somewhere gets it as its own.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"master_port {port}: must be between 0 and 65535")
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((_HOST, port))
        except OSError as exc:
            raise ConfigError(f"master_port {port}: {exc.strerror}") from exc
        yield holder.getsockname()[1]


def _job_variables(world_size: int, port: int) -> dict[str, str]:
    return {"WORLD_SIZE": str(world_size), "MASTER_ADDR": _HOST, "MASTER_PORT": str(port)}


def _error_of(
    outcome: Failed | Late | Stuck | signal.Signals, workers: int, join_timeout_s: float | None
) -> BaseException:
    if isinstance(outcome, signal.Signals):
        return SystemExit(128 + outcome)
    if isinstance(outcome, Late):
        ranks = ", ".join(map(str, outcome.ranks))
        return DeadlineExceeded(f"after {join_timeout_s:g} s these of {workers} ranks had not ended: {ranks}")
    if isinstance(outcome, Stuck):
        what = f"returned, but its process did not end within {LAUNCH_EXIT_LIMIT_S:g} s: is a thread still running?"
        return ProcessFailed(outcome.rank, what)
    cause = outcome.cause
    if isinstance(cause, Exited):
        return SystemExit(cause.code)
    if isinstance(cause, Raised):
        return ProcessFailed(outcome.rank, f"raised {cause.type_name}", traceback=cause.traceback)
    return ProcessFailed(outcome.rank, _describe(cause), exit_code=cause.returncode)


def _describe(death: Died) -> str:
    when = "after" if death.has_returned else "before"
    if death.returncode is None:
        return "closed the pipe to the process that started it, and went on"
    if death.returncode >= 0:
        return f"ended with exit code {death.returncode} {when} its function returned"
    number = -death.returncode
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"was killed by {name} {when} its function returned"
