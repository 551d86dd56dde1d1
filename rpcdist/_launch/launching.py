"""`launch`: starts a process per rank, waits for all of them, and ends all when one fails."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, TypeVarTuple, overload

from rpcdist._launch.job_plan import HOST, RankPlan, Role, held_port, plan_job, this_machine
from rpcdist._launch.job_records import job_record
from rpcdist._launch.local_ranks import LocalRanks
from rpcdist._launch.output import ERROR_LINES, JobOutput
from rpcdist._launch.placement import ROLE_VARIABLE, Placement, placement_from_environment
from rpcdist._launch.progress import Failed, Late, Outcome, Progress, error_of, interrupted, is_unread_output
from rpcdist._launch.rank_main import check_not_importing_main, drop_unread_output, report_end, takes_output
from rpcdist._launch.reports import load_result, pickle_call
from rpcdist._launch.supervisor import StopSignals, run_job
from rpcdist.deadline import Deadline
from rpcdist.errors import ConfigError, DeadlineExceeded, ProcessFailed
from rpcdist.own_shortage import check_can_start, names_shortage

logger = logging.getLogger("rpcdist.launch")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Variables = Mapping[str, str] | Sequence[Mapping[str, str]]


@overload
def launch(
    function: Callable[[int, *Ts], T],
    args: tuple[*Ts] = ...,
    *,
    workers: int,
    join_timeout_s: float | None = None,
    env: Variables | None = None,
    master_port: int = 0,
    max_restarts: int = 0,
    resources: Mapping[str, float] | None = None,
    prefix: bool | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
) -> list[T]: ...


@overload
def launch(
    *,
    roles: Sequence[Role],
    join_timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    master_port: int = 0,
    prefix: bool | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
) -> dict[str, list[Any]]: ...


def launch(
    function: Callable[..., Any] | None = None,
    args: tuple[Any, ...] = (),
    *,
    workers: int | None = None,
    roles: Sequence[Role] | None = None,
    join_timeout_s: float | None = None,
    env: Variables | None = None,
    master_port: int = 0,
    max_restarts: int = 0,
    resources: Mapping[str, float] | None = None,
    prefix: bool | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
) -> list[Any] | dict[str, list[Any]]:
    """Calls a function in `workers` new processes of this machine, and returns the results in the order of ranks.

    Each process is a rank: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set before it imports
    modules, so `init_rpc(name)` and `init_process_group()` need no more arguments. As with every way to spawn
    processes, the call must be under `if __name__ == "__main__":`, since each process imports the main module.

    With `roles` instead of a function, the ranks of each role run its function, and the results are lists by the name
    of the role. All ranks form one world. `placement_from_environment().name` is the name of a rank's worker.

    Under torchrun, srun, mpirun or another launcher of several processes, it starts no processes: it calls the function
    in this process with its rank, and returns a list of this one result. The launcher then decides what the other
    arguments would.

    When a rank fails, all others are ended, and the error names the rank that failed first. Ctrl-C, SIGTERM and SIGHUP,
    which the ranks get as SIGTERM, end all ranks. No rank outlives this process, even if it is killed (on Linux).

    Args:
        function: called with the rank and `args`. It is passed by reference, so define it at the top of a module; in a
            notebook, and under `python -c` and `python -`, functions and classes of the main module go by value.
        args: the other arguments of the function, pickled.
        workers: number of processes, and the world size.
        roles: see `Role`; replaces the arguments above, `max_restarts` and `resources`.
        join_timeout_s: limit for the whole job in seconds; None for no limit.
        env: environment variables of the new processes, added to those of this process; or a list with those of each.
        master_port: port for the rendezvous; 0 reserves a free port until the job ends.
        max_restarts: how often each rank is started again after its process was killed. An exception always ends the
            job.
        resources: the resources of each rank: `{"GPU": 1, "CPU": 4}` sets its GPUs (`CUDA_VISIBLE_DEVICES`) and
            threads. By default all ranks see all GPUs, and share the cores.
        prefix: whether each line of a rank's output begins with its name; by default only with roles.
        log_dir: a folder for the ranks' output, in files `NAME.ATTEMPT.log`.
        name: the name of the job for `python -m rpcdist status`; its address by default.

    Returns:
        The results of the function on rank 0, 1 and so on, which travel pickled. With roles, by role; None for a daemon
        that was stopped.

    Raises:
        ProcessFailed: a rank raised an exception, or its process ended without returning; the text has its traceback,
            or the last lines of its output.
        DeadlineExceeded: the job did not end within `join_timeout_s`.
        ConfigError: an argument is wrong, the port is in use, or the launcher's WORLD_SIZE is not `workers`.
        SerializationError: the function, its arguments or a result cannot be pickled.
        TransportError: this process has too few descriptors, or too little memory, to start the others.
        OSError: a process cannot be started for another reason.
        SystemExit: a rank called `sys.exit` with this code (not 0); or the main guard is missing, and the text has the
            line where it belongs; or 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, and 141 if a rank could
            not write its output, because nobody reads that of this program any more (`| head`). The exception after
            Ctrl-C is also a `KeyboardInterrupt`, and only that at a prompt or in a notebook.
    """
    check_not_importing_main("launch")
    check_join_timeout(join_timeout_s)
    all_roles, common = roles_of(function, args, workers, roles, env, max_restarts, resources)
    placement = placement_from_environment()
    if placement is None:
        check_can_start("launch")
    machine = None if placement is not None else this_machine({**os.environ, **common})
    plans, notice = plan_job(all_roles, common, os.environ, machine, named=roles is not None)
    if placement is not None:
        return run_here(placement, plans, by_role=roles is not None)
    if notice:
        logger.info(notice)
    output = JobOutput(roles is not None if prefix is None else prefix, log_dir, takes_output)
    calls = {role.name: pickle_call(role.function, role.args) for role in all_roles}
    progress = progress_of(plans, join_timeout_s)
    with names_shortage("launch"), StopSignals() as stop, held_port(master_port) as port:
        variables = {**os.environ, "MASTER_ADDR": HOST, "MASTER_PORT": str(port)}
        engine = LocalRanks(dict(enumerate(plans)), calls, variables, stop, output)
        with job_record(name, f"{HOST}:{port}", output.log_dir) as write:
            outcome = run_job(engine, progress, stop, partial(write, plans, progress))
    return results_of(outcome, plans, progress, output, join_timeout_s, by_role=roles is not None)


def roles_of(
    function: Callable[..., Any] | None,
    args: tuple[Any, ...],
    workers: int | None,
    roles: Sequence[Role] | None,
    env: Variables | None,
    max_restarts: int,
    resources: Mapping[str, float] | None,
) -> tuple[Sequence[Role], Mapping[str, str]]:
    """Returns the roles for the arguments of `launch`, and the variables of all ranks. Raises `ConfigError`."""
    if roles is None:
        if function is None or workers is None:
            raise ConfigError("pass launch a function and the number of workers, or roles")
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, not {workers}")
        return [Role("worker", function, workers, args, max_restarts, env, resources)], {}
    if function is not None or workers is not None or args or max_restarts or resources:
        raise ConfigError("with roles, pass function, args, workers, max_restarts and resources to each Role")
    if env is not None and not isinstance(env, Mapping):
        raise ConfigError("with roles, env must be a dictionary; pass a list with the variables of each rank to a Role")
    for role in roles:
        if not isinstance(role, Role):
            raise ConfigError(f"roles has {role!r}, which is not an rpcdist.Role")
    return roles, env or {}


def check_join_timeout(join_timeout_s: float | None) -> None:
    if join_timeout_s is not None and not join_timeout_s > 0:
        raise ConfigError(f"join_timeout_s must be above 0, not {join_timeout_s:g}; None means no limit")


def run_here(placement: Placement, plans: Sequence[RankPlan], by_role: bool) -> list[Any] | dict[str, list[Any]]:
    """Runs this process's rank, under a launcher."""
    if placement.world_size != len(plans):
        raise ConfigError(
            f"workers={len(plans)}, but the launcher started WORLD_SIZE={placement.world_size} processes: pass as "
            "many workers, or start one process"
        )
    role = plans[placement.rank].role
    if by_role:
        os.environ[ROLE_VARIABLE] = plans[placement.rank].variables[ROLE_VARIABLE]
    result = role.function(placement.rank, *role.args)
    return {role.name: [result]} if by_role else [result]


