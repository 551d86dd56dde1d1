"""GPU memory that other processes of the host can read, and waits of a stream for streams of another process.

The memory is allocated for this purpose alone. torch's own memory cannot be shared under `expandable_segments` or
`cudaMallocAsync`, and its tensors change while others read them.

A stream waits for a number in that memory, and not for an event of the other process: if that process is killed while
its kernels run, its events never come, and a stream that waits for one never ends. Any process can write a number.

Tests derive a `CudaMemory` that needs no GPU.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Final

import torch

_COPY_BETWEEN_DEVICES: Final = 4  # cudaMemcpyDefault: addresses say which devices they are of
_NOT_BEHIND_DEFAULT_STREAM: Final = 1  # cudaStreamNonBlocking
_HANDLE_BYTES: Final = 64  # CUDA_IPC_HANDLE_SIZE
_GREATER_OR_EQUAL: Final = 0  # CU_STREAM_WAIT_VALUE_GEQ: as if the difference were signed, so numbers may go round

_raw_current_stream: Final[Any] = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class GpuUnavailable(Exception):
    """GPU memory cannot be shared here, for the reason in the text."""


def is_reached(memory: CudaMemory, device: int, address: int, number: int) -> bool:
    """Whether a wait for this number at an address would end now."""
    return not 0 < (number - memory.read(device, address) & 0xFFFFFFFF) < 1 << 31


class CudaMemory:
    """The part of CUDA that lending and borrowing need. Devices are indices. Thread-safe.

    Raises (constructor):
        GpuUnavailable: CuPy, the driver or a GPU is missing.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise GpuUnavailable("torch finds no GPU here")
        try:
            self._runtime: Any = import_module("cupy.cuda.runtime")
            self._driver = ctypes.CDLL("libcuda.so.1")
            self._wait_value, self._write_value = (
                self._driver.cuStreamWaitValue32_v2,
                self._driver.cuStreamWriteValue32_v2,
            )
        except (ImportError, OSError, AttributeError) as exc:
            raise GpuUnavailable(
                f"CuPy or the driver of the GPU cannot be used ({exc}); `pip install 'rpcdist[cuda]'` brings CuPy "
                "(cupy-cuda13x for CUDA 13)"
            ) from exc
        value_arguments = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
        self._wait_value.argtypes = self._write_value.argtypes = value_arguments
        self._aside: dict[int, torch.cuda.ExternalStream] = {}
        self._bound = threading.local()
        self._lock = threading.Lock()

    def uuid(self, device: int) -> bytes:
        """Identifies a device in every process, whatever its index there."""
        return str(torch.cuda.get_device_properties(device).uuid).encode()

    def total_bytes(self, device: int) -> int:
        """The memory of the device."""
        return int(torch.cuda.get_device_properties(device).total_memory)

    def allocate(self, device: int, size: int) -> int:
        """Allocates memory that can be shared, filled with zeros; returns its address. Raises `MemoryError`."""
        with torch.cuda.device(device):
            try:
                address = int(self._runtime.malloc(size))
            except self._runtime.CUDARuntimeError as exc:
                raise MemoryError(f"{size} bytes cannot be allocated on cuda:{device}: {exc}") from exc
            aside = self._stream_aside(device)
            self._runtime.memsetAsync(address, 0, size, aside.cuda_stream)
            aside.synchronize()
            return address

    def free(self, device: int, address: int) -> None:
        """Frees memory from `allocate`; may wait until the device is idle."""
        with torch.cuda.device(device):
            self._runtime.free(address)

    def handle(self, device: int, address: int) -> bytes:
        """Names memory of `allocate` for other processes."""
        with torch.cuda.device(device):
            return bytes(self._runtime.ipcGetMemHandle(address))

    def open(self, device: int, handle: bytes) -> tuple[int, int]:
        """The address and the size of memory of another process. Raises `GpuUnavailable`."""
        if len(handle) != _HANDLE_BYTES:  # CuPy reads so many, whatever the length
            raise GpuUnavailable(f"the handle of memory of another process has {len(handle)} bytes")
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
        """Undoes `open`; may wait until the device is idle."""
        with torch.cuda.device(device):
            self._runtime.ipcCloseMemHandle(address)

    def copy(self, device: int, target: int, source: int, size: int) -> None:
        """Copies memory of devices, in the current stream of this thread."""
        # The handle 0 means the default stream of the current device, whichever that is.
        arguments = target, source, size, _COPY_BETWEEN_DEVICES, _raw_stream(device)
        self._act(self._runtime.memcpyAsync, device, *arguments)

    def write(self, home: int, address: int, number: int, devices: Sequence[int]) -> None:
        """Writes four bytes to memory of `home` when the current streams of `devices` reach this point."""
        if len(devices) == 1 and devices[0] == home:
            self._act(self._write_value, home, _raw_stream(home), address, number, 0)
            return
        writing = torch.cuda.Stream(home)  # memory of another device is not written from a stream
        for device in devices:
            writing.wait_stream(torch.cuda.current_stream(device))
        self._act(self._write_value, home, writing.cuda_stream, address, number, 0)

    def wait(self, home: int, address: int, number: int, device: int) -> None:
        """Makes the current stream of a device wait until four bytes of memory of `home` reach this number."""
        if device == home:
            self._act(self._wait_value, home, _raw_stream(home), address, number, _GREATER_OR_EQUAL)
            return
        waiting = torch.cuda.Stream(home)
        self._act(self._wait_value, home, waiting.cuda_stream, address, number, _GREATER_OR_EQUAL)
        torch.cuda.current_stream(device).wait_stream(waiting)

    def force(self, device: int, address: int, number: int) -> None:
        """Writes four bytes soon, without waiting for other streams of this process."""
        self._act(self._write_value, device, self._stream_aside(device).cuda_stream, address, number, 0)

    def read(self, device: int, address: int) -> int:
        """Reads four bytes, without waiting for other streams of this process."""
        with torch.cuda.device(device):
            stream = self._stream_aside(device)
            number = torch.empty(1, dtype=torch.int32, device="cpu", pin_memory=True)
            self._runtime.memcpyAsync(number.data_ptr(), address, 4, _COPY_BETWEEN_DEVICES, stream.cuda_stream)
            stream.synchronize()
            return int(number.item()) & 0xFFFFFFFF

    def _act(self, function: Callable[..., int | None], device: int, *arguments: int) -> None:
        """Calls a function of the driver or of CuPy's runtime, with the context of a device."""
        if self._bound.__dict__.get("device") != device or self._runtime.getDevice() != device:
            with torch.cuda.device(device):
                self._runtime.setDevice(device)  # binds the context, if torch has not used it on this thread yet
                status = function(*arguments)
            self._bound.device = device
        else:
            status = function(*arguments)
        if status:
            raise GpuUnavailable(f"a function of the driver failed with CUresult {status}")

    def _stream_aside(self, device: int) -> torch.cuda.ExternalStream:
        """The stream of a device that waits for no other one.

        It is not one of torch's: these are 32, used in turn, and so are also streams of handlers, which wait.
        """
        with self._lock:
            stream = self._aside.get(device)
            if stream is None:
                with torch.cuda.device(device):
                    handle = self._runtime.streamCreateWithFlags(_NOT_BEHIND_DEFAULT_STREAM)
                stream = self._aside[device] = torch.cuda.ExternalStream(handle, device)
            return stream


def _raw_stream(device: int) -> int:
    """The current stream; the public function costs ten times as much."""
    raw: int = _raw_current_stream(device) if _raw_current_stream else torch.cuda.current_stream(device).cuda_stream
    return raw


@cache
def _cuda_memory() -> CudaMemory | GpuUnavailable:
    try:
        return CudaMemory()
    except GpuUnavailable as exc:
        return exc


def cuda_memory() -> CudaMemory:
    """The CUDA memory of this process, made at the first use. Raises `GpuUnavailable`."""
    made = _cuda_memory()
    if isinstance(made, GpuUnavailable):
        raise GpuUnavailable(str(made))
    return made
