"""How often the bytes of a payload are copied between two tensors; docs/architecture.md has the sums.

The tests count new memory on Python's heap: a copy needs a place, and each step below makes one at most.
"""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch
from chunk_envelopes import chunk_of, messages_of
from transport_nodes import is_local

from rpcdist._proto import value_pb2
from rpcdist.freed_memory import stock_small_blocks
from rpcdist.rpc._values.buffers import ReceiveBuffer
from rpcdist.rpc._values.codec import decode, encode_into
from rpcdist.transport import Node, Session, acquire_node
from rpcdist.transport._framing.frames import CHUNK_BYTES
from rpcdist.transport._framing.incoming import Delivery, Incoming
from rpcdist.transport._framing.outgoing import Outgoing
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.session import NullHandler
from rpcdist.transport.wire_messages import ReplyMessage

T = TypeVar("T")
MIB = 1 << 20
SIZE_BYTES = 64 * MIB
SMALL = 64 * 1024  # objects around the payload: headers, views, protobuf messages
LIMIT_S = 60.0


@pytest.fixture
def heap() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def heap_growth(step: Callable[[], T]) -> tuple[T, int]:
    """The result of the step, and the bytes that it took from the heap at its peak."""
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    result = step()
    return result, tracemalloc.get_traced_memory()[1] - before


def tensor() -> torch.Tensor:
    return torch.arange(SIZE_BYTES // 4, dtype=torch.int32)


def message_of(value: torch.Tensor) -> tuple[ReplyMessage, list[LargeBuffer]]:
    encoded = value_pb2.Value()
    large = encode_into(encoded, value)
    return ReplyMessage(1, value=encoded), large


@pytest.mark.usefixtures("heap")
def test_sender_copies_once() -> None:
    """Encoding copies nothing; a chunk is copied when it is written, into the bytes that gRPC is given."""
    payload, outgoing = tensor(), Outgoing()

    def queue() -> None:
        message, large = message_of(payload)
        outgoing.add(message, large)

    _, grown = heap_growth(queue)
    assert grown < SMALL
    envelope, _ = heap_growth(outgoing.next_envelope)
    assert envelope is not None and len(envelope) < SMALL, "the message goes first, without its payload"
    num_chunks = 0
    while outgoing:
        envelope, grown = heap_growth(outgoing.next_envelope)
        assert envelope is not None
        assert CHUNK_BYTES <= len(envelope) < CHUNK_BYTES + SMALL
        assert grown < CHUNK_BYTES + SMALL, "one chunk, one copy"
        outgoing.grant(len(envelope))
        num_chunks += 1
    assert num_chunks == SIZE_BYTES // CHUNK_BYTES


@pytest.mark.usefixtures("heap")
def test_receiver_copies_once() -> None:
    """A chunk is read in place, and written to the memory that the tensor will have."""
    stock_small_blocks()  # else this thread would make its stock with the first buffer
    outgoing, incoming = Outgoing(), Incoming(ReceiveBuffer.allocate)
    message, large = message_of(tensor())
    outgoing.add(message, large)
    first = outgoing.next_envelope()
    assert first is not None
    delivery = incoming.announce(messages_of(first)[0])
    while outgoing:
        envelope = outgoing.next_envelope()
        assert envelope is not None and delivery is None
        outgoing.grant(len(envelope))
        delivery, grown = heap_growth(lambda data=envelope: receive(incoming, data))  # type: ignore[misc]
        assert grown < SMALL, "no new memory: the one copy goes to the buffer"
    assert delivery is not None
    received, buffers = delivery
    assert isinstance(received, ReplyMessage) and received.value is not None
    value = received.value
    result, grown = heap_growth(lambda: decode(value, buffers))  # type: ignore[arg-type]
    assert grown < SMALL
    assert isinstance(result, torch.Tensor) and isinstance(buffers[0], ReceiveBuffer)
    assert result.data_ptr() == buffers[0].memory.data_ptr()
    assert torch.equal(result, tensor())


def receive(incoming: Incoming, envelope: bytes) -> Delivery | None:
    chunk = chunk_of(envelope)
    assert chunk is not None
    assert chunk.data.obj is envelope, "the chunk is a view of what gRPC returned"
    return incoming.chunk(chunk)


class Echo(NullHandler):
    """Both ends of a session of a process with itself: the serving end sends each value back."""

    limit_bytes = None

    def __init__(self) -> None:
        self.done = threading.Event()
        self.result: object = None

    def on_opened(self, session: Session) -> None:
        assert not session.opened_by_me

    def on_messages(self, session: Session, messages: list[tuple[ReplyMessage, list[Any]]]) -> None:
        [(message, buffers)] = messages
        assert message.value is not None
        value = decode(message.value, buffers)
        if session.opened_by_me:
            self.result = value
            self.done.set()
        else:
            assert isinstance(value, torch.Tensor)
            session.send(*message_of(value))

    def on_closed(self, session: Session, reason: str) -> None:
        self.done.set()

    def allocate(self, size_bytes: int) -> ReceiveBuffer:
        return ReceiveBuffer.allocate(size_bytes)


@pytest.fixture(params=["grpc", "auto"], ids=["grpc", "local channel"])
def node(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv("RPCDIST_CHANNELS", request.param)
    node = acquire_node()
    yield node
    node.release()


@pytest.mark.usefixtures("heap")
def test_echo_holds_a_few_chunks(node: Node) -> None:
    """64 MiB there and back through a channel, in one process: the heap never holds more than some chunks of it.

    On the local channel it holds less than one: nothing is copied but by the kernel.
    """
    echo = Echo()
    node.handle_role("echo", echo)
    address = node.serve("127.0.0.1", 0)
    link = node.run(node.connect(address, "echo", LIMIT_S, handler=echo), LIMIT_S)
    payload = tensor()

    def there_and_back() -> bool:
        link.session.send(*message_of(payload))
        return echo.done.wait(LIMIT_S)

    done, grown = heap_growth(there_and_back)
    assert done and isinstance(echo.result, torch.Tensor), link.session.closed_reason
    assert torch.equal(echo.result, payload)
    assert echo.result.data_ptr() != payload.data_ptr()
    assert grown < (CHUNK_BYTES if is_local(link) else 8 * CHUNK_BYTES)
