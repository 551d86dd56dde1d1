"""Makes calls and their messages, and the sinks for their replies: a blocked thread, or a future.

A message gets the name of the function, the encoded arguments, the deadline and the autograd context.
"""

from __future__ import annotations

import logging
import sys
import time
from _thread import allocate_lock, get_ident
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any, Final, NamedTuple

import torch

from rpcdist.deadline import NEVER, Deadline, acquire, current_deadline, limit_of
from rpcdist.errors import Cancelled, NotInitialized, SerializationError
from rpcdist.rpc._autograd_hooks import CallContext, current_autograd
from rpcdist.rpc._calling.call_table import FETCH, INFINITE, CallTable, PendingCall, ReplySink
from rpcdist.rpc._executors.blocking import blocking, hooks
from rpcdist.rpc._executors.torch_state import is_default
from rpcdist.rpc._inspection import call_records
from rpcdist.rpc._marshal.arrived_value import Arrived, ArrivedFailure
from rpcdist.rpc._marshal.marshal import Marshal, Written
from rpcdist.rpc._peers.device_maps import DeviceMap, device_map_to_pb
from rpcdist.rpc._peers.network import AnySession, PoolJob, calling_worker
from rpcdist.rpc._rref.handles import Handle
from rpcdist.rpc._rref.messages import ReferenceShare
from rpcdist.rpc._rref.proxied import CALLS_OF_METHODS, called_method
from rpcdist.rpc._values.exceptions import add_note
from rpcdist.rpc._values.function_names import function_reference, unwrap
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.rpc.future import Future
from rpcdist.time_limits import THREAD_GRACE_S
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.wire_messages import CallMessage

logger = logging.getLogger(__name__)


def positional(args: Any) -> tuple[Any, ...]:
    """The positional arguments; raises `TypeError` for values that users pass only by mistake."""
    if type(args) is tuple:
        return args
    if args is None:
        return ()
    # These are iterable, too, but users who write `args=tensor` or `args="text"` do not mean their items.
    if isinstance(args, str | bytes | torch.Tensor) or not isinstance(args, Iterable):
        raise TypeError(
            f"args must be a tuple or list of the function's arguments, but it is a {type(args).__name__}; to pass one "
            "value, write args=(value,)"
        )
    return tuple(args)


def by_keyword(kwargs: Any) -> Mapping[str, Any]:
    """The keyword arguments; raises `TypeError` if they are not a mapping."""
    if kwargs is None:
        return {}
    if type(kwargs) is not dict and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict of the function's keyword arguments, not a {type(kwargs).__name__}")
    return kwargs


class Invocation(NamedTuple):
    """A function and its arguments, as users give them.

    Attributes:
        timeout_s: see `NewCalls.timeout_of`.
        target_ref: a reference to a value of the callee, which becomes the function's first argument there. The call
            only names it, so the owner counts no new share; the call holds the reference until it ends.
        device_map: replaces the device map of the options for this call.
    """

    func: Callable[..., Any]
    args: Any = None
    kwargs: Any = None
    timeout_s: float = UNSET_RPC_TIMEOUT
    target_ref: Handle | None = None
    device_map: DeviceMap | None = None


NewCall = tuple[PendingCall, CallMessage, Sequence[LargeBuffer]]
"""A call that was not sent yet, its message, and the large buffers of the message."""

MAX_KNOWN: Final = 4096


