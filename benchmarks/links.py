"""$ python benchmarks/links.py
The cost of a link between two hosts: TLS beside plain connections and Gloo; with `--delay 10`, a long fat link beside
torch's RPC.

Two network namespaces play two hosts; that takes root and iproute2, and for `--delay` a C compiler and /dev/net/tun.
Each library has a pair of processes, one on each host, with one thread for computing. All pairs are measured in rounds
in which each has its turn, in changing order; the table shows medians of the times and of the ratios within rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from _hosts import ADDRESSES, NETWORK, enter, two_hosts
from _pairs import Pair, PairFailed, open_pair
from _report import Line, about_machine, layout, show

OURS, PLAIN, PEER = "ours, TLS", "ours, plain", "torch"
NAMES = ("host0", "host1")
SIZES = {"64 MiB": 64 << 20, "1 MiB": 1 << 20, "4 KiB": 4 << 10}
HEAD: Line = ("what", "library", "ms", "processor ms", "of the other", "in single rounds", "budget", "ok")
Budget = tuple[str, str, str, float]
TLS_BUDGETS: list[Budget] = [
    ("all_reduce 64 MiB", OURS, PLAIN, 2.6),
    ("all_reduce 64 MiB", OURS, PEER, 1.2),
    ("all_reduce 1 MiB", OURS, PLAIN, 3.0),
    ("all_reduce 1 MiB", OURS, PEER, 1.0),
    ("echo 64 MiB", OURS, PLAIN, 2.0),
]
DELAY_BUDGETS: list[Budget] = [("echo 64 MiB", PLAIN, PEER, 1.0), ("echo 1 MiB", PLAIN, PEER, 1.0)]


class Times(NamedTuple):
    """Of one operation: what rank 0 waited for, and what both hosts' processors did."""

    elapsed_s: float
    processor_s: float


def echo(value: Any) -> Any:
    return value


