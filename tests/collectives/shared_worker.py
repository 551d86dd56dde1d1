"""A process that takes part in groups on shared memory, for tests; it does what it is told over a Unix socket.

As a program it is the parent of such processes: importing torch takes seconds, forking a process that has imported it
takes milliseconds. It starts no thread, so forking is safe.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from shared_cases import Case, check, make_operation

from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp
from rpcdist.collectives._transports.base import Control, TransportMismatch, TransportTimeout
from rpcdist.collectives._transports.shm import Layout, ShmTransport
from rpcdist.deadline import Deadline
from rpcdist.transport import shared_memory

__all__ = ["receive", "send"]

LENGTH = struct.Struct("<Q")
LIMIT_S = 30.0


class Stopped(Exception):
    """What the control of a test raises."""


class WorkerControl(Control):
    """A control with a deadline and one condition that ends the operation."""

    __slots__ = ("_ended", "deadline", "fingerprint", "sequence")

    def __init__(self, operation: Operation, sequence: int, limit_s: float, ended: Callable[[], bool]) -> None:
        self.deadline = Deadline.after(limit_s)
        self.sequence = sequence
        self.fingerprint = operation.fingerprint(sequence)
        self._ended = ended

    @property
    def wakeup_fd(self) -> int:
        return -1

    def check(self) -> None:
        if self._ended():
            raise Stopped


def send(sock: socket.socket, message: object) -> None:
    data = pickle.dumps(message)
    sock.sendall(LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket) -> Any:
    (length,) = LENGTH.unpack(_read(sock, LENGTH.size))
    return pickle.loads(_read(sock, length))


def _read(sock: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = sock.recv(length - len(data))
        if not more:
            raise EOFError
        data += more
    return data


class Worker:
    """Runs in the forked process; methods are called by name."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._transport: ShmTransport | None = None
        self._sequence = 0

    def serve(self) -> None:
        while True:
            try:
                name, arguments = receive(self._sock)
            except EOFError:
                return
            try:
                send(self._sock, ("result", getattr(self, name)(*arguments)))
            except Exception as exc:
                send(self._sock, ("error", f"{type(exc).__name__}: {exc}"))

    def pid(self) -> int:
        return os.getpid()

    def join(self, rank: int, size: int, buffer_bytes: int) -> None:
        """Takes part in a new group; its segment comes over the socket."""
        segment = shared_memory.accept(self._sock, LIMIT_S)
        self.leave()
        self._transport = ShmTransport(rank, size, segment, Layout(size, buffer_bytes))
        self._sequence = 0

    def leave(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport.close()
        self._transport = None

    def mappings(self) -> int:
        """How many pieces of shared memory this process has mapped."""
        with open("/proc/self/maps") as maps:
            return sum("memfd:rpcdist" in line for line in maps)

    def _run(self, operation: Operation, limit_s: float = LIMIT_S, ended: Callable[[], bool] = lambda: False) -> None:
        assert self._transport is not None
        self._sequence += 1
        self._transport.run(operation, WorkerControl(operation, self._sequence, limit_s, ended))

    def cases(self, cases: list[Case]) -> list[str]:
        """Runs them one after the other; returns what went wrong."""
        assert self._transport is not None
        problems = []
        for case in cases:
            operation = make_operation(case, self._transport.rank, self._transport.size)
            self._run(operation)
            problems.append(check(case, self._transport.rank, self._transport.size, operation))
        return [problem for problem in problems if problem]

    def outcome(self, case: Case, sequence: int, limit_s: float, gone: int, busy_s: float) -> tuple[str, Any]:
        """What `case` ends with, as (name, details); `gone` is a process whose end the control reports.

        A rank with `busy_s` comes so much too late.
        """
        assert self._transport is not None
        operation = make_operation(case, self._transport.rank, self._transport.size)
        self._sequence = sequence - 1
        began = time.monotonic()
        threading.Event().wait(busy_s)
        try:
            self._run(operation, limit_s, lambda: bool(gone) and not os.path.exists(f"/proc/{gone}"))
        except TransportMismatch as exc:
            return "mismatch", exc.views
        except TransportTimeout as exc:
            return "timeout", sorted(exc.waiting_for)
        except Stopped:
            return "stopped", time.monotonic() - began
        return "done", check(case, self._transport.rank, self._transport.size, operation)

    def modes(self, case: Case) -> list[str]:
        """The case with tensors that need gradients, with inference tensors, and with shapes."""
        assert self._transport is not None
        rank, size = self._transport.rank, self._transport.size
        problems = []
        operation = make_operation(case, rank, size)
        for tensor in operation.inputs:
            tensor.requires_grad_()
        self._run(operation)
        problems.append(check(case, rank, size, _detached(operation)))
        with torch.inference_mode():
            operation = make_operation(case, rank, size)
        self._run(operation)
        problems.append(check(case, rank, size, operation))
        operation = make_operation(case, rank, size)
        shaped = tuple(tensor.view(1, -1, 1) for tensor in operation.outputs)
        in_place = operation.outputs is operation.inputs
        self._run(replace(operation, inputs=shaped if in_place else operation.inputs, outputs=shaped))
        problems.append(check(case, rank, size, operation))
        return [problem for problem in problems if problem]

    def hammer(self, rounds: int, seed: int) -> str:
        """Many operations of changing kind and size, without a pause; a digest of all results."""
        assert self._transport is not None
        digest = hashlib.sha256()
        generator = torch.Generator().manual_seed(seed)
        for _ in range(rounds):
            kind, count, pause = torch.randint(0, 1 << 30, (3,), generator=generator).tolist()
            tensor = torch.full((count % 3000,), float(self._transport.rank + count % 7))
            if pause % (5 + self._transport.rank) == 0:
                os.sched_yield()  # ranks fall behind one another in changing order
            if kind % 3 == 0:
                self._run(Operation(Kind.BROADCAST, (tensor,), (tensor,), root=count % self._transport.size))
            else:
                self._run(Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.SUM))
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()


def _detached(operation: Operation) -> Operation:
    inputs = tuple(tensor.detach() for tensor in operation.inputs)
    in_place = operation.outputs is operation.inputs
    return replace(operation, inputs=inputs, outputs=inputs if in_place else operation.outputs)


def main(descriptor: int) -> None:
    """Forks a worker for each socket that comes, until nobody can send one any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    torch.set_num_threads(1)
    with socket.socket(fileno=descriptor) as control:
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return
            if os.fork() == 0:
                control.close()
                with socket.socket(fileno=descriptors[0]) as sock:
                    Worker(sock).serve()
                os._exit(0)
            os.close(descriptors[0])


if __name__ == "__main__":
    main(int(sys.argv[1]))
