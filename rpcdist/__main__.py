"""$ python -m rpcdist --help
The commands of this package.
"""

from __future__ import annotations

import argparse
import sys

from rpcdist._dashboard.commands import add_live_commands
from rpcdist._doctor.command import add_doctor
from rpcdist._inspect.report_command import add_report
from rpcdist._inspect.stacks_command import add_stacks
from rpcdist._launch.job_commands import add_launch_commands
from rpcdist.compat._commands import add_port, add_run

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command that the arguments name; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m rpcdist", description="Commands of rpcdist.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_launch_commands(commands)
    add_stacks(commands)
    add_live_commands(commands)
    add_report(commands)
    add_doctor(commands)
    add_port(commands)
    add_run(commands)
    chosen = parser.parse_args(arguments)
    status: int = chosen.run(chosen)
    return status


if __name__ == "__main__":
    sys.exit(main())