class Peer:
    """One process on its host. Its public methods are the orders."""

    def __init__(self, rank: int, port: int, library: str, namespace: tuple[str, str]) -> None:
        self.rank = rank
        self.port = port
        self.library = library
        enter(namespace[rank])

    def start(self) -> None:
        import torch

        torch.set_num_threads(1)
        os.environ.update(MASTER_ADDR=ADDRESSES[0], MASTER_PORT=str(self.port), RANK=str(self.rank), WORLD_SIZE="2")
        os.environ["RPCDIST_CHANNELS"] = "tcp"  # namespaces share Unix sockets, which hosts do not
        if self.library == PLAIN:
            os.environ["RPCDIST_TRUSTED_NETWORKS"] = NETWORK
        self.rpc, self.collectives = self.start_peer() if self.library == PEER else self.start_ours()
        self.tensors = {name: torch.zeros(size // 4) for name, size in SIZES.items()}

    def start_ours(self) -> tuple[Any, Any]:
        from rpcdist import collectives, rpc
        from rpcdist.collectives.tcp import TcpOptions

        rpc.init_rpc(NAMES[self.rank])
        collectives.init_process_group("tcp", pg_options=TcpOptions(shared_memory=False))
        return rpc, collectives

    def start_peer(self) -> tuple[Any, Any]:
        import torch.distributed as collectives
        from torch.distributed import rpc

        device = device_with(ADDRESSES[self.rank])
        os.environ.update(TP_SOCKET_IFNAME=device, GLOO_SOCKET_IFNAME=device)
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://{ADDRESSES[0]}:{self.port + 1}", _transports=["uv"], _channels=["mpt_uv"]
        )
        rpc.init_rpc(NAMES[self.rank], rank=self.rank, world_size=2, rpc_backend_options=options)
        collectives.init_process_group("gloo")
        return rpc, collectives

    def meet(self) -> None:
        self.collectives.barrier()

    def processor_s(self) -> float:
        return time.process_time()

    def measure(self, what: str, count: int) -> float:
        """The median seconds of so many; the other host only takes part in collectives."""
        kind, _, size = what.partition(" ")
        tensor = self.tensors[size]
        act: Callable[[], object]
        if kind == "all_reduce":
            act = lambda: self.collectives.all_reduce(tensor)  # noqa: E731
        elif self.rank == 0:
            act = lambda: self.rpc.rpc_sync(NAMES[1], echo, (tensor,))  # noqa: E731
        else:
            return 0.0
        times = []
        for _ in range(count):
            began = time.perf_counter()
            act()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def stop(self) -> None:
        self.collectives.destroy_process_group()
        self.rpc.shutdown()


def device_with(address: str) -> str:
    """The name of the interface that has an address."""
    import psutil

    return next(name for name, found in psutil.net_if_addrs().items() if any(one.address == address for one in found))


def measure(pairs: list[Pair], cases: list[str], rounds: int, effort: float) -> dict[str, dict[str, list[Times]]]:
    """By what and library, for each round."""
    times: dict[str, dict[str, list[Times]]] = {what: {pair.name: [] for pair in pairs} for what in cases}
    for number in range(-1, rounds):  # the first round warms up
        print(f"round {number} ...", file=sys.stderr, flush=True)
        for what in cases:
            count = max(2, int(effort * (4 if "64 MiB" in what else 40)))
            for pair in pairs[number % len(pairs) :] + pairs[: number % len(pairs)]:
                pair.ask_both("meet")
                before = sum(pair.ask_both("processor_s"))
                elapsed_s = pair.ask_both("measure", what, count)[0]
                processor_s = (sum(pair.ask_both("processor_s")) - before) / count
                if number >= 0:
                    times[what][pair.name].append(Times(elapsed_s, processor_s))
    return times


def make_lines(times: dict[str, dict[str, list[Times]]], budgets: list[Budget]) -> list[Line]:
    lines: list[Line] = []
    for what, found in times.items():
        for name, rounds in found.items():
            elapsed, processor = (show(statistics.median(values) * 1e3) for values in zip(*rounds, strict=True))
            lines.append((what, name, elapsed, processor, "", "", "", ""))
        for _, name, other, most in [budget for budget in budgets if budget[0] == what]:
            if name in found and other in found:
                both = list(zip(found[name], found[other], strict=True))
                ratios = sorted(one.elapsed_s / two.elapsed_s for one, two in both)
                ratio = statistics.median(ratios)
                of_processor = statistics.median(one.processor_s / two.processor_s for one, two in both)
                last = f"{most:.1f}x", "yes" if ratio <= most else "NO"
                spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
                of = f"{ratio:.2f}x of {other}"
                lines.append(("", name, "", f"{of_processor:.2f}x", of, spread, *last))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("--delay", type=float, default=0.0, help="of the link in each direction, in ms (default: none)")
    parser.add_argument("--congestion", help="TCP's congestion control, such as cubic (default: the system's)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default: 9)")
    parser.add_argument("--effort", type=float, default=1.0, help="how many of each in a round (default: 1.0)")
    parser.add_argument("--only", nargs="*", help="the cases, such as 'echo 1 MiB'")
    parser.add_argument("--libraries", nargs="*", help=f"of {OURS!r}, {PLAIN!r}, {PEER!r}")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a budget is not kept")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # the pairs inherit it
    budgets = DELAY_BUDGETS if arguments.delay else TLS_BUDGETS
    libraries = arguments.libraries or ([PLAIN, PEER] if arguments.delay else [OURS, PLAIN, PEER])
    cases = arguments.only or list(dict.fromkeys(budget[0] for budget in budgets))
    about = [*about_machine("rpcdist", "torch"), f"- {arguments.delay:g} ms each way, {arguments.rounds} rounds"]
    print("\n".join(about), flush=True)
    try:
        with two_hosts(None, arguments.delay, arguments.congestion) as hosts, contextlib.ExitStack() as stack:
            pairs = [stack.enter_context(open_pair(name, Peer, name, hosts)) for name in libraries]
            lines = make_lines(measure(pairs, cases, arguments.rounds, arguments.effort), budgets)
    except PairFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print("\n".join(["", *layout(HEAD, lines)]))
    return int(arguments.check and any(line[-1] == "NO" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
