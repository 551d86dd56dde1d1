"""Runs the calls that arrive.

    reading thread     the I/O loop, or a waiting thread: admits a call, and submits it to the pool (or a known
                       coroutine function to the user loop)
    pool thread        finds the function, decodes the arguments, runs it, encodes the result
    user loop          runs coroutines; their arguments were decoded in the pool unless they are plain

Every call gets one reply (for an exception, `sys.exit`, a result that cannot be encoded or a deadline, too), unless its
caller has cancelled it or is gone.
"""

from __future__ import annotations

import inspect
import threading
import time
from _thread import get_ident
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextvars import Context, copy_context
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch.autograd import profiler as torch_profiler

from rpcdist._counters import Histogram
from rpcdist._proto import rpc_pb2
from rpcdist.deadline import current_deadline
from rpcdist.errors import (
    CallRefused,
    Cancelled,
    DeadlineExceeded,
    Overloaded,
    PoolExhausted,
    ProtocolViolation,
    RpcdistError,
    described,
)
from rpcdist.freed_memory import LARGE_BYTES, stock_small_blocks
from rpcdist.ids import Identity
from rpcdist.profile_ranges import profile, record_function
from rpcdist.rpc._actors.actor_names import ActorTable
from rpcdist.rpc._actors.serial_actor import Turn
from rpcdist.rpc._autograd_hooks import CallContext, current_autograd
from rpcdist.rpc._calling.result_streams import DEFAULT_WINDOW
from rpcdist.rpc._devices.handler_streams import HandlerStreams, gpu_tensors
from rpcdist.rpc._executors.blocking import hooks
from rpcdist.rpc._executors.deferred_replies import DeferredReply
from rpcdist.rpc._executors.lane import Lane
from rpcdist.rpc._executors.thread_pool import ThreadPool
from rpcdist.rpc._executors.user_loop import UserLoop
from rpcdist.rpc._inspection import call_records
from rpcdist.rpc._inspection.call_records import CallRecorder
from rpcdist.rpc._marshal.marshal import Marshal
from rpcdist.rpc._peers.device_maps import inverse_of
from rpcdist.rpc._peers.network import AnySession, Lifetime, PoolJob, calling_worker, functions_that_ask, line_of
from rpcdist.rpc._rref.messages import ReferenceShare
from rpcdist.rpc._rref.proxied import CALLS_OF_METHODS, MAX_METHOD_CHARS, _invoke_in_turn, called_method, method_of
from rpcdist.rpc._rref.shell import RRefShell
from rpcdist.rpc._serving.active_calls import ActiveCall, ActiveCalls, Callables, decoded_call
from rpcdist.rpc._serving.answers import Answers
from rpcdist.rpc._serving.producers import AsyncProducer, StreamSender, SyncProducer, is_generator
from rpcdist.rpc._values.buffers import ReceiveBuffer, keep_for_current_streams
from rpcdist.rpc._values.function_names import function_name
from rpcdist.rpc.functions import ASYNC_MARK
from rpcdist.rpc.future import Future
from rpcdist.transport._framing.incoming import MissingBuffer
from rpcdist.transport.io_loop import unblock_signals
from rpcdist.transport.wire_messages import CallMessage, ReplyMessage

MAX_KNOWN_NAMES: Final = 4096
MAX_FUNCTION_CHARS: Final = 2000
_IN_TURN: Final = function_name(_invoke_in_turn)


