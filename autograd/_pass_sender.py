"""Sends the messages of one worker's backward passes, and those about the end of its contexts.

A pass fails when one of its messages is lost. Contexts that hold little memory are released together, with a delay: a
message for each would cost a training loop more than the rest of a step's end.
"""

from __future__ import annotations

import logging
import threading
from _thread import RLock
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rpcdist._proto import autograd_pb2
from rpcdist.autograd._context import Context, SpanKind
from rpcdist.autograd._pass_events import PassOptions
from rpcdist.autograd._pass_message import PassMessage
from rpcdist.errors import RpcdistError, TransportError, WorkerLost
from rpcdist.rpc._calling.autograd_links import AutogradLinks
from rpcdist.rpc._peers.network import MessageSink
from rpcdist.rpc._values import LargeBuffer
from rpcdist.time_limits import CONTEXT_RELEASE_DELAY_S
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
    """The connections of one worker, as its backward passes use them. Any thread may call any method."""

    def __init__(self, host: AutogradLinks) -> None:
        self.id = host.identity.id
        self.plain_only = not host.allow_pickle
        self.standing_session = host.standing_session
        self.gpus = host.gpus
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


@dataclass(slots=True)
class _PassMessageObserver:
    """Fails a pass when one of its messages was not sent."""

    _sender: PassSender
    _owner: PassOwner
    _to: int

    @property
    def ended(self) -> bool:
        # A pass that has succeeded on this worker still owes the other workers its last messages.
        return self._owner.error is not None

    @property
    def kept_until(self) -> None:
        """None: another process in that place knows nothing of the pass."""
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


MAX_PUT_OFF = 256  # contexts


class Releases:
    """The contexts that are over here, and that neighbours have not been told about. Any thread may call any method."""

    def __init__(self, host: AutogradLinks) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._put_off: dict[int, list[int]] = {}  # contexts by neighbour
        self._count = 0
        self._is_timed = False

    def tell(self, workers: Iterable[int], context_id: int, at_once: bool) -> None:
        """Tells workers that a context is over; `at_once`: now, and not within `CONTEXT_RELEASE_DELAY_S`."""
        if at_once:
            for worker in workers:
                self._send(worker, [context_id])
            return
        with self._lock:
            for worker in workers:
                self._put_off.setdefault(worker, []).append(context_id)
            self._count += 1
            is_full = self._count >= MAX_PUT_OFF
            starts_timer = not self._is_timed and not is_full and bool(self._put_off)
            self._is_timed = self._is_timed or starts_timer
        if is_full:
            self.flush()
        elif starts_timer:
            self._host.call_later(CONTEXT_RELEASE_DELAY_S, self._time_is_over)

    def flush(self) -> None:
        """Sends what was put off."""
        with self._lock:
            due, self._put_off, self._count = self._put_off, {}, 0
        for worker, contexts in due.items():
            self._send(worker, contexts)

    def _time_is_over(self) -> None:
        with self._lock:
            self._is_timed = False
        self.flush()

    def _send(self, worker: int, contexts: list[int]) -> None:
        if not self._host.is_closed:
            message = autograd_pb2.AutogradMessage(context=contexts[0])
            message.release.SetInParent()
            message.release.others.extend(contexts[1:])
            self._host.send_control(worker, message)
