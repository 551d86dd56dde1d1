"""What a backward pass has to say to its neighbours, collected until it may wait: one message for each of them.

A worker that runs its part of a pass at once says with a single message that it takes part, what the gradients are, and
that it is done. Sending is only delayed, never reordered for one neighbour, and whoever is about to wait for others
sends first; so the others never wait for what lies here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from rpcdist.autograd._message_nodes import Gradients, RecordedRecv
from rpcdist.autograd._pass_events import SendBegin, SendDone, SendVerdicts
from rpcdist.time_limits import GRADIENT_HOLD_LIMIT_S

__all__ = ["MAX_HELD_BYTES", "MergedMessage", "Outbox"]

MAX_HELD_BYTES = 32 << 10


class MergedMessage:
    """All that one neighbour is told at a time.

    Attributes:
        begin: that this worker takes part; None if the neighbour knows.
        verdicts: by message of the graph.
        messages: the messages of the graph whose gradients it has.
        gradients: the gradients, in the same order.
        done: whether this worker and its children are done.
    """

    __slots__ = ("begin", "done", "gradients", "messages", "verdicts")

    def __init__(self) -> None:
        self.begin: SendBegin | None = None
        self.verdicts: dict[int, int | None] = {}
        self.messages: list[int] = []
        self.gradients: list[Gradients] = []
        self.done = False


class Outbox:
    """The merged messages of one pass that have not been sent. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: dict[int, MergedMessage] = {}
        self._held_bytes = 0
        self._held_since = 0.0

    def __bool__(self) -> bool:
        return bool(self._messages)

    def __repr__(self) -> str:
        return f"<Outbox for {sorted(self._messages)} [{self._held_bytes} bytes of gradients]>"

    def add(self, action: SendBegin | SendVerdicts | SendDone) -> None:
        with self._lock:
            message = self._message(action.to)
            if type(action) is SendBegin:
                message.begin = action
            elif type(action) is SendVerdicts:
                message.verdicts.update(action.verdicts)
            else:
                message.done = True

    def add_gradients(self, answers: Sequence[tuple[RecordedRecv, Gradients]]) -> bool:
        """Adds the gradients of recvs; returns whether it is time to send: so much is there, or for so long."""
        now = time.monotonic()
        with self._lock:
            if not self._held_since:
                self._held_since = now
            for recv, gradients in answers:
                message = self._message(recv.sender)
                message.messages.append(recv.id)
                # A hook may have returned one that requires grad.
                message.gradients.append(
                    [one if one is None or not one.requires_grad else one.detach() for one in gradients]
                )
                self._held_bytes += recv.size_bytes
            return self._held_bytes > MAX_HELD_BYTES or now - self._held_since > GRADIENT_HOLD_LIMIT_S

    def take(self) -> dict[int, MergedMessage]:
        """Removes and returns all messages, by receiver."""
        with self._lock:  # a thread that adds to a message does so before it is taken, or finds a new one
            taken, self._messages = self._messages, {}
            self._held_bytes, self._held_since = 0, 0.0
        return taken

    def _message(self, to: int) -> MergedMessage:
        message = self._messages.get(to)
        if message is None:
            message = self._messages[to] = MergedMessage()
        return message
