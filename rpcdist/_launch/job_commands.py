"""`python -m rpcdist launch | status | stop | logs`: jobs on this machine, from a shell."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Final

from rpcdist._launch.job_plan import Role
from rpcdist._launch.job_records import LaunchedJob, find_job, jobs, start_of
from rpcdist._launch.launching import launch
from rpcdist._launch.reports import text_of_error
from rpcdist.errors import ConfigError, text_of
from rpcdist.time_limits import JOB_STOP_LIMIT_S, LONGEST_WAIT_S

_ROLE_FORM: Final = "NAME=N:MODULE:FUNCTION"


def add_launch_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add = commands.add_parser("launch", help="runs a function in processes of this machine, in one role or several")
    add.set_defaults(run=_launch)
    add.add_argument(
        "function", nargs="?", metavar="MODULE:FUNCTION", help="called with its rank in --workers processes"
    )
    add.add_argument("--workers", type=int, metavar="N", help="how many")
    role = "instead of a function: the N processes of a role; repeat it for each role, first the role of rank 0"
    for option, metavar, text in (
        ("--role", _ROLE_FORM, role),
        ("--daemon", "NAME", "the job does not wait for this role"),
        ("--max-restarts", "[NAME=]N", "restarts a lost rank (of this role), at most this often"),
        ("--env", "NAME=VALUE", "sets an environment variable for all ranks"),
    ):
        add.add_argument(option, action="append", default=[], metavar=metavar, help=text)
    add.add_argument(
        "--log-dir", metavar="FOLDER", help="writes the output of each rank to a separate file in this folder"
    )
    add.add_argument("--no-prefix", action="store_true", help="omits the workers' names before the lines")
    add.add_argument("--name", help="name of the job for the commands below; by default its address")
    status = commands.add_parser("status", help="shows the ranks of the jobs that `launch` runs on this machine")
    status.set_defaults(run=_status)
    status.add_argument(
        "job", nargs="?", metavar="ADDRESS|NAME", help="name of a job; by default all jobs of this user"
    )
    stop = commands.add_parser("stop", help="ends a job that `launch` runs on this machine")
    stop.set_defaults(run=_stop)
    stop.add_argument("job", metavar="ADDRESS|NAME")
    logs = commands.add_parser("logs", help="shows the output of the ranks of a job that has a --log-dir")
    logs.set_defaults(run=_logs)
    logs.add_argument("job", metavar="ADDRESS|NAME")
    logs.add_argument("worker", nargs="?", help="name of a worker; by default all workers")


def _launch(arguments: argparse.Namespace) -> int:
    env = dict(_pair("--env", text, "NAME=VALUE") for text in arguments.env)
    restarts = dict(_restarts(text) for text in arguments.max_restarts)
    common: dict[str, Any] = {"log_dir": arguments.log_dir, "prefix": not arguments.no_prefix, "name": arguments.name}
    has_one_function = arguments.function is not None and arguments.workers is not None
    has_part_of_it = arguments.function is not None or arguments.workers is not None
    if has_part_of_it if arguments.role else not has_one_function:
        raise ConfigError("pass MODULE:FUNCTION and --workers, or --role once or several times")
    names = {_pair("--role", text, _ROLE_FORM)[0] for text in arguments.role}
    for name in {*arguments.daemon, *restarts} - {"", *names}:
        known = f"the roles are {', '.join(sorted(names))}" if names else "define roles with --role"
        raise ConfigError(f"no --role defines {name!r}; {known}")
    if not arguments.role:
        launch(
            _function(arguments.function),
            workers=arguments.workers,
            env=env,
            max_restarts=restarts.get("", 0),
            **common,
        )
        return 0
    roles = []
    for text in arguments.role:
        name, rest = _pair("--role", text, _ROLE_FORM)
        count, _, function = rest.partition(":")
        if not count.isdecimal():
            raise ConfigError(f"--role {text}: write {_ROLE_FORM}, with a number for N")
        num_restarts = restarts.get(name, restarts.get("", 0))
        roles.append(
            Role(name, _function(function), int(count), max_restarts=num_restarts, daemon=name in arguments.daemon)
        )
    launch(roles=roles, env=env, **common)
    return 0


def _restarts(text: str) -> tuple[str, int]:
    name, _, number = text.rpartition("=")
    if not number.isdecimal():
        raise ConfigError(f"--max-restarts {text}: write a number, or NAME=NUMBER")
    return name, int(number)


def _pair(option: str, text: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError(f"{option} {text}: write {form}")
    return name, value


def _function(text: str) -> Callable[..., Any]:
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"{text!r}: write MODULE:FUNCTION, with a colon between the two")
    folder, file = os.path.split(os.path.normpath(module))
    if folder or file.endswith(".py"):
        where = f", and start the command in {folder}" if folder else ""
        raise ConfigError(f"{text}: write the module as `import` does, {file.removesuffix('.py')}:{name}{where}")
    try:
        found = importlib.import_module(module)
    except Exception as exc:  # the user's module may raise any
        if isinstance(exc, ModuleNotFoundError) and f"{module}.".startswith(f"{exc.name}."):
            raise ConfigError(f"{text}: {text_of(exc)}; modules are also searched in this folder") from exc
        raise ConfigError(f"{text}: the import of {module} failed\n\n{text_of_error(exc).rstrip()}") from exc
    function = getattr(found, name, None)
    if not callable(function):
        similar = get_close_matches(name, [one for one, value in vars(found).items() if callable(value)], 1)
        advice = f"; is it {similar[0]}?" if similar else ""
        raise ConfigError(f"{text}: the module {module} has no function {name!r}{advice}")
    return function  # type: ignore[no-any-return]


def _status(arguments: argparse.Namespace) -> int:
    found = list(jobs()) if arguments.job is None else [find_job(arguments.job)]
    if not found:
        print("no job of this user runs on this machine")
    for job in found:
        print(f"{job.name}: at {job.address}, process {job.pid}" + (f", logs in {job.log_dir}" if job.log_dir else ""))
        width = max(map(len, job.states), default=0)
        for name, state in job.states.items():
            print(f"  {name:{width}}  {state}")
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    job = find_job(arguments.job)
    with suppress(ProcessLookupError):
        os.kill(job.pid, signal.SIGTERM)
    if not _has_ended(job, JOB_STOP_LIMIT_S):
        raise ConfigError(f"process {job.pid} was asked to end, but still runs after {JOB_STOP_LIMIT_S:g} s")
    print(f"{job.name} has ended")
    return 0


def _has_ended(job: LaunchedJob, limit_s: float) -> bool:
    """Waits until the program of a job has ended; returns False after the limit."""
    end = time.monotonic() + limit_s
    try:
        handle = os.pidfd_open(job.pid)
    except ProcessLookupError:
        return True
    try:
        while start_of(job.pid) == job.started:
            remaining_s = end - time.monotonic()
            if remaining_s <= 0:
                return False
            if select.select([handle], [], [], min(remaining_s, LONGEST_WAIT_S))[0]:
                return True
        return True
    finally:
        os.close(handle)


def _logs(arguments: argparse.Namespace) -> int:
    job = find_job(arguments.job)
    if job.log_dir is None:
        raise ConfigError(f"the job {job.name} keeps no logs: start it with --log-dir, or launch(..., log_dir=...)")
    if arguments.worker is not None and arguments.worker not in job.states:
        raise ConfigError(f"the job {job.name} has no worker {arguments.worker!r}; there are {', '.join(job.states)}")
    for name in [arguments.worker] if arguments.worker is not None else list(job.states):
        attempt = 0
        while os.path.isfile(path := os.path.join(job.log_dir, f"{name}.{attempt}.log")):
            print(f"==> {path}")
            with open(path, errors="replace") as file:
                sys.stdout.writelines(file)
            attempt += 1
    return 0
