"""What a session needs of a channel: whole envelopes in both directions, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from rpcdist.inspection import ChannelFacts
from rpcdist.transport._channels.leading import Sleep
from rpcdist.transport._framing.frames import ChunkHead
from rpcdist.transport.shared_memory import Segment


class Channel(Protocol):
    """Carries the envelopes of one session; used on the I/O loop.

    Attributes:
        facts: its kind, and what has passed through it; the session adds the rest.
    """

    @property
    def facts(self) -> ChannelFacts: ...

    async def write(self, data: bytes) -> None:
        """Returns when the channel can take more; raises `TransportError` when it broke."""

    def abort(self, reason: str) -> None:
        """Ends the channel at once; pending reads and writes fail. Idempotent."""


class ReadChannel(Channel, Protocol):
    """A channel that a task reads."""

    async def read(self) -> bytes | None:
        """The next envelope; None when the peer closed the channel. Raises `TransportError` when it broke."""


class FrameReceiver(Protocol):
    """Takes what a `DirectChannel` brings, on the I/O loop or on a thread that leads, never on two threads at once.

    An exception that it raises ends the channel.
    """

    def receive(self, data: bytes | bytearray) -> None:
        """An envelope arrived."""

    def place(self, head: ChunkHead) -> memoryview | None:
        """Where the bytes of a chunk belong, so that they can be received there; None: nobody wants them any more."""

    def placed(self, head: ChunkHead, num_bytes: int) -> None:
        """The bytes are there; `num_bytes` is the size of their whole envelope."""


@runtime_checkable
class DirectChannel(Channel, Protocol):
    """A channel that any thread may write to, and that calls a receiver instead of being read.

    Attributes:
        is_free: whether `put` may be called.
        passes_descriptors: whether `pass_segment` and `take_descriptor` may be called.
    """

    is_free: bool
    passes_descriptors: bool

    @property
    def traffic(self) -> tuple[int, int]:
        """The bytes sent and received so far; any thread."""

    @property
    def shortest_round_trip_s(self) -> float | None:
        """The shortest that the kernel has measured on it; None where it measures none."""

    async def deliver(self, receiver: FrameReceiver) -> None:
        """Runs until the channel ends, and raises why."""

    def lead(
        self,
        is_waiting: Callable[[], bool],
        timeout_s: float | None,
        sleep: Sleep | None = None,
        first: Callable[[], object] | None = None,
    ) -> bool:
        """Has this thread deliver what arrives while it waits, unless another one does; see `Lead.lead`."""

    def ring(self) -> None:
        """Has a thread that leads look whether it still waits; any thread."""

    def fail(self, error: Exception) -> None:
        """Ends the reading, and with it `deliver`, which raises the error; on the I/O loop."""

    @property
    def has_unread(self) -> bool:
        """Whether something has arrived that nobody has read yet."""

    def read_out(self) -> Exception | None:
        """Delivers at once all that has arrived; returns why the channel has ended, or None."""

    def put(self, head: bytes, payload: memoryview | None = None) -> None:
        """Sends an envelope as far as that is possible without waiting; one thread at a time."""

    async def write_parts(self, head: bytes, payload: memoryview | None = None) -> None:
        """Like `Channel.write`, for an envelope whose last bytes lie in memory of their own."""

    async def flush(self) -> None:
        """Writes what `put` has left."""

    async def pass_segment(self, head: bytes, segment: Segment) -> None:
        """As `write_parts`, of an envelope that takes the descriptor of shared memory along."""

    def take_descriptor(self) -> int | None:
        """The next descriptor that came, which the caller closes; None if this process had no room for it.

        Raises:
            ProtocolViolation: none came.
        """
