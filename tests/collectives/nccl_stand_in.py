"""NCCL and a GPU, played by the threads of one process on CPU tensors, to test the `nccl` backend without a GPU.

The communicator has the methods of CuPy's. A call does its work at once, or at the end of its group, on the caller's
thread, after waiting for the calls of the other ranks; ranks whose calls do not match fail, where NCCL would hang. With
`hangs`, calls do nothing, and their stream is not done until the communicator is aborted.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch

from rpcdist.collectives._nccl.communicator_calls import CudaRuntime

__all__ = ["LIMIT_S", "StandInError", "StandInRuntime", "StandInWorld"]

LIMIT_S = 20.0
DTYPES = {
    0: torch.int8, 1: torch.uint8, 2: torch.int32, 3: torch.uint32, 4: torch.int64, 5: torch.uint64,
    6: torch.float16, 7: torch.float32, 8: torch.float64, 9: torch.bfloat16,
}  # fmt: skip
SUM, PRODUCT, MAX, MIN, AVG = range(5)


class StandInError(RuntimeError):
    """As NCCL's."""


def memory(address: int, count: int, datatype: int) -> torch.Tensor:
    """The tensor at an address."""
    dtype = DTYPES[datatype]
    if not count:
        return torch.empty(0, dtype=dtype)
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype)


def combine(op: int, parts: list[torch.Tensor]) -> torch.Tensor:
    """In wider numbers, as an independent reference; whole numbers wrap around in the end."""
    dtype = parts[0].dtype
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    result = parts[0].to(wide)
    for part in parts[1:]:
        other = part.to(wide)
        if op == PRODUCT:
            result = result * other
        elif op in (MAX, MIN):
            result = torch.maximum(result, other) if op == MAX else torch.minimum(result, other)
        else:
            result = result + other
    if op == AVG:
        assert dtype.is_floating_point, "NCCL's average of whole numbers rounds in its own way: do not rely on it"
        result = result / len(parts)
    return result.to(dtype)


