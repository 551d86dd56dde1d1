"""$ python benchmarks/rpc.py
Compares rpcdist's RPC with torch's (TensorPipe, which picks its transports itself) in one run on one machine.

Two pairs of processes live at the same time, one for each library. Every case is measured in rounds, and in each round
first one pair and then the other, in changing order, so that a machine that slows down slows down both. The table shows
the median over the rounds. Functions, tensors and measuring code are the same Python code for both; every process has
one OpenMP thread; processes are not pinned to cores unless `--pin` is given.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys

from _cases import CASES, Case, Row
from _pairs import Pair, PairFailed, open_rpc_pair
from _report import RESULTS, Line, about_machine, layout, show, write_results

MEMORY = "memory"
MEMORY_ROWS = tuple(
    Row(f"growth of resident memory per 10,000 calls, {who}", "", who, "MiB", 2**-20, limit=5.0)
    for who in ("caller", "callee")
)
HEAD: Line = ("what", "size", "unit", "ours", "torch", "ours/torch", "in single rounds", "budget", "ok")


# ---- measuring


def measure_case(case: Case, ours: Pair, torch: Pair, rounds: int, effort: float) -> list[Line]:
    """Alternates between the pairs, and returns the case's lines."""
    samples: list[tuple[dict[str, float], dict[str, float]]] = []
    for number in range(rounds):
        if number % 2 == 0:
            our_sample = ours.ask_first("measure", case.name, effort)
            samples.append((our_sample, torch.ask_first("measure", case.name, effort)))
        else:
            torch_sample = torch.ask_first("measure", case.name, effort)
            samples.append((ours.ask_first("measure", case.name, effort), torch_sample))
    return [make_line(row, [(mine[row.metric], peers[row.metric]) for mine, peers in samples]) for row in case.rows]


def measure_memory(ours: Pair, torch: Pair, effort: float) -> list[Line]:
    """Warms up with as many calls as are measured, so that pools and caches have their size."""
    num_calls = max(2000, round(20_000 * effort))
    growths = []
    for pair in (ours, torch):
        pair.ask_first("churn", num_calls)
        before = pair.ask_both("resident_bytes")
        pair.ask_first("churn", num_calls)
        after = pair.ask_both("resident_bytes")
        growths.append([(new - old) * 10_000 / num_calls for old, new in zip(before, after, strict=True)])
    pairs = zip(*growths, strict=True)
    return [make_line(row, [pair]) for row, pair in zip(MEMORY_ROWS, pairs, strict=True)]


def make_line(row: Row, rounds: list[tuple[float, float]]) -> Line:
    """The table's line for what was measured as (ours, torch) in each round."""
    ours, torch = (statistics.median(values) * row.scale for values in zip(*rounds, strict=True))
    ratio = None if row.unit == "MiB" else ours / torch  # growths may be zero or negative
    budget, kept = judge(row, ours, ratio)
    ratios = sorted(mine / peers for mine, peers in rounds) if ratio is not None else []
    return (
        row.what,
        row.size,
        row.unit,
        show(ours),
        show(torch),
        "" if ratio is None else f"{ratio:.2f}x",
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}" if ratios else "",
        budget,
        "" if kept is None else "yes" if kept else "NO",
    )


def judge(row: Row, ours: float, ratio: float | None) -> tuple[str, bool | None]:
    """The budget in words, and whether it was kept; None where there is no budget."""
    if row.limit is not None:
        return f"at most {row.limit:g} {row.unit}", ours <= row.limit
    limit = row.channel_ratio if channel_is_used() else row.ratio
    if limit is None or ratio is None:
        return "", None
    if row.more_is_better:
        return f"at least {limit:g}x", ratio >= limit
    return f"at most {limit:g}x", ratio <= limit


def channel_is_used() -> bool:
    """Whether our pair may use the local channel; torch's may always use shared memory."""
    return sys.platform == "linux" and os.environ.get("RPCDIST_CHANNELS") != "grpc"


# ---- showing


def describe_machine(arguments: argparse.Namespace) -> list[str]:
    """Where and with what this was measured."""
    pinned = "pinned to one core each" if arguments.pin else "not pinned"
    return [
        *about_machine("rpcdist", "torch", "grpcio", "protobuf", "uvloop"),
        f"- 2 pairs of 2 processes, {pinned}, 1 OpenMP thread each; medians of {arguments.rounds} alternating rounds",
        f"- ours is `{arguments.ours}` {'on the local channel' if channel_is_used() else 'over gRPC alone'}, torch is "
        "`torch.distributed.rpc`",
    ]


# ---- the command


def compare(arguments: argparse.Namespace) -> int:
    """Prints the table; returns the exit status."""
    about = describe_machine(arguments)
    print("\n".join(about), flush=True)
    effort = 0.1 if arguments.quick else 1.0
    lines: list[Line] = []
    with contextlib.ExitStack() as stack:
        ours, torch = (
            stack.enter_context(open_rpc_pair(module, pin=arguments.pin, profile=False))
            for module in (arguments.ours, "torch.distributed.rpc")
        )
        for name in arguments.only:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            if name == MEMORY:
                lines += measure_memory(ours, torch, effort)
            else:
                case = next(case for case in CASES if case.name == name)
                lines += measure_case(case, ours, torch, arguments.rounds, effort)
    table = layout(HEAD, lines)
    print("\n".join(["", *table]))
    if arguments.write:
        write_results("rpc.py" if channel_is_used() else "rpc.py --channels grpc", [*about, "", *table])
    return int(arguments.check and any(line[-1] == "NO" for line in lines))


def profile(arguments: argparse.Namespace) -> int:
    """Runs the cases on our pair alone, and prints what the threads of both processes did in each."""
    with open_rpc_pair(arguments.ours, pin=arguments.pin, profile=True) as pair:
        for name in arguments.only:
            if name == MEMORY:
                continue
            pair.ask_first("measure", name, 0.1)
            pair.ask_both("profile_reset")
            pair.ask_first("measure", name, 0.3 if arguments.quick else 1.0)
            for who, report in zip(("caller", "callee"), pair.ask_both("profile_report"), strict=True):
                print(f"\n======== {name}: {who}\n{report}", flush=True)
    return 0


def add_channels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--channels", choices=("auto", "grpc"), default=os.environ.get("RPCDIST_CHANNELS", "auto"),
                        help="grpc: over gRPC alone, as between hosts (default: %(default)s)")  # fmt: skip


def main() -> int:
    names = [*(case.name for case in CASES), MEMORY]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("--quick", action="store_true", help="few calls: shows that it runs, not how fast")
    parser.add_argument("--rounds", type=int, help="alternating rounds (default: 7, or 2 with --quick)")
    parser.add_argument("--only", action="append", choices=names, help="this case; may be given several times")
    parser.add_argument("--pin", action="store_true", help="pin each caller to one core and each callee to another")
    add_channels(parser)
    parser.add_argument("--write", action="store_true", help=f"put the table into {RESULTS.name}")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a budget is not kept")
    parser.add_argument("--profile", action="store_true", help="show where the time goes in our processes instead")
    parser.add_argument("--ours", default="rpcdist.rpc", metavar="MODULE", help="the module that is measured as ours; "
                        "torch.distributed.rpc shows the noise (default: %(default)s)")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least 1")
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 7)
    arguments.only = arguments.only or names
    os.environ.update(OMP_NUM_THREADS="1", RPCDIST_CHANNELS=arguments.channels)  # the pairs inherit it
    try:
        return profile(arguments) if arguments.profile else compare(arguments)
    except PairFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
