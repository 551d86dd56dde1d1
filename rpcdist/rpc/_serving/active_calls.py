"""The calls that a worker handles, from their arrival to their reply; their table; and the functions they may call."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rpcdist._counters import OK
from rpcdist._proto import rpc_pb2
from rpcdist.deadline import NEVER, Deadline
from rpcdist.errors import CallRefused, ProtocolViolation, RpcdistError, SerializationError
from rpcdist.ids import UniqueId
from rpcdist.rpc._actors.serial_actor import Turn
from rpcdist.rpc._autograd_hooks import CallContext
from rpcdist.rpc._executors.user_loop import UserCall
from rpcdist.rpc._inspection import call_records
from rpcdist.rpc._inspection.call_records import CallRecorder, EndedCalls
from rpcdist.rpc._marshal.arrived_value import Arrived
from rpcdist.rpc._peers.device_maps import DeviceMap
from rpcdist.rpc._peers.network import AnySession
from rpcdist.rpc._rref.messages import ReferenceShare, RRefId
from rpcdist.rpc._rref.proxied import CALLS_OF_METHODS
from rpcdist.rpc._serving.producers import AsyncProducer, SyncProducer
from rpcdist.rpc._values.exceptions import copied
from rpcdist.rpc._values.function_names import decode_function, function_name, loaded_function, names_itself
from rpcdist.rpc.future import Future
from rpcdist.rpc.options import RpcOptions
from rpcdist.time_limits import LONGEST_TIMEOUT_S
from rpcdist.transport.wire_messages import CallMessage, NamedReference
from rpcdist.waiters import RareWaits

CALL_BYTES: Final = 5 << 10
"""The memory of a call until it has ended, without its arguments. Measured: 1.7 KiB while it waits for a thread, 4.7
KiB as a coroutine."""

NAMES_OF_METHOD_CALLS: Final = frozenset(function_name(function) for function in CALLS_OF_METHODS)
MAX_KNOWN: Final = 4096  # names of callables; a peer may send any number of names


@dataclass(slots=True, eq=False, repr=False)
class ActiveCall:
    """One call, from its arrival to its reply.

    Attributes:
        session: the session of the call and its reply.
        id: the caller's number for the call.
        function: its name; empty for a function by value, and for a fetch.
        method: class and name of the method, for a call through a reference whose value exists; for inspection.
        is_by_value: whether the function has no name, and is sent after its arguments.
        arguments: not decoded yet; None if the function takes none.
        back: the inverse of the device map that the call brought; None if the device map of its session applies.
        weight: the bytes that it takes in its caller's account.
        cancelled_at: when its caller cancelled it, in monotonic seconds; infinity for never.
        handle: a handle of the user loop, while a coroutine runs; or the turn at an actor, from its wait to its end.
        result: for `remote()`: the caller's share of the result.
        entry: for `remote()`: the reference under which the result is kept.
        autograd: the caller's context, in which the function runs.
        value: the share of the reference whose method is called, or whose value is fetched.
        wants_value: for `remote()`: whether its caller also waits for the result.
        target: the value that is fetched, or whose method is called; it may not exist yet.
        counts_as_idle: whether it waits for other workers, so that a shutdown of this one does not wait for it.
        is_serial: for `remote()`: whether the result is an actor.
        awaited: the future that the function has returned, while the call waits for it.
        is_answered: whether its answer is being sent, or was sent; it is removed right after that.
        is_chained: whether the function has returned a future for which the call waits.
        arrived: when it arrived, in monotonic seconds.
        span: the span of OpenTelemetry, if the program uses spans.
        started: when its function was called, in monotonic seconds; 0 before.
    """

    session: AnySession
    id: int
    function: str
    arguments: Arrived | None
    deadline: Deadline
    arrived: float
    method: str = ""
    is_by_value: bool = False
    back: DeviceMap | None = None
    result: ReferenceShare | None = None
    value: ReferenceShare | None = None
    counts_as_idle: bool = False
    cancelled_at: float = NEVER.at
    handle: UserCall | Turn | None = None
    producer: SyncProducer | AsyncProducer | None = None
    entry: RRefId | None = None
    autograd: CallContext | None = None
    target: Future[Any] | None = None
    is_answered: bool = False
    is_chained: bool = False
    awaited: object = None
    is_serial: bool = False
    wants_value: bool = False
    is_nested: bool = False
    span: Any = None
    weight: int = CALL_BYTES
    started: float = 0.0

    def __repr__(self) -> str:
        return f"<call {self.id} from {self.session.peer.name}: {self.what}, {self.deadline!r}>"

    @classmethod
    def of(cls, session: AnySession, call: CallMessage, arguments: Arrived | None) -> ActiveCall:
        now, timeout_s = time.monotonic(), call.timeout_us / 1e6
        is_limited = 0.0 < timeout_s <= LONGEST_TIMEOUT_S
        deadline = Deadline(now + timeout_s) if is_limited else NEVER
        active = cls(session, call.id, call.function, arguments, deadline, now)
        active.is_nested = call.is_nested
        active.counts_as_idle = call.counts_as_idle
        active.is_by_value = call.is_by_value
        active.weight += call.size_bytes
        if call.result is not None:
            active.result = _share_of(call.result)
            active.wants_value, active.is_serial = call.wants_value, call.is_serial
        if call.target is not None:
            active.value = _share_of(call.target)
        return active

    def target_value(self) -> Any:
        """The value of `target`, which is done; raises a copy of its error, which other calls raise, too."""
        assert self.target is not None
        error = self.target.exception()
        if error is not None:
            raise copied(error)
        return self.target.value()

    @property
    def is_fetch(self) -> bool:
        """Whether it calls no function, and its result is the value of a reference."""
        return self.value is not None and not self.function and not self.is_by_value

    @property
    def is_abandoned(self) -> bool:
        """Whether it waits for a future, which may never complete, while its caller no longer waits."""
        return self.is_chained and (self.cancelled or self.deadline.expired())

    @property
    def counts_as_work(self) -> bool:
        """Whether a shutdown of this worker waits for it."""
        return not self.counts_as_idle and not self.is_abandoned

    @property
    def cancelled(self) -> bool:
        return self.cancelled_at < NEVER.at

    @property
    def unwanted_since(self) -> float:
        """When its caller stops waiting, in monotonic seconds; infinity for never."""
        return min(self.cancelled_at, self.deadline.at)

    @property
    def what(self) -> str:
        if self.method:
            return self.method
        if self.function:
            is_method = self.function in NAMES_OF_METHOD_CALLS
            return "a method (name not read yet)" if is_method else self.function
        return "a function by value" if self.is_by_value else "fetch" if self.value is not None else "?"

    @property
    def run_began(self) -> float:
        """When the function was called, or the turn of the call at its actor began; 0 before."""
        return self.handle.began if isinstance(self.handle, Turn) else self.started

    def state(self) -> rpc_pb2.CallState:
        phases = rpc_pb2.CallState.Phase
        turn = self.handle if isinstance(self.handle, Turn) else None
        started = self.run_began
        running_us = int((time.monotonic() - started) * 1e6) if started else 0
        if self.producer is not None:
            phase = phases.STREAMING
        elif turn is not None:
            phase = phases.RUNNING if started else phases.IN_LINE
        elif self.is_chained:
            phase = phases.WAITING
        else:
            phase = phases.RUNNING if started else phases.QUEUED
        return rpc_pb2.CallState(phase=phase, running_us=running_us)

    def cancel(self) -> None:
        self.cancelled_at = min(self.cancelled_at, time.monotonic())
        if (producer := self.producer) is not None:
            producer.cancel()
        if self.handle is not None:
            self.handle.cancel()


def _share_of(ids: NamedReference) -> ReferenceShare:
    return ReferenceShare(UniqueId(*ids[:3]), UniqueId(*ids[3:]))


NUM_UNCOUNTED: Final = 64
"""While a worker serves fewer calls than this, small calls are not counted, which saves each two locks."""
UNCOUNTED_BYTES: Final = CALL_BYTES + 4096


class ActiveCalls:
    """The table of the calls, by session and number. Any thread may use it."""

    def __init__(self, recorder: CallRecorder | None = None) -> None:
        self.ended = EndedCalls(None if recorder is None else recorder.served)
        self.num_served = 0
        self._calls: dict[tuple[AnySession, int], ActiveCall] = {}
        self._idle = RareWaits()

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[ActiveCall]:
        return iter(list(self._calls.values()))

    def by_age(self) -> Iterator[ActiveCall]:
        """See `CallTable.by_age`."""
        try:
            yield from self._calls.values()
        except RuntimeError:
            return

    def add(self, active: ActiveCall) -> str | None:
        """Adds a call. If its caller has too much here already, does not add it, and returns the reason.

        Raises:
            ProtocolViolation: another call has the same number.
        """
        session, calls = active.session, self._calls
        if len(calls) < NUM_UNCOUNTED and active.weight <= UNCOUNTED_BYTES:
            active.weight = 0
        elif (refusal := session.account.add(active.weight, "arrived with a call")) is not None:
            return refusal
        if calls.setdefault((session, active.id), active) is not active:
            session.account.subtract(active.weight)
            raise ProtocolViolation(f"a call arrived with the number {active.id} of a call that has not ended")
        self.num_served += 1
        return None

    def find(self, session: AnySession, number: int) -> ActiveCall | None:
        return self._calls.get((session, number))

    def remove(self, active: ActiveCall, outcome: str = OK) -> None:
        """Removes a call that has ended; idempotent. `outcome` is for the recorder and tracing."""
        session = active.session
        key = session, active.id
        # A refused call may have the number of a call that is here.
        if self._calls.get(key) is active and self._calls.pop(key, None) is not None:
            if active.weight:
                session.account.subtract(active.weight)
            if (note := self.ended.note) is not None:
                began = active.started if active.handle is None else active.run_began
                note((active.id, session.peer.id, active.what, active.arrived, time.monotonic(), outcome, began))
            if active.span is not None and (spans := call_records.exporter) is not None:
                spans.end(active.span, active.what, session.peer.name, outcome)
        if self._idle.num:
            self._idle.recheck()

    def wait_idle(self, timeout_s: float | None) -> bool:
        return self._idle.wait_for(lambda: not self._working(), timeout_s)

    def wait_gathered(self, timeout_s: float) -> bool:
        """Waits until the workers that wait here for others have been answered; False on timeout."""
        return self._idle.wait_for(lambda: not any(active.counts_as_idle for active in self), timeout_s)

    def wait_noted(self, timeout_s: float) -> bool:
        """Waits until the end of each call whose caller may have the answer is recorded; False on timeout."""
        answered = [active for active in self if active.is_answered]
        return self._idle.wait_for(
            lambda: not any(self.find(one.session, one.id) is one for one in answered), timeout_s
        )

    def _working(self) -> list[ActiveCall]:
        return [active for active in self if active.counts_as_work]

    def abandon(self, began: float, limit_s: float) -> list[str]:
        """Forgets the calls that did not end within `limit_s` after `began` and after their callers stopped waiting."""
        now = time.monotonic()
        unwanted = [active for active in self._working() if max(active.unwanted_since, began) + limit_s <= now]
        for active in unwanted:
            self.remove(active, "abandoned by shutdown")
        return [repr(active) for active in unwanted]

    @property
    def only_streams(self) -> bool:
        """Whether the only remaining work is to produce items of streams."""
        return all(active.producer is not None for active in self._working())

    def describe(self) -> list[str]:
        return [repr(active) for active in self._working()]

    def cancel_all(self) -> None:
        for active in self:
            active.cancel()


class Callables:
    """Finds the functions that peers may call.

    Args:
        options: the allow-list, and whether pickles are accepted.
        always: functions that every peer may call, by the name on the wire, even if the allow-list does not name them:
            no job can shut down without them.
    """

    def __init__(self, options: RpcOptions, always: Mapping[str, Callable[..., Any]], worker_name: str) -> None:
        self._options = options
        self._always = always
        self._worker_name = worker_name
        self._known: dict[str, tuple[str, str]] = {}  # module and function, by the name on the wire

    def find(self, name: str) -> Callable[..., Any]:
        """The callable that "module:qualified.name" names here.

        Its module may be imported, and asked for the name (`__getattr__`), if peers may run any code, or if the
        allow-list has the full name. Otherwise the name must be an attribute of a loaded module.

        Raises:
            CallRefused: it may not be called.
        """
        if name in self._always:
            return self._always[name]
        if self._options.allow_functions is not None:
            return self._allowed(name, self._options.allow_functions)
        if not self._options.allow_pickle:
            return loaded_function(name)
        parts = self._known.get(name)  # not the function itself: the module may hold another one now
        if parts is not None and (module := sys.modules.get(parts[0])) is not None:
            function = getattr(module, parts[1], None)
            if callable(function):
                return function  # type: ignore[no-any-return]
        return self._found(name)

    def check(self, name: str) -> None:
        """Raises `CallRefused` if a peer may not call this function, which is one of rpcdist's."""
        if self._options.allow_functions is not None:
            self._allowed(name, self._options.allow_functions)

    def _found(self, name: str) -> Callable[..., Any]:
        function = decode_function(name)
        module_name, _, path = name.partition(":")
        if "." not in path and len(self._known) < MAX_KNOWN:
            self._known[name] = module_name, path
        return function

    def check_by_value(self) -> None:
        """Raises `CallRefused` if functions without a name, which are sent as values, may not be called."""
        if self._options.allow_functions is not None or not self._options.allow_pickle:
            raise CallRefused(
                f"worker {self._worker_name!r} accepts functions by name only (it has set allow_functions or "
                "allow_pickle=False); call a module-level function"
            )

    def _allowed(self, name: str, patterns: tuple[str, ...]) -> Callable[..., Any]:
        module, _, qualname = name.partition(":")
        if not self._options.allows(module, qualname):
            raise CallRefused(
                f"worker {self._worker_name!r} does not allow calls of {name}; add it to "
                "RpcOptions(allow_functions=...) of that worker"
            )
        if name in patterns:
            return decode_function(name)
        function = loaded_function(name, any(pattern.partition(":")[0] == module for pattern in patterns))
        home = function_name(function, is_quiet=True) if names_itself(function) else None
        # A pattern names what a module defines, not what it imports: "tools:*" must not lead to "tools:os.system".
        if not (home and self._options.allows(*home.split(":", 1))):
            raise CallRefused(
                f"worker {self._worker_name!r} does not allow calls of {name}, which is "
                f"{home or 'a callable without a name of its own'}; to allow it, add it to "
                "RpcOptions(allow_functions=...) of that worker, without wildcards"
            )
        return function


def decoded_call(
    active: ActiveCall, callables: Callables
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function, and its positional and keyword arguments; decoding runs user code.

    Whether the function may be called is checked before anything is decoded.
    """
    if active.is_by_value:
        callables.check_by_value()
        args, kwargs, function = _parts(active, 3)
        if not callable(function):
            raise SerializationError(
                f"the call sent a {type(function).__name__} as its function, which cannot be called"
            )
    else:
        function = callables.find(active.function)
        args, kwargs = ((), {}) if active.arguments is None else _parts(active, 2)
    args = tuple(args)
    if active.target is not None:
        active.target_value()  # raises its error
        args = (active.target, *args)
    return function, args, kwargs


def _parts(active: ActiveCall, count: int) -> tuple[Any, ...]:
    parts = active.arguments.decode() if active.arguments is not None else None
    if not (isinstance(parts, tuple) and len(parts) == count and isinstance(parts[1], dict)):
        raise RpcdistError("the arguments of the call are not a tuple and a dict, with the function if it is by value")
    return parts
