"""$ python benchmarks/call_cost.py
The Python functions that an operation runs on the thread that begins it, and their budgets. A function costs a few
hundred nanoseconds where caches are cold, as they are between two calls. The numbers do not depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable

import _call_cost_functions as functions
from _report import Line, layout

import rpcdist

HEAD: Line = ("operation", "Python functions", "budget", "ok")
CASES: list[tuple[str, Callable[[str], Counter[str]], int]] = [
    ("rpc_sync of a no-op", functions.functions_of_a_call, 66),
    ("rref.rpc_sync().method()", functions.functions_of_a_method, 93),
    ("remote() + to_here()", functions.functions_of_a_creation, 132),
    ("a method of an actor", functions.functions_of_a_turn, 105),
    ("a call with two tensors, and its backward pass", functions.functions_of_a_pass, 300),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a budget is not kept")
    parser.add_argument("--functions", action="store_true", help="list the functions of each operation")
    arguments = parser.parse_args()
    lines: list[Line] = []
    with rpcdist.LocalCluster(2):
        for what, count, most in CASES:
            found = count("worker1")
            lines.append((what, str(found.total()), f"at most {most}", "yes" if found.total() <= most else "NO"))
            if arguments.functions:
                print(f"{what}:", *(f"{number:4} {name}" for name, number in found.most_common()), sep="\n")
    print("\n".join(layout(HEAD, lines)))
    return int(arguments.check and any(line[-1] == "NO" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
