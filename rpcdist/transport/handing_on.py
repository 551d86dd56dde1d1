"""Messages that were read, handed to the owner of their session: on the thread that read them, or on the I/O loop.

[Note: order] One thread at a time reads: the loop, or one that leads. A leader hands messages on itself if the handler
takes them anywhere, and leaves the others to the loop. Until the loop has handled those, all that comes after them goes
the same way, whoever reads it. So the handler gets everything in order, and one message at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import Context

from rpcdist.transport._framing.incoming import Delivery
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.messages import WireMessage

__all__ = ["HandingOn"]


class HandingOn:
    """One per session.

    Args:
        io: the I/O loop.
        takes_anywhere: whether the handler may get a message on any thread.
        handle: gives the handler messages that arrived together; called on the loop, or by whoever reads.
        failed: told on the loop what `handle` raised there.
    """

    def __init__(
        self,
        io: IoLoop,
        takes_anywhere: Callable[[WireMessage], bool],
        handle: Callable[[list[Delivery]], object],
        failed: Callable[[Exception], object],
    ) -> None:
        self._io = io
        self._takes_anywhere = takes_anywhere
        self._handle = handle
        self._failed = failed
        self._left_to_loop: deque[list[Delivery]] = deque()

    def __repr__(self) -> str:
        return f"<HandingOn [{len(self._left_to_loop)} left to the loop]>"

    def hand_on(self, messages: list[Delivery]) -> None:
        """Takes messages that whoever reads has read; [Note: order]."""
        takes_anywhere = self._takes_anywhere
        if not self._left_to_loop and (
            all([takes_anywhere(message) for message, _ in messages]) or self._io.on_thread()
        ):
            self._handle(messages)
        else:
            self._left_to_loop.append(messages)
            # In a context of its own: that of this thread may be one of the user's, with a deadline.
            Context().run(self._io.call_soon, self._hand_on_the_rest)

    def _hand_on_the_rest(self) -> None:
        """On the loop; one entry for each time it is called."""
        try:
            self._handle(self._left_to_loop[0])
        except Exception as exc:
            self._failed(exc)
        self._left_to_loop.popleft()  # not before: whoever reads meanwhile must queue behind it
