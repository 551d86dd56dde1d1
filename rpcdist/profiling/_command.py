"""The command `profile-call`: starts two processes twice, without marks and with them, and prints the stages."""

from __future__ import annotations

import argparse
import re
import sys
from statistics import median
from typing import TYPE_CHECKING, Final

from rpcdist.errors import RpcdistError
from rpcdist.time_limits import PROFILE_LIMIT_S

if TYPE_CHECKING:
    from rpcdist.profiling._ranks import Measured

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


KINDS: Final = ("noop", "echo", "remote", "method")
"""The calls that can be profiled."""

_SIZE: Final = re.compile(r"(\d+) ?(B|KiB|MiB|GiB)?")
_UNITS: Final = {None: 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def add_profile_call(commands: Commands) -> None:
    """Adds the command to a parser; `arguments.run(arguments)` runs it."""
    parser = commands.add_parser(
        "profile-call",
        help="where the time of a call goes",
        description="Calls from one process to another on this host, and prints where the time of a call goes: the "
        "median of each stage, in both processes. See docs/performance.md.",
    )
    parser.add_argument("kind", nargs="?", choices=KINDS, default="noop",
                        help="noop: rpc_sync of a function that does nothing (default); echo: of one that sends a "
                        "tensor back; remote: remote().to_here(); method: rref.rpc_sync().method()")  # fmt: skip
    parser.add_argument("--size", type=parse_size, default="1KiB", help="of an echo's tensor (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=500, help="how many to measure (default: %(default)s)")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="sleep before each call (default: %(default)g)")
    parser.add_argument("--channels", default="auto", help="value of RPCDIST_CHANNELS (default: %(default)s)")
    parser.set_defaults(run=run)


def parse_size(text: str) -> int:
    """A number of bytes: `64KiB`, `1 MiB`, `4096`."""
    if (match := _SIZE.fullmatch(text.strip())) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write a number of bytes, or 64KiB, or 1MiB")
    return int(match[1]) * _UNITS[match[2]]


def run(arguments: argparse.Namespace) -> int:
    """Prints the profile; returns the exit status."""
    from rpcdist.profiling._stages import profile_calls, table

    if arguments.calls < 1 or arguments.pause_ms < 0:
        print("error: --calls is at least 1, and --pause-ms at least 0", file=sys.stderr)
        return 2
    try:
        plain, _ = _measure(arguments, with_marks=False)
        caller, callee = _measure(arguments, with_marks=True)
    except RpcdistError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    profile = profile_calls(caller.calls, [*caller.marks, *callee.marks])
    plain_us = median(call.ended_ns - call.began_ns for call in plain.calls) / 1e3
    size = f" of {arguments.size} bytes" if arguments.kind == "echo" else ""
    print(f"{arguments.kind}{size}: {plain_us:.1f} us without marks, {profile.total_us:.1f} us with them; medians of "
          f"{arguments.calls} calls")  # fmt: skip
    print("\n".join(["", *table(profile)]))
    if profile.rare:
        events = ", ".join(f"{event}: {number}" for event, number in profile.rare.items())
        print(f"\nNot in every call: {events}.")
    if missing := sorted({*caller.missing, *callee.missing}):
        print(f"\nNot found, so without a mark: {', '.join(missing)}. Bring rpcdist/profiling/_points.py up to date.")
    return 0


def _measure(arguments: argparse.Namespace, with_marks: bool) -> list[Measured]:
    from rpcdist._launch.launching import (
        launch,  # not at the top: it takes seconds to import torch, and --help waits for it
    )
    from rpcdist.profiling._ranks import Settings, measure

    settings = Settings(arguments.kind, arguments.size, arguments.calls, arguments.pause_ms / 1e3, with_marks)
    env = {"RPCDIST_CHANNELS": arguments.channels, "OMP_NUM_THREADS": "1"}
    return launch(measure, (settings,), workers=2, join_timeout_s=PROFILE_LIMIT_S, env=env)
