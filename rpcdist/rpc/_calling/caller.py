"""The caller's side of an agent: makes calls, and ends them at their deadline, by cancellation or by loss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.deadline import Deadline, current_deadline
from rpcdist.errors import BlockingInLoop, Cancelled, RpcdistError, TransportError, WorkerLost
from rpcdist.rpc._autograd_hooks import CallContext, current_autograd
from rpcdist.rpc._calling.call_table import CallTable, PendingCall, ReplySink
from rpcdist.rpc._calling.reply_sinks import FutureReplySink, SyncReplySink
from rpcdist.rpc._membership.gatherings import CONTRIBUTE
from rpcdist.rpc._rref.identifiers import UniqueId
from rpcdist.rpc._rref.protobuf import id_to_pb
from rpcdist.rpc._values import LargeBuffer
from rpcdist.rpc._values.function_names import encode_function, unwrap
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.rpc.future import Future
from rpcdist.rpc.worker_info import WorkerInfo
from rpcdist.transport import Session

if TYPE_CHECKING:
    from rpcdist.rpc._agent import Agent

__all__ = ["Caller", "Destination"]

Destination = str | int | WorkerInfo
INFINITE = float("inf")


class Caller:
    """One per agent. Any thread may use it; the timer runs on the I/O loop."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.calls = CallTable(self._wake_at)
        self.rpc_timeout_s = agent.options.rpc_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0  # kept here: for a time that has passed, uvloop returns a handle that does not know it

    def __repr__(self) -> str:
        return f"<Caller {self.calls!r}>"

    def timeout_of(self, timeout_s: float) -> float:
        """The user's timeout with torch's conventions (-1: the default, 0: none) as seconds, infinity for none."""
        if timeout_s == UNSET_RPC_TIMEOUT:
            timeout_s = self.rpc_timeout_s
        return INFINITE if timeout_s == 0 else timeout_s

    def sync(self, to: Destination, func: Callable[..., Any], args: Any, kwargs: Any, timeout_s: float) -> Any:
        if asyncio._get_running_loop() is not None:
            raise BlockingInLoop("rpc_sync")
        reply_sink = SyncReplySink(self._agent.options.allow_pickle)
        call = self._call(self._agent.directory.resolve(to), func, args, kwargs, timeout_s, reply_sink)
        return reply_sink.wait(call, self._agent)

    def start(self, to: Destination, func: Callable[..., Any], args: Any, kwargs: Any, timeout_s: float) -> Future[Any]:
        future: Future[Any] = Future()
        call = self._call(
            self._agent.directory.resolve(to), func, args, kwargs, timeout_s, FutureReplySink(self._agent, future)
        )
        future._on_cancel = lambda: self.cancel(call, None)
        return future

    def remote(
        self, to: int, fork: value_pb2.RRefFork, func: Callable[..., Any], args: Any, kwargs: Any, timeout_s: float
    ) -> Future[Any]:
        """Asks a worker to run a function and keep its result under the ids in `fork`."""
        future: Future[Any] = Future()
        self._call(to, func, args, kwargs, timeout_s, FutureReplySink(self._agent, future), result=fork)
        return future

    def fetch(self, owner: int, rref: UniqueId, fork: UniqueId, timeout_s: float) -> Future[Any]:
        """The value of a remote reference, from its owner."""
        future: Future[Any] = Future()
        message = rpc_pb2.Message()
        target = message.call.fetch
        target.rref.CopyFrom(id_to_pb(rref))
        target.fork.CopyFrom(id_to_pb(fork))
        context = self._join_autograd(message.call, owner)
        call = self._send_call(
            owner,
            message,
            (),
            timeout_s,
            self._deadline(timeout_s),
            FutureReplySink(self._agent, future),
            lambda: f"to_here() of {rref}",
            autograd=context,
        )
        future._on_cancel = lambda: self.cancel(call, None)
        return future

    def _call(
        self,
        to: int,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        timeout_s: float,
        reply_sink: ReplySink,
        result: value_pb2.RRefFork | None = None,
    ) -> PendingCall:
        if not callable(func):
            raise TypeError("function should be callable.")
        deadline = self._deadline(timeout_s)  # before encoding, which may run slow user code
        message = rpc_pb2.Message()
        call = message.call
        func, args, kwargs = unwrap(func, _positional(args), _by_keyword(kwargs))
        name = encode_function(func, by_value=self._agent.options.by_value)
        if isinstance(name, str):
            call.function = name
        else:
            call.function_pickle = name
        context = None if name == CONTRIBUTE else self._join_autograd(call, to)
        large, forks = self._agent.encode_for(call.arguments, (args, kwargs), to, context)
        if result is not None:
            call.result.CopyFrom(result)

        def what() -> str:
            called = name if isinstance(name, str) else getattr(func, "__qualname__", repr(func))
            return f"rpc to {self._agent.worker_name_of(to)!r} of {called}"

        return self._send_call(to, message, large, timeout_s, deadline, reply_sink, what, forks, context)

    def _join_autograd(self, call: rpc_pb2.Call, to: int) -> CallContext | None:
        """Takes the autograd context of this thread or task along, if there is one."""
        current = current_autograd.get()
        if current is None:
            return None
        context = current.for_call()
        call.autograd_context = context.joined_by(to)
        return context if call.autograd_context else None

    def _deadline(self, timeout_s: float) -> Deadline:
        return Deadline.after(self.timeout_of(timeout_s)).earlier(current_deadline.get())

    def _send_call(
        self,
        to: int,
        message: rpc_pb2.Message,
        large: Sequence[LargeBuffer],
        timeout_s: float,
        deadline: Deadline,
        reply_sink: ReplySink,
        what: Callable[[], str],
        forks: list[value_pb2.RRefFork] | None = None,
        autograd: CallContext | None = None,
    ) -> PendingCall:
        if self._agent.closed:
            raise RpcdistError("RPC is shutting down in this process")
        call = PendingCall(
            self._agent, self.calls.next_id(), to, what, deadline, self.timeout_of(timeout_s), reply_sink
        )
        message.call.id = call.id
        if deadline.is_finite:
            message.call.timeout_us = max(1, int(deadline.remaining_s() * 1e6))
        call.forks = forks or None
        call.autograd = autograd
        gathers = message.call.function == CONTRIBUTE and not large and not forks
        call.repeatable = message if gathers or message.call.HasField("fetch") else None
        self.calls.add(call)
        try:
            if to == self._agent.worker_id:
                call.session = self._agent.loopback
                self._agent.loopback.send(message, large)
            else:
                self._agent.connections.living_peer(to).send(message, large, call)
        except TransportError as exc:
            self.end(
                call,
                WorkerLost(self._agent.worker_name_of(to), what(), self._agent.connections.silence_s(to), str(exc)),
            )
        except BaseException:
            self.calls.take(call.id)
            self._agent.give_back(forks, to)
            raise
        return call

    def end(self, call: PendingCall, exc: BaseException) -> None:
        """Fails a call, unless it has ended; any thread."""
        if self.calls.take(call.id) is not None:
            self._agent.give_back(call.forks, call.peer)
            call.reply_sink.failed(exc)

    def cancel(self, call: PendingCall, exc: BaseException | None) -> bool:
        """Ends a call and tells the callee; False if it has ended already.

        Args:
            call: the call.
            exc: what it fails with; None where the caller completes its own side.
        """
        if self.calls.take(call.id) is None:
            return False
        session = call.session
        if isinstance(session, Session) and call.transfer:
            session.abort_transfer(call.transfer, "the call was cancelled")
        if session is not None:
            session.send(rpc_pb2.Message(cancel=rpc_pb2.Cancel(id=call.id)))  # type: ignore[attr-defined]
        self._agent.give_back(call.forks, call.peer)
        if exc is not None:
            call.reply_sink.failed(exc)
        return True

    def interrupt(self) -> None:
        """Ends every call in flight, for Ctrl-C: waits inside torch's C++ do not notice signals."""
        for call in self.calls:
            self.cancel(call, Cancelled(f"{call.what()} was interrupted by Ctrl-C"))

    # ------------------------------------------------------------ deadlines (I/O loop)

    def _wake_at(self, at: float) -> None:
        self._agent.node.io.call_soon(self._arm, at)

    def _arm(self, at: float) -> None:
        loop = self._agent.node.io.loop
        when = loop.time() + at - time.monotonic()
        if self._timer is not None and not self._timer.cancelled() and loop.time() < self._timer_at <= when:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = loop.call_at(when, self._expire), when

    def _expire(self) -> None:
        self._timer = None
        for call in self.calls.take_expired():
            session = call.session
            if isinstance(session, Session) and call.transfer:
                session.abort_transfer(call.transfer, "the deadline of the call is over")
            self._agent.give_back(call.forks, call.peer)
            call.reply_sink.failed(call.deadline_error())

    def fail_all(self, exc: BaseException) -> None:
        """Ends every call here; nobody is told."""
        for call in self.calls.take_where(lambda call: True):
            call.reply_sink.failed(exc)

    def stop_timer(self) -> None:
        """On the I/O loop."""
        if self._timer is not None:
            self._timer.cancel()


def _positional(args: Any) -> tuple[Any, ...]:
    if type(args) is tuple:
        return args
    if args is None:
        return ()
    # These can be taken apart, too, but nobody who writes `args=tensor` or `args="text"` means that.
    if isinstance(args, str | bytes | torch.Tensor) or not isinstance(args, Iterable):
        raise TypeError(
            f"args must be a tuple or list of the function's arguments, not one of type {type(args).__name__}; write "
            "args=(value,) to pass one value"
        )
    return tuple(args)


def _by_keyword(kwargs: Any) -> Mapping[str, Any]:
    if kwargs is None:
        return {}
    if type(kwargs) is not dict and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict of the function's keyword arguments, not a {type(kwargs).__name__}")
    return kwargs
