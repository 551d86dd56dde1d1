"""The calls that a worker handles: each from its arrival to its reply, the table of them, and what they may call."""

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
"""The memory of a call until it has ended, without its arguments. Measured: 1.7 KiB while it waits for a thread, 4.7 as
a coroutine."""

_CALLS_OF_METHODS: Final = frozenset(function_name(function) for function in CALLS_OF_METHODS)
MAX_KNOWN: Final = 4096  # names of callables; a peer may send any


@dataclass(slots=True, eq=False, repr=False)
class ActiveCall:
    """One call, from its arrival to its reply.

    Attributes:
        session: where it came from, and where the reply goes.
        id: the caller's number of it.
        function: its name; empty for one by value, and where only a value is fetched.
        method: class and name of the method, for a call through a reference, once its value is there; for views.
        is_by_value: the function has no name, and stands behind its arguments.
        arguments: not decoded yet; None if the function takes none.
        back: the inverse of the device map that the call brought; None where that of its session counts.
        weight: what it takes in the account of its caller, in bytes.
        cancelled_at: when its caller said that it does not want the result, on the monotonic clock; infinity for never.
        handle: of the user loop, while a coroutine runs; of an actor, while the call waits for its turn or runs there.
        result: for `remote()`: the share that its caller has of the result.
        entry: for `remote()`: the reference under which the result is kept.
        autograd: the caller's context, in which the function runs.
        value: the share of the reference whose method is called, or whose value is fetched.
        wants_value: for `remote()`: its caller waits for the result, too.
        target: the value that is fetched, or that a method is called on, which may not be there yet.
        counts_as_idle: it waits for other workers; a shutdown of this one does not wait for it.
        is_serial: for `remote()`: the result is an actor.
        awaited: the future that the function has returned, while that is waited for.
        is_answered: its answer is on the way, or was sent; it is removed at once after that.
        is_chained: the function has returned a future, and that is waited for.
        arrived: when it came, in seconds of the monotonic clock.
        span: of OpenTelemetry, if the program wants spans.
        started: when its function was called, in seconds of the monotonic clock; 0 before.
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
        """A call that came."""
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
        """The value of `target`, which is done; raises a copy of its error, which others raise, too."""
        assert self.target is not None
        error = self.target.exception()
        if error is not None:
            raise copied(error)
        return self.target.value()

    @property
    def is_fetch(self) -> bool:
        """Whether nothing is called, and the value of a reference is the result."""
        return self.value is not None and not self.function and not self.is_by_value

    @property
    def is_plain(self) -> bool:
        """Whether it neither makes nor uses a remote reference."""
        return self.result is None and self.value is None

    @property
    def is_abandoned(self) -> bool:
        """Nothing runs, and nobody waits: its caller gave up, and the future may never be completed."""
        return self.is_chained and (self.cancelled or self.deadline.expired())

    @property
    def counts_as_work(self) -> bool:
        """Whether a shutdown of this worker waits for it."""
        return not self.counts_as_idle and not self.is_abandoned

    @property
    def cancelled(self) -> bool:
        """Its caller does not want the result any more."""
        return self.cancelled_at < NEVER.at

    @property
    def unwanted_since(self) -> float:
        """When its caller gave up, or will, on the monotonic clock; infinity for never."""
        return min(self.cancelled_at, self.deadline.at)

    @property
    def what(self) -> str:
        if self.method:
            return self.method
        if self.function:
            is_method = self.function in _CALLS_OF_METHODS  # its name is among the arguments, which are not decoded yet
            return "a method (name not read yet)" if is_method else self.function
        return "a function by value" if self.is_by_value else "fetch" if self.value is not None else "?"

    @property
    def run_began(self) -> float:
        """When the function was called, or the turn of the call at its actor began; 0 before."""
        return self.handle.began if isinstance(self.handle, Turn) else self.started

    def state(self) -> rpc_pb2.CallState:
        """How far the call is."""
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
        """Stops what runs; any thread."""
        self.cancelled_at = min(self.cancelled_at, time.monotonic())
        if self.producer is not None:
            self.producer.cancel()
        if self.handle is not None:
            self.handle.cancel()


def _share_of(ids: NamedReference) -> ReferenceShare:
    return ReferenceShare(UniqueId(*ids[:3]), UniqueId(*ids[3:]))


NUM_UNCOUNTED: Final = 64
"""While a worker serves fewer calls than that, a small one counts in no account, which saves it two locks."""
UNCOUNTED_BYTES: Final = CALL_BYTES + 4096


class ActiveCalls:
    """By session and number. Any thread may use it.

    Args:
        recorder: remembers how calls ended; None for not at all.
    """

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
        """Keeps a call that has come; if its caller has too much here already, does not, and returns the reason.

        Raises:
            ProtocolViolation: its number is that of another one.
        """
        session, calls = active.session, self._calls
        if len(calls) < NUM_UNCOUNTED and active.weight <= UNCOUNTED_BYTES:
            active.weight = 0
        elif (refusal := session.account.add(active.weight, "came with a call")) is not None:
            return refusal
        if calls.setdefault((session, active.id), active) is not active:
            session.account.subtract(active.weight)
            raise ProtocolViolation(f"two calls came under the number {active.id}, and the first has not ended")
        self.num_served += 1
        return None

    def find(self, session: AnySession, number: int) -> ActiveCall | None:
        """The call with a number on a session; None if it is over."""
        return self._calls.get((session, number))

    def remove(self, active: ActiveCall, outcome: str = OK) -> None:
        """A call is over; once more does no harm. `outcome` is for those that are told of it."""
        session = active.session
        key = session, active.id
        # A call that was refused may have come under the number of one that is here.
        if self._calls.get(key) is active and self._calls.pop(key, None) is not None:
            if active.weight:
                session.account.subtract(active.weight)
            if (note := self.ended.note) is not None:
                note(
                    (
                        active.id,
                        session.peer.id,
                        active.what,
                        active.arrived,
                        time.monotonic(),
                        outcome,
                        active.started if active.handle is None else active.run_began,
                    )
                )
            if active.span is not None and (spans := call_records.exporter) is not None:
                spans.end(active.span, active.what, session.peer.name, outcome)
        if self._idle.num:
            self._idle.look_again()

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Waits until no call is being handled; False when the time is over."""
        return self._idle.wait_for(lambda: not self._working(), timeout_s)

    def wait_gathered(self, timeout_s: float) -> bool:
        """Waits until the workers that wait here for others have been answered; False when the time is over."""
        return self._idle.wait_for(lambda: not any(active.counts_as_idle for active in self), timeout_s)

    def wait_noted(self, timeout_s: float) -> bool:
        """Waits until the end of each call whose caller may have the answer is noted; False when the time is over."""
        answered = [active for active in self if active.is_answered]
        return self._idle.wait_for(
            lambda: not any(self.find(one.session, one.id) is one for one in answered), timeout_s
        )

    def _working(self) -> list[ActiveCall]:
        return [active for active in self if active.counts_as_work]

    def give_up(self, began: float, limit_s: float) -> list[str]:
        """Forgets the calls that have not ended for so long after their callers gave up, and after `began`."""
        now = time.monotonic()
        unwanted = [active for active in self._working() if max(active.unwanted_since, began) + limit_s <= now]
        for active in unwanted:
            self.remove(active, "given up by shutdown")
        return [repr(active) for active in unwanted]

    @property
    def only_streams(self) -> bool:
        """Whether all that is left to do here is to produce items of streams."""
        return all(active.producer is not None for active in self._working())

    def describe(self) -> list[str]:
        """The calls that are being handled, for messages."""
        return [repr(active) for active in self._working()]

    def cancel_all(self) -> None:
        """Cancels what is left."""
        for active in self:
            active.cancel()


