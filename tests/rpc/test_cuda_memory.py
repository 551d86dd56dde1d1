"""CUDA's part of lending and borrowing, on a stand-in for CuPy, the driver, and torch's streams: which device and which
stream each function gets.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rpcdist.rpc._devices import cuda_memory
from rpcdist.rpc._devices.cuda_memory import CudaMemory, GpuUnavailable

DEFAULT = 0
"""The handle of the default stream of the current device."""

NUM_STREAMS = 32
"""torch has so many streams for each device, which it gives out in turn."""


class Stream:
    def __init__(self, cuda: Cuda, device: int, handle: int) -> None:
        self._cuda = cuda
        self.device = device
        self.cuda_stream = handle

    def wait_stream(self, other: Stream) -> None:
        self._cuda.calls.append(("wait for stream", self.device, self.cuda_stream, other.cuda_stream))

    def synchronize(self) -> None:
        self._cuda.calls.append(("synchronize", self.device, self.cuda_stream))


class Cuda:
    """Two GPUs.

    Attributes:
        calls: what was enqueued: its name, the device, and the stream there.
        current: the current device, and the current stream of each device.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.device = 0
        self.current = [DEFAULT, DEFAULT]
        self._num_streams = 0
        self._num_own = 0
        runtime = SimpleNamespace(
            memcpyAsync=self._copy,
            getDevice=lambda: self.device,
            setDevice=lambda device: None,
            streamCreateWithFlags=self._new_stream,
            CUDARuntimeError=RuntimeError,
        )
        driver = SimpleNamespace(
            cuStreamWaitValue32_v2=self._driver_call("wait"), cuStreamWriteValue32_v2=self._driver_call("write")
        )
        self.runtime, self.driver = runtime, driver

    def _copy(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        self.calls.append(("copy", self.device, stream))

    def _driver_call(self, name: str) -> Any:
        class Function:
            argtypes: Any = None

            def __call__(_, stream: int, address: int, number: int, flags: int) -> int:
                self.calls.append((name, self.device, stream))
                return 0

        return Function()

    def _new_stream(self, flags: int) -> int:
        assert flags == 1  # it does not wait for the default stream
        self._num_own += 1
        return 1000 + self._num_own

    def stream_of_pool(self, device: int) -> Stream:
        self._num_streams += 1
        return Stream(self, device, 1 + self._num_streams % NUM_STREAMS)

    @contextlib.contextmanager
    def use(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(cuda_memory, "import_module", lambda name: cuda.runtime)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda.driver)
    monkeypatch.setattr(cuda_memory, "_raw_current_stream", lambda device: cuda.current[device])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", cuda.use)
    monkeypatch.setattr(torch.cuda, "Stream", cuda.stream_of_pool)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: Stream(cuda, device, handle))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(cuda, device, cuda.current[device]))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **options: empty(*shape, **options))
    return cuda


@pytest.mark.parametrize("device", [0, 1])
def test_a_default_stream_is_that_of_the_device_of_the_memory(cuda: Cuda, device: int) -> None:
    """Its handle is the same for each device, and means the one of the current device, whichever that is."""
    memory = CudaMemory()
    memory.wait(device, 512, 1, device)
    memory.copy(device, 4096, 8192, 100)
    memory.write(device, 640, 1, [device])
    assert cuda.calls == [("wait", device, DEFAULT), ("copy", device, DEFAULT), ("write", device, DEFAULT)]
    assert cuda.device == 0


@pytest.mark.parametrize("size", [0, 63, 65])
def test_a_damaged_handle_does_not_reach_the_driver(cuda: Cuda, size: int) -> None:
    """CuPy would read beyond its end."""
    with pytest.raises(GpuUnavailable, match=f"has {size} bytes"):
        CudaMemory().open(0, bytes(size))
    assert cuda.calls == []


def test_what_ends_a_wait_is_behind_no_stream_that_waits(cuda: Cuda) -> None:
    """Not even if the program has used all streams of torch, or another device copies the memory."""
    memory = CudaMemory()
    memory.force(0, 512, 1)
    memory.wait(0, 512, 1, 1)
    memory.copy(1, 4096, 8192, 100)
    memory.write(0, 640, 1, [1])
    of_pool = {cuda.stream_of_pool(0).cuda_stream for _ in range(NUM_STREAMS)}
    waiting = {call[2] for call in cuda.calls if call[0] in ("wait", "wait for stream")}
    assert waiting <= of_pool | {DEFAULT}
    cuda.calls.clear()
    memory.force(0, 512, 2)
    memory.read(0, 512)
    memory.force(1, 512, 2)
    (_, _, first), (_, _, second), (_, _, third), (_, _, other) = cuda.calls
    assert first == second == third and not {first, other} & (of_pool | {DEFAULT}) and first != other


def test_a_copy_to_another_device_waits_there_and_is_reported_at_home(cuda: Cuda) -> None:
    memory = CudaMemory()
    cuda.current[1] = 77
    memory.wait(0, 512, 1, 1)
    memory.copy(1, 4096, 8192, 100)
    memory.write(0, 640, 1, [1])
    (_, _, waiting), *_, (_, _, writing) = cuda.calls
    assert cuda.calls == [
        ("wait", 0, waiting),
        ("wait for stream", 1, 77, waiting),
        ("copy", 1, 77),
        ("wait for stream", 0, writing, 77),
        ("write", 0, writing),
    ]
