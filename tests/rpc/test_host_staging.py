"""Tensors of GPUs through memory of the host, on a stand-in for GPUs.

Chunks are sent when they have been copied from the GPU, and copied to the GPU while others arrive; no event loop waits
for a GPU, and no memory is left when something fails.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import rpc_victim_functions as victims
import torch
from agents_here import LIMIT_S, agents_here
from fake_gpus import FakeCopyStream
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_timeouts import UNIT_S

from rpcdist import autograd, rpc
from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.autograd import _pass_message
from rpcdist.autograd._context import Context
from rpcdist.autograd._message_nodes import RecordedSend
from rpcdist.errors import BackwardError, NotInitialized, ProtocolViolation, SerializationError, WorkerLost
from rpcdist.ids import Identity
from rpcdist.rpc._current import current_agent, use_agent
from rpcdist.rpc._devices import gpu_sharing, pinned_arrivals
from rpcdist.rpc._devices.borrowed_gpu_memory import BorrowedGpuMemory
from rpcdist.rpc._devices.gpu_sharing import GpuSharing, ValueOnGpus
from rpcdist.rpc._devices.pinned_arrivals import CopyStream, GpuReceiveBuffer, PinnedRing
from rpcdist.rpc._marshal.arrived_value import ArrivedValue
from rpcdist.rpc._values import buffers
from rpcdist.rpc._values.buffers import STAGED_BYTES, GpuBuffer, ReceiveBuffer, received_buffers
from rpcdist.rpc._values.rebuild import rebuild_tensors
from rpcdist.rpc._values.tensors import DeviceRoute
from rpcdist.testing import WorkerPool, eventually
from rpcdist.transport._channels.channel import CHANNELS_VARIABLE
from rpcdist.transport._framing.frames import CHUNK_BYTES, Chunk
from rpcdist.transport._framing.incoming import Delivery, Incoming, StripeCursor
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.striping import PAYLOAD_CONNECTIONS_VARIABLE
from rpcdist.transport.wire_messages import CallMessage, CompactPass, ReplyMessage, WireMessage

MIB = 1 << 20
GPU = torch.device("cuda:0")
PART = 1000
"""Size of a chunk in most tests."""

# ---------------------------------------------------------------- at the sender, and for small tensors


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

    monkeypatch.setattr(buffers, "pinned_memory", pinned)
    monkeypatch.setattr(gpu_sharing, "new_tensor", lambda shape, dtype, device, size: torch.zeros(shape, dtype=dtype))
    value = ValueOnGpus(value_pb2.Value(), Identity("alice", 0, 1), no_loans(), "bob")
    source = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    received = ReceiveBuffer.allocate(size)
    received.memory.copy_(source)
    for buffer in (bytes(source.numpy()), received):
        made = value.copy_of(buffer, (size,), torch.uint8, torch.device("cuda:0"))
        assert torch.equal(made, source)
    assert [memory.nbytes for memory in staged] == [size, size]


def test_copies_take_other_memory_if_no_more_can_be_pinned(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(buffers, "pinned_memory", refuse)
    assert bytes(copies.begin(2 * STAGED_BYTES).view[-2:]) == b"\2\2"
    source = torch.arange(3 * PART).to(torch.uint8)
    target = torch.zeros_like(source)
    pinned_arrivals.copy_up(source, target)
    assert torch.equal(source, target)

    def refuse_all(size: int) -> ReceiveBuffer:
        raise SerializationError("it does not fit into memory")

    monkeypatch.setattr(ReceiveBuffer, "allocate", refuse_all)
    with pytest.raises(SerializationError, match="does not fit"):
        copies.begin(5)


# ---------------------------------------------------------------- at the receiver

Submit = Callable[[Callable[[], None]], None]


def at_once(function: Callable[[], None]) -> None:
    function()


def value_of(*sizes: int, device: str = "cuda:0") -> value_pb2.Value:
    """A value with a tensor of bytes for each size."""
    return value_pb2.Value(
        gpus=[0],
        tensors=[
            value_pb2.Tensor(buffer=number, dtype=8, shape=[size], device=device) for number, size in enumerate(sizes)
        ],
        buffers=[value_pb2.Buffer(size=size) for size in sizes],
    )


class Receiver:
    """One worker that receives messages with tensors for its GPU.

    Args:
        num_parts: of the ring.
        part: the size of each.
        limit_bytes: see `CopyStream`.
        free_bytes: of the GPU.
    """

    def __init__(
        self,
        num_parts: int = 4,
        submit: Submit = at_once,
        part: int = PART,
        limit_bytes: int = 1 << 40,
        free_bytes: int = 1 << 40,
    ) -> None:
        self.num_parts = num_parts
        self.stream: Any = FakeCopyStream(CopyStream(GPU, limit_bytes).hold, free_bytes)
        memory = torch.empty(num_parts * part, dtype=torch.uint8)
        streams: dict[str, Any] = {"cuda:0": self.stream}
        self.ring = PinnedRing(memory, streams)
        self.submit = submit
        self.incoming = Incoming(ReceiveBuffer.allocate, lambda message: {}, AnnouncedBytes(), self._stage)
        self._numbers = iter(range(1, 1000))

    def _stage(self, message: WireMessage) -> Any:
        value = pinned_arrivals.value_for_gpus(message, lambda part: None)
        return {} if value is None else self.ring.buffers(value, message.large, self.submit)

    def announce(self, *sizes: int, value: value_pb2.Value | None = None) -> int:
        """Announces a call; returns the number of the transfer."""
        number = next(self._numbers)
        value = value_of(*sizes) if value is None else value
        message = CallMessage(number, "m:f", value=value, transfer=number, large=list(sizes))
        assert self.incoming.announce(message) is None
        return number

    def chunk(self, transfer: int, buffer: int, start: int, data: bytes) -> Delivery | None:
        return self.incoming.chunk(Chunk(transfer, buffer, start, memoryview(data)))

    def piece(self, index: int, count: int, data: bytes) -> Delivery | None:
        """The next bytes of a stripe of the first message."""
        size = len(data)
        places = self.incoming.stripe(1, index, count, size)
        assert places is not None
        for place in places:
            place[:], data = data[: len(place)], data[len(place) :]
        return self.incoming.stripe_placed(1, index, size)

    def receive(self, transfer: int, data: list[bytes], step: int) -> Delivery:
        """All of a message, in chunks of `step` bytes."""
        delivery = None
        for number, of_buffer in enumerate(data):
            for start in range(0, len(of_buffer), step):
                assert delivery is None
                delivery = self.chunk(transfer, number, start, of_buffer[start : start + step])
        assert delivery is not None
        return delivery

    def decode(self, delivery: Delivery) -> list[torch.Tensor]:
        """The tensors of a message."""
        message, buffers = delivery
        assert isinstance(message, CallMessage) and message.value is not None
        on_gpus = ValueOnGpus(message.value, Identity("alice", 0, 1), no_loans(), "bob")
        arrived: list[Any] = list(buffers)
        return rebuild_tensors(message.value, received_buffers(message.value, arrived), gpus=on_gpus)

    def is_free(self) -> bool:
        """Whether all parts of the ring are back, and none of their copies waits."""
        gc.collect()
        return self.ring.num_free == self.num_parts


def no_loans() -> BorrowedGpuMemory:
    return BorrowedGpuMemory(lambda: None, lambda: None)  # type: ignore[arg-type, return-value]


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    """The chunks that arrive are small, and tensors are for a GPU that this machine need not have."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pinned_arrivals, "STAGED_BYTES", PART)
        patched.setattr(pinned_arrivals, "STAGED_FROM_BYTES", PART)
        any_gpu(patched)
        yield


