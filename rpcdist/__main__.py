"""$ python -m rpcdist --help
The commands of this package.
"""

from __future__ import annotations

import argparse
import sys

from rpcdist.compat._port_command import add_port
from rpcdist.compat._run_command import add_run
from rpcdist.profiling import add_profile_call

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command that the arguments name; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m rpcdist", description="Commands of rpcdist.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_port(commands)
    add_profile_call(commands)
    add_run(commands)
    chosen = parser.parse_args(arguments)
    status: int = chosen.run(chosen)
    return status


if __name__ == "__main__":
    sys.exit(main())
