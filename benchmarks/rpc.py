"""$ python benchmarks/rpc.py
Compares rpcdist's RPC with torch's (TensorPipe, which picks its transports itself) in one run on one machine.

Two pairs of processes live at the same time, one for each library. Every case is measured in rounds, and in each round
first one pair and then the other, in changing order, so that a machine that slows down slows down both. The table shows
the median over the rounds, and which share of our rounds is "steady": within 1.5x of their median. Functions, tensors
and measuring code are the same Python code for both; every process has one OpenMP thread; processes are not pinned to
cores unless `--pin` is given.

`--unsuspecting` measures what somebody sees who has read nothing about measuring: torch's default number of threads,
nothing pinned, and each round in fresh processes, of one library at a time. Nine of ten rounds shall be steady.

`--torch-tcp` has torch use TCP alone, as it does between hosts; by default it copies the payloads of processes of one
host from memory to memory, whatever channel ours use.

`--ray PYTHON` compares a method of an object that lives in another process with an actor of Ray, in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys

import _budget_table
import _ray
from _cases import Metrics, Row
from _comparison import CHANNELS, STEADY_SHARE, channel_in_use, head, in_turns, make_line, make_lines, measure_in_turns
from _pairs import TORCH_TCP, Pair, PairFailed, open_rpc_pair
from _report import RESULTS, Line, about_machine, layout, write_results
from _rpc_cases import CASES

__all__ = ["add_channels", "describe_machine", "inherit", "with_channels"]

MODULE = "_rpc_cases"
TORCH = "torch.distributed.rpc"
MEMORY = "memory"
MEMORY_ROWS = tuple(
    Row(f"growth of resident memory per 10,000 calls, {who}", "", who, "MiB", 2**-20, limits=dict.fromkeys(CHANNELS, 5))
    for who in ("caller", "callee")
)
ROUNDS, ROUNDS_UNSUSPECTING, ROUNDS_QUICK = 7, 10, 2


# ---- measuring


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


def measure_side_by_side(arguments: argparse.Namespace, effort: float) -> list[Line]:
    """Both pairs live all the time, and each case is done with before the next one."""
    lines: list[Line] = []
    with contextlib.ExitStack() as stack:
        ours, torch = (
            stack.enter_context(open_rpc_pair(module, pin=arguments.pin)) for module in (arguments.ours, TORCH)
        )
        for name in arguments.only:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            if name == MEMORY:
                lines += measure_memory(ours, torch, effort)
            else:
                case = next(case for case in CASES if case.name == name)
                lines += make_lines(case.rows, measure_in_turns(case, ours, torch, arguments.rounds, effort, MODULE))
    return lines


def measure_apart(arguments: argparse.Namespace, effort: float) -> list[Line]:
    """Each round starts a pair, measures all cases on it, and ends it, before a pair of the other library starts."""
    chosen = [case for case in CASES if case.name in arguments.only]

    def measure_all(module: str) -> Metrics:
        print(f"measuring {module} in fresh processes ...", file=sys.stderr, flush=True)
        found: Metrics = {}
        with open_rpc_pair(module, one_thread=False) as pair:
            for case in chosen:
                metrics = pair.ask_first("measure", case.name, effort, MODULE)
                found |= {f"{case.name} {metric}": value for metric, value in metrics.items()}
        return found

    samples = in_turns(lambda: measure_all(arguments.ours), lambda: measure_all(TORCH), arguments.rounds)
    return [
        make_line(row, [(mine[key], torch[key]) for mine, torch in samples])
        for case in chosen
        for row in case.rows
        for key in [f"{case.name} {row.metric}"]
    ]


def measure_against_ray(arguments: argparse.Namespace, effort: float) -> list[Line]:
    """A method of an object on the callee, and of an actor."""
    case = next(case for case in CASES if case.name == "method")
    with open_rpc_pair(arguments.ours, pin=arguments.pin) as ours, _ray.open_actor(arguments.ray) as actor:
        samples = in_turns(
            lambda: ours.ask_first("measure", case.name, effort, MODULE),
            lambda: actor.measure(effort),
            arguments.rounds,
        )
    return make_lines([_ray.ROW], samples)


# ---- showing


def describe_machine(arguments: argparse.Namespace) -> list[str]:
    """Where and with what this was measured."""
    peer = f"`{TORCH}`{' over TCP alone' if arguments.torch_tcp else ''}"
    if arguments.unsuspecting:
        how = f"1 pair of 2 processes at a time, not pinned, default threads; medians of {arguments.rounds} rounds"
    else:
        pinned = "pinned to one core each" if arguments.pin else "not pinned"
        how = f"2 pairs of 2 processes, {pinned}, 1 OpenMP thread each; medians of {arguments.rounds} rounds in turns"
    return [
        *about_machine("rpcdist", "torch", "grpcio", "protobuf", "uvloop"),
        f"- {how}",
        f"- ours is `{arguments.ours}` on the {channel_in_use()} channel, torch is {peer}",
    ]


def with_channels(name: str) -> str:
    """The command that measures as now, for the heading of its table."""
    channel = channel_in_use()
    tls = os.environ.get("RPCDIST_TLS", "off")
    return (name if channel == "local" else f"{name} --channels {channel}") + (f" --tls {tls}" if tls != "off" else "")


def name_of_table(arguments: argparse.Namespace) -> str:
    if arguments.ray:
        return with_channels("rpc.py --ray")
    name = with_channels("rpc.py --unsuspecting" if arguments.unsuspecting else "rpc.py")
    return f"{name} --torch-tcp" if arguments.torch_tcp else name


def sum_up(lines: list[Line], arguments: argparse.Namespace) -> list[str]:
    """The summary of the table."""
    titles = head("torch")
    verdicts = [line[titles.index("ok")] for line in lines if line[titles.index("ok")]]
    kept = sum(verdict != "NO" for verdict in verdicts)
    found = [f"{kept} of {len(verdicts)} budgets kept, {verdicts.count('stretch')} with the stretch."]
    shares = [float(share.rstrip("%")) / 100 for line in lines if (share := line[titles.index("steady")])]
    if arguments.rounds > ROUNDS_QUICK and shares:
        steady = sum(share >= STEADY_SHARE for share in shares)
        found.append(f"{steady} of {len(shares)} rows have {STEADY_SHARE:.0%} of our rounds within 1.5x of the median, "
                     f"{statistics.mean(shares):.0%} of all rounds are.")  # fmt: skip
    return ["", *found]


# ---- the command


def compare(arguments: argparse.Namespace) -> int:
    """Prints the table; returns the exit status."""
    about = describe_machine(arguments)
    print("\n".join(about), flush=True)
    effort = 0.1 if arguments.quick else 1.0
    if arguments.ray:
        about.append(f"- Ray {_ray.version(arguments.ray)}, one actor, an answer awaited before the next call")
        lines = measure_against_ray(arguments, effort)
    else:
        lines = (measure_apart if arguments.unsuspecting else measure_side_by_side)(arguments, effort)
    titles = head("Ray" if arguments.ray else "torch")
    table = [*layout(titles, lines), *sum_up(lines, arguments)]
    print("\n".join(["", *table]))
    if arguments.write:
        write_results(name_of_table(arguments), [*about, "", *table])
        if not (arguments.ray or arguments.torch_tcp) and (not arguments.unsuspecting or channel_in_use() == "local"):
            _budget_table.update("unsuspecting" if arguments.unsuspecting else channel_in_use(), titles, lines)
    return int(arguments.check and any(line[-1] == "NO" for line in lines))


def profile(arguments: argparse.Namespace) -> int:
    """Runs the cases on our pair alone, and prints what the threads of both processes did in each."""
    with open_rpc_pair(arguments.ours, pin=arguments.pin, profile=True) as pair:
        for name in arguments.only:
            if name == MEMORY:
                continue
            pair.ask_first("measure", name, 0.1, MODULE)
            pair.ask_both("profile_reset")
            pair.ask_first("measure", name, 0.3 if arguments.quick else 1.0, MODULE)
            for who, report in zip(("caller", "callee"), pair.ask_both("profile_report"), strict=True):
                print(f"\n======== {name}: {who}\n{report}", flush=True)
    return 0


def add_channels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--channels", choices=CHANNELS, default=os.environ.get("RPCDIST_CHANNELS", "auto"),
                        help="what our processes may use (default: %(default)s)")  # fmt: skip
    parser.add_argument("--tls", choices=("auto", "always", "off"), help="what our processes encrypt: gRPC, raw TCP "
                        "connections of one host as well, or nothing (default: nothing)")  # fmt: skip


def inherit(arguments: argparse.Namespace) -> None:
    """Has the pairs use these channels. torch encrypts nothing, and so do we unless asked to."""
    os.environ.update(RPCDIST_CHANNELS=arguments.channels, RPCDIST_TLS=arguments.tls or "off")


def parse(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[2].partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="few calls: shows that it runs, not how fast")
    parser.add_argument("--rounds", type=int, help=f"rounds (default: {ROUNDS}; {ROUNDS_UNSUSPECTING} with "
                        f"--unsuspecting; {ROUNDS_QUICK} with --quick)")  # fmt: skip
    parser.add_argument("--only", action="append", choices=names, help="this case; may be given several times")
    parser.add_argument("--pin", action="store_true", help="pin each caller to one core and each callee to another")
    add_channels(parser)
    parser.add_argument("--write", action="store_true", help=f"put the table into {RESULTS.name} and NOTES.md")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a budget is not kept")
    parser.add_argument("--torch-tcp", action="store_true", help="torch uses TCP alone, as between hosts")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument(
        "--unsuspecting", action="store_true", help="default threads, fresh processes, one pair at a time"
    )
    ways.add_argument("--ray", metavar="PYTHON", help=f"against an actor of Ray; PYTHON has `{_ray.REQUIREMENT}`")
    ways.add_argument("--profile", action="store_true", help="show where the time goes in our processes instead")
    parser.add_argument("--ours", default="rpcdist.rpc", metavar="MODULE", help="the module that is measured as ours; "
                        "torch.distributed.rpc shows the noise (default: %(default)s)")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least 1")
    if arguments.unsuspecting and arguments.pin:
        parser.error("--unsuspecting pins nothing: leave --pin out")
    by_default = ROUNDS_UNSUSPECTING if arguments.unsuspecting else ROUNDS
    arguments.rounds = arguments.rounds or (ROUNDS_QUICK if arguments.quick else by_default)
    arguments.only = arguments.only or names
    return arguments


def main() -> int:
    arguments = parse([*(case.name for case in CASES), MEMORY])
    inherit(arguments)
    if arguments.torch_tcp:
        os.environ[TORCH_TCP] = "1"
    if not arguments.unsuspecting:
        os.environ["OMP_NUM_THREADS"] = "1"
    try:
        return profile(arguments) if arguments.profile else compare(arguments)
    except PairFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
