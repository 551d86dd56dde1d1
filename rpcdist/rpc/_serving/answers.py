"""Sends the outcomes of calls: a result, the beginning of a stream, the creation of a value, or a failure."""

from __future__ import annotations

import logging
import time
from _thread import get_ident
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

from rpcdist._proto import rpc_pb2
from rpcdist.errors import Cancelled, DeadlineExceeded, described
from rpcdist.ids import Identity
from rpcdist.rpc._executors.deferred_replies import DeferredReply
from rpcdist.rpc._marshal.marshal import Marshal, Share
from rpcdist.rpc._peers.network import AnySession, Lifetime
from rpcdist.rpc._rref.messages import RRefId
from rpcdist.rpc._rref.shell import RRefShell
from rpcdist.rpc._serving.active_calls import NAMES_OF_METHOD_CALLS, ActiveCall, ActiveCalls
from rpcdist.rpc._serving.producers import is_generator
from rpcdist.rpc._values.buffers import takes_long
from rpcdist.rpc._values.failures import exception_of
from rpcdist.time_limits import LOG_PERIOD_S
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.wire_messages import ReplyMessage

logger = logging.getLogger(__name__)

MAX_LOGGED_CHARS: Final = 200  # of a handler's error (its caller gets all), and of the function's name
MAX_LOGGED_CALLS: Final = 1000
"""Failures of one peer's calls that are logged as warnings within `LOG_PERIOD_S`: a peer must not fill a disk."""


