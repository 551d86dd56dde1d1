"""Sends the messages of one worker's backward passes, and fails a pass whose message is lost."""

from __future__ import annotations

import logging
from _thread import RLock
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from rpcdist._proto import autograd_pb2
from rpcdist.autograd._context import Context
from rpcdist.autograd._pass_events import PassOptions
from rpcdist.autograd._pass_message import PassMessage
from rpcdist.autograd._spans import SpanKind
from rpcdist.errors import RpcdistError, TransportError, WorkerLost
from rpcdist.rpc._autograd_hooks import AutogradHost
from rpcdist.rpc._peers.network import MessageSink
from rpcdist.rpc._values import LargeBuffer
from rpcdist.transport.wire_messages import CompactPass

logger = logging.getLogger(__name__)


class PassOwner(Protocol):
    """A backward pass, as its part and its messages see it. `BackwardPass` says what these are."""

    me: int
    context: Context
    parent: int | None
    options: PassOptions
    root_gradients: Sequence[torch.Tensor]
    spans: list[tuple[SpanKind, int, float, float]]
    lock: RLock
    error: BaseException | None
    is_finishing: bool

    @property
    def submit(self) -> Callable[..., object]: ...
    @property
    def name_of(self) -> Callable[[int], str]: ...
    def message_to(self, to: int) -> PassMessage: ...
    def follow_up_of(self, to: int) -> bytes | None: ...
    def timeout_us(self) -> int: ...
    def flush(self) -> None: ...
    def post(self, job: Callable[[], object]) -> None: ...
    def guarded(self, job: Callable[[], object]) -> object: ...
    def finish(self) -> None: ...
    def lost(self, worker_id: int, exc: Exception) -> None: ...
    def went_by(self, to: int, session: MessageSink) -> None: ...


class PassSender:
    """The connections of one worker, as its backward passes use them. Any thread may call any method.

    Args:
        host: the agent.
    """

    def __init__(self, host: AutogradHost) -> None:
        self.id = host.identity.id
        self.plain_only = not host.allow_pickle
        self.standing_session = host.standing_session
        self._host = host

    def name_of(self, worker_id: int) -> str:
        return self._host.worker_name_of(worker_id)

    def submit(self, function: Callable[..., object], *arguments: object) -> None:
        """Calls a function on a thread of the pool."""
        self._host.submit(function, *arguments)

    def send(
        self,
        to: int,
        body: autograd_pb2.AutogradMessage | CompactPass,
        owner: PassOwner | None = None,
        large: Sequence[LargeBuffer] = (),
    ) -> None:
        """Sends a message, at most once; if that fails, its owner fails."""
        observer = None if owner is None else _PassMessageObserver(self, owner, to)
        try:
            self._host.send(to, body, large, observer)
        except RpcdistError as exc:
            if owner is not None:
                owner.lost(to, self.lost(to, str(exc)))
            else:
                logger.debug("not sent to worker %s: %s", to, exc)

    def spread(self, workers: Iterable[int], body: autograd_pb2.AutogradMessage) -> None:
        """Sends a message to several workers, except this one; ignores workers that are lost."""
        for worker in set(workers) - {self.id}:
            self.send(worker, body)

    def lost(self, worker_id: int, reason: str, silence_s: float | None = None) -> WorkerLost:
        """The error for a message that a worker did not get."""
        if silence_s is None:
            silence_s = self._host.silence_s(worker_id)
        return WorkerLost(self.name_of(worker_id), "a backward pass", silence_s, reason)


class _PassMessageObserver:
    """Fails a pass when one of its messages was not sent."""

    __slots__ = ("_owner", "_sender", "_to")

    def __init__(self, sender: PassSender, owner: PassOwner, to: int) -> None:
        self._sender = sender
        self._owner = owner
        self._to = to

    @property
    def ended(self) -> bool:
        # A pass that has succeeded on this worker still owes the other workers its last messages.
        return self._owner.error is not None

    @property
    def kept_until(self) -> None:
        """Another process knows nothing of the pass."""
        return None

    def on_sent(self, session: MessageSink, transfer: int) -> None:
        self._owner.went_by(self._to, session)
        if session.closed_reason is not None:
            self._fail(self._sender.lost(self._to, session.closed_reason))

    def on_not_sent(self, silence_s: float, reason: str, is_lost: bool = True) -> None:
        lost = self._sender.lost(self._to, reason, silence_s)
        self._fail(lost if is_lost else TransportError(f"{lost.what} was not sent: {reason}"))

    def _fail(self, exc: TransportError) -> None:
        self._sender.submit(self._owner.lost, self._to, exc)  # observers are called on the I/O loop
