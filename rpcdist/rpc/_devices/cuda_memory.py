"""Memory of GPUs that other processes of the host can read, and the events that say when: CUDA's IPC.

CuPy hands out memory that the driver can share, torch the events and the streams. Memory of torch's own allocator is
not shared: with `expandable_segments` or `cudaMallocAsync` it cannot be, and tensors change while others read them.

`GpuMemory` is the seam at which tests put a stand-in that needs no GPU.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import import_module
from typing import Any, Final, Protocol

import torch

_COPY_BETWEEN_DEVICES: Final = 4  # cudaMemcpyDefault: addresses say which devices they are of


class GpuUnavailable(Exception):
    """Why memory of GPUs cannot be shared here."""


class GpuEvent(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether all work before it is done."""


class GpuMemory(Protocol):
    """What lending and borrowing need of CUDA. Devices are given by their index; any thread may call."""

    def uuid(self, device: int) -> bytes:
        """The same in every process, whatever index the device has there."""

    def total_bytes(self, device: int) -> int:
        """The memory of the device."""

    def allocate(self, device: int, size: int) -> int:
        """The address of new memory that can be shared. Raises `MemoryError`."""

    def free(self, device: int, address: int) -> None:
        """Ends memory of `allocate`; waits until the device does not use it."""

    def handle(self, device: int, address: int) -> bytes:
        """Names memory of `allocate` for other processes."""

    def open(self, device: int, handle: bytes) -> tuple[int, int]:
        """The address and the size of memory of another process. Raises `GpuUnavailable`."""

    def close(self, device: int, address: int) -> None:
        """Ends what `open` began."""

    def new_event(self, device: int) -> tuple[GpuEvent, bytes]:
        """An event that other processes can wait for, and its name."""

    def open_event(self, device: int, handle: bytes) -> GpuEvent:
        """The event of that name. Raises `GpuUnavailable`."""

    def record(self, device: int, event: GpuEvent | None = None) -> GpuEvent:
        """Records an event, or a new one of this process alone, in the current stream of this thread."""

    def wait(self, device: int, event: GpuEvent) -> None:
        """Has the current stream of this thread wait for an event."""

    def copy(self, device: int, target: int, source: int, size: int) -> None:
        """Copies memory of devices, in the current stream of this thread."""


class CudaMemory:
    """`GpuMemory` of CUDA. Raises `GpuUnavailable` where CuPy, the driver or a GPU is missing."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise GpuUnavailable("torch finds no GPU here")
        try:
            self._runtime: Any = import_module("cupy.cuda.runtime")
            self._driver = ctypes.CDLL("libcuda.so.1")
        except (ImportError, OSError) as exc:
            raise GpuUnavailable(
                f"CuPy cannot be used ({exc}); `pip install 'rpcdist[cuda]'` brings it (cupy-cuda13x for CUDA 13)"
            ) from exc

    def uuid(self, device: int) -> bytes:
        return str(torch.cuda.get_device_properties(device).uuid).encode()

    def total_bytes(self, device: int) -> int:
        return int(torch.cuda.get_device_properties(device).total_memory)

    def allocate(self, device: int, size: int) -> int:
        with torch.cuda.device(device):
            try:
                return int(self._runtime.malloc(size))
            except self._runtime.CUDARuntimeError as exc:
                raise MemoryError(f"{size} bytes cannot be allocated on cuda:{device}: {exc}") from exc

    def free(self, device: int, address: int) -> None:
        with torch.cuda.device(device):
            self._runtime.free(address)

    def handle(self, device: int, address: int) -> bytes:
        with torch.cuda.device(device):
            return bytes(self._runtime.ipcGetMemHandle(address))

    def open(self, device: int, handle: bytes) -> tuple[int, int]:
        with torch.cuda.device(device):
            try:
                address = int(self._runtime.ipcOpenMemHandle(handle))
            except (self._runtime.CUDARuntimeError, ValueError) as exc:
                raise GpuUnavailable(f"memory of cuda:{device} in another process cannot be opened: {exc}") from exc
            base, size = ctypes.c_uint64(), ctypes.c_size_t()
            status = self._driver.cuMemGetAddressRange_v2(
                ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
            )
            if status or base.value != address:
                self._runtime.ipcCloseMemHandle(address)
                raise GpuUnavailable(f"the size of memory of another process is not known (CUresult {status})")
            return address, size.value

    def close(self, device: int, address: int) -> None:
        with torch.cuda.device(device):
            self._runtime.ipcCloseMemHandle(address)

    def new_event(self, device: int) -> tuple[GpuEvent, bytes]:
        with torch.cuda.device(device):
            event = torch.cuda.Event(interprocess=True)
            event.record()  # there is no handle before
            return event, event.ipc_handle()

    def open_event(self, device: int, handle: bytes) -> GpuEvent:
        try:
            event: GpuEvent = torch.cuda.Event.from_ipc_handle(torch.device("cuda", device), handle)
        except (RuntimeError, ValueError) as exc:
            raise GpuUnavailable(f"an event of another process cannot be opened on cuda:{device}: {exc}") from exc
        return event

    def record(self, device: int, event: Any = None) -> GpuEvent:
        if event is None:
            event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        recorded: GpuEvent = event
        return recorded

    def wait(self, device: int, event: Any) -> None:
        torch.cuda.current_stream(device).wait_event(event)

    def copy(self, device: int, target: int, source: int, size: int) -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        self._runtime.memcpyAsync(target, source, size, _COPY_BETWEEN_DEVICES, stream)


@cache
def _cuda_memory() -> CudaMemory | GpuUnavailable:
    try:
        return CudaMemory()
    except GpuUnavailable as exc:
        return exc


def cuda_memory() -> GpuMemory:
    """That of this process, made when it is asked for first. Raises `GpuUnavailable`."""
    made = _cuda_memory()
    if isinstance(made, GpuUnavailable):
        raise GpuUnavailable(str(made))
    return made
