"""Memory of GPUs, and streams, without a GPU: `CudaMemory` over memory of the host, with streams that run when told.

Each process of the host has one stream. Work that is enqueued there runs in its order when `run` is called, up to a
wait for a number that is not there yet. So a test decides which GPU is slow, and sees what is read too early.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence

import torch

from rpcdist.at_exit import AtEnd
from rpcdist.errors import SerializationError
from rpcdist.rpc._devices.cuda_memory import CudaMemory, GpuUnavailable

__all__ = ["FakeCopyStream", "FakeEvent", "FakeGpuMemory", "FakeHost"]

UUID = b"GPU-of-nobody"


class FakeHost:
    """One GPU, whose memory all processes can share.

    Args:
        total_bytes: of the GPU.
    """

    def __init__(self, total_bytes: int = 1 << 30) -> None:
        self.total_bytes = total_bytes
        self.allocations: dict[bytes, ctypes.Array[ctypes.c_char]] = {}
        self.num_made = 0
        self.makers: dict[bytes, str] = {}
        self.opened: list[tuple[str, bytes]] = []

    def process(self, name: str) -> FakeGpuMemory:
        return FakeGpuMemory(self, name)


class FakeGpuMemory(CudaMemory):
    """The memory of one process."""

    def __init__(self, host: FakeHost, name: str) -> None:
        self.host = host
        self.name = name
        self.stream: deque[Callable[[], bool]] = deque()  # each says whether it is done

    def run(self) -> bool:
        """Runs the stream; returns whether nothing is left there."""
        while self.stream and self.stream[0]():
            self.stream.popleft()
        return not self.stream

    def enqueue(self, act: Callable[[], object]) -> None:
        """Adds work that takes as long as `run` is not called."""

        def done() -> bool:
            act()
            return True

        self.stream.append(done)

    def uuid(self, device: int) -> bytes:
        return UUID

    def total_bytes(self, device: int) -> int:
        return self.host.total_bytes

    def allocate(self, device: int, size: int) -> int:
        self.host.num_made += 1
        handle = b"%064d" % self.host.num_made
        memory = self.host.allocations[handle] = ctypes.create_string_buffer(size)
        self.host.makers[handle] = self.name
        return ctypes.addressof(memory)

    def free(self, device: int, address: int) -> None:
        del self.host.allocations[self.handle(device, address)]

    def handle(self, device: int, address: int) -> bytes:
        (handle,) = [each for each, memory in self.host.allocations.items() if ctypes.addressof(memory) == address]
        return handle

    def open(self, device: int, handle: bytes) -> tuple[int, int]:
        memory = self.host.allocations.get(handle)
        if memory is None:
            raise GpuUnavailable("nobody has made this")
        if self.host.makers[handle] == self.name:
            raise GpuUnavailable("a process cannot open its own memory")
        self.host.opened.append((self.name, handle))
        return ctypes.addressof(memory), len(memory)

    def close(self, device: int, address: int) -> None:
        self.host.opened.remove((self.name, self.handle(device, address)))

    def copy(self, device: int, target: int, source: int, size: int) -> None:
        self.enqueue(lambda: ctypes.memmove(target, source, size))

    def write(self, home: int, address: int, number: int, devices: Sequence[int]) -> None:
        self.enqueue(lambda: self.force(home, address, number))

    def wait(self, home: int, address: int, number: int, device: int) -> None:
        self.stream.append(lambda: ctypes.c_int32(self.read(home, address) - number).value >= 0)

    def force(self, device: int, address: int, number: int) -> None:
        ctypes.c_uint32.from_address(address).value = number

    def read(self, device: int, address: int) -> int:
        return ctypes.c_uint32.from_address(address).value


class FakeEvent:
    """An event behind a copy in a stream."""

    def __init__(self, stream: FakeCopyStream) -> None:
        self.has_occurred = False
        self._stream = stream

    def query(self) -> bool:
        self._stream.check()
        return self.has_occurred


class FakeCopyStream:
    """`CopyStream` of a GPU whose memory is of the host. Copies are made by `run`, or when their result is waited for.

    Attributes:
        copies: the start and the size of each copy so far, and whether its source is pinned.
        is_broken: whether the GPU fails.

    Args:
        free_bytes: of the GPU.
        hold: see `CopyStream`.
    """

    def __init__(self, hold: Callable[[int], AtEnd | None], free_bytes: int = 1 << 40) -> None:
        self.device = torch.device("cuda:0")
        self.free_bytes = free_bytes
        self.copies: list[tuple[int, int, bool]] = []
        self.is_broken = False
        self.hold = hold
        self._queue: deque[tuple[torch.Tensor, torch.Tensor, FakeEvent]] = deque()

    @property
    def num_waiting(self) -> int:
        """The copies that are not made yet."""
        return len(self._queue)

    def check(self) -> None:
        """Raises the error of a GPU that has failed."""
        if self.is_broken:
            raise RuntimeError("CUDA error: unspecified launch failure")

    def allocate(self, size: int) -> torch.Tensor:
        if size > self.free_bytes:
            raise SerializationError(f"a tensor of {size} bytes arrived, where {self.free_bytes} bytes are free")
        return torch.zeros(size, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor, is_pinned: bool) -> FakeEvent:
        self.check()
        event = FakeEvent(self)
        self._queue.append((target, source, event))
        self.copies.append((int(target.storage_offset()), target.nbytes, is_pinned))
        return event

    def run(self, num_copies: int | None = None) -> None:
        """Makes the first of the copies that wait; all of them by default."""
        for _ in range(len(self._queue) if num_copies is None else num_copies):
            target, source, event = self._queue.popleft()
            target.copy_(source)
            event.has_occurred = True

    def join(self, copied: FakeEvent, target: torch.Tensor) -> None:
        """Stands for a stream that waits: what it waits for has happened when it reads the tensor."""
        while not copied.has_occurred:
            self.run(1)