class NewCalls:
    """Makes the calls of one agent. Any thread may use it; encoding runs user code."""

    def __init__(self, table: CallTable, marshal: Marshal, rpc_timeout_s: float) -> None:
        self.rpc_timeout_s = rpc_timeout_s
        self._known: dict[object, tuple[str, str, str]] = {}  # module, name in it, and name on the wire
        self._table = table
        self._next_id = table.next_id
        self._marshal = marshal

    def timeout_of(self, timeout_s: float) -> float:
        """See `limit_of`; the default is that of `init_rpc`."""
        return limit_of(timeout_s, self.rpc_timeout_s)

    def of_function(
        self,
        to: int,
        what: Invocation,
        reply_sink: ReplySink,
        result: ReferenceShare | None = None,
        is_serial: bool = False,
    ) -> NewCall:
        """A call of a function.

        Args:
            result: for `remote()`: the ids under which the callee keeps the result.
        """
        func, args, kwargs, timeout_s, target_ref, device_map = what
        if not callable(func):
            kind = type(func).__name__
            raise TypeError(
                f"function should be callable, but it is a value of type {kind}. Pass the function itself, without "
                "calling it, and its arguments after it: rpc_sync(to, function, args=(value,))"
            )
        timeout_s, deadline, made = self._limits(timeout_s)  # before encoding, which may run slow user code
        if type(args) is not tuple:
            args = () if args is None else positional(args)
        kwargs = {} if kwargs is None else by_keyword(kwargs)
        if type(func) is not FunctionType:
            func, args, kwargs = unwrap(func, args, kwargs)
        name = self._name_of(func)
        current = current_autograd.get()
        context, context_id = (None, 0) if current is None else current.for_call(to)
        called = name
        if target_ref is not None and func in CALLS_OF_METHODS:
            called = f"the method {called_method(args)}()"
        elif called is None:
            called = getattr(func, "__qualname__", repr(func))
        pending = PendingCall(self._table, self._next_id(), to, called, deadline, timeout_s, made, reply_sink)
        pending.autograd = context
        pending.target_ref = target_ref
        pending.is_bound = result is not None or target_ref is not None or context is not None
        written: Written | None = None
        if name is None:
            written = self._by_value(func, args, kwargs, to, device_map)
        elif args or kwargs:
            written = self._marshal.write((args, kwargs), to, None, device_map)
        call = CallMessage(pending.id, name or "")
        if name is None:
            call.is_by_value = True
        if device_map is not None:
            call.device_map = device_map_to_pb(device_map)
        call.context = context_id
        call.is_nested = _is_in_handler()
        if result is not None:
            call.result, call.is_serial = (*result.rref, *result.fork), is_serial
        if target_ref is not None:
            call.target = (*target_ref.state.rref, *target_ref.state.id)
        # Not before: the span would never end if the arguments cannot be written.
        if (spans := call_records.exporter) is not None:
            pending.span = spans.begin_made(called)
            call.traceparent = spans.traceparent(pending.span)
        if written is None:
            return pending, call, ()
        try:
            large, forks = self._marshal.put(call, written, context)
        except BaseException as exc:
            pending.end_span(type(exc).__name__)
            if isinstance(exc, Exception):
                self._explain(exc, pending, written)
            raise
        pending.forks = forks or None
        return pending, call, large

    def _name_of(self, func: Callable[..., Any]) -> str | None:
        """The function's name on the wire; None if it has none.

        Names of functions and classes at the top level of modules are kept. Such a name is valid while its module has
        the same object there, so reloading and patching a module take effect.
        """
        # For objects of other types, equality or the hash may run user code, or depend on their contents.
        can_be_known = type(func) is FunctionType or type(func) is type
        known = self._known.get(func) if can_be_known else None
        if known is not None:
            module = sys.modules.get(known[0])
            if module is not None and getattr(module, known[1], None) is func:
                return known[2]
            self._known.pop(func, None)  # deleted or replaced: the entry would keep the function alive
        by_value = self._marshal.by_value
        name = function_reference(func, by_value=by_value)
        if name is not None and can_be_known and not by_value and "." not in func.__qualname__:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()  # names in use soon come back
            self._known[func] = func.__module__, func.__qualname__, name
        return name

    def _explain(self, exc: Exception, pending: PendingCall, written: Written) -> None:
        assert isinstance(written.obj, tuple)
        parts = dict(zip(("args", "kwargs", "function"), written.obj, strict=False))
        self._marshal.explain(exc, f"in an {pending.what()}", **parts)
        if "function" in parts and not self._marshal.by_value:
            add_note(
                exc,
                "rpcdist sends a function by its name. Define it at the top level of a module that both sides can "
                "import, or let the caller send it by value: RpcOptions(by_value=True).",
            )

    def is_for_all(self, made: NewCall) -> bool:
        call = made[1]
        return call.is_compact and not (call.context or call.result or call.target)

    def for_another(self, made: NewCall, to: int, reply_sink: ReplySink) -> NewCall | None:
        """Copies a call for another worker without encoding it again; None if parts of it suit one worker only."""
        call, message, large = made
        if not self.is_for_all(made) or (message.num_tensors and self._marshal.moves_cpu(to)):
            return None
        pending = PendingCall(
            self._table, self._next_id(), to, call.called, call.deadline, call.timeout_s, call.made, reply_sink
        )
        again = CallMessage(pending.id, message.function, 0, message.body, message.num_tensors)
        again.is_nested = message.is_nested
        return pending, again, large

    def of_fetch(self, owner: int, share: ReferenceShare, timeout_s: float, reply_sink: ReplySink) -> NewCall:
        """A call for the value of a reference that the caller holds. It may safely be sent twice."""
        timeout_s, deadline, made = self._limits(timeout_s)
        current = current_autograd.get()
        context, context_id = (None, 0) if current is None else current.for_call(owner)
        pending = PendingCall(self._table, self._next_id(), owner, share, deadline, timeout_s, made, reply_sink, True)
        pending.autograd = context
        call = CallMessage(pending.id, "", target=(*share.rref, *share.fork))
        call.context = context_id
        call.is_nested = _is_in_handler()
        if (spans := call_records.exporter) is not None:
            pending.span = spans.begin_made(FETCH)
            call.traceparent = spans.traceparent(pending.span)
        return pending, call, ()

    def of_gathering(
        self, to: int, name: str, args: tuple[Any, ...], timeout_s: float, reply_sink: ReplySink
    ) -> NewCall:
        """A call of a function that every worker serves under this name, and that waits for other workers."""
        timeout_s, deadline, made = self._limits(timeout_s)
        pending = PendingCall(
            self._table, self._next_id(), to, name, deadline, timeout_s, made, reply_sink, True, False
        )
        call = CallMessage(pending.id, name, counts_as_idle=True)
        large, pending.forks = self._marshal.put(call, self._marshal.write((args, {}), to))
        return pending, call, large

    def _by_value(
        self, func: Callable[..., Any], args: object, kwargs: object, to: int, device_map: DeviceMap | None
    ) -> Written:
        """The function is written after its arguments, with the values that it holds (tensors, references)."""
        if not self._marshal.allow_pickle:
            raise SerializationError(
                f"{getattr(func, '__qualname__', repr(func))!r} has no name under which the callee can find it, and "
                "pickle is off here; define it at the top level of a module that both sides can import"
            )
        return self._marshal.write((args, kwargs, func), to, None, device_map)

    def _limits(self, timeout_s: float) -> tuple[float, Deadline, float]:
        """The timeout in seconds; the deadline, or the deadline of the call that is handled here if earlier; now."""
        is_default = timeout_s == UNSET_RPC_TIMEOUT
        timeout_s = (self.rpc_timeout_s or INFINITE) if is_default else self.timeout_of(timeout_s)
        inherited = current_deadline.get()
        now = time.monotonic()
        at = now + timeout_s
        return timeout_s, inherited if inherited.at < at else NEVER if at == INFINITE else Deadline(at), now