def progress_of(plans: Sequence[RankPlan], join_timeout_s: float | None) -> Progress:
    """Returns the progress of a job whose ranks have not been started."""
    return Progress(
        range(len(plans)),
        Deadline.after(join_timeout_s).at,
        max_restarts={rank: plan.role.max_restarts for rank, plan in enumerate(plans)},
        daemons={rank for rank, plan in enumerate(plans) if plan.role.daemon},
    )


def results_of(
    outcome: Outcome | signal.Signals,
    plans: Sequence[RankPlan],
    progress: Progress,
    output: JobOutput,
    join_timeout_s: float | None,
    by_role: bool,
) -> list[Any] | dict[str, list[Any]]:
    """Returns the results by rank, or lists of them by role; raises if the job did not succeed."""
    if isinstance(outcome, tuple):
        results = [None if one is None else load_result(rank, one) for rank, one in enumerate(outcome)]
        if not by_role:
            return results
        lists: dict[str, list[Any]] = {}
        for one, result in zip(plans, results, strict=True):
            lists.setdefault(one.role.name, []).append(result)
        return lists
    if outcome == signal.SIGINT:
        raise interrupted(report_end)
    if isinstance(outcome, signal.Signals):
        report_end("terminated")
        raise SystemExit(128 + outcome)
    if isinstance(outcome, Late):
        ranks = ", ".join(map(str, outcome.ranks))
        raise DeadlineExceeded(f"after {join_timeout_s:g} s these of {len(plans)} ranks had not ended: {ranks}")
    error = error_of(outcome)
    if isinstance(outcome, Failed) and is_unread_output(outcome.cause) and drop_unread_output():
        raise SystemExit(128 + signal.SIGPIPE) from error
    if isinstance(error, SystemExit) and isinstance(error.code, int):  # a text is shown at the end
        logger.warning("%s called sys.exit(%r), which ends the job", plans[outcome.rank].name, error.code)
    if isinstance(error, ProcessFailed):
        name = plans[error.rank].name
        error.worker = name if by_role else ""
        error.output = output.tail(name, ERROR_LINES)
        error.outcomes = {
            one.name: progress.state(rank) if progress.is_over(rank) else "stopped" for rank, one in enumerate(plans)
        }
        for rank, loss in progress.losses().items():
            error.add_note(f"{plans[rank].name} {loss}")
    raise error
