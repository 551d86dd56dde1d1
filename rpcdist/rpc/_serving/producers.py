"""The sending end of a stream: draws from a generator, one item per credit."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeGuard

from rpcdist._proto import rpc_pb2
from rpcdist.deadline import NEVER
from rpcdist.errors import PoolExhausted
from rpcdist.rpc._autograd_hooks import CallContext, current_autograd
from rpcdist.rpc._executors.blocking import hooks
from rpcdist.rpc._executors.thread_pool import ThreadPool
from rpcdist.rpc._executors.torch_state import StateSlot
from rpcdist.rpc._executors.user_loop import UserLoop
from rpcdist.rpc._marshal.marshal import Marshal
from rpcdist.rpc._peers.device_maps import DeviceMap
from rpcdist.rpc._peers.network import AnySession

logger = logging.getLogger(__name__)

_CLASSES: Final = (Generator, AsyncGenerator)


def is_generator(value: object) -> TypeGuard[Generator[Any, Any, Any] | AsyncGenerator[Any, Any]]:
    """Whether a value is a plain or an async generator.

    Both kinds have a method to throw into them, which few other values have; checking against the abstract classes
    takes microseconds.
    """
    kind = type(value)
    return (hasattr(kind, "throw") or hasattr(kind, "athrow")) and isinstance(value, _CLASSES)


MAX_CREDIT: Final = 1024
"""Limit on the items that a producer makes ahead of its consumer, whatever the consumer grants: they wait in memory."""


@dataclass(eq=False, repr=False)
class StreamSender:
    """Sends the items of one stream, and its end.

    Args:
        id: the call whose result is the stream.
        autograd: the context of the call, or None.
        ended: called before the end is sent.
        back: see `ActiveCall`.
    """

    marshal: Marshal
    session: AnySession
    id: int
    autograd: CallContext | None
    ended: Callable[[], None]
    back: DeviceMap | None = None

    def item(self, item: object) -> None:
        message = rpc_pb2.Message()
        message.stream_item.id = self.id
        written = self.marshal.write(item, self.session.peer.id, self.session, self.back)
        large, forks = self.marshal.fill(message.stream_item.value, written, self.autograd)
        self.marshal.check_room(self.session, message.ByteSize(), large, forks)
        self.marshal.send(self.session, message, large, forks)

    def end(self, exc: BaseException | None) -> None:
        self.ended()
        if exc is None:
            self.session.send(rpc_pb2.Message(stream_end=rpc_pb2.StreamEnd(id=self.id)))
            return
        failure, large, forks = self.marshal.failure(exc, self.session, self.back)
        message = rpc_pb2.Message(stream_end=rpc_pb2.StreamEnd(id=self.id, failure=failure))
        self.marshal.send(self.session, message, large, forks)


@dataclass(eq=False, repr=False)
class SyncProducer:
    """Draws from a plain generator on one pool thread, from its first step to its end.

    While the generator waits for its consumer, the thread is lent: the pool does not count it. Context variables and
    torch's thread state (`with torch.no_grad(): yield ...`) that the generator sets apply only to itself.
    """

    _pool: ThreadPool
    _sender: StreamSender
    _generator: Generator[Any, Any, Any]
    _context: Context
    _state: StateSlot = field(default_factory=StateSlot)
    _credits: int = 0
    _is_running: bool = False
    _cancelled: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)  # protects the three above

    def __post_init__(self) -> None:
        self._context.run(current_autograd.set, self._sender.autograd)

    def run(self, items: int) -> None:
        """Begins with `items` credits; on this thread, which has created the generator, if it is a pool thread."""
        worker = hooks.worker
        if worker is None or worker.is_lent:
            self.credit(items)
            return
        with self._changed:
            self._credits += items
            if self._is_running:  # it was cancelled
                return
            self._is_running = True
        self._pump()

    def credit(self, items: int) -> None:
        with self._changed:
            self._credits = min(self._credits + items, MAX_CREDIT)
            self._go_on()

    def cancel(self) -> None:
        with self._changed:
            self._cancelled = True
            self._go_on()

    def _go_on(self) -> None:
        if not self._is_running:
            self._is_running = True
            self._pool.submit(self._pump)
        self._changed.notify()

    def _pump(self) -> None:
        while True:
            with self._changed:
                may_step = self._credits > 0 and not self._cancelled
                self._credits -= may_step
            if may_step:
                if not self._step():
                    return
            elif self._cancelled:
                self._sender.end(self._closed())
                return
            elif (refusal := self._wait()) is not None:
                self._closed()
                self._sender.end(refusal)
                return

    def _wait(self) -> PoolExhausted | None:
        """Waits for a credit or a cancellation, which a broken connection also causes; or returns why it cannot."""
        try:
            self._pool.reserve()
        except PoolExhausted as exc:
            return exc
        try:
            with self._pool.lent(), self._changed:
                while not self._credits and not self._cancelled:
                    self._changed.wait()
        finally:
            self._pool.give_back()
        return None

    def _step(self) -> bool:
        """Sends one item; False if the stream has ended."""
        try:
            self._sender.item(self._on_its_own(next, self._generator))
        except StopIteration:
            self._sender.end(None)
        except BaseException as exc:
            self._closed()  # if the item could not be sent, the generator still waits
            self._sender.end(exc)
        else:
            return True
        return False

    def _on_its_own(self, function: Callable[..., Any], *arguments: object) -> Any:
        return self._context.run(self._state.call, function, *arguments)

    def _closed(self) -> BaseException | None:
        """Closes the generator; returns the exception that it raises then, since the stream must end in any case."""
        try:
            self._on_its_own(self._generator.close)
        except BaseException as exc:
            return exc
        return None


class AsyncProducer:
    """Draws from an async generator on the user loop; a waiting producer costs no thread."""

    def __init__(
        self, user_loop: UserLoop, sender: StreamSender, generator: AsyncGenerator[Any, Any], context: Context
    ) -> None:
        self._generator = generator
        self._sender = sender
        self._credits = 0
        self._lock = threading.Lock()
        self._wake: Callable[[], object] | None = None
        context.run(current_autograd.set, sender.autograd)
        name = generator.__qualname__ if inspect.isasyncgen(generator) else None
        self._handle = user_loop.submit(self._drive, self._done, deadline=NEVER, context=context, name=name)

    def credit(self, items: int) -> None:
        with self._lock:
            self._credits = min(self._credits + items, MAX_CREDIT)
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def cancel(self) -> None:
        self._handle.cancel()

    async def _drive(self) -> None:
        try:
            while True:
                await self._take_credit()
                try:
                    item = await anext(self._generator)
                except StopAsyncIteration:
                    return
                self._sender.item(item)
        finally:
            await self._generator.aclose()

    async def _take_credit(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                if self._credits:
                    self._credits -= 1
                    return
                event = asyncio.Event()
                self._wake = partial(loop.call_soon_threadsafe, event.set)
            await event.wait()  # ends with a credit, or with the cancellation of the stream

    def _done(self, outcome: object, exc: BaseException | None) -> None:
        self._sender.end(exc)
