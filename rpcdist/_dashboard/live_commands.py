"""`python -m rpcdist dashboard ADDRESS` and `python -m rpcdist top ADDRESS`."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import socket
import sys
import threading
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final

from rpcdist._launch.job_records import address_of
from rpcdist.errors import AuthenticationFailed, ConfigError, listed, raised_as
from rpcdist.inspection.fact_texts import printable_lines
from rpcdist.time_limits import LIVE_VIEW_PERIOD_S

if TYPE_CHECKING:
    from rpcdist._inspect.asking import Asker
    from rpcdist.inspection.facts import JobFacts


_PERIODS: Final = (0.2, 3600.0)
MAX_LISTED: Final = 10
MAX_COMMAND: Final = 100


def add_live_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    dashboard = commands.add_parser("dashboard", help="serves a web page that shows a job live")
    dashboard.set_defaults(run=_run_dashboard)
    dashboard.add_argument(
        "--host",
        default="127.0.0.1",
        help="address at which the page is served; by default only this machine reaches it",
    )
    dashboard.add_argument("--port", type=int, default=0, help="port of the page; by default a free one")
    dashboard.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)
    top = commands.add_parser("top", help="shows the workers of a job live, in the terminal")
    top.set_defaults(run=_run_top)
    for command in (dashboard, top):
        command.add_argument(
            "address",
            nargs="?",
            help="of a worker (MASTER_ADDR:MASTER_PORT), or name of a job of `launch`; by default the only job here",
        )
        command.add_argument(
            "--period",
            type=float,
            default=LIVE_VIEW_PERIOD_S,
            metavar="SECONDS",
            help="time between two queries of the job; 0.5 by default",
        )


def _run_dashboard(arguments: argparse.Namespace) -> int:
    try:
        import plotly  # type: ignore[import-untyped] # noqa: F401 # its script is served
        import uvicorn

        from rpcdist._dashboard.job_watch import JobWatch
        from rpcdist._dashboard.page_server import few_connections, make_page_server
    except ImportError as error:
        return _lacks(error)
    from rpcdist._inspect.asking import Asker

    _check_period(arguments.period)
    with Asker(is_live=True) as asker, closing(_listen(arguments.host, arguments.port)) as listener:
        address = _address_of_job(asker, arguments.address)  # errors are shown here, and not on the page
        token = secrets.token_urlsafe(24)

        async def serve() -> None:
            watch = JobWatch(asker, address, arguments.period)
            app = make_page_server(watch, token, lambda: server.should_exit)
            config = uvicorn.Config(
                app, http=few_connections(), log_level="warning", access_log=False, timeout_graceful_shutdown=3
            )
            server = uvicorn.Server(config)
            if arguments.until_stdin_ends:
                _end_with_stdin(server)
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"http://{shown}:{port}/?token={token}", flush=True)
            await server.serve(sockets=[listener])

        asyncio.run(serve())
    return 0


def _run_top(arguments: argparse.Namespace) -> int:
    try:
        from rpcdist._dashboard.top import Top
    except ImportError as error:
        return _lacks(error)
    from rpcdist._inspect.asking import Asker

    _check_period(arguments.period)
    with Asker() as asker:
        Top(asker, _address_of_job(asker, arguments.address), arguments.period).run()
    return 0


def _lacks(error: ImportError) -> int:
    print(f"the live view needs {error.name or error}: pip install 'rpcdist[dashboard]'",
          file=sys.stderr)  # fmt: skip
    return 1


def _address_of_job(asker: Asker, given: str | None) -> str:
    """The address of a worker that answers: of the given job, or of the only one that has workers on this host."""
    if given is not None:
        address = address_of(given)
        asker.job_at(address)
        return address
    found, refusals = asker.jobs_here()
    jobs = [job for job in found if job.workers]
    if not jobs:
        raise ConfigError(
            "no worker with this job token runs on this host: pass the address of a worker on another host"
        )
    lines = [printable_lines(_in_a_line(job)) for job in jobs[:MAX_LISTED]]
    if len(jobs) > 1:
        raise ConfigError(
            "\n  ".join([f"{len(jobs)} jobs have workers on this host: pass one of these addresses", *lines])
        )
    print(f"the only job here: {lines[0]}", file=sys.stderr)
    for address, refusal in refusals.items():
        if not isinstance(refusal, AuthenticationFailed):  # a worker of another user
            print(f"the process at {address} did not answer: {refusal}", file=sys.stderr)
    return jobs[0].workers[0].address


def _in_a_line(job: JobFacts) -> str:
    """One line with a job's address, its workers, and the program of its first worker on this host."""
    from rpcdist.transport.unix_sockets import process_at  # loads gRPC

    names = [worker.worker for worker in job.workers] + [one.worker for one in job.silent]
    pids = (process_at(worker.address) for worker in job.workers)
    pid = next((pid for pid in pids if pid is not None), None)
    program = "" if pid is None else f", process {pid}: {_command_of(pid)}"
    return f"{job.workers[0].address} is {job.job}: {listed(names, 4)}{program}"


def _command_of(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read(MAX_COMMAND).replace(b"\0", b" ").decode(errors="replace").strip()
    return "(ended)"


def _check_period(period_s: float) -> None:
    if not _PERIODS[0] <= period_s <= _PERIODS[1]:
        raise ConfigError(f"--period is {period_s}, but must be from {_PERIODS[0]:g} to {_PERIODS[1]:g} seconds")


def _listen(host: str, port: int) -> socket.socket:
    with raised_as(ConfigError, f"the page cannot be served at {host}, port {port}", OSError, OverflowError):
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _end_with_stdin(server: object) -> None:
    """Ends the server when the process that started it has ended, or has closed the pipe."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        server.should_exit = True  # type: ignore[attr-defined]

    threading.Thread(target=wait, name="rpcdist-dashboard-end", daemon=True).start()
