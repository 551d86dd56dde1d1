"""Ranks of a group as threads of this process, each with a socket hub and a transport of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from inside_groups import Control
from socket_hubs import LIMIT_S, hubs

from rpcdist.collectives._operations.operation import Operation
from rpcdist.collectives._transports.sockets.pair_connections import PairConnections
from rpcdist.collectives._transports.sockets.socket_transport import SocketTransport
from rpcdist.deadline import Deadline

__all__ = ["FakeControl", "Ranks", "Running", "connections_of", "socket_ranks"]


class FakeControl(Control):
    """An engine's control that a test can fail.

    Attributes:
        failure: what `check` raises.
        num_checks: how often it was called.
    """

    def __init__(self, operation: Operation, sequence: int, timeout_s: float = LIMIT_S) -> None:
        self.deadline = Deadline.after(timeout_s)
        self.sequence = sequence
        self.fingerprint = operation.fingerprint(sequence)
        self.failure: Exception | None = None
        self.num_checks = 0
        self._read_fd, self._write_fd = os.pipe()

    @property
    def wakeup_fd(self) -> int:
        return self._read_fd

    def check(self) -> None:
        self.num_checks += 1
        if self.failure is not None:
            raise self.failure

    def fail(self, failure: Exception) -> None:
        self.failure = failure
        os.write(self._write_fd, b"x")

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self._write_fd)


class Running:
    """Operations under way on several ranks."""

    def __init__(
        self,
        transports: Sequence[SocketTransport],
        operations: Sequence[Operation | None],
        controls: Sequence[FakeControl | None],
    ) -> None:
        self._errors: list[Exception | None] = [None] * len(transports)
        self._failed = threading.Event()
        self._threads = {
            rank: threading.Thread(target=self._run, args=(rank, transports[rank], operation, control))
            for rank, (operation, control) in enumerate(zip(operations, controls, strict=True))
            if operation is not None
        }
        for thread in self._threads.values():
            thread.start()

    def _run(self, rank: int, transport: SocketTransport, operation: Operation, control: FakeControl) -> None:
        try:
            transport.run(operation, control)
        except Exception as exc:
            self._errors[rank] = exc
            self._failed.set()

    def join_any(self) -> Exception | None:
        """Waits until a rank has failed; returns one that was raised."""
        self._failed.wait(LIMIT_S)
        return next((error for error in self._errors if error is not None), None)

    def join(self) -> list[Exception | None]:
        """Waits for all ranks; returns what each rank raised."""
        for rank, thread in self._threads.items():
            thread.join(LIMIT_S + 5)
            assert not thread.is_alive(), f"rank {rank} hangs"
        return self._errors


def connections_of(transport: SocketTransport) -> dict[Any, Any]:
    """The open ones, by place; a test may replace them by others."""
    return transport._connections._open


class Ranks:
    """A group.

    Attributes:
        transports: of the ranks.
        controls: of the operations that run or ran last; None for ranks without.
        sequence: number of the last operation.
    """

    def __init__(self, transports: Sequence[SocketTransport]) -> None:
        self.transports = transports
        self.controls: list[FakeControl | None] = []
        self.sequence = 0

    def start(self, operations: Sequence[Operation | None], timeout_s: float = LIMIT_S) -> Running:
        """Runs an operation on each rank that has one."""
        self.close_controls()
        self.sequence += 1
        self.controls = [
            None if operation is None else FakeControl(operation, self.sequence, timeout_s) for operation in operations
        ]
        return Running(self.transports, operations, self.controls)

    def run(self, operations: Sequence[Operation | None], timeout_s: float = LIMIT_S) -> list[Exception | None]:
        """The error that each rank raised."""
        return self.start(operations, timeout_s).join()

    def run_well(self, operations: Sequence[Operation]) -> None:
        """Raises what the first rank raised that failed."""
        for error in self.run(operations):
            if error is not None:
                raise error

    def close_controls(self) -> None:
        """Once nothing runs."""
        for control in self.controls:
            if control is not None:
                control.close()
        self.controls = []


@contextmanager
def socket_ranks(size: int, unix: bool | None = None, sockets_per_pair: int | None = None) -> Iterator[Ranks]:
    """A group of `size` ranks."""
    with hubs(size) as members, ExitStack() as stack:
        addresses = [hub.address for hub in members]
        transports = []
        for rank, hub in enumerate(members):
            transport = SocketTransport(PairConnections(rank, hub, "test group", addresses, unix, sockets_per_pair))
            stack.callback(transport.close)
            transports.append(transport)
        ranks = Ranks(transports)
        stack.callback(ranks.close_controls)
        yield ranks