@dataclass(kw_only=True, eq=False, repr=False)
class Dispatcher:
    """The callee's side of an agent.

    Args:
        new_context: makes the contexts in which handlers and coroutines run.
        admit_context: the autograd context of a call, by its id; None if it has ended.
        lifetime: once it has ended, failures are not sent: the end of the process explains more than they do.

    Attributes:
        accepting: whether calls are accepted; otherwise they are refused.
        gil_waits: the times that handlers waited for the interpreter lock; None if they are not measured.
    """

    pool: ThreadPool
    user_loop: UserLoop
    new_context: Callable[[], Context]
    marshal: Marshal
    rrefs: RRefShell
    actors: ActorTable
    callables: Callables
    admit_context: Callable[[int, Identity], CallContext | None]
    me: Identity
    lifetime: InitVar[Lifetime]
    recorder: InitVar[CallRecorder | None] = None
    # Names that led to coroutine functions, which need no pool thread the next time. A name may lead to another
    # object later: the object that is found then decides.
    _coroutine_functions: set[str] = field(default_factory=set)
    accepting: bool = True
    gil_waits: Histogram | None = None

    def __post_init__(self, lifetime: Lifetime, recorder: CallRecorder | None) -> None:
        self.calls = ActiveCalls(recorder)
        marshal, born = self.marshal, self.actors.born
        self._answers = Answers(marshal, self.rrefs, self.calls, self._produce, born, self.me, lifetime)

    # ------------------------------------------------------------ I/O loop; `on_call` on the reading thread

    def on_call(
        self, session: AnySession, call: CallMessage, buffers: list[ReceiveBuffer], jobs: list[PoolJob]
    ) -> None:
        """Handles a call; appends the pool's work to `jobs`.

        Steps that run no user code are done at once, so that a pool thread has less to do: the shares of references in
        the arguments are received, and the result of a `remote()` is registered as being created.
        """
        arguments = self.marshal.arrived_with(call, buffers, session.peer)
        active = ActiveCall.of(session, call, arguments)
        try:
            if len(call.function) > MAX_FUNCTION_CHARS:  # names are kept for the inspection of ended calls
                active.function = f"{call.function[:MAX_METHOD_CHARS]}..."
                raise CallRefused(
                    f"a function's name has at most {MAX_FUNCTION_CHARS} characters, not {len(call.function)}"
                )
            if call.device_map is not None:
                active.back = inverse_of(call.device_map)
            if call.large:
                sizes = zip(call.large, buffers, strict=False)
                active.weight += sum(size for size, buffer in sizes if not isinstance(buffer, MissingBuffer))
            if (refusal := self.calls.add(active)) is not None:
                raise Overloaded(refusal)
            if (spans := call_records.exporter) is not None and not active.counts_as_idle:
                active.span = spans.begin_served(call.traceparent)
            if call.context:
                active.autograd = self.admit_context(call.context, session.peer)
                if arguments is not None:
                    arguments.autograd = active.autograd
            if not self.accepting:
                raise RpcdistError(f"worker {self.me.name!r} has shut down")
            if active.result is not None:
                self.rrefs.accept_creation(active.result, session.peer.id, session.peer.incarnation)
                active.entry = active.result.rref
        except ProtocolViolation:  # ends the connection
            raise
        except RpcdistError as exc:
            self._answers.fail(active, exc)
            return
        if active.value is not None and not self._find_target(active, active.value):
            return
        # The lane in which it must run: for the creation of an actor, or a call that finds its actor free.
        lane: Lane | None = None
        if active.is_serial and active.result is not None:
            lane = self.actors.begin(active.result.rref)
        elif active.value is not None and active.function == _IN_TURN:
            lane = self.actors.free_lane(active.value.rref)
        confirmed = arguments.confirmation() if arguments is not None else None
        if confirmed is not None:
            # A function may rely on its arguments: their owners have counted the shares before it runs.
            submit = partial(self._submit, active) if lane is None else lane.submit
            confirmed._when_done(lambda _: submit(self.run, active))
        elif lane is not None:
            try:
                lane.submit(self.run, active)
            except PoolExhausted as exc:
                self._answers.fail(active, exc)
        elif active.function in self._coroutine_functions and (arguments is None or arguments.is_simple):
            self._start_coroutine(active, None)
        elif active.is_nested:
            self._submit(active, self.run, active)
        else:
            jobs.append((self.run, (active,)))

    def _find_target(self, active: ActiveCall, value: ReferenceShare) -> bool:
        """Finds the value that is fetched, or whose method is called.

        Returns:
            Whether it exists. If not, the call continues when it does: a method in the pool, a fetch on the thread that
            has made the value.
        """
        peer = active.session.peer
        if (there_already := self.rrefs.value_there(value, peer.id, peer.incarnation)) is not None:
            active.target = there_already
            return True
        reader, is_there = get_ident(), False

        def there(target: Future[Any]) -> None:
            nonlocal is_there
            active.target = target
            active.is_chained = False
            if reader == get_ident():  # at once
                is_there = True
            elif active.is_fetch:
                self._finish_fetch(active)
            else:
                self._submit(active, self.run, active)

        active.is_chained = True
        self.rrefs.when_there(value, there, peer.id, peer.incarnation)
        reader = 0
        return is_there

    def on_cancel(self, session: AnySession, message: rpc_pb2.Message, buffers: list[ReceiveBuffer]) -> None:
        active = self.calls.find(session, message.cancel.id)
        if active is not None:
            active.cancel()

    def on_question(self, session: AnySession, message: rpc_pb2.Message, buffers: list[ReceiveBuffer]) -> None:
        number = message.call_question.id
        active = self.calls.find(session, number)
        state = rpc_pb2.CallState() if active is None else active.state()
        state.id = number
        session.send(rpc_pb2.Message(call_state=state))
        session.flush()

    def on_credit(self, session: AnySession, message: rpc_pb2.Message, buffers: list[ReceiveBuffer]) -> None:
        credit = message.stream_credit
        active = self.calls.find(session, credit.id)
        if active is not None and (producer := active.producer) is not None:
            producer.credit(credit.items)

    def on_broken(self, session: AnySession, reason: str) -> None:
        """Cancels the calls of a connection that has ended, except those whose results `remote()` keeps here."""
        for active in self.calls:
            if active.session is session and active.result is None:
                active.cancel()

    def on_exhausted(self, error: PoolExhausted, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        """Handles a job that waited too long for a thread: a call fails, another job runs on a thread of its own."""
        if function == self.run:
            self._answers.fail(arguments[0], error)
        else:
            run = partial(self.new_context().run, function, *arguments)
            threading.Thread(target=_run_beside, args=(run,), name="rpcdist-overflow", daemon=True).start()

    # ------------------------------------------------------------ pool

    def run(self, active: ActiveCall, is_last: bool | None = None) -> DeferredReply | None:
        """Runs a call on this thread; returns the result of `Answers.finish`.

        Args:
            is_last: see `Answers.finish`; by default, whether this is a pool thread.
        """
        token = current_deadline.set(active.deadline)
        outer = current_autograd.set(active.autograd)
        spans = call_records.exporter
        attached = None if spans is None or active.span is None else spans.attach(active.span)
        try:
            now = time.monotonic()
            if now >= active.cancelled_at or now >= active.deadline.at:
                self._refuse(active)
                return None
            active.started = now
            if self.gil_waits is not None:
                time.sleep(0)  # releases the interpreter lock, and waits for it
                self.gil_waits.add(time.monotonic() - now)
            if is_last is None:
                is_last = hooks.enter is not None
            return self._finish_fetch(active, is_last) if active.is_fetch else self._invoke(active, is_last)
        except BaseException as exc:  # including SystemExit and KeyboardInterrupt, which go to the caller
            self._answers.fail(active, exc)
            return None
        finally:
            current_deadline.reset(token)
            current_autograd.reset(outer)
            if spans is not None and attached is not None:
                spans.detach(attached)

    def _submit(self, active: ActiveCall, function: Callable[..., object], *arguments: object) -> None:
        self.pool.submit_many(((function, arguments),), line_of(active.session, active.is_nested))

    def _refuse(self, active: ActiveCall) -> None:
        error: RpcdistError = DeadlineExceeded(
            "RPC ran for more than set timeout: the deadline passed before the call ran"
        )
        if active.cancelled:
            error = Cancelled("the call was cancelled before it ran")
        self._answers.fail(active, error)

    def _finish_fetch(self, active: ActiveCall, is_last: bool = False) -> DeferredReply | None:
        """Answers a fetch with the value, which exists; see `Answers.finish`."""
        try:
            value = active.target_value()
        except BaseException as exc:
            self._answers.fail(active, exc)
            return None
        return self._answers.finish(active, value, is_last)

    def _invoke(self, active: ActiveCall, is_last: bool) -> DeferredReply | None:
        gpus = () if active.arguments is None else active.arguments.gpus()
        streams = HandlerStreams(gpus) if gpus else None
        try:
            return self._decode_and_invoke(active, is_last, streams)
        finally:
            if streams is not None:
                streams.leave()

    def _decode_and_invoke(
        self, active: ActiveCall, is_last: bool, streams: HandlerStreams | None
    ) -> DeferredReply | None:
        if active.weight >= LARGE_BYTES:  # the result is likely to be as large
            stock_small_blocks()
        function, args, kwargs = decoded_call(active, self.callables)
        name = active.function
        if function in CALLS_OF_METHODS:  # the value and its method decide how it runs
            target, *order, method, args, kwargs = args
            if active.value is not None:
                named, value = active.value.rref, target.value()
            else:  # the owner's own call
                named, value = target._handle.state.rref, target.local_value()
            number = order[0] if order else None
            kind = described("the name of the type", lambda: type(value).__name__)
            active.method = f"{kind[:MAX_METHOD_CHARS]}.{called_method((method, args, kwargs))}"
            turn = self.actors.turn(active.session.peer, named, value, number, method, args, kwargs)
            if turn is not None:
                # The object of an actor must be freed on its own thread, so this thread must not hold the last
                # reference.
                active.target = None
                del target, value
                if streams is not None:  # the method may run on another thread
                    streams.leave()
                    keep_for_current_streams(gpu_tensors((args, kwargs)))
                return self._chain(active, turn)
            function, args, kwargs = method_of(value, method, args, kwargs)
            name = ""
        if active.counts_as_idle or active.function in functions_that_ask:
            calling_worker.set(active.session.peer)
        if torch_profiler._is_profiler_enabled:
            with record_function(f"handler of {active.what}"):
                result = profile.serve(function, args, kwargs)
        elif profile.of_process:
            result = profile.serve(function, args, kwargs)
        else:
            result = function(*args, **kwargs)
        if streams is not None:  # other threads use the result, too
            streams.leave()
            if inspect.iscoroutine(result) or is_generator(result) or hasattr(function, ASYNC_MARK):
                keep_for_current_streams(gpu_tensors((args, kwargs)))
        del args, kwargs  # lent memory should be returned with the first answer
        if result is not None and inspect.iscoroutine(result):
            names = self._coroutine_functions
            if name and len(names) < MAX_KNOWN_NAMES and inspect.iscoroutinefunction(function):
                names.add(name)
            self._start_coroutine(active, result)
            return None
        if hasattr(function, ASYNC_MARK):
            return self._chain(active, result)
        return self._answers.finish(active, result, is_last)

    def _chain(self, active: ActiveCall, future: object) -> DeferredReply | None:
        if not isinstance(future, torch._C.Future):
            raise RuntimeError(
                "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
                f"but got {type(future)}"
            )

        def completed(done: torch._C.Future[Any]) -> None:
            try:
                result = done.wait()
            except BaseException as exc:
                self._answers.fail(active, exc)
            else:
                # The turn of an actor may have come at once, or later as a job of its own: then nothing is left to do,
                # unless other jobs wait here. They may be the next turns, and the answer must not wait behind them.
                is_turn_here = isinstance(future, Turn) and future.thread == get_ident()
                is_last = is_turn_here and hooks.enter is not None and not self.pool.has_queue
                reply = self._answers.finish(active, result, is_last)
                if isinstance(future, Turn):
                    future.reply = reply

        active.is_chained = True
        active.awaited = future
        future.add_done_callback(completed)
        if isinstance(future, Turn):
            active.handle = future
            if active.cancelled:  # between the check and here
                future.cancel()
            return future.enter()
        return None

    # ------------------------------------------------------------ user loop

    def _start_coroutine(self, active: ActiveCall, coroutine: Coroutine[Any, Any, Any] | None) -> None:
        async def run() -> object:
            active.started = time.monotonic()
            if coroutine is not None:
                return await coroutine
            function, args, kwargs = decoded_call(active, self.callables)
            result = function(*args, **kwargs)
            return await result if inspect.iscoroutine(result) else result

        def done(outcome: object, exc: BaseException | None) -> None:
            if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # cancelled before its first step: Python would warn that it was never awaited
            # Encoding may run user code and be slow; the loop has other coroutines to run.
            if exc is not None:
                self._submit(active, self._answers.fail, active, exc)
            elif outcome is None:
                self._answers.finish(active, None)
            else:
                self._submit(active, self._answers.finish, active, outcome)

        # A plain function may have set context variables before it returned a coroutine.
        context = self.new_context() if coroutine is None else copy_context()
        context.run(current_autograd.set, active.autograd)
        context.run(calling_worker.set, active.session.peer)
        if coroutine is None and active.span is not None and (spans := call_records.exporter) is not None:
            context.run(spans.attach, active.span)
        name = getattr(coroutine, "__qualname__", active.what)
        try:
            active.handle = self.user_loop.submit(run, done, deadline=active.deadline, context=context, name=name)
        except BaseException as exc:  # RPC is shutting down, or the loop cannot start
            if inspect.iscoroutine(coroutine):
                coroutine.close()  # otherwise Python warns that it was never awaited
            self._answers.fail(active, exc)
            return
        if active.cancelled:  # between the check and here
            active.handle.cancel()

    def _produce(self, active: ActiveCall, generator: Generator[Any, Any, Any] | AsyncGenerator[Any, Any]) -> None:
        def ended() -> None:
            self.calls.remove(active)
            active.producer = None  # it refers to this function

        sender = StreamSender(self.marshal, active.session, active.id, active.autograd, ended, active.back)
        producer: SyncProducer | AsyncProducer
        if isinstance(generator, Generator):
            producer = SyncProducer(self.pool, sender, generator, self.new_context())
            begin = producer.run
        else:
            producer = AsyncProducer(self.user_loop, sender, generator, self.new_context())
            begin = producer.credit
        active.session.send(ReplyMessage(active.id, is_stream=True))  # not before: the loop may refuse the producer
        active.producer = producer
        if active.cancelled:
            producer.cancel()
        begin(DEFAULT_WINDOW)


def _run_beside(run: Callable[[], object]) -> None:
    unblock_signals()
    run()


def describe_job(function: Callable[..., object], arguments: tuple[object, ...]) -> str:
    """Describes a job of the pool for messages: the call that it serves, or else its function."""
    active = next((argument for argument in arguments if isinstance(argument, ActiveCall)), None)
    return repr(function) if active is None else repr(active)
