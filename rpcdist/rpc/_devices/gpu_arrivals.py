"""The tensors of one value that arrived and go to GPUs."""

from __future__ import annotations

import logging
from functools import cache

import torch

from rpcdist._proto import value_pb2
from rpcdist.errors import SerializationError
from rpcdist.ids import Identity
from rpcdist.rpc._devices.borrowed_gpu_memory import BorrowedGpuMemory, new_memory
from rpcdist.rpc._values import ReceiveBuffer
from rpcdist.rpc._values.buffers import Received

logger = logging.getLogger(__name__)


class ValueOnGpus:
    """`GpuArrivals` of a value. Decode it on one thread, and call `done`; or `discard` it.

    Args:
        value: the value.
        sender: the worker that has sent it.
        borrowed: memory that others lend.
        me: this worker's name.
    """

    __slots__ = ("_borrowed", "_copied_to", "_is_over", "_me", "_sender", "_value")

    def __init__(self, value: value_pb2.Value, sender: Identity, borrowed: BorrowedGpuMemory, me: str) -> None:
        self._value = value
        self._sender = sender
        self._borrowed = borrowed
        self._me = me
        self._copied_to: set[int] = set()
        self._is_over = not value.gpu_loans

    def devices(self) -> list[int]:
        """The GPUs of this worker that tensors of the value go to; a device that is missing is told of by `decode`."""
        found = set()
        if self._value.on_gpus:
            for message in self._value.tensors:
                name, _, index = message.device.partition(":")
                if name == "cuda":
                    found.add(int(index) if index.isdigit() else torch.cuda.current_device())
        return sorted(index for index in found if index < torch.cuda.device_count())

    def device_of(self, message: value_pb2.Tensor, buffer: Received | None) -> torch.device:
        """See `GpuArrivals`."""
        device = torch.device(message.device)
        if device.type != "cuda":
            return device
        count = torch.cuda.device_count()
        if message.device == "cuda":
            if isinstance(buffer, value_pb2.Buffer):
                return torch.device("cuda", self._borrowed.device_of(self._loan_of(buffer)))
            return torch.device("cuda", torch.cuda.current_device()) if count else torch.device("cpu")
        index = device.index or 0
        if index < count:
            return torch.device("cuda", index)
        if message.unmapped and not count:
            _say_once(self._me, self._sender.name)
            return torch.device("cpu")
        there = ", ".join(f"cuda:{number}" for number in range(count)) or "no GPU"
        raise SerializationError(
            f"a tensor for {device} arrived from worker {self._sender.name!r}, and worker {self._me!r} has {there}. "
            "Name a device that is there in the device map of the worker that calls"
        )

    def on_device(self, buffer: Received, device: torch.device) -> torch.Tensor:
        """See `GpuArrivals`."""
        if isinstance(buffer, value_pb2.Buffer):
            if device.type != "cuda":
                raise SerializationError(f"a tensor for {device} arrived that lies in memory of a GPU")
            self._copied_to.add(device.index)
            return self._borrowed.copy(self._loan_of(buffer), self._sender.id, buffer.offset, buffer.size, device.index)
        memory = (
            buffer.memory
            if isinstance(buffer, ReceiveBuffer)
            else torch.frombuffer(bytearray(buffer), dtype=torch.uint8)
        )
        if device.type != "cuda":
            return memory.to(device)
        return new_memory(memory.nbytes, device.index).copy_(memory)

    def _loan_of(self, buffer: value_pb2.Buffer) -> value_pb2.GpuLoan:
        if buffer.gpu_loan > len(self._value.gpu_loans):
            raise SerializationError(f"a tensor refers to loan {buffer.gpu_loan} of {len(self._value.gpu_loans)}")
        return self._value.gpu_loans[buffer.gpu_loan - 1]

    def done(self) -> None:
        """All that is wanted of the loans was copied, as far as that was possible."""
        if not self._is_over and self._copied_to:
            self._is_over = True
            self._borrowed.copied(self._value.gpu_loans, self._sender.id, self._copied_to)
        self.discard()

    def discard(self) -> None:
        """The value is not wanted; idempotent."""
        if not self._is_over:
            self._is_over = True
            self._borrowed.discard(self._value.gpu_loans, self._sender.id)


@cache
def _say_once(me: str, sender: str) -> None:
    logger.warning(
        "worker %r has no GPU: tensors of GPUs that worker %r sends without a device map are on its CPU", me, sender
    )
