"""The tensors of one value that arrived and go to GPUs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Final

import torch

from rpcdist._proto import value_pb2
from rpcdist.errors import SerializationError
from rpcdist.ids import Identity
from rpcdist.rpc._devices.borrowed_gpu_memory import Borrowed, BorrowedGpuMemory
from rpcdist.rpc._values import ReceiveBuffer
from rpcdist.rpc._values.buffers import Received

logger = logging.getLogger(__name__)

_BYTE: Final = torch.uint8
CHUNK_BYTES: Final = 4 << 20


class ValueOnGpus:
    """`GpuArrivals` of a value. Decode it on one thread, and call `done`; or `discard` it.

    Args:
        value: the value.
        sender: the worker that has sent it.
        borrowed: memory that others lend.
        me: this worker's name.
    """

    __slots__ = ("_begun", "_borrowed", "_is_over", "_me", "_sender", "_value")

    def __init__(self, value: value_pb2.Value, sender: Identity, borrowed: BorrowedGpuMemory, me: str) -> None:
        self._value = value
        self._sender = sender
        self._borrowed = borrowed
        self._me = me
        self._begun: dict[int, Borrowed] = {}  # loans, by their index
        self._is_over = not value.gpu_loans

    def device_of(self, message: value_pb2.Tensor, buffer: Received | None) -> torch.device:
        """See `GpuArrivals`."""
        place = _place(message.device)
        if place is not None:
            return place
        count = torch.cuda.device_count()
        if message.device == "cuda":
            if isinstance(buffer, value_pb2.Buffer):
                return torch.device("cuda", self._borrowed.device_of(self._loan_of(buffer)))
            return torch.device("cuda", torch.cuda.current_device()) if count else torch.device("cpu")
        if message.unmapped and not count:
            _say_once(self._me, self._sender.name)
            return torch.device("cpu")
        there = ", ".join(f"cuda:{number}" for number in range(count)) or "no GPU"
        raise SerializationError(
            f"a tensor for {message.device} arrived from worker {self._sender.name!r}, and worker {self._me!r} has "
            f"{there}. Name a device that is there in the device map of the worker that calls"
        )

    def copy_of(self, buffer: Received, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `GpuArrivals`."""
        if not isinstance(buffer, value_pb2.Buffer):
            source = (
                buffer.memory if isinstance(buffer, ReceiveBuffer) else torch.frombuffer(bytearray(buffer), dtype=_BYTE)
            )
            if device.type != "cuda" or source.nbytes < CHUNK_BYTES:
                return source.view(dtype).reshape(shape).to(device)
            target = new_tensor(shape, dtype, device, source.nbytes)
            copy_up(source, target.view(-1).view(_BYTE))
            return target
        if device.type != "cuda":
            raise SerializationError(f"a tensor for {device} arrived that lies in memory of a GPU")
        loan = self._loan_of(buffer)
        begun = self._begun.get(buffer.gpu_loan)
        if begun is None:
            begun = self._begun[buffer.gpu_loan] = self._borrowed.begin(loan, self._sender.id)
        target = new_tensor(shape, dtype, device, buffer.size)
        self._borrowed.copy(begun, buffer.offset, target, buffer.size)
        return target

    def _loan_of(self, buffer: value_pb2.Buffer) -> value_pb2.GpuLoan:
        if buffer.gpu_loan > len(self._value.gpu_loans):
            raise SerializationError(f"a tensor refers to loan {buffer.gpu_loan} of {len(self._value.gpu_loans)}")
        return self._value.gpu_loans[buffer.gpu_loan - 1]

    def done(self) -> None:
        """All that is wanted of the loans was copied, as far as that was possible."""
        for begun in self._begun.values():
            self._borrowed.finish(begun, self._sender.id)
        self.discard()

    def discard(self) -> None:
        """The value is not wanted, or not any more; idempotent."""
        if not self._is_over:
            self._is_over = True
            loans = self._value.gpu_loans
            if len(self._begun) < len(loans):
                left = [loan for number, loan in enumerate(loans, 1) if number not in self._begun]
                self._borrowed.discard(left, self._sender.id)


def new_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device, size: int) -> torch.Tensor:
    """A tensor on a GPU. Raises `SerializationError`, with the bytes that are free, where it does not fit."""
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError as exc:
        free, total = torch.cuda.mem_get_info(device)
        raise SerializationError(
            f"a tensor of {size} bytes arrived for {device}, where {free} of {total} bytes are free"
        ) from exc


def copy_up(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies bytes of the host to a GPU, in its current stream: one chunk goes up while the next is copied into pinned
    memory, which torch's allocator keeps for the next time. The driver's own way takes twice as long.
    """
    pinned = torch.empty(source.nbytes, dtype=_BYTE, pin_memory=True)
    for part, staged, there in zip(
        source.split(CHUNK_BYTES), pinned.split(CHUNK_BYTES), target.split(CHUNK_BYTES), strict=True
    ):
        there.copy_(staged.copy_(part), non_blocking=True)


@lru_cache(maxsize=256)
def _place(name: str) -> torch.device | None:
    """The device of a name; None if it has no index, or this process does not have it."""
    device = torch.device(name)
    if device.type != "cuda":
        return device
    return device if device.index is not None and device.index < torch.cuda.device_count() else None


@cache
def _say_once(me: str, sender: str) -> None:
    logger.warning(
        "worker %r has no GPU: tensors of GPUs that worker %r sends without a device map are on its CPU", me, sender
    )