@dataclass(eq=False, repr=False)
class Answers:
    """Answers the calls of an agent; any thread.

    Args:
        calls: the unfinished calls; an answered call is removed.
        produce: begins the stream of a generator that a call returned.
        on_born: called with each object that a `remote(serial=True)` has made, before others can reach it.
        lifetime: once it has ended, failures are not sent: the end of the process explains more than they do.
    """

    _marshal: Marshal
    _rrefs: RRefShell
    _calls: ActiveCalls
    _produce: Callable[[ActiveCall, Generator[Any, Any, Any] | AsyncGenerator[Any, Any]], None]
    _on_born: Callable[[RRefId, object], None]
    _me: Identity
    _lifetime: Lifetime
    # By thread that is storing a result: the answers to fetches that waited for it, which the thread's job returns.
    _fetches: dict[int, DeferredReply] = field(default_factory=dict)
    # By account: start of the period, and count.
    _logged: dict[AnnouncedBytes, tuple[float, int]] = field(default_factory=dict)

    def finish(self, active: ActiveCall, result: object, is_last: bool = False) -> DeferredReply | None:
        """Answers a call. If the answer cannot be made or sent, the error is sent as the call's failure.

        Args:
            is_last: whether this pool thread has nothing else to do for the call.

        Returns:
            The answer, if `is_last`: the pool thread sends it when everything that the function has used is freed, and
            may wait for the next call on the same connection. None if nothing is left to send.
        """
        try:
            if result is not None and is_generator(result) and active.entry is None:
                if active.deadline.expired():  # the caller has timed out: it will never take an item, nor cancel
                    raise DeadlineExceeded(
                        "RPC ran for more than set timeout: the deadline passed before the stream began"
                    )
                self._produce(active, result)
                return None
            large: Sequence[LargeBuffer] = ()
            forks: Sequence[Share] = ()
            if active.entry is not None:
                return self._keep(active, active.entry, result, is_last)
            if result is None:  # as most functions return: a reply without a result
                message = ReplyMessage(active.id)
            else:
                message, large, forks = self._encode(active, result)
        except BaseException as exc:
            self.fail(active, exc)
            return None
        answer = partial(self._answer, active, message, large, forks)
        if is_last:
            return DeferredReply([answer], active.session, bool(large) and takes_long(large))
        fetches = self._fetches.get(get_ident()) if active.is_fetch else None
        if fetches is not None and fetches.session is active.session:
            fetches.answers.append(answer)
            if takes_long(large):
                self._fetches[get_ident()] = fetches._replace(is_long=True)
        else:
            answer()
        return None

    def _keep(self, active: ActiveCall, entry: RRefId, result: object, is_last: bool) -> DeferredReply | None:
        """Stores the result of a `remote()`. Fetches of the same worker that waited for it are answered together."""
        if active.is_serial:
            self._on_born(entry, result)
        if not is_last:
            self._rrefs.set_value(entry, result)
            self._answer(active, *self._created(active, result))
            return None
        self._fetches[get_ident()] = DeferredReply([], active.session)
        try:
            try:
                self._rrefs.set_value(entry, result)
            finally:
                fetches = self._fetches.pop(get_ident())
            message, large, forks = self._created(active, result)
        except BaseException:
            fetches.send()
            raise
        fetches.answers.insert(0, partial(self._answer, active, message, large, forks))
        return fetches._replace(is_long=True) if large and takes_long(large) else fetches

    def _created(
        self, active: ActiveCall, result: object
    ) -> tuple[ReplyMessage, Sequence[LargeBuffer], Sequence[Share]]:
        """The reply to a `remote()`, with the result if it is wanted and can be sent; else its caller fetches it."""
        if active.wants_value and not is_generator(result):
            try:
                if result is not None:
                    reply, large, forks = self._encode(active, result)
                    self._marshal.check_room(active.session, reply.size_bytes, large, forks)
                    return reply, large, forks
                return ReplyMessage(active.id, created=True, has_value=True), (), ()
            except Exception as exc:  # the value exists nevertheless; a fetch gets the error
                logger.debug("the result of %s is not sent with the reply: %r", active.what, exc)
        return ReplyMessage(active.id, created=True), (), ()

    def _answer(
        self, active: ActiveCall, reply: ReplyMessage, large: Sequence[LargeBuffer], forks: Sequence[Share]
    ) -> None:
        try:
            if (large or not reply.is_small) and not active.entry:
                self._marshal.check_room(active.session, reply.size_bytes, large, forks)
            active.is_answered = True
            self._marshal.send(active.session, reply, large, forks)
        except BaseException as exc:
            self.fail(active, exc)
            return
        self._calls.remove(active)

    def _encode(
        self, active: ActiveCall, result: object
    ) -> tuple[ReplyMessage, Sequence[LargeBuffer], Sequence[Share]]:
        back = None if active.entry is not None else active.back  # a later fetch of the value ignores it, too
        written = self._marshal.write(result, active.session.peer.id, active.session, back)
        reply = ReplyMessage(active.id)
        reply.created = reply.has_value = active.entry is not None
        try:
            large, forks = self._marshal.put(reply, written, active.autograd)
        except Exception as exc:
            self._marshal.explain(exc, f"as the result of {active.what}", result=result)
            raise
        return reply, large, forks

    def fail(self, active: ActiveCall, exc: BaseException) -> None:
        outcome = "not answered"
        try:
            if issubclass(type(exc), Cancelled) and active.session.closed_reason is not None and active.entry is None:
                if active.arguments is not None:
                    active.arguments.discard()
                return  # no caller is left: after a flood, encoding this for each call took seconds
            outcome = self._send_failure(active, exc)
        finally:
            # Not before: a shutdown that waits for this may then close the connections.
            self._calls.remove(active, outcome)

    def _send_failure(self, active: ActiveCall, exc: BaseException) -> str:
        """Sends an exception; returns a short description of it."""
        failure, large, forks = self._marshal.failure(exc, active.session, active.back)
        try:
            if active.arguments is not None:
                active.arguments.discard()
            self._log(active, failure)
            if active.entry is not None:
                # `SystemExit` of a handler would end the threads that ask for the value: they get the error that
                # callers get.
                kept = cast(Exception, exc) if issubclass(type(exc), Exception) else exception_of(failure)
                self._rrefs.set_error(active.entry, kept)
        finally:
            if self._lifetime.is_closed:  # the end of this process explains more than the errors of its handlers
                self._marshal.give_back(forks)
            else:
                active.is_answered = True
                self._marshal.send(active.session, ReplyMessage(active.id, failure=failure), large, forks)
        return f"{failure.type_name}: {failure.text}"[:MAX_LOGGED_CHARS]

    def _log(self, active: ActiveCall, failure: rpc_pb2.Failure) -> None:
        called = _called(active)
        if failure.kind == rpc_pb2.Failure.USER and called:
            caller, called = active.session.peer.name, called[:MAX_LOGGED_CHARS]
            error = f"{failure.type_name}: {failure.text}".partition("\n")[0][:MAX_LOGGED_CHARS]
            level = self._level_of_next(active.session)
            logger.log(level, "a call of %s from %s failed on %s: %s", called, caller, self._me.name, error)
            logger.debug("the traceback of that:\n%s", failure.traceback)

    def _level_of_next(self, session: AnySession) -> int:
        """The log level of the next failure of this peer's calls; logs a warning when it becomes DEBUG."""
        now = time.monotonic()
        since, num = self._logged.get(session.account, (now, 0))
        if now - since > LOG_PERIOD_S:
            since, num = now, 0
        self._logged[session.account] = since, num + 1
        if num == MAX_LOGGED_CALLS:
            name = session.peer.name
            logger.warning(
                "%d calls from %s have failed; further failures are logged at level DEBUG for a while", num, name
            )
        return logging.WARNING if num < MAX_LOGGED_CALLS else logging.DEBUG


def _called(active: ActiveCall) -> str:
    """The user code that a call runs, for the log; empty for a call of rpcdist's own functions."""
    if not active.function.startswith("rpcdist."):
        return active.function
    if active.function not in NAMES_OF_METHOD_CALLS:
        return ""
    target, kind = active.target, active.method.partition(".")[0]
    if not kind and target is not None and target.done() and target.exception() is None:
        kind = described("the name of the type", lambda: type(target.value()).__name__)
    return f"a method of a {kind}" if kind else ""