def any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ValueOnGpus, "device_of", lambda self, message, buffer: torch.device(message.device))


# ---------------------------------------------------------------- when chunks are copied


def test_each_chunk_is_copied_while_the_next_arrives() -> None:
    bob = Receiver()
    transfer, data = bob.announce(3 * PART + 7), os.urandom(3 * PART + 7)
    copied = []
    for start in range(0, len(data), PART // 2):
        delivery = bob.chunk(transfer, 0, start, data[start : start + PART // 2])
        copied.append(len(bob.stream.copies))
    assert copied == [0, 1, 1, 2, 2, 3, 4]  # the copies that have begun after each half of a chunk
    assert bob.stream.copies == [(0, PART, True), (PART, PART, True), (2 * PART, PART, True), (3 * PART, 7, True)]
    assert delivery is not None
    [tensor] = bob.decode(delivery)
    assert bytes(tensor.numpy()) == data and bob.is_free()


def test_the_decoding_thread_starts_the_copies_that_are_left() -> None:
    """It does not wait for the pool, whose threads may all be busy."""
    waiting: list[Callable[[], None]] = []
    bob = Receiver(submit=waiting.append)
    data = os.urandom(2 * PART)
    delivery = bob.receive(bob.announce(len(data)), [data], PART)
    assert len(waiting) == 2 and bob.stream.copies == []
    [tensor] = bob.decode(delivery)
    assert bytes(tensor.numpy()) == data
    for each in waiting:
        each()
    assert len(bob.stream.copies) == 2


def test_the_thread_that_decodes_waits_for_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    bob = Receiver()
    monkeypatch.setattr(bob.stream, "join", lambda copied, target: None)
    delivery = bob.receive(bob.announce(2 * PART), [os.urandom(2 * PART)], PART)
    bob.decode(delivery)
    assert bob.stream.num_waiting == 2


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 5 * PART), min_size=1, max_size=4).filter(lambda sizes: max(sizes) >= PART),
    st.integers(1, 16),
    st.integers(100, 3 * PART),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_payloads_in_stripes(sizes: list[int], count: int, step: int, num_parts: int, rng: random.Random) -> None:
    """Several connections carry one message, in any order; some buffers are too small for a copy of their own."""
    bob = Receiver(num_parts)
    data = [rng.randbytes(size) for size in sizes]
    bob.announce(*sizes)
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    stripes = [cursor for index in range(count) if (cursor := StripeCursor(ends, index, count)).left]
    delivery = None
    while stripes:
        sent = rng.choice(stripes)
        ranges = sent.take(step)
        piece = b"".join(data[number][start:end] for number, start, end in ranges)
        assert delivery is None
        delivery = bob.piece(sent.index, count, piece)
        stripes = [cursor for cursor in stripes if cursor.left]
        if rng.random() < 0.3:
            bob.stream.run(rng.randint(0, bob.stream.num_waiting))
    assert delivery is not None
    large = [isinstance(buffer, GpuReceiveBuffer) for buffer in delivery[1]]
    assert large == [size >= PART for size in sizes]
    for buffer, expected in zip(delivery[1], data, strict=True):
        found = buffer.on_gpu(GPU) if isinstance(buffer, GpuReceiveBuffer) else buffer.memory  # type: ignore[attr-defined]
        assert bytes(found.numpy()) == expected
    del buffer, delivery, found
    assert bob.is_free()


@settings(deadline=None)
@given(st.integers(PART, 9 * PART), st.integers(1, 3 * PART))
def test_chunks_of_any_size(size: int, step: int) -> None:
    """Chunks of other senders may lie in two parts of the ring."""
    bob = Receiver()
    data = os.urandom(size)
    [tensor] = bob.decode(bob.receive(bob.announce(size), [data], step))
    assert bytes(tensor.numpy()) == data


def test_chunks_of_this_version_lie_in_one_part() -> None:
    assert STAGED_BYTES % CHUNK_BYTES == 0


# ---------------------------------------------------------------- the memory


def test_a_part_is_used_again_when_its_chunk_was_copied() -> None:
    bob = Receiver(num_parts=2)
    data = os.urandom(6 * PART)
    transfer = bob.announce(len(data))
    for number in range(6):
        if number == 4:
            bob.stream.run(1)
        start = number * PART
        delivery = bob.chunk(transfer, 0, start, data[start : start + PART])
    pinned = [is_pinned for _, _, is_pinned in bob.stream.copies]
    assert pinned == [True, True, False, False, True, False]  # the GPU has copied one of them
    assert delivery is not None
    [tensor] = bob.decode(delivery)
    assert bytes(tensor.numpy()) == data
    assert bob.is_free() and bob.ring.take() is not None


def test_no_chunk_is_received_into_a_part_that_is_still_copied() -> None:
    bob = Receiver(num_parts=1)
    first, second = os.urandom(PART), os.urandom(PART)
    one = bob.receive(bob.announce(PART), [first], PART)
    other = bob.receive(bob.announce(PART), [second], PART)
    assert bytes(bob.decode(one)[0].numpy()) == first and bytes(bob.decode(other)[0].numpy()) == second
    bob.receive(bob.announce(PART), [second], PART)
    assert [is_pinned for _, _, is_pinned in bob.stream.copies] == [True, False, True]


@pytest.mark.parametrize("end", ["aborted", "closed"])
def test_what_does_not_arrive_leaves_nothing(end: str) -> None:
    bob = Receiver()
    transfer = bob.announce(4 * PART, 2 * PART)
    for start in range(0, 4 * PART, PART):
        bob.chunk(transfer, 0, start, os.urandom(PART))
    bob.stream.run()
    place = bob.incoming.place(transfer, 1, 0, PART // 2)
    assert place is not None
    if end == "aborted":
        bob.incoming.abort(transfer)
    else:
        bob.incoming.close()
    gc.collect()
    assert bob.ring.num_free == 3  # the reader still receives into the fourth
    assert bob.incoming.placed(transfer, 1, PART // 2) is None
    del place
    assert bob.is_free()


def test_a_value_that_is_not_decoded_leaves_nothing() -> None:
    bob = Receiver()
    delivery: Any = bob.receive(bob.announce(3 * PART), [os.urandom(3 * PART)], PART)
    del delivery
    assert bob.is_free()


def test_tensors_of_calls_that_wait_leave_the_gpu_to_others() -> None:
    bob = Receiver(limit_bytes=5 * PART)
    waiting: list[Any] = [bob.receive(bob.announce(2 * PART), [bytes(2 * PART)], PART) for _ in range(4)]
    of_gpu = [isinstance(buffer, GpuReceiveBuffer) for _, [buffer] in waiting]
    assert of_gpu == [True, True, False, False]
    decoded = waiting.pop(0)
    bob.decode(decoded)
    _, [buffer] = bob.receive(bob.announce(2 * PART), [bytes(2 * PART)], PART)
    assert isinstance(buffer, GpuReceiveBuffer)
    del buffer, waiting
    bob.incoming.abort(bob.announce(5 * PART))
    _, [buffer] = bob.receive(bob.announce(5 * PART), [bytes(5 * PART)], PART)
    assert isinstance(buffer, GpuReceiveBuffer)
    _, [other] = bob.receive(bob.announce(PART), [bytes(PART)], PART)
    assert not isinstance(other, GpuReceiveBuffer)


# ---------------------------------------------------------------- failures


def test_no_memory_on_the_gpu_is_the_error_of_its_message() -> None:
    bob = Receiver(free_bytes=3 * PART)
    delivery = bob.receive(bob.announce(4 * PART), [os.urandom(4 * PART)], PART)
    with pytest.raises(
        SerializationError, match=r"^a tensor of 4000 bytes arrived, where 3000 bytes are free"
    ) as raised:
        bob.decode(delivery)
    assert raised.value is not None and bob.stream.copies == []  # while the error lives
    del delivery
    assert bob.is_free()
    data = os.urandom(3 * PART)
    assert bytes(bob.decode(bob.receive(bob.announce(len(data)), [data], PART))[0].numpy()) == data


def test_a_gpu_that_fails() -> None:
    bob = Receiver()
    transfer = bob.announce(4 * PART)
    bob.chunk(transfer, 0, 0, os.urandom(PART))
    bob.stream.is_broken = True
    for start in (PART, 2 * PART):
        assert bob.chunk(transfer, 0, start, os.urandom(PART)) is None
    delivery = bob.chunk(transfer, 0, 3 * PART, os.urandom(PART))
    assert delivery is not None
    with pytest.raises(SerializationError, match=r"cannot be copied to cuda:0: .*unspecified launch failure") as raised:
        bob.decode(delivery)
    del delivery
    assert raised.value is not None and bob.is_free()


def test_memory_that_a_failed_gpu_may_still_read_is_not_used_again(caplog: pytest.LogCaptureFixture) -> None:
    bob = Receiver()
    bob.receive(bob.announce(4 * PART), [os.urandom(4 * PART)], PART)
    assert bob.is_free()
    bob.stream.is_broken = True
    assert bob.ring.take() is None and bob.ring.num_free == 0
    assert caplog.text.count("pinned memory is lost, because its GPU has failed") == 4
    bob.stream.is_broken = False  # messages for another GPU, for example
    data = os.urandom(PART)
    assert bytes(bob.decode(bob.receive(bob.announce(PART), [data], PART))[0].numpy()) == data


def test_no_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    bob = Receiver(num_parts=1)
    transfer = bob.announce(3 * PART)
    bob.chunk(transfer, 0, 0, os.urandom(PART))

    def refuse(size: int) -> ReceiveBuffer:
        raise SerializationError(f"a buffer of {size} bytes does not fit into memory")

    monkeypatch.setattr(ReceiveBuffer, "allocate", refuse)
    bob.chunk(transfer, 0, PART, os.urandom(PART))
    delivery = bob.chunk(transfer, 0, 2 * PART, os.urandom(PART))
    assert delivery is not None
    with pytest.raises(SerializationError, match="does not fit into memory"):
        bob.decode(delivery)
    bob.stream.run()
    del delivery
    assert bob.is_free()


def test_a_stripe_comes_on_one_connection() -> None:
    """If two had parts of it at the same time, memory of the GPU would count as written that is not."""
    bob = Receiver()
    bob.announce(2 * PART)
    assert bob.incoming.stripe(1, 0, 1, PART // 2) is not None
    with pytest.raises(ProtocolViolation, match="two connections bring stripe 0"):
        bob.incoming.stripe(1, 0, 1, PART // 2)


def test_no_memory_on_the_gpu_names_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 80))
    with pytest.raises(SerializationError, match="a tensor of 12 bytes arrived for cuda:0, where 5 of 80 bytes are"):
        pinned_arrivals.new_tensor((3,), torch.float32, GPU, 12)


# ---------------------------------------------------------------- which buffers


def tensor(buffer: int, device: str, shape: int = 2 * PART) -> value_pb2.Tensor:
    return value_pb2.Tensor(buffer=buffer, dtype=8, shape=[shape], device=device)


@pytest.mark.parametrize(
    ("tensors", "staged"),
    [
        ([tensor(0, "cuda:0"), tensor(1, ""), tensor(3, "cuda:0")], [0, 2]),
        ([tensor(0, "cuda:0"), tensor(0, "cuda:0"), tensor(1, "cuda:0")], [0, 1]),
        ([tensor(0, "cuda:0"), tensor(0, "")], []),
        ([tensor(0, "cuda:0"), tensor(0, "cuda:1")], []),
        ([tensor(0, "cuda:0"), tensor(0, "", shape=0), tensor(0, "meta")], [0]),
        ([tensor(0, "cuda:1"), tensor(1, "cuda"), tensor(3, "gpu of mine")], []),
        ([tensor(0, "cuda:0"), value_pb2.Tensor(shape=[5], sparse=value_pb2.Sparse(indices=1))], [0]),
        ([tensor(2, "cuda:0")], []),
        ([tensor(77, "cuda:0")], []),
    ],
    ids=["some", "shared", "on both", "on two", "without memory", "elsewhere", "sparse", "inside", "none"],
)
def test_buffers_that_lie_on_one_gpu(tensors: list[value_pb2.Tensor], staged: list[int]) -> None:
    """Buffer 2 is inside the message, and has no bytes of its own."""
    sizes = [2 * PART, 2 * PART, 0, 2 * PART]
    buffers = [value_pb2.Buffer(size=size) if size else value_pb2.Buffer(inline=b"x") for size in sizes]
    value = value_pb2.Value(gpus=[0], tensors=tensors, buffers=buffers)
    ring = Receiver().ring
    assert list(ring.buffers(value, [2 * PART] * 3, at_once)) == staged
    assert list(ring.buffers(value, [2 * PART] * 4, at_once)) == []  # damaged
    for buffer in buffers[:2]:
        buffer.size = PART - 1
    value = value_pb2.Value(gpus=[0], tensors=tensors, buffers=buffers)
    assert list(ring.buffers(value, [PART - 1, PART - 1, 2 * PART], at_once)) == [n for n in staged if n == 2]
    value = value_pb2.Value(gpus=[0], tensors=tensors, buffers=[value_pb2.Buffer(size=2 * PART)], body_buffer=1)
    assert list(ring.buffers(value, [2 * PART], at_once)) == []


@pytest.mark.parametrize(
    ("message", "has_value"),
    [
        (CallMessage(1, "m:f", value=value_of(PART)), True),
        (ReplyMessage(1, value=value_of(PART)), True),
        (rpc_pb2.Message(stream_item=rpc_pb2.StreamItem(value=value_of(PART))), True),
        (CallMessage(1, "m:f", value=value_pb2.Value()), False),
        (CallMessage(1, "m:f", body=b"x"), False),
        (rpc_pb2.Message(heartbeat=rpc_pb2.Heartbeat()), False),
        (ReplyMessage(1, failure=rpc_pb2.Failure(exception=value_of(PART))), True),
        (rpc_pb2.Message(stream_end=rpc_pb2.StreamEnd(failure=rpc_pb2.Failure(exception=value_of(PART)))), True),
        (rpc_pb2.Message(stream_end=rpc_pb2.StreamEnd(failure=rpc_pb2.Failure(text="x"))), False),
        (CompactPass(1, 1, b"for a GPU"), True),
        (CompactPass(1, 1, b"for the CPU"), False),
        (CompactPass(1, 1, b"damaged"), False),
    ],
    ids=[
        "call", "reply", "item", "without GPUs", "compact", "heartbeat", "exception", "exception of a stream", "text",
        "gradients", "on the CPU", "damaged",
    ],
)  # fmt: skip
def test_messages_with_tensors_for_gpus(message: WireMessage, has_value: bool) -> None:
    gradients = {b"for a GPU": value_of(PART), b"for the CPU": value_of(PART, device="")}
    gradients[b"for the CPU"].ClearField("gpus")
    for size in (PART - 1, PART):
        if isinstance(message, rpc_pb2.Message):
            del message.large[:]
            message.large.append(size)
        else:
            message.large = [size]
        found = pinned_arrivals.value_for_gpus(message, lambda part: gradients.get(part.body))
        assert (found is not None) == (has_value and size == PART)


def test_other_parts_of_a_value_are_not_read_from_a_gpu() -> None:
    bob = Receiver()
    _, [buffer] = bob.receive(bob.announce(PART), [os.urandom(PART)], PART)
    assert isinstance(buffer, GpuReceiveBuffer)
    with pytest.raises(SerializationError, match="not a tensor arrived in memory of cuda:0"):
        _ = buffer.view
    with pytest.raises(SerializationError, match="a tensor on the CPU arrived in memory of cuda:0"):
        _ = buffer.memory
    for device in ("cuda:1", "cpu"):
        with pytest.raises(SerializationError, match=f"a tensor for {device} arrived in memory of cuda:0"):
            buffer.on_gpu(torch.device(device))


SESSION: Any = SimpleNamespace(peer=Identity("alice", 0, 1))


def new_sharing(submit: Callable[..., None], takes_loans: bool = True) -> GpuSharing:
    nothing: Any = None
    return GpuSharing(
        Identity("bob", 1, 1),
        nothing,
        nothing,
        nothing,
        nothing,
        submit,
        lambda *part: None,
        takes_loans=takes_loans,
        lends=True,
    )


def test_the_ring_is_made_beside_the_thread_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may take long for it, so the first tensors arrive in other memory."""
    jobs: list[Callable[[], None]] = []
    ring = Receiver().ring
    monkeypatch.setattr(gpu_sharing, "pinned_ring", lambda: ring)
    bob = new_sharing(jobs.append)
    on_cpu = CallMessage(1, "m:f", value=value_pb2.Value(), large=[PART])
    on_gpu = CallMessage(1, "m:f", value=value_of(PART), large=[PART])
    assert bob.stage(SESSION, on_cpu) == {} and jobs == []
    assert bob.stage(SESSION, on_gpu) == {} and bob.stage(SESSION, on_gpu) == {} and len(jobs) == 1
    jobs.pop()()
    assert list(bob.stage(SESSION, on_gpu)) == [0] and bob.stage(SESSION, on_cpu) == {} and jobs == []
    assert new_sharing(jobs.append, takes_loans=False).stage(SESSION, on_gpu) == {} and jobs == []


def test_without_pinned_memory_tensors_arrive_in_other_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def refuse() -> None:
        raise RuntimeError("no memory can be pinned")

    on_gpu = CallMessage(1, "m:f", value=value_of(PART), large=[PART])
    for make in (refuse, lambda: None):
        monkeypatch.setattr(gpu_sharing, "pinned_ring", make)
        bob = new_sharing(at_once)
        assert [bob.stage(SESSION, on_gpu) for _ in range(3)] == [{}, {}, {}]
    assert caplog.text.count("for lack of pinned memory: no memory can be pinned") == 1


def test_chunks_that_arrive_when_rpc_has_ended_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Callable[[], None]) -> None:
        raise NotInitialized

    ring = Receiver().ring
    bob = new_sharing(refuse)
    bob.ring = ring
    incoming = Incoming(ReceiveBuffer.allocate, lambda message: {}, AnnouncedBytes(), partial(bob.stage, SESSION))
    assert incoming.announce(CallMessage(1, "m:f", value=value_of(PART), transfer=1, large=[PART])) is None
    assert incoming.chunk(Chunk(1, 0, 0, memoryview(bytes(PART)))) is not None


# ---------------------------------------------------------------- CUDA's part


def test_copies_have_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[Any, ...]] = []
    current = SimpleNamespace(name="current", wait_event=lambda event: log.append(("current", "waits for", event)))

    def new_stream(device: torch.device, priority: int) -> SimpleNamespace:
        log.append(("made", str(device), priority))
        return SimpleNamespace(name="of copies", record_event=lambda: f"event {len(log)}")

    @contextmanager
    def inside(stream: SimpleNamespace) -> Iterator[None]:
        log.append(("begin", stream.name))
        yield
        log.append(("end", stream.name))

    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(pinned_arrivals, "new_tensor", lambda *arguments: log.append(("allocate", *arguments)))
    monkeypatch.setattr(pinned_arrivals, "copy_up", lambda source, target: log.append(("through other memory", source)))
    stream = CopyStream(GPU, 0)
    assert log == []  # it takes memory of the GPU
    stream.allocate(5)
    target: Any = SimpleNamespace(
        copy_=lambda source, non_blocking: log.append(("copy", source, non_blocking)),
        record_stream=lambda stream: log.append(("kept for", stream.name)),
    )
    source: Any = "chunk"
    event = stream.copy(target, source, True)
    stream.copy(target, source, False)
    stream.join(event, target)
    assert log == [
        ("made", "cuda:0", -1),
        ("begin", "of copies"),
        ("allocate", (5,), torch.uint8, GPU, 5),
        ("end", "of copies"),
        ("begin", "of copies"),
        ("copy", "chunk", True),
        ("end", "of copies"),
        ("begin", "of copies"),
        ("through other memory", "chunk"),
        ("end", "of copies"),
        ("current", "waits for", "event 6"),
        ("kept for", "current"),
    ]


def test_a_machine_without_a_gpu_has_no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pinned_arrivals.pinned_ring.__wrapped__() is None


def test_a_forked_process_does_not_use_the_ring_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver does not map pinned memory in a child, which would end at the first byte that it receives there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pinned_arrivals.pinned_ring()
    assert pinned_arrivals.pinned_ring.cache_info().currsize == 1
    child = os.fork()
    if not child:
        os._exit(pinned_arrivals.pinned_ring.cache_info().currsize)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pinned_arrivals.pinned_ring.cache_clear()


def test_the_ring_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_arrivals, "STAGED_BYTES", STAGED_BYTES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 * STAGED_BYTES)
    )
    monkeypatch.setattr(pinned_arrivals, "pinned_memory", partial(torch.empty, dtype=torch.uint8))
    ring = pinned_arrivals.pinned_ring.__wrapped__()
    assert ring is not None and ring.num_free == 16
    for device in ("cuda:0", "cuda:1", "cuda:2"):
        value = value_of(STAGED_BYTES, device=device)
        assert bool(ring.buffers(value, [STAGED_BYTES], at_once)) == (device != "cuda:2")
        assert not ring.buffers(value_of(STAGED_BYTES + 1, device=device), [STAGED_BYTES + 1], at_once)


# ---------------------------------------------------------------- between agents


FAR_PART = 1_000_000

SIZE = 5 * FAR_PART + 3
"""Bytes of a tensor; so many that the connections carry it in stripes."""

MAP: dict[Any, Any] = {"cpu": "cuda:0"}


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Receiver:
    return far_receiver(monkeypatch)


def far_receiver(monkeypatch: pytest.MonkeyPatch) -> Receiver:
    """For workers between which tensors travel over TCP; the memory of their GPU is that of a stand-in."""
    monkeypatch.setattr(pinned_arrivals, "STAGED_BYTES", FAR_PART)
    monkeypatch.setattr(pinned_arrivals, "STAGED_FROM_BYTES", FAR_PART // 2)
    monkeypatch.setenv(CHANNELS_VARIABLE, "tcp")
    monkeypatch.setattr(ArrivedValue, "gpus", lambda self: ())
    monkeypatch.setattr(gpu_sharing, "new_tensor", lambda shape, dtype, device, size: torch.zeros(shape, dtype=dtype))
    monkeypatch.setattr(buffers, "pinned_memory", partial(torch.empty, dtype=torch.uint8))
    monkeypatch.setattr("rpcdist.rpc._api.call_functions.check_own_devices", lambda *arguments: None)
    receiver = Receiver(num_parts=3, part=FAR_PART)
    monkeypatch.setattr(gpu_sharing, "pinned_ring", lambda: receiver.ring)
    return receiver


def total(value: torch.Tensor) -> int:
    return int(value.sum(dtype=torch.int64))


def count_up(value: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    for number in range(count):
        yield value + number


@pytest.mark.parametrize("connections", ["0", "2", "16"])
@pytest.mark.parametrize("channel", ["tcp", "grpc"])
def test_calls_between_hosts(far: Receiver, monkeypatch: pytest.MonkeyPatch, connections: str, channel: str) -> None:
    monkeypatch.setenv(PAYLOAD_CONNECTIONS_VARIABLE, connections)
    monkeypatch.setenv(CHANNELS_VARIABLE, channel)
    value = torch.randint(0, 255, (SIZE,), dtype=torch.uint8)
    with agents_here("alice", "bob") as (alice, bob), use_agent(alice):
        assert rpc.rpc_sync("bob", total, (value,), device_map=MAP) == total(value)
        eventually(lambda: bob.gpus.ring is not None)
        for number in range(4):
            assert rpc.rpc_sync("bob", total, (value,), device_map=MAP) == total(value)
            assert len(far.stream.copies) == 6 * (number + 1)
        back: torch.Tensor = rpc.rpc_sync("bob", torch.add, (value, 1), device_map={"cuda:0": "cpu"})
        eventually(lambda: alice.gpus.ring is not None)
        back = rpc.rpc_sync("bob", torch.add, (value, 1), device_map={"cuda:0": "cpu"})
        assert torch.equal(back, value + 1)
        items = list(rpc.rpc_stream("bob", count_up, (value, 3), device_map={"cuda:0": "cpu"}))
        assert [total(item) for item in items] == [total(value + number) for number in range(3)]
        assert len(far.stream.copies) == 6 * 8
    eventually(far.is_free)


def fail(value: torch.Tensor) -> Iterator[torch.Tensor]:
    raise ValueError("with a tensor", value)


def count_and_fail(value: torch.Tensor) -> Iterator[torch.Tensor]:
    yield value[:3]
    raise ValueError("with a tensor", value)


def test_exceptions_between_hosts(far: Receiver) -> None:
    value = torch.randint(0, 255, (SIZE,), dtype=torch.uint8)
    back: dict[Any, Any] = {"cuda:0": "cpu"}
    with agents_here("alice", "bob") as (alice, _), use_agent(alice):
        for number in range(3):
            for function in (fail, count_and_fail):
                with pytest.raises(ValueError, match="with a tensor") as raised:
                    list(rpc.rpc_stream("bob", function, (value,), device_map=back))
                assert torch.equal(raised.value.args[1], value)
            if not number:
                eventually(lambda: alice.gpus.ring is not None)
                far.stream.copies.clear()
        assert len(far.stream.copies) == 6 * 4
        del raised
    eventually(far.is_free)


def test_tensors_that_are_smaller_than_a_chunk(far: Receiver) -> None:
    """Each is a chunk of its own, until the ring has no part left."""
    sizes = [FAR_PART // 2, 5, FAR_PART - 1, FAR_PART // 2 - 1, FAR_PART + 1]
    values = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
    with agents_here("alice", "bob") as (alice, bob), use_agent(alice):
        for _ in range(3):
            totals = rpc.rpc_sync("bob", totals_of, (values,), device_map=MAP)
            assert totals == [total(value) for value in values]
            eventually(lambda: bob.gpus.ring is not None)
    copied = Counter(size for _, size, _ in far.stream.copies)
    assert copied == dict.fromkeys((FAR_PART // 2, FAR_PART - 1, FAR_PART, 1), 2)
    eventually(far.is_free)


def totals_of(values: list[torch.Tensor]) -> list[int]:
    return [total(value) for value in values]


@pytest.fixture
def gradients_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients go to the GPU of the tensors whose gradients they are, which is not in their message."""

    class Route(DeviceRoute):
        """Gradients are on the GPU of their sender."""

        def __init__(self, *arguments: Any, back: bool = False) -> None:
            super().__init__(*arguments, back=back)
            self.moves_cpu |= back

    record = RecordedSend.__init__

    def record_on_gpu(self: RecordedSend, id: int, to: int, stamp: int, tensors: Any) -> None:
        record(self, id, to, stamp, tensors)
        self.devices = [GPU] * len(tensors)

    monkeypatch.setattr(gpu_sharing, "DeviceRoute", Route)
    monkeypatch.setattr(RecordedSend, "__init__", record_on_gpu)
    monkeypatch.setattr(Context, "to_original_devices", lambda self, message, gradients: gradients)
    monkeypatch.setattr(_pass_message, "compact_tensors", lambda *arguments, **options: None)


def backward_over_bob(number: int) -> None:
    """A gradient of two chunks goes to bob and another one back."""
    leaf = torch.full((FAR_PART // 2,), float(number), requires_grad=True)
    with autograd.context() as context:
        result: torch.Tensor = rpc.rpc_sync("bob", torch.square, (leaf,), device_map={})
        autograd.backward(context, [(result * result).sum()])
        assert autograd.get_gradients(context)[leaf].eq(4 * number**3).all()


@pytest.mark.parametrize("connections", ["0", "2"])
@pytest.mark.usefixtures("gradients_on_gpus")
def test_gradients_between_hosts(far: Receiver, monkeypatch: pytest.MonkeyPatch, connections: str) -> None:
    monkeypatch.setenv(PAYLOAD_CONNECTIONS_VARIABLE, connections)
    with agents_here("alice", "bob") as (alice, bob), use_agent(alice):
        for number in range(4):
            if number == 1:
                eventually(lambda: alice.gpus.ring is not None and bob.gpus.ring is not None)
                far.stream.copies.clear()
            backward_over_bob(number)
        assert [(start, count) for start, count, _ in far.stream.copies] == [(0, FAR_PART), (FAR_PART, FAR_PART)] * 6
    eventually(far.is_free)


@pytest.mark.parametrize("connections", ["0", "2"])
def test_copies_begin_while_the_rest_is_still_at_the_sender(
    far: Receiver, monkeypatch: pytest.MonkeyPatch, connections: str
) -> None:
    """No chunk begins to arrive before the copies have begun of those that were complete when the last one began."""
    monkeypatch.setenv(PAYLOAD_CONNECTIONS_VARIABLE, connections)
    issued, late = threading.Condition(), []
    copy, parts, arrived = far.stream.copy, GpuReceiveBuffer.parts, GpuReceiveBuffer.arrived
    got: Counter[tuple[GpuReceiveBuffer, int]] = Counter()
    begun: set[tuple[GpuReceiveBuffer, int]] = set()
    wanted = [0]

    def pieces(start: int, end: int) -> Iterator[tuple[int, int]]:
        for number in range(start // FAR_PART, (end - 1) // FAR_PART + 1):
            yield number, min(end, (number + 1) * FAR_PART) - max(start, number * FAR_PART)

    def noted_copy(*arguments: Any) -> Any:
        with issued:
            event = copy(*arguments)
            issued.notify_all()
        return event

    def late_parts(self: GpuReceiveBuffer, start: int, end: int) -> list[memoryview]:
        for number, _ in pieces(start, end):
            if (self, number) not in begun:
                begun.add((self, number))
                with issued:
                    if not issued.wait_for(lambda: len(far.stream.copies) >= wanted[0], LIMIT_S / 3):
                        late.append(number)
                wanted[0] = sum(size == min(FAR_PART, SIZE - n * FAR_PART) for (_, n), size in got.items())
        return parts(self, start, end)

    def noted_arrived(self: GpuReceiveBuffer, start: int, end: int) -> None:
        for number, size in pieces(start, end):
            got[self, number] += size
        arrived(self, start, end)

    monkeypatch.setattr(far.stream, "copy", noted_copy)
    monkeypatch.setattr(GpuReceiveBuffer, "parts", late_parts)
    monkeypatch.setattr(GpuReceiveBuffer, "arrived", noted_arrived)
    value = torch.randint(0, 255, (SIZE,), dtype=torch.uint8)
    with agents_here("alice", "bob") as (alice, bob), use_agent(alice):
        rpc.rpc_sync("bob", total, (value,), device_map=MAP)
        eventually(lambda: bob.gpus.ring is not None)
        for _ in range(3):
            assert rpc.rpc_sync("bob", total, (value,), device_map=MAP) == total(value)
    assert not late and len(far.stream.copies) == 18


def test_a_call_without_room_on_the_gpu_fails_alone(far: Receiver) -> None:
    value = torch.ones(SIZE, dtype=torch.uint8)
    with agents_here("alice", "bob") as (alice, bob), use_agent(alice):
        rpc.rpc_sync("bob", total, (value,), device_map=MAP)
        eventually(lambda: bob.gpus.ring is not None)
        far.stream.free_bytes = SIZE - 1
        session = bob.connections.sessions()[0]
        with pytest.raises(SerializationError, match=f"{SIZE} bytes arrived, where {SIZE - 1} bytes are free"):
            rpc.rpc_sync("bob", total, (value,), device_map=MAP)
        assert rpc.rpc_sync("bob", total, (value[:-1],), device_map=MAP) == SIZE - 1
        assert session.closed_reason is None
        eventually(far.is_free)


@contextmanager
def cut_at(session: Any, at: int) -> Iterator[None]:
    """The connection ends when this byte of a tensor is about to arrive."""
    parts = GpuReceiveBuffer.parts

    def break_off(self: GpuReceiveBuffer, start: int, end: int) -> list[memoryview]:
        if start >= at:
            session.close("the test cuts the cable")
        return parts(self, start, end)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GpuReceiveBuffer, "parts", break_off)
        yield


@pytest.mark.parametrize("at", [0, FAR_PART, 9 * FAR_PART // 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("connections", ["0", "2"])
def test_a_connection_that_is_lost_in_the_middle(
    far: Receiver, monkeypatch: pytest.MonkeyPatch, connections: str, at: int
) -> None:
    monkeypatch.setenv(PAYLOAD_CONNECTIONS_VARIABLE, connections)
    value = torch.ones(SIZE, dtype=torch.uint8)
    with agents_here("alice", "bob") as (alice, bob), use_agent(alice):
        for _ in range(3):
            rpc.rpc_sync("bob", total, (value,), device_map=MAP)
        eventually(lambda: bob.gpus.ring is not None)
        [session] = bob.connections.sessions()
        with cut_at(session, at), pytest.raises(WorkerLost):
            rpc.rpc_sync("bob", total, (value,), device_map=MAP)
        eventually(far.is_free)


@pytest.mark.parametrize("at", [0, FAR_PART], ids=["first", "last"])
@pytest.mark.parametrize("connections", ["0", "2"])
@pytest.mark.usefixtures("gradients_on_gpus")
def test_a_connection_that_is_lost_in_a_gradient(
    far: Receiver, monkeypatch: pytest.MonkeyPatch, connections: str, at: int
) -> None:
    monkeypatch.setenv(PAYLOAD_CONNECTIONS_VARIABLE, connections)
    with agents_here("alice", "bob") as (alice, bob), use_agent(alice):
        for number in range(2):
            backward_over_bob(number)
            eventually(lambda: alice.gpus.ring is not None and bob.gpus.ring is not None)
        [session] = bob.connections.sessions()
        with cut_at(session, at), pytest.raises(BackwardError, match="'bob' was lost"):
            backward_over_bob(2)
        eventually(far.is_free)


# ---------------------------------------------------------------- between processes


MANY = 60 * FAR_PART
"""Bytes of a tensor; more than the buffers of sockets hold."""

receivers: list[Receiver] = []
"""In a worker's process, the one of that worker."""


def receive_on_a_stand_in() -> None:
    patched = pytest.MonkeyPatch()
    any_gpu(patched)
    receivers.append(far_receiver(patched))


def send_ones(to: str) -> int:
    return rpc.rpc_sync(to, total, (torch.ones(MANY, dtype=torch.uint8),), device_map=MAP)


def has_ring() -> bool:
    return current_agent().gpus.ring is not None


def lost_workers() -> list[str]:
    return list(current_agent().directory.losses())


def is_free() -> bool:
    return receivers[0].is_free()


def stop_in_the_middle(pid: int) -> None:
    """Stops a process, once, when the second chunk of a tensor is about to arrive here."""
    parts = GpuReceiveBuffer.parts

    def stop(self: GpuReceiveBuffer, start: int, end: int) -> list[memoryview]:
        if start >= FAR_PART:
            GpuReceiveBuffer.parts = parts  # type: ignore[method-assign]
            os.kill(pid, signal.SIGSTOP)
        return parts(self, start, end)

    GpuReceiveBuffer.parts = stop  # type: ignore[method-assign]


@pytest.mark.multiproc
@pytest.mark.parametrize(("connections", "stopped"), [("0", "alice"), ("2", "alice"), ("2", "bob")])
def test_a_process_that_stops_in_the_middle(worker_pool: WorkerPool, connections: str, stopped: str) -> None:
    """The other one gives it up, its pinned memory is free then, and it can be reached again afterwards."""
    worker_pool.environment.update({PAYLOAD_CONNECTIONS_VARIABLE: connections, CHANNELS_VARIABLE: "tcp"})
    world = worker_pool.world("alice", "bob", peer_timeout=UNIT_S)
    alice, bob = world["alice"], world["bob"]
    for worker in world:
        worker.run(receive_on_a_stand_in)
    assert alice.run(send_ones, "bob") == MANY
    eventually(lambda: bob.run(has_ring))
    assert alice.run(send_ones, "bob") == MANY
    bob.run(stop_in_the_middle, world[stopped].pid)
    pending = alice.begin(send_ones, "bob")
    world[stopped].wait_until_stopped()
    if stopped == "alice":
        eventually(lambda: "alice" in bob.run(lost_workers))
        eventually(lambda: bob.run(is_free))
        alice.resume()
    error = pending.error(WorkerLost)
    if stopped == "bob":
        assert "no sign of life" in error.reason
        bob.resume()
    alice.run(victims.call_until_it_works, "bob")
    assert alice.run(send_ones, "bob") == MANY
    eventually(lambda: bob.run(is_free))
