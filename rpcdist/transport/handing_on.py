"""Messages that were read, handed to the owner of their session: on the thread that read them, or on the I/O loop.

[Note: order] One thread at a time reads: the loop, or one that leads. A leader hands messages on itself if the handler
takes them anywhere, and leaves the others to the loop. Until the loop has handled those, all that comes after them goes
the same way, whoever reads it. So the handler gets everything in order.

Payload connections have readers of their own, whose messages have no place in that order. The lock sees to it that the
handler gets one message at a time nevertheless.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any, Protocol

from rpcdist._proto import rpc_pb2
from rpcdist.time_limits import LEADER_LEAVE_LIMIT_S
from rpcdist.transport._framing.incoming import Delivery
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.wire_messages import WireMessage


class MessageHandler(Protocol):
    """See `SessionHandler`."""

    def takes_anywhere(self, message: WireMessage) -> bool: ...

    def on_messages(self, session: Any, messages: list[tuple[Any, list[Any]]]) -> None: ...


class HandingOn:
    """One per session.

    Args:
        io: the I/O loop.
        session: whose messages they are.
        handler: gets them.
        failed: told on the loop what the handler raised there.
    """

    def __init__(
        self, io: IoLoop, session: object, handler: MessageHandler, failed: Callable[[Exception], object]
    ) -> None:
        self._io = io
        self._session = session
        self._handler = handler
        self._failed = failed
        self._one_at_a_time = threading.Lock()
        self._left_to_loop: deque[list[Delivery]] = deque()
        self._has_failed = False
        self._has_ended = False

    def __repr__(self) -> str:
        return f"<HandingOn [{len(self._left_to_loop)} left to the loop]>"

    def hand_on(self, messages: list[Delivery]) -> None:
        """Takes messages that whoever reads has read; [Note: order]."""
        if not self._left_to_loop:
            for message, _ in messages:
                # Compact ones may be taken anywhere, always.
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
        # In a context of its own: that of this thread may be one of the user's, with a deadline.
        Context().run(self._io.call_soon, self._hand_on_the_rest)

    def _hand_on_the_rest(self) -> None:
        """On the loop; one entry for each time it is called."""
        try:
            if not (self._has_failed or self._has_ended):
                with self._one_at_a_time:
                    self._handler.on_messages(self._session, self._left_to_loop[0])
        except Exception as exc:
            self._has_failed = True  # what comes after it would be handled out of order: none of it is
            self._failed(exc)
        self._left_to_loop.popleft()  # not before: whoever reads meanwhile must queue behind it

    def end(self) -> None:
        """The session has ended: nothing is handed on from now on, nor any more; on the loop.

        Waits for the reader of a payload connection that is about it, for `LEADER_LEAVE_LIMIT_S` at most.
        """
        self._has_ended = True
        if self._one_at_a_time.acquire(timeout=LEADER_LEAVE_LIMIT_S):
            self._one_at_a_time.release()