class Callables:
    """One per agent.

    Args:
        options: the allow-list, and whether pickles are accepted.
        always: what every peer may call, by the name on the wire, whatever the allow-list says: without these no job
            can shut down.
    """

    def __init__(self, options: RpcOptions, always: Mapping[str, Callable[..., Any]], worker_name: str) -> None:
        self._options = options
        self._always = always
        self._worker_name = worker_name
        self._known: dict[str, tuple[str, str]] = {}  # module and function, by the name on the wire

    def find(self, name: str) -> Callable[..., Any]:
        """The callable that "module:qualified.name" names here.

        Its module is imported, and asked for it (`__getattr__`), where peers may run any code, or where the allow-list
        has the whole name. Else it is one that a loaded module holds.

        Raises:
            CallRefused: it may not be called.
        """
        if name in self._always:
            return self._always[name]
        if self._options.allow_functions is not None:
            return self._allowed(name, self._options.allow_functions)
        if not self._options.allow_pickle:
            return loaded_function(name)
        parts = self._known.get(name)  # not the function: what the module holds now is meant
        if parts is not None and (module := sys.modules.get(parts[0])) is not None:
            function = getattr(module, parts[1], None)
            if callable(function):
                return function  # type: ignore[no-any-return]
        return self._found(name)

    def check(self, name: str) -> None:
        """Raises `CallRefused` if a peer may not call this function, which is one of ours."""
        if self._options.allow_functions is not None:
            self._allowed(name, self._options.allow_functions)

    def _found(self, name: str) -> Callable[..., Any]:
        function = decode_function(name)
        module_name, _, path = name.partition(":")
        if "." not in path and len(self._known) < MAX_KNOWN:
            self._known[name] = module_name, path
        return function

    def check_by_value(self) -> None:
        """Raises `CallRefused` if functions without a name, which come as values, may not be called."""
        if self._options.allow_functions is not None or not self._options.allow_pickle:
            raise CallRefused(
                f"worker {self._worker_name!r} accepts functions by name only (allow_functions or "
                "allow_pickle=False is set there); call a module-level function"
            )

    def _allowed(self, name: str, patterns: tuple[str, ...]) -> Callable[..., Any]:
        module, _, qualname = name.partition(":")
        if not self._options.allows(module, qualname):
            raise CallRefused(
                f"worker {self._worker_name!r} does not allow calls of {name}; "
                "add it to RpcOptions(allow_functions=...) there"
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
                "RpcOptions(allow_functions=...) there, without wildcards"
            )
        return function


def decoded_call(
    active: ActiveCall, callables: Callables
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function, and its positional and keyword arguments; decoding runs code of users.

    Whether the function may be called is decided before anything is decoded.
    """
    if active.is_by_value:
        callables.check_by_value()
        args, kwargs, function = _parts(active, 3)
        if not callable(function):
            raise SerializationError(
                f"what arrived as a function is a {type(function).__name__}, which cannot be called"
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
        raise RpcdistError("the arguments of the call are not a tuple and a dict, with the function if that is a value")
    return parts