def _is_in_handler() -> bool:
    """Whether this thread, or the task that it runs, handles a call of another worker."""
    return hooks.enter is not None or calling_worker.get() is not None


# ---------------------------------------------------------------- sinks for replies


def result_of(failure: ArrivedFailure | None, payload: object) -> object:
    """The value of a reply; raises the callee's exception. Runs user code: never on the I/O loop."""
    if isinstance(payload, Arrived):
        return payload.decode()
    if failure is not None:
        raise failure.exception()
    return payload  # a stream, or None


def _is_made_here(payload: object) -> bool:
    """Whether the thread that has read a reply also decodes its value, because that is quick and runs no user code.

    In torch's modes, which could change them, a user's thread decodes no tensors of other calls.
    """
    if isinstance(payload, Arrived):
        return payload.is_short and ((payload.is_simple and payload.autograd is None) or is_default())
    return payload is None  # the result of most functions


def _run_inside(context: CallContext | None, job: Callable[[], object]) -> None:
    """Runs callbacks of a call in the autograd context in which it was made. Each job has a `contextvars` context."""
    if context is not None:
        current_autograd.set(context)
    try:
        job()
    finally:
        del job  # it refers to the future, and the traceback of the future's error to this frame


Read = Callable[[Callable[[], bool], float | None], bool]
"""Reads a session while a thread waits; called with whether it still waits, and the limit in seconds."""


