"""Transports among threads of one process, simple enough to be the reference for all others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from inside_groups import Control, Transport, TransportMismatch, TransportTimeout

from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp, describe_fingerprint
from rpcdist.deadline import Deadline

T = TypeVar("T")
LIMIT_S = 20.0


class MemoryControl(Control):
    """Never fails."""

    def __init__(self, operation: Operation, sequence: int = 1, timeout_s: float = LIMIT_S) -> None:
        self.deadline = Deadline.after(timeout_s)
        self.sequence = sequence
        self.fingerprint = operation.fingerprint(sequence)

    @property
    def wakeup_fd(self) -> int:
        return -1

    def check(self) -> None:
        pass


class _Room:
    """Where the ranks meet: everybody brings something, and everybody gets all of it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._slots: list[object] = [None] * size

    def meet(self, rank: int, brought: T, timeout_s: float) -> list[T]:
        self._slots[rank] = brought
        try:
            self._barrier.wait(timeout_s)
            found = list(self._slots)
            self._barrier.wait(timeout_s)
        except threading.BrokenBarrierError as exc:
            missing = frozenset(other for other in range(self.size) if self._slots[other] is None)
            raise TransportTimeout(missing) from exc
        return found  # type: ignore[return-value]


class MemoryTransport(Transport):
    """One rank's end; `memory_transports` makes all of them."""

    def __init__(self, rank: int, room: _Room) -> None:
        self.rank = rank
        self.size = room.size
        self.closed = False
        self._room = room

    def run(self, operation: Operation, control: Control) -> None:
        inputs = [tensor.clone().view(-1) for tensor in operation.inputs]
        brought = (control.fingerprint, inputs)
        everything = self._room.meet(self.rank, brought, control.deadline.remaining_s())
        if any(fingerprint != control.fingerprint for fingerprint, _ in everything):
            raise TransportMismatch({rank: describe_fingerprint(entry[0]) for rank, entry in enumerate(everything)})
        results = reference(operation, self.rank, [tensors for _, tensors in everything])
        for output, result in zip(operation.outputs, results, strict=True):
            output.view(-1).copy_(result)
        self._room.meet(self.rank, True, control.deadline.remaining_s())

    def close(self) -> None:
        self.closed = True


def memory_transports(size: int) -> list[MemoryTransport]:
    room = _Room(size)
    return [MemoryTransport(rank, room) for rank in range(size)]


def reference(operation: Operation, rank: int, inputs: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The outputs of `rank` afterwards, given the flat inputs of all ranks. By the table in `_operation`."""
    kind, root, size = operation.kind, operation.root, len(inputs)
    if kind is Kind.ALL_REDUCE or (kind is Kind.REDUCE and rank == root):
        return [reduced(operation, [tensors[0] for tensors in inputs])]
    if kind is Kind.REDUCE:
        return [inputs[rank][0]]
    if kind is Kind.BROADCAST:
        return [inputs[root][0]]
    if kind is Kind.ALL_GATHER or (kind is Kind.GATHER and rank == root):
        return [tensors[0] for tensors in inputs]
    if kind is Kind.SCATTER:
        return [inputs[root][rank]]
    if kind is Kind.REDUCE_SCATTER:
        return [reduced(operation, [tensors[rank] for tensors in inputs])]
    if kind is Kind.ALL_TO_ALL:
        return [inputs[other][rank] for other in range(size)]
    return []


def reduced(operation: Operation, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The reduction, element by element, in the order of the ranks."""
    op, dtype = operation.reduce_op, tensors[0].dtype
    assert op is not None
    tensors = [wide(tensor) for tensor in tensors]
    if op is ReduceOp.PREMUL_SUM:
        assert operation.factor is not None
        tensors = [(tensor * operation.factor).to(dtype) for tensor in tensors]
        tensors = [wide(tensor) for tensor in tensors]
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = _STEPS[op](total, tensor)
    if op is ReduceOp.AVG:
        if total.dtype.is_floating_point or total.dtype.is_complex:
            total = total / len(tensors)
        elif total.dtype is not torch.bool:
            total = torch.div(total, len(tensors), rounding_mode="trunc")
    return total.to(dtype)


WIDE = {
    torch.uint16: torch.int64, torch.uint32: torch.int64, torch.uint64: torch.int64, torch.complex32: torch.complex64,
    torch.float8_e4m3fn: torch.float32, torch.float8_e5m2: torch.float32,
}  # fmt: skip


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in a dtype that torch calculates with."""
    return tensor.to(WIDE.get(tensor.dtype, tensor.dtype))


def _either(boolean: Callable[..., torch.Tensor], other: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda a, b: boolean(a, b) if a.dtype is torch.bool else other(a, b)


_STEPS: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: _either(torch.logical_or, torch.add),
    ReduceOp.AVG: _either(torch.logical_or, torch.add),
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.PRODUCT: _either(torch.logical_and, torch.mul),
    ReduceOp.MIN: _either(torch.logical_and, torch.minimum),
    ReduceOp.MAX: _either(torch.logical_or, torch.maximum),
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def run_ranks(functions: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """Runs one function per rank, each on a thread; returns results or what they raised. Bounded."""
    results: list[T | BaseException] = [TimeoutError("did not end")] * len(functions)

    def run(rank: int) -> None:
        try:
            results[rank] = functions[rank]()
        except BaseException as exc:
            results[rank] = exc

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S * 2)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results
