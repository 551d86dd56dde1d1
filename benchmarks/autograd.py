"""$ python benchmarks/autograd.py
Compares distributed autograd with torch's in one run on one machine, as benchmarks/rpc.py compares calls.

The backward passes of rpcdist are those of its default mode, which copes with unused results; torch's only mode does
not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

import rpc
from _autograd_cases import CASES
from _comparison import head, make_lines, measure_in_turns
from _pairs import PairFailed, open_rpc_pair
from _report import RESULTS, Line, layout, write_results

__all__ = ["main"]

MODULE = "_autograd_cases"


def compare(arguments: argparse.Namespace) -> int:
    """Prints the table; returns the exit status."""
    about = rpc.describe_machine(arguments)
    print("\n".join(about), flush=True)
    lines: list[Line] = []
    with contextlib.ExitStack() as stack:
        ours, torch = (
            stack.enter_context(open_rpc_pair(module)) for module in (arguments.ours, "torch.distributed.rpc")
        )
        for case in CASES:
            if case.name in arguments.only:
                print(f"measuring {case.name} ...", file=sys.stderr, flush=True)
                effort = 0.1 if arguments.quick else 1.0
                lines += make_lines(case.rows, measure_in_turns(case, ours, torch, arguments.rounds, effort, MODULE))
    table = layout(head("torch"), lines)
    print("\n".join(["", *table]))
    if arguments.write:
        write_results(rpc.with_channels("autograd.py"), [*about, "", *table])
    return int(arguments.check and any(line[-1] == "NO" for line in lines))


def main() -> int:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("--quick", action="store_true", help="few calls: shows that it runs, not how fast")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (default: %(default)s)")
    parser.add_argument("--only", action="append", choices=names, help="this case; may be given several times")
    rpc.add_channels(parser)
    parser.add_argument("--write", action="store_true", help=f"put the table into {RESULTS.name}")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a budget is not kept")
    arguments = parser.parse_args(
        namespace=argparse.Namespace(pin=False, unsuspecting=False, torch_tcp=False, ours="rpcdist.rpc")
    )
    arguments.only = arguments.only or names
    rpc.inherit(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"  # the pairs inherit it
    try:
        return compare(arguments)
    except PairFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
