"""Runs the calls that arrive.

    I/O loop           admits a call, and hands it to the pool (or a known coroutine function to the user loop)
    pool thread        finds the function, decodes the arguments, runs it, encodes the result
    user loop          runs coroutines; their arguments were decoded in the pool unless they are plain

Whatever happens to a call (an exception, `sys.exit`, a result that cannot be encoded, its deadline), its caller gets
one reply, unless the caller cancelled it or is gone.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import torch

from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.deadline import NEVER, Deadline, current_deadline
from rpcdist.errors import CallRefused, Cancelled, DeadlineExceeded, RpcdistError
from rpcdist.rpc._autograd_hooks import CallContext, current_autograd
from rpcdist.rpc._calling.call_table import Job
from rpcdist.rpc._calling.result_streams import DEFAULT_WINDOW
from rpcdist.rpc._membership.gatherings import CONTRIBUTE, INTERNAL
from rpcdist.rpc._serving.producers import AsyncProducer, Producer, SyncProducer
from rpcdist.rpc._values import ReceiveBuffer
from rpcdist.rpc._values.arrived import ArrivedValue
from rpcdist.rpc._values.failures import failure_of
from rpcdist.rpc._values.function_names import decode_function, function_name
from rpcdist.rpc.functions import is_async_execution

if TYPE_CHECKING:
    from rpcdist.rpc._agent import Agent, AnySession

__all__ = ["ActiveCall", "Dispatcher", "describe_job"]

logger = logging.getLogger(__name__)

MAX_KNOWN_COROUTINES = 4096


class ActiveCall:
    """A call that this worker is handling."""

    __slots__ = (
        "arguments",
        "autograd",
        "call",
        "cancelled",
        "deadline",
        "entry",
        "handle",
        "is_chained",
        "producer",
        "session",
    )

    def __init__(
        self, session: AnySession, call: rpc_pb2.Call, arguments: ArrivedValue | None, deadline: Deadline
    ) -> None:
        self.session = session
        self.call = call
        self.arguments = arguments
        self.deadline = deadline
        self.cancelled = False
        self.handle: Any = None  # of the user loop, while a coroutine runs
        self.producer: Producer | None = None
        self.entry: Any = None  # remote(): where the result is kept
        self.autograd: CallContext | None = None  # the caller's, in which the function runs
        self.is_chained = False  # the function has returned a future, and that is waited for

    @property
    def is_abandoned(self) -> bool:
        """Nothing runs, and nobody waits: its caller gave up, and the future may never be completed."""
        return self.is_chained and (self.cancelled or self.deadline.expired())

    def __repr__(self) -> str:
        return f"<call {self.call.id} from {self.session.peer.name}: {self.what}, {self.deadline!r}>"

    @property
    def what(self) -> str:
        return self.call.function or self.call.WhichOneof("target") or "?"


class Dispatcher:
    """The callee's side of an agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._active: dict[tuple[object, int], ActiveCall] = {}
        self._coroutine_functions: set[str] = set()
        self._idle = threading.Condition()
        self._idle_waiters = 0
        self.accepting = True

    def __len__(self) -> int:
        return len(self._active)

    # ------------------------------------------------------------ I/O loop

    def admit(self, session: AnySession, call: rpc_pb2.Call, buffers: Sequence[ReceiveBuffer], jobs: list[Job]) -> None:
        """Takes a call; appends what the pool must do to `jobs`."""
        agent = self._agent
        arguments = None
        if call.HasField("arguments"):
            plain_only = not agent.options.allow_pickle
            arguments = ArrivedValue(call.arguments, buffers, agent.rrefs, session.peer, plain_only)
        deadline = Deadline.after(call.timeout_us / 1e6) if call.timeout_us else NEVER
        active = ActiveCall(session, call, arguments, deadline)
        if call.autograd_context and agent.autograd is not None:
            active.autograd = agent.autograd.admit(call.autograd_context, session.peer)
            if arguments is not None:
                arguments.autograd = active.autograd
        self._active[session, call.id] = active
        if not self.accepting:
            self.fail(active, RpcdistError(f"worker {agent.worker_name!r} has shut down"))
            return
        if call.HasField("result"):
            try:
                active.entry = agent.rrefs.accept_creation(call.result, session.peer.id, session.peer.incarnation)
            except RpcdistError as exc:
                self.fail(active, exc)
                return
        confirmed = arguments.confirmation() if arguments is not None else None
        if confirmed is not None:
            # A function may rely on its arguments: their owners have counted them before it runs.
            confirmed.add_done_callback(lambda _: agent.pool.submit(self.run, active))
        elif call.function in self._coroutine_functions and self._runs_on_loop(active):
            self._start_coroutine(active, None)
        else:
            jobs.append((self.run, (active,)))

    def _runs_on_loop(self, active: ActiveCall) -> bool:
        """Whether decoding the arguments runs no user code, so that the pool can be skipped."""
        arguments = active.call.arguments
        return arguments.encoding == value_pb2.Value.PLAIN and not arguments.rrefs and not len(arguments.buffers)

    def cancel(self, session: AnySession, id: int) -> None:
        """The caller does not want the result any more."""
        active = self._active.get((session, id))
        if active is not None:
            self._cancel(active)

    def credit(self, session: AnySession, id: int, items: int) -> None:
        active = self._active.get((session, id))
        if active is not None and active.producer is not None:
            active.producer.credit(items)

    def session_ended(self, session: AnySession) -> None:
        """Nobody waits for these replies any more."""
        for key, active in list(self._active.items()):
            if key[0] is session and not active.call.HasField("result"):
                self._cancel(active)

    def _cancel(self, active: ActiveCall) -> None:
        active.cancelled = True
        if active.producer is not None:
            active.producer.cancel()
        if active.handle is not None:
            active.handle.cancel()

    # ------------------------------------------------------------ pool

    def run(self, active: ActiveCall) -> None:
        """Runs a call on this thread."""
        token = current_deadline.set(active.deadline)
        outer = current_autograd.set(active.autograd)
        try:
            if not self._wanted(active):
                return
            if self._agent.gil_profiling:
                self._agent.gil_wait.sample()
            if active.call.HasField("fetch"):
                self._fetch(active)
            else:
                self._invoke(active)
        except BaseException as exc:  # SystemExit and KeyboardInterrupt of a handler are its caller's business
            self.fail(active, exc)
        finally:
            current_deadline.reset(token)
            current_autograd.reset(outer)

    def _wanted(self, active: ActiveCall) -> bool:
        if active.cancelled:
            self.fail(active, Cancelled("the call was cancelled before it ran"))
            return False
        if active.deadline.expired():
            self.fail(active, DeadlineExceeded("the deadline was over before the call ran"))
            return False
        return True

    def _function(self, call: rpc_pb2.Call) -> Callable[..., Any]:
        options = self._agent.options
        if call.HasField("function_pickle"):
            if options.allow_functions is not None or not options.allow_pickle:
                raise CallRefused(
                    f"worker {self._agent.worker_name!r} accepts functions by name only (allow_functions or "
                    "allow_pickle=False is set there); call a module-level function"
                )
            return decode_function(call.function_pickle)
        module, _, name = call.function.partition(":")
        if options.allow_functions is None or call.function in INTERNAL:
            return decode_function(call.function)
        if not options.allows(module, name):
            raise CallRefused(
                f"worker {self._agent.worker_name!r} does not allow calls of {call.function}; "
                "add it to RpcOptions(allow_functions=...) there"
            )
        function = decode_function(call.function)
        home = function_name(function)
        # A pattern names what a module defines, not what it imports: "tools:*" must not lead to "tools:os.system".
        if call.function not in options.allow_functions and not (home and options.allows(*home.split(":", 1))):
            raise CallRefused(
                f"worker {self._agent.worker_name!r} does not allow calls of {call.function}, which is "
                f"{home or 'a callable without a name of its own'}; to allow it, add it to "
                "RpcOptions(allow_functions=...) there, without wildcards"
            )
        return function

    def _invoke(self, active: ActiveCall) -> None:
        function = self._function(active.call)
        args, kwargs = _arguments(active)
        result = function(*args, **kwargs)
        if inspect.iscoroutine(result):
            if inspect.iscoroutinefunction(function):
                self._remember(active.call.function)
            self._start_coroutine(active, result)
        elif is_async_execution(function):
            self._chain(active, result)
        else:
            self._finish(active, result)

    def _chain(self, active: ActiveCall, future: object) -> None:
        if not isinstance(future, torch._C.Future):
            raise RuntimeError(
                "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
                f"but got {type(future)}"
            )

        def completed(done: torch._C.Future[Any]) -> None:
            try:
                result = done.wait()
            except BaseException as exc:
                self.fail(active, exc)
            else:
                self._finish(active, result)

        active.is_chained = True
        future.add_done_callback(completed)

    def _fetch(self, active: ActiveCall) -> None:
        fetch, peer = active.call.fetch, active.session.peer
        future = self._agent.rrefs.get_value_future(fetch.rref, fetch.fork, peer.id, peer.incarnation)
        self._chain(active, future)

    # ------------------------------------------------------------ user loop

    def _remember(self, name: str) -> None:
        if name and len(self._coroutine_functions) < MAX_KNOWN_COROUTINES:
            self._coroutine_functions.add(name)

    def _start_coroutine(self, active: ActiveCall, coroutine: Coroutine[Any, Any, Any] | None) -> None:
        async def run() -> object:
            if coroutine is not None:
                return await coroutine
            function = self._function(active.call)
            args, kwargs = _arguments(active)
            result = function(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        def done(outcome: object, exc: BaseException | None) -> None:
            # Encoding may run user code and be slow; the loop has other coroutines to serve.
            if exc is not None:
                self._agent.pool.submit(self.fail, active, exc)
            elif outcome is None:
                self._finish(active, None)
            else:
                self._agent.pool.submit(self._finish, active, outcome)

        context = copy_context()
        context.run(current_autograd.set, active.autograd)
        active.handle = self._agent.user_loop.submit(run, done, deadline=active.deadline, context=context)
        if active.cancelled:  # between the check and here
            active.handle.cancel()

    # ------------------------------------------------------------ outcomes

    def _finish(self, active: ActiveCall, result: object) -> None:
        """Answers a call; anything that goes wrong with the answer becomes its failure."""
        try:
            if active.entry is not None:
                self._agent.rrefs.set_value(active.entry, result)
                reply = rpc_pb2.Message(reply=rpc_pb2.Reply(id=active.call.id, created=True))
                active.session.send(reply)
                self._forget(active)
            elif isinstance(result, (Generator, AsyncGenerator)):
                if active.deadline.expired():  # the caller has given up and will never take an item, nor cancel
                    raise DeadlineExceeded("the deadline was over before the stream began")
                self._produce(active, result)
            else:
                message = rpc_pb2.Message()
                message.reply.id = active.call.id
                peer = active.session.peer.id
                large, forks = self._agent.encode_for(message.reply.value, result, peer, active.autograd)
                self._agent.send_reply(active.session, message, large, forks)
                self._forget(active)
        except BaseException as exc:
            self.fail(active, exc)

    def fail(self, active: ActiveCall, exc: BaseException) -> None:
        """Answers a call with an exception."""
        try:
            self._send_failure(active, exc)
        finally:
            self._forget(active)  # not before: a shutdown that waits for this may close the connections then

    def _send_failure(self, active: ActiveCall, exc: BaseException) -> None:
        if active.arguments is not None:
            active.arguments.discard()
        agent = self._agent
        failure = failure_of(exc, agent.worker_name)
        by_user = active.call.function and not active.call.function.startswith("rpcdist.")
        if failure.kind == rpc_pb2.Failure.USER and by_user:
            logger.warning(
                "a call of %s from %s failed on %s:\n%s",
                active.what,
                active.session.peer.name,
                agent.worker_name,
                failure.traceback,
            )
        if active.entry is not None:
            agent.rrefs.set_error(active.entry, exc)
        if not agent.closed:  # the end of this process says more than what it did to its handlers
            message = rpc_pb2.Message(reply=rpc_pb2.Reply(id=active.call.id, failure=failure))
            active.session.send(message)

    def _produce(self, active: ActiveCall, generator: Generator[Any, Any, Any] | AsyncGenerator[Any, Any]) -> None:
        to = (self._agent, active.session, active.call.id, active.autograd)
        active.session.send(rpc_pb2.Message(reply=rpc_pb2.Reply(id=active.call.id, stream=True)))
        producer: Producer
        if isinstance(generator, Generator):
            producer = SyncProducer(*to, generator, lambda: self._forget(active))
        else:
            producer = AsyncProducer(*to, generator, lambda: self._forget(active))
        active.producer = producer
        producer.credit(DEFAULT_WINDOW)
        if active.cancelled:
            producer.cancel()

    def _forget(self, active: ActiveCall) -> None:
        self._active.pop((active.session, active.call.id), None)
        if self._idle_waiters:
            with self._idle:
                self._idle.notify_all()

    # ------------------------------------------------------------ shutdown

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Waits until no call is being handled; False when the time is over."""
        with self._idle:
            self._idle_waiters += 1
            try:
                return self._idle.wait_for(lambda: not self._working(), timeout_s)
            finally:
                self._idle_waiters -= 1

    def wait_gathered(self, timeout_s: float) -> bool:
        """Waits until the workers that wait here for others have been answered; False when the time is over."""
        with self._idle:
            self._idle_waiters += 1
            try:
                return self._idle.wait_for(
                    lambda: all(active.call.function != CONTRIBUTE for active in list(self._active.values())), timeout_s
                )
            finally:
                self._idle_waiters -= 1

    def _working(self) -> list[ActiveCall]:
        """The calls of users that count; a barrier that waits here for others is no work of this worker."""
        calls = list(self._active.values())
        return [active for active in calls if active.call.function != CONTRIBUTE and not active.is_abandoned]

    def describe(self) -> list[str]:
        """The calls that are being handled, for messages."""
        return [repr(active) for active in self._working()]

    def cancel_all(self) -> None:
        """Cancels what is left."""
        for active in list(self._active.values()):
            self._cancel(active)


def describe_job(function: Callable[..., object], arguments: tuple[object, ...]) -> str:
    """For messages: the call that a job of the pool serves, or else the job's function."""
    active = next((argument for argument in arguments if isinstance(argument, ActiveCall)), None)
    return repr(function) if active is None else repr(active)


def _arguments(active: ActiveCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if active.arguments is None:
        return (), {}
    pair = active.arguments.decode()
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], dict)):
        raise RpcdistError("the arguments of the call are not a pair of a tuple and a dict")
    return tuple(pair[0]), pair[1]