class Clique:
    """The state that the communicators of one group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.joined: set[int] = set()
        self.calls: dict[int, dict[int, tuple[object, torch.Tensor | None]]] = {}
        self.messages: dict[tuple[int, int], deque[torch.Tensor]] = {}
        self.splits: dict[tuple[int, int], Clique] = {}

    def wait_for(self, condition: Callable[[], bool], communicator: StandInCommunicator, what: str) -> None:
        with self.changed:
            self.changed.wait_for(lambda: condition() or communicator.aborted, LIMIT_S)
            if communicator.aborted:
                raise StandInError(f"{what}: aborted")
            if not condition():
                raise StandInError(f"{what}: the other ranks did not call it")


class StandInCommunicator:
    def __init__(self, runtime: StandInRuntime, clique: Clique, rank: int) -> None:
        self.runtime = runtime
        self.clique = clique
        self.rank = rank
        self.aborted = False
        self.destroyed = False
        self._calls = 0
        self._splits = 0
        with clique.changed:
            clique.joined.add(rank)
            clique.changed.notify_all()
        clique.wait_for(lambda: len(clique.joined) == clique.size, self, "connecting")

    # ------------------------------------------------------------ collectives

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        def collect(parts: list[torch.Tensor]) -> None:
            memory(recvbuf, count, datatype).copy_(combine(op, parts))

        self._collective(("allReduce", count, datatype, op), memory(sendbuf, count, datatype), collect, stream)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        def collect(parts: list[torch.Tensor]) -> None:
            if self.rank == root:
                memory(recvbuf, count, datatype).copy_(combine(op, parts))

        self._collective(("reduce", count, datatype, op, root), memory(sendbuf, count, datatype), collect, stream)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        assert count < 2**31, "CuPy takes a C int here"

        def collect(parts: list[torch.Tensor]) -> None:
            memory(recvbuff, count, datatype).copy_(parts[root])

        source = memory(sendbuff, count if self.rank == root else 0, datatype)
        self._collective(("broadcast", count, datatype, root), source, collect, stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        def collect(parts: list[torch.Tensor]) -> None:
            memory(recvbuf, count * self.clique.size, datatype).copy_(torch.cat(parts))

        self._collective(("allGather", count, datatype), memory(sendbuf, count, datatype), collect, stream)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        def collect(parts: list[torch.Tensor]) -> None:
            mine = [part.chunk(self.clique.size)[self.rank] for part in parts]
            memory(recvbuf, recvcount, datatype).copy_(combine(op, mine))

        source = memory(sendbuf, recvcount * self.clique.size, datatype)
        self._collective(("reduceScatter", recvcount, datatype, op), source, collect, stream)

    def _collective(
        self, signature: object, source: torch.Tensor, collect: Callable[[list[torch.Tensor]], None], stream: int
    ) -> None:
        number, self._calls = self._calls, self._calls + 1
        clique = self.clique

        def begin() -> None:
            with clique.changed:
                clique.calls.setdefault(number, {})[self.rank] = (signature, source.clone())
                clique.changed.notify_all()

        def end() -> None:
            clique.wait_for(lambda: len(clique.calls[number]) == clique.size, self, str(signature))
            seen = [clique.calls[number][rank] for rank in range(clique.size)]
            if any(other != signature for other, _ in seen):
                raise StandInError(f"the ranks do not match: {[other for other, _ in seen]}")
            collect([part for _, part in seen if part is not None])

        self.runtime.issue(begin, end, f"{signature}", stream)

    # ------------------------------------------------------------ messages

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        assert count, "nothing should be sent for an empty tensor"
        clique = self.clique

        def begin() -> None:
            with clique.changed:
                part = memory(sendbuf, count, datatype).clone()
                clique.messages.setdefault((self.rank, peer), deque()).append(part)
                clique.changed.notify_all()

        self.runtime.issue(begin, lambda: None, f"send to {peer}", stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        clique, key = self.clique, (peer, self.rank)

        def end() -> None:
            clique.wait_for(lambda: bool(clique.messages.get(key)), self, f"recv from {peer}")
            part = clique.messages[key].popleft()
            if part.numel() != count or part.dtype != DTYPES[datatype]:
                raise StandInError(f"recv of {count} got {part.numel()}")
            memory(recvbuf, count, datatype).copy_(part)

        self.runtime.issue(lambda: None, end, f"recv from {peer}", stream)

    # ------------------------------------------------------------ the rest

    def commSplit(self, color: int, key: int) -> StandInCommunicator | None:
        clique, self._splits = self.clique, self._splits + 1
        number = -self._splits
        with clique.changed:
            clique.calls.setdefault(number, {})[self.rank] = ((color, key), None)
            clique.changed.notify_all()
        clique.wait_for(lambda: len(clique.calls[number]) == clique.size, self, "split")
        if color < 0:
            return None
        members = [said for said, _ in clique.calls[number].values() if isinstance(said, tuple) and said[0] == color]
        with clique.changed:
            part = clique.splits.setdefault((number, color), Clique(len(members)))
        return StandInCommunicator(self.runtime, part, key)

    def check_async_error(self) -> None:
        if self.runtime.async_error is not None:
            raise self.runtime.async_error

    def abort(self) -> None:
        with self.clique.changed:
            self.aborted = True
            self.clique.changed.notify_all()
        self.runtime.aborted.set()

    def destroy(self) -> None:
        assert not self.destroyed, "destroyed twice"
        self.destroyed = True


class StandInEvent:
    def __init__(self, stream: StandInStream, hung: bool) -> None:
        self._stream = stream
        self._hung = hung

    def query(self) -> bool:
        return not self._hung or self._stream.runtime.aborted.is_set()

    def synchronize(self) -> None:
        assert self.query()


class StandInStream:
    def __init__(self, runtime: StandInRuntime, name: str) -> None:
        self.runtime = runtime
        self.name = name
        self.cuda_stream = id(self)
        self.hung = False
        runtime.streams[self.cuda_stream] = self

    def record_event(self) -> StandInEvent:
        return StandInEvent(self, self.hung)

    def wait_event(self, event: StandInEvent) -> None:
        self.runtime.log.append((self.name, "waits"))


class StandInRuntime(CudaRuntime):
    """One rank's device. `log` lists what went to which stream, in order; the main one is the default."""

    def __init__(self, world: StandInWorld, version: int = 22907) -> None:
        self.device = torch.device("cpu")
        self.version = version
        self.errors: tuple[type[Exception], ...] = (StandInError,)
        self.log: list[tuple[str, str]] = []
        self.streams: dict[int, StandInStream] = {}
        self.main = StandInStream(self, "main")
        self.hangs = False
        self.capturing = False
        self.async_error: StandInError | None = None
        self.aborted = threading.Event()
        self.communicators: list[StandInCommunicator] = []
        self._world = world
        self._local = threading.local()

    def unique_id(self) -> bytes:
        return secrets.token_bytes(128)

    def connect(self, size: int, unique_id: bytes, rank: int) -> StandInCommunicator:
        assert len(unique_id) == 128
        communicator = StandInCommunicator(self, self._world.clique(unique_id, size), rank)
        self.communicators.append(communicator)
        return communicator

    def issue(self, begin: Callable[[], None], end: Callable[[], None], name: str, stream: int) -> None:
        group: list[tuple[Callable[[], None], Callable[[], None]]] | None = getattr(self._local, "group", None)
        self.log.append((self.streams[stream].name, name.split("'")[1] if "'" in name else name))
        if self.hangs:
            self.streams[stream].hung = True
        elif group is not None:
            group.append((begin, end))
        else:
            begin()
            end()

    @contextmanager
    def grouped(self) -> Iterator[None]:
        calls: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self._local.group = calls
        try:
            yield
        finally:
            self._local.group = None
        for begin, _ in calls:
            begin()
        for _, end in calls:
            end()

    @contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def current_stream(self) -> torch.cuda.Stream:
        return cast(torch.cuda.Stream, getattr(self._local, "stream", self.main))

    def new_stream(self) -> torch.cuda.Stream:
        return cast(torch.cuda.Stream, StandInStream(self, f"side {len(self.streams)}"))

    def is_capturing(self) -> bool:
        return self.capturing


class StandInWorld:
    """Where communicators of one process find one another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cliques: dict[bytes, Clique] = {}

    def clique(self, unique_id: bytes, size: int) -> Clique:
        with self._lock:
            return self._cliques.setdefault(unique_id, Clique(size))
