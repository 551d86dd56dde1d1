"""`python -m rpcdist dashboard ADDRESS` and `python -m rpcdist top ADDRESS`."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import socket
import sys
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Final

from rpcdist.errors import ConfigError, RpcdistError
from rpcdist.time_limits import LIVE_VIEW_PERIOD_S

if TYPE_CHECKING:
    from rpcdist._inspect.asking import Asker

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_PERIODS: Final = (0.2, 3600.0)


def add_live_commands(commands: Commands) -> None:
    """Adds the commands."""
    dashboard = commands.add_parser("dashboard", help="serves a web page that shows a job live")
    dashboard.set_defaults(run=_run_dashboard)
    dashboard.add_argument(
        "--host", default="127.0.0.1", help="where the page is served; this machine alone by default"
    )
    dashboard.add_argument("--port", type=int, default=0, help="of the page; a free one by default")
    dashboard.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)
    top = commands.add_parser("top", help="shows the workers of a job live, in the terminal")
    top.set_defaults(run=_run_top)
    for command in (dashboard, top):
        command.add_argument("address", nargs="?", help="of a worker, or MASTER_ADDR:MASTER_PORT; the job of this host")
        command.add_argument(
            "--period",
            type=float,
            default=LIVE_VIEW_PERIOD_S,
            metavar="SECONDS",
            help="between two looks at the job; 0.5 by default",
        )


def _run_dashboard(arguments: argparse.Namespace) -> int:
    try:
        import plotly  # type: ignore[import-untyped] # noqa: F401 # its script is served
        import uvicorn

        from rpcdist._dashboard.job_watch import JobWatch
        from rpcdist._dashboard.page_server import make_page_server
    except ImportError as error:
        return _lacks(error)
    from rpcdist._inspect.asking import Asker

    try:
        _check_period(arguments.period)
        with Asker(is_live=True) as asker, closing(_listen(arguments.host, arguments.port)) as listener:
            address = _address_of_job(asker, arguments.address)  # what is wrong is told here, and not on the page
            token = secrets.token_urlsafe(24)

            async def serve() -> None:
                watch = JobWatch(asker, address, arguments.period)
                app = make_page_server(watch, token, lambda: server.should_exit)
                config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=3)
                server = uvicorn.Server(config)
                if arguments.until_stdin_ends:
                    _end_with_stdin(server)
                host, port = listener.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                print(f"http://{shown}:{port}/?token={token}", flush=True)
                await server.serve(sockets=[listener])

            asyncio.run(serve())
    except RpcdistError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _run_top(arguments: argparse.Namespace) -> int:
    try:
        from rpcdist._dashboard.top import run_top
    except ImportError as error:
        return _lacks(error)
    from rpcdist._inspect.asking import Asker

    try:
        _check_period(arguments.period)
        with Asker() as asker:
            address = _address_of_job(asker, arguments.address)
            run_top(asker, address, arguments.period)
    except RpcdistError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _lacks(error: ImportError) -> int:
    print(f"{error.name or error} is not installed; install what the live view needs: pip install 'rpcdist[dashboard]'",
          file=sys.stderr)  # fmt: skip
    return 1


def _address_of_job(asker: Asker, given: str | None) -> str:
    """The address of a worker that answers: the given one, or one of the only job that has workers on this host."""
    if given is not None:
        asker.job_at(given)
        return given
    jobs = [job for job in asker.jobs_here()[0] if job.workers]
    if len(jobs) != 1:
        raise ConfigError(
            f"{len(jobs)} jobs with this token have workers on this host: name the address of a worker"
            + "".join(f", such as {job.workers[0].address} of {job.job}" for job in jobs[:10])
        )
    return jobs[0].workers[0].address


def _check_period(period_s: float) -> None:
    if not _PERIODS[0] <= period_s <= _PERIODS[1]:
        raise ConfigError(f"--period is {period_s}: give {_PERIODS[0]:g} to {_PERIODS[1]:g} seconds")


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"the page cannot be served at {host}, port {port}: {error}") from error


def _end_with_stdin(server: object) -> None:
    """Ends the server when the process that started it has ended, or has closed the pipe."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        server.should_exit = True  # type: ignore[attr-defined]

    threading.Thread(target=wait, name="rpcdist-dashboard-end", daemon=True).start()
