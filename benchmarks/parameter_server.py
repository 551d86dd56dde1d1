"""$ python benchmarks/parameter_server.py
Compares `ParameterServer` and `ShardedEmbedding` with servers written for torch's RPC: a step, one trainer, one server.

Two pairs of processes live at the same time, one for each library. In each round both are measured, in changing order;
the table shows medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from _pairs import open_rpc_pair
from _report import about_machine, layout, show, write_results

HEAD = ("a trainer's step", "ours ms", "torch ms", "ours/torch")
MODULES = ("rpcdist.rpc", "torch.distributed.rpc")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--effort", type=float, default=1.0, help="how many steps are measured, 1 for the usual number")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    from _parameter_server_cases import CASES

    about = [*about_machine("rpcdist", "torch"), f"- {arguments.rounds} rounds; one trainer, one server"]
    print("\n".join(about))
    lines = []
    with open_rpc_pair(MODULES[0]) as ours, open_rpc_pair(MODULES[1]) as torch:
        for case in CASES:
            times: dict[str, list[float]] = {module: [] for module in MODULES}
            for number in range(arguments.rounds):
                for pair in (ours, torch) if number % 2 == 0 else (torch, ours):
                    found = pair.ask_first("measure", case.name, arguments.effort, "_parameter_server_cases")
                    times[pair.name].append(found["step"])
            mine, theirs = (statistics.median(times[module]) for module in MODULES)
            lines.append((case.what, show(mine), show(theirs), f"{mine / theirs:.2f}x"))
    table = layout(HEAD, lines)
    print("\n".join(["", *table]))
    if arguments.write:
        write_results("parameter_server.py", [*about, "", *table])
    return 0


if __name__ == "__main__":
    sys.exit(main())
