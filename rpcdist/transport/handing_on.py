"""Hands received messages to the session's handler: on the thread that read them, or on the I/O loop.

[Note: order] One thread at a time reads the session's connection: the loop or a leader. A leader calls the handler
itself for messages that the handler takes on any thread, and leaves other messages to the loop. Until the loop has
handled those, all later messages also go through the loop. So the handler gets all messages in order.

The readers of payload connections deliver messages outside that order. A lock still gives the handler one message at a
time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any, Protocol

from rpcdist._proto import rpc_pb2
from rpcdist.ids import Identity
from rpcdist.time_limits import LEAVE_LIMIT_S
from rpcdist.transport._framing.incoming import Delivery, IncomingBuffer
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.wire_messages import WireMessage


class SessionHandler(Protocol):
    """The owner of a session. It must not block or run user code.

    Its methods are called on the I/O loop, except `on_messages`: a leading thread may call it with compact messages and
    with messages that the handler `takes_anywhere`. It is called on one thread at a time, in the order of the messages.
    """

    def on_opened(self, session: Any) -> None:
        """A peer opened this session. Not called for sessions that this process opens."""

    def on_messages(self, session: Any, messages: list[tuple[Any, list[IncomingBuffer]]]) -> None:
        """Complete messages (`WireMessage`) arrived, in the order in which they became complete."""

    def takes_anywhere(self, message: WireMessage) -> bool:
        """Whether `on_messages` may be called with this message on a thread other than the I/O loop's."""

    def on_closed(self, session: Any, reason: str) -> None:
        """The session ended; called once. Messages that are queued and not written are lost."""

    def allocate(self, size_bytes: int) -> IncomingBuffer:
        """Allocates memory for a large buffer that was announced."""

    def borrow(self, view: memoryview) -> IncomingBuffer:
        """Makes a buffer of memory that the peer lends; `view` is writable and keeps the memory alive."""

    @property
    def shares_payloads(self) -> bool:
        """Whether large buffers may use shared memory, in both directions."""

    def announced_by(self, peer: Identity) -> AnnouncedBytes:
        """The counter of the bytes that this peer has announced on all its sessions and not sent."""


class HandingOn:
    """One per session.

    Args:
        io: the I/O loop.
        session: the session, which is passed to the handler.
        handler: gets the messages.
        failed: called on the loop with an error that the handler raised there.
    """

    def __init__(
        self, io: IoLoop, session: object, handler: SessionHandler, failed: Callable[[Exception], object]
    ) -> None:
        self._io = io
        self._session = session
        self._handler = handler
        self._failed = failed
        self._one_at_a_time = threading.Lock()
        self._left_to_loop: deque[list[Delivery]] = deque()
        self._has_failed = False
        self._has_ended = False

    def hand_on(self, messages: list[Delivery]) -> None:
        """Takes messages on the thread that read them. [Note: order]"""
        if not self._left_to_loop:
            for message, _ in messages:
                # Compact messages may be handled on any thread.
                if message.__class__ is rpc_pb2.Message and not self._handler.takes_anywhere(message):
                    may_be_here = self._io.on_thread()
                    break
            else:
                may_be_here = True
            if may_be_here:
                with self._one_at_a_time:
                    if not self._has_ended:
                        self._handler.on_messages(self._session, messages)
                return
        self._left_to_loop.append(messages)
        # In a new context: this thread's context may be a user's, with a deadline.
        Context().run(self._io.call_soon, self._hand_on_the_rest)

    def _hand_on_the_rest(self) -> None:
        """Handles one entry of the queue, on the loop."""
        try:
            if not (self._has_failed or self._has_ended):
                with self._one_at_a_time:
                    self._handler.on_messages(self._session, self._left_to_loop[0])
        except Exception as exc:
            self._has_failed = True  # later messages would be handled out of order, so none is handled
            self._failed(exc)
        self._left_to_loop.popleft()  # after the call: messages read meanwhile must queue behind it

    def end(self) -> None:
        """Stops calling the handler, since the session has ended; on the loop.

        If the reader of a payload connection is in the handler, waits for it, at most `LEAVE_LIMIT_S`.
        """
        self._has_ended = True
        if self._one_at_a_time.acquire(timeout=LEAVE_LIMIT_S):
            self._one_at_a_time.release()
