"""$ python -m rpcdist --help
The commands of this package.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
from typing import Final

_EARLY_END: Final = __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _EARLY_END:  # during the imports below, Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from rpcdist._dashboard.live_commands import add_live_commands
from rpcdist._doctor.command import add_doctor
from rpcdist._inspect.flight_report import add_report, add_stacks
from rpcdist._launch.job_commands import add_launch_commands
from rpcdist._launch.progress import interrupted
from rpcdist._launch.rank_main import drop_unread_output
from rpcdist.compat._commands import add_port, add_run
from rpcdist.errors import RpcdistError

_CANNOT_BE_WRITTEN: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""The errors of a full disk, and of a terminal that was closed."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command that the arguments name; returns the exit status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as with `>&-`
            setattr(sys, name, open(os.devnull, "w"))
    parser = argparse.ArgumentParser(prog="python -m rpcdist", description="Commands of rpcdist.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    add_launch_commands(commands)
    add_stacks(commands)
    add_live_commands(commands)
    add_report(commands)
    add_doctor(commands)
    add_port(commands)
    add_run(commands)
    _add_store(commands)
    chosen = parser.parse_args(arguments)
    try:
        if _EARLY_END:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status: int = chosen.run(chosen)
        sys.stdout.flush()
    except RpcdistError as error:  # without a traceback, since its text says what to do
        print(f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        if chosen.command == "run" or isinstance(error, SystemExit):  # the user's program; the latter is reported
            raise
        raise interrupted() from None
    except OSError as error:
        if isinstance(error, BrokenPipeError) and drop_unread_output():  # `head`, for example, has had enough
            return 1
        if chosen.command == "run" or error.errno not in _CANNOT_BE_WRITTEN:
            raise
        print(f"the output cannot be written: {error.strerror}. Write it to another place", file=sys.stderr)
        _drop_rest()
        return 1
    return status


def _drop_rest() -> None:
    """Redirects stdout to nowhere if it takes no data: the interpreter would report that at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _add_store(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    store = commands.add_parser(
        "store",
        help="serves a store outside of the ranks, for RPCDIST_STORE",
        description="Serves a store until SIGTERM, SIGHUP or Ctrl-C, to the processes that have the same job token. "
        "Ranks with RPCDIST_STORE=HOST:PORT meet there, so that rank 0, too, may be lost and come back at another "
        "address.",
    )
    store.add_argument("address", metavar="HOST:PORT", help="where it listens; port 0 takes any that is free")
    store.set_defaults(run=_serve_store)


def _serve_store(arguments: argparse.Namespace) -> int:
    ended = threading.Event()
    # Before the imports: torch's C++ code drops a Ctrl-C that comes while it imports.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under `nohup`
            signal.signal(number, lambda *_: ended.set())
    from rpcdist.collectives import TCPStore
    from rpcdist.transport.addresses import join_address, split_address

    host, port = split_address(arguments.address)
    store = TCPStore(host, port, None, is_master=True, wait_for_workers=False)
    try:
        print(f"RPCDIST_STORE={join_address(host, store.port)}", flush=True)
        ended.wait()
    finally:
        store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