class SyncReplySink:
    """One blocked thread, which also decodes the value, so that a call involves no third thread.

    The constructor takes the lock, and the end of the call releases it. Until then the thread reads from the connection
    of the call, or sleeps on the lock if another thread reads.
    """

    __slots__ = ("_error", "_failure", "_lock", "_payload", "_session", "_thread")

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()
        self._failure: ArrivedFailure | None = None
        self._payload: object = None
        self._error: BaseException | None = None
        self._thread = 0  # the thread that waits
        self._session: AnySession | None = None  # the session that the thread may be reading

    def replied(self, failure: ArrivedFailure | None, payload: object, jobs: list[PoolJob]) -> None:
        self._failure = failure
        self._payload = payload
        self._lock.release()
        if self._session is not None and self._thread != get_ident():
            self._session.interrupt()

    def failed(self, exc: BaseException) -> None:
        self._error = exc
        self._lock.release()
        if self._session is not None and self._thread != get_ident():
            self._session.interrupt()

    def wait(
        self,
        call: PendingCall,
        send: Callable[[], object] | None = None,
        session: AnySession | None = None,
        read: Read | None = None,
        forget: Callable[[], bool] | None = None,
    ) -> object:
        """Waits for the call.

        Args:
            send: sends it before; None if it was sent already, or `read` sends it.
            session: the session that will bring the reply, if it is known.
            read: reads that session while this thread waits; by default `AnySession.read_while_waiting`.
            forget: called if the wait was interrupted, or the deadline has passed; False if the call has ended
                already. By default the call is cancelled.

        Returns:
            The result; raises the call's failure, or `DeadlineExceeded`.
        """
        try:
            if hooks.enter is None:  # a thread of the user
                ended = self._wait(call, send, session, read)
            else:
                with blocking():
                    ended = self._wait(call, send, session, read)
        except BaseException:  # Ctrl-C in the main thread
            if forget is not None:
                forget()
            else:
                call.table.cancel(call, Cancelled(f"{call.what()} was interrupted"))
            raise
        error: BaseException | None = None
        if not ended:
            overdue = call.deadline_error()
            if forget() if forget is not None else call.cancel():
                error = overdue
            else:
                self._lock.acquire(timeout=THREAD_GRACE_S)  # the outcome has arrived at this moment
            del overdue
        if error is None:
            error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it holds this frame and the arguments: a cycle, in which references would stay alive
        return result_of(self._failure, self._payload)

    def _wait(
        self, call: PendingCall, send: Callable[[], object] | None, session: AnySession | None, read: Read | None
    ) -> bool:
        if send is not None:
            send()
        if (session := session or call.session) is not None:
            self._thread = get_ident()
            self._session = session  # before the lock is checked: a thread that releases it later then interrupts
            read = session.read_while_waiting if read is None else read
            if read(self._lock.locked, call.deadline.wait_s()):
                return True
        return acquire(self._lock, call.deadline.wait_s())


class CallFuture(Future[Any]):
    """The future of a call. The thread that reads the reply completes it if the value is plain and short. Other values
    are decoded by a thread that waits for the future, or else by the pool, which also runs the callbacks.
    """

    __slots__ = ()

    def expect(self, call: PendingCall) -> None:
        """Sets the call, before it is sent; a complete future drops its call, which holds the future."""
        self._expected = call
        self._on_cancel = call.cancel

    def replied(self, failure: ArrivedFailure | None, payload: object, jobs: list[PoolJob]) -> None:
        context = payload.autograd if isinstance(payload, Arrived) else None
        if failure is None and _is_made_here(payload):
            try:
                value = result_of(None, payload)
            except Exception as exc:  # damaged, or nested too deeply for the stack of this thread: see below
                logger.debug("a reply is left to the pool: %r", exc)
            else:
                if self._arrive(value):
                    jobs.append((_run_inside, (context, self._run_callbacks)))
                return
        arrived = payload if failure is None else failure.original
        if isinstance(arrived, Arrived) and arrived.is_on_gpus:
            arrived.keep_gpu_tensors()
            self._arrived = arrived
        if self._deliver(partial(result_of, failure, payload)):
            jobs.append((_run_inside, (context, self._settle)))
        elif self.cancelled() and isinstance(payload, Arrived):
            payload.discard()
        elif self.cancelled() and failure is not None:
            failure.discard()

    def failed(self, exc: BaseException) -> None:
        call = self._expected
        if isinstance(call, PendingCall):  # otherwise the future is complete
            with suppress(NotInitialized):  # the program ends without `shutdown`, and callbacks do not run any more
                call.table.submit(self._fail, exc)
