"""Tensors of GPUs through memory of the host, on a stand-in for GPUs: chunks are read when they have been copied, and
no event loop waits for that.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rpcdist._proto import value_pb2
from rpcdist.ids import Identity
from rpcdist.rpc._devices import gpu_sharing
from rpcdist.rpc._devices.borrowed_gpu_memory import BorrowedGpuMemory
from rpcdist.rpc._devices.gpu_sharing import ValueOnGpus
from rpcdist.rpc._values import buffers
from rpcdist.rpc._values.buffers import STAGED_BYTES, GpuBuffer, ReceiveBuffer

MIB = 1 << 20


class Copies:
    """The copies of one buffer; a chunk is there when its event, or a later one, has been waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited: list[int] = []
        self._num_events = 0
        self._host: torch.Tensor | None = None
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=self._record))
        monkeypatch.setattr(buffers, "pinned_memory", lambda size: torch.empty(size, dtype=torch.uint8))

    def _record(self) -> SimpleNamespace:
        number, self._num_events = self._num_events, self._num_events + 1

        def synchronize() -> None:
            self.waited.append(number)
            assert self._host is not None
            for chunk, memory in enumerate(self._host.split(STAGED_BYTES)[: number + 1]):
                memory.fill_(chunk + 1)

        return SimpleNamespace(synchronize=synchronize, query=lambda: number <= max(self.waited, default=-1))

    def begin(self, size: int) -> GpuBuffer:
        tensor = torch.zeros(size, dtype=torch.uint8)
        buffer = GpuBuffer(tensor.data_ptr(), size, [tensor]).on_host()
        self._host = buffer._host
        assert self._host is not None
        self._host.zero_()  # nothing is there yet
        return buffer


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


def test_a_part_waits_for_its_chunks_alone(copies: Copies) -> None:
    buffer = copies.begin(2 * STAGED_BYTES + 5)
    assert not buffer.is_ready(1)
    assert bytes(buffer.part(0, 3)) == b"\1\1\1" and copies.waited == [0]
    assert buffer.is_ready(STAGED_BYTES) and not buffer.is_ready(STAGED_BYTES + 1)
    assert bytes(buffer.part(STAGED_BYTES - 1, STAGED_BYTES + 1)) == b"\1\2"
    assert bytes(buffer.part(2 * STAGED_BYTES, 2 * STAGED_BYTES + 5)) == b"\3" * 5
    assert copies.waited == [0, 1, 2] and buffer.is_ready(buffer.size)


@pytest.mark.parametrize("size", [1, 1000, STAGED_BYTES, 16 * MIB, 37 * MIB + 3])
def test_all_of_it(copies: Copies, size: int) -> None:
    expected = b"".join(
        bytes([number + 1]) * (min(size, (number + 1) * STAGED_BYTES) - number * STAGED_BYTES)
        for number in range(-(-size // STAGED_BYTES))
    )
    assert bytes(copies.begin(size).view) == expected
    target = torch.zeros(size, dtype=torch.uint8)
    copies.waited.clear()
    copies.begin(size).copy_to(target.data_ptr())
    assert bytes(target.numpy()) == expected


@pytest.mark.parametrize("size", [1, 8, 40_000, 5 * MIB])
def test_what_arrives_is_copied_from_pinned_memory_whatever_its_size(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from other memory waits for the device."""
    staged: list[torch.Tensor] = []

    def pinned(size: int) -> torch.Tensor:
        staged.append(torch.empty(size, dtype=torch.uint8))
        return staged[-1]

    monkeypatch.setattr(gpu_sharing, "pinned_memory", pinned)
    monkeypatch.setattr(gpu_sharing, "new_tensor", lambda shape, dtype, device, size: torch.zeros(shape, dtype=dtype))
    borrowed = BorrowedGpuMemory(lambda: None, lambda: None)  # type: ignore[arg-type, return-value]
    value = ValueOnGpus(value_pb2.Value(), Identity("alice", 0, 1), borrowed, "bob")
    source = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    received = ReceiveBuffer.allocate(size)
    received.memory.copy_(source)
    for buffer in (bytes(source.numpy()), received):
        made = value.copy_of(buffer, (size,), torch.uint8, torch.device("cuda:0"))
        assert torch.equal(made, source)
    assert [memory.nbytes for memory in staged] == [size, size]
