"""Pairs of processes that take orders from the benchmark through pipes; those for RPC."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol, cast

__all__ = ["TORCH_TCP", "Pair", "PairFailed", "free_port", "open_pair", "open_rpc_pair"]

ORDER_TIMEOUT_S = 180.0  # covers the start, each measurement, and the shutdown
NAMES = ("caller", "callee")
TORCH_TCP = "RPCDIST_BENCHMARK_TORCH_TCP"
"""Set in the environment, it has torch's RPC use TCP alone; by default it copies payloads from process to process."""


class PairFailed(RuntimeError):
    """A process of a pair raised, died, or did not answer in time."""


class Peer(Protocol):
    """One process of a pair. Its public methods are the orders; `stop` is the last one."""

    def start(self) -> object: ...
    def stop(self) -> object: ...


@dataclass(frozen=True)
class Pair:
    """Two processes that use one library.

    Attributes:
        name: of the library.
        processes: by rank; for RPC, the caller and the callee.
        pipes: to them. An order is a tuple (name, arguments...), and each is answered.
    """

    name: str
    processes: tuple[SpawnProcess, ...]
    pipes: tuple[Connection, ...]

    def ask_first(self, *order: object) -> Any:
        """Gives an order to rank 0, and waits for the answer."""
        self.pipes[0].send(order)
        return self._answer(0, str(order))

    def ask_both(self, *order: object) -> tuple[Any, ...]:
        """Gives the same order to both, and waits for both answers."""
        for pipe in self.pipes:
            pipe.send(order)
        return tuple(self._answer(rank, str(order)) for rank in range(len(self.pipes)))

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops both processes meanwhile: torch's RPC polls on a core for each process also when nothing is called."""
        for process in self.processes:
            os.kill(cast(int, process.pid), signal.SIGSTOP)
        try:
            yield
        finally:
            for process in self.processes:
                os.kill(cast(int, process.pid), signal.SIGCONT)

    def _answer(self, rank: int, what: str) -> Any:
        who = f"rank {rank} of {self.name} (process {self.processes[rank].pid})"
        if not self.pipes[rank].poll(ORDER_TIMEOUT_S):
            raise PairFailed(f"{who} did not finish {what} within {ORDER_TIMEOUT_S:.0f} s")
        try:
            failed, answer = self.pipes[rank].recv()
        except EOFError:
            raise PairFailed(f"{who} died during {what}") from None
        if failed:
            raise PairFailed(f"{who} failed in {what}:\n{answer}")
        return answer


@contextlib.contextmanager
def open_pair(name: str, make: Callable[..., Peer], *arguments: object) -> Iterator[Pair]:
    """Starts two processes, each with the peer `make(rank, port, *arguments)`, and ends them in any case."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    processes, pipes = [], []
    try:
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=live, args=(theirs, make, rank, port, *arguments), daemon=True)
            process.start()
            theirs.close()  # only the child holds it now, so its death ends our waiting
            processes.append(process)
            pipes.append(ours)
        pair = Pair(name, tuple(processes), tuple(pipes))
        pair.ask_both("start")
        yield pair
        pair.ask_both("stop")
    finally:
        end(processes)


def open_rpc_pair(
    module: str, *, pin: bool = False, profile: bool = False, one_thread: bool = True
) -> contextlib.AbstractContextManager[Pair]:
    """A caller and a callee that use one RPC library.

    Args:
        module: the library's.
        pin: each to a core of its own.
        profile: they can be asked where their time goes.
        one_thread: torch's operators use one thread in each; else as many as they take by default.
    """
    return open_pair(module, RpcPeer, module, pin, profile, one_thread)


def end(processes: list[SpawnProcess]) -> None:
    """Gives them a moment to end by themselves, and kills what is left."""
    deadline = time.monotonic() + 5
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join(5)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return cast(int, probe.getsockname()[1])


# ---- what runs in the processes of a pair


def live(pipe: Connection, make: Callable[..., Peer], *arguments: object) -> None:
    """Obeys orders until the benchmark says stop or is gone; the error of an order is its answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark decides; when it dies, the pipe ends
    peer = make(*arguments)
    name = ""
    with contextlib.suppress(EOFError):
        while name != "stop":
            name, *order = pipe.recv()
            try:
                answer = (False, getattr(peer, name)(*order))
            except BaseException:
                answer = (True, traceback.format_exc())
            pipe.send(answer)


class RpcPeer:
    """One process of a pair that talks RPC. See `Peer`."""

    def __init__(self, rank: int, port: int, module: str, pin: bool, profile: bool, one_thread: bool) -> None:
        self.module = module
        self.rank = rank
        self.port = port
        self.profile = profile
        self.one_thread = one_thread
        if pin:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[rank % len(cores)]})

    def start(self) -> None:
        if self.profile:
            import _profiles

            self.profiler = _profiles.ThreadProfiler()
            self.profiler.install()  # before the library starts its threads
        import torch

        for message in ("You are using a Backend", "`TorchScript` support"):  # torch uses what torch deprecates
            warnings.filterwarnings("ignore", message=message)
        if self.one_thread:
            torch.set_num_threads(1)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port))
        self.rpc = importlib.import_module(self.module)
        options = {}
        if self.module == "torch.distributed.rpc" and os.environ.get(TORCH_TCP):
            only_tcp = self.rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
            options["rpc_backend_options"] = only_tcp
        self.rpc.init_rpc(NAMES[self.rank], rank=self.rank, world_size=2, **options)

    def measure(self, name: str, effort: float, module: str) -> dict[str, float]:
        cases = importlib.import_module(module).CASES
        measured: dict[str, float] = next(case for case in cases if case.name == name).measure(self.rpc, effort)
        return measured

    def waits(self) -> tuple[int, int, int]:
        """Of threads for what connections bring: those that polled, those that slept, and how many of these had polled
        in vain. Since the start; none for torch.
        """
        brief_polling = sys.modules.get("rpcdist.transport._channels.polling_and_signals")
        found = [each for each in gc.get_objects() if brief_polling and type(each) is brief_polling.BriefPolling]
        return (
            sum(each.num_polled for each in found),
            sum(each.num_slept for each in found),
            sum(each.num_in_vain for each in found),
        )

    def churn(self, num_calls: int) -> None:
        from _rpc_cases import churn

        churn(self.rpc, num_calls)

    def resident_bytes(self) -> int:
        import psutil

        gc.collect()
        return psutil.Process().memory_info().rss

    def profile_reset(self) -> None:
        self.profiler.reset()

    def profile_report(self) -> str:
        return self.profiler.report()

    def stop(self) -> None:
        self.rpc.shutdown()
