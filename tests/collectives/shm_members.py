"""The functions that the ranks of `rank_pool` run in groups on shared memory; a process is in one group at a time."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from inside_groups import Control, TransportMismatch, TransportTimeout
from shared_cases import Case, check, make_operation

from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp
from rpcdist.collectives._transports.shm.routes import Layout
from rpcdist.collectives._transports.shm.shm_transport import ShmTransport
from rpcdist.deadline import Deadline
from rpcdist.transport import shared_memory

__all__ = ["call", "join"]

LIMIT_S = 30.0


current: list[Member] = []
"""This process's place in its newest group."""


def join(rank: int, size: int, address: str, buffer_bytes: int) -> None:
    """Takes part in a new group; its segment comes from a Unix socket."""
    for member in current:
        member.leave()
    mapped_before = _mapped()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        segment = shared_memory.accept(sock, LIMIT_S)
    current[:] = [Member(ShmTransport(rank, size, segment, Layout(size, buffer_bytes)), mapped_before)]


def call(rank: int, size: int, name: str, *arguments: object) -> Any:
    """Calls a method of this process's member."""
    return getattr(current[0], name)(*arguments)


def _mapped() -> set[str]:
    """The pieces of shared memory that this process has mapped, each with its address and inode."""
    with open("/proc/self/maps") as maps:
        return {line for line in maps if "memfd:rpcdist" in line}


class Stopped(Exception):
    """The error that the control of a test raises."""


class MemberControl(Control):
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


class Member:
    """A rank of one group; `call` calls its methods by name."""

    def __init__(self, transport: ShmTransport, mapped_before: set[str]) -> None:
        self._transport: ShmTransport | None = transport
        self._mapped_before = mapped_before
        self._sequence = 0

    def leave(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport.close()
        self._transport = None

    def mappings(self) -> int:
        """How many pieces of shared memory this process has mapped since it joined."""
        return len(_mapped() - self._mapped_before)

    def _run(self, operation: Operation, limit_s: float = LIMIT_S, ended: Callable[[], bool] = lambda: False) -> None:
        assert self._transport is not None
        self._sequence += 1
        self._transport.run(operation, MemberControl(operation, self._sequence, limit_s, ended))

    def cases(self, cases: list[Case]) -> list[str]:
        """Runs them one after the other; returns what went wrong."""
        assert self._transport is not None
        problems = []
        for case in cases:
            operation = make_operation(case, self._transport.rank, self._transport.size)
            self._run(operation)
            problems.append(check(case, self._transport.rank, self._transport.size, operation))
        return [problem for problem in problems if problem]

    def average(self, values: list[list[float]], dtype: torch.dtype) -> bytes:
        """The bits of the average of each rank's row."""
        assert self._transport is not None
        own = torch.tensor(values[self._transport.rank], dtype=dtype)
        self._run(Operation(Kind.ALL_REDUCE, (own,), (own,), ReduceOp.AVG))
        return own.view(torch.uint8).numpy().tobytes()

    def outcome(self, case: Case, sequence: int, limit_s: float, gone: int, busy_s: float) -> tuple[str, Any]:
        """The outcome of `case`, as (name, details); `gone` is a process whose end the control reports.

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

    def together(self, cases: list[Case], parts: list[int]) -> list[str]:
        """The tensor of each case in parts, of so many elements and the rest, in one operation; returns the errors."""
        assert self._transport is not None
        rank, size = self._transport.rank, self._transport.size
        problems = []
        for case in cases:
            operation = make_operation(case, rank, size)
            tensors = tuple(operation.inputs[0].split([*parts, case.count - sum(parts)]))
            self._run(replace(operation, inputs=tensors, outputs=tensors))
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
