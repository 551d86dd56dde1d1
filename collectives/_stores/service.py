"""The gRPC service `Store`: a table served to other processes.

Everything here runs on the I/O loop of the process that serves, so the table needs no lock. A call that waits holds a
future; it ends by an event in the table, at its own time limit, or when the transport cancels the call because the
client went away, and in each case its waiter leaves the table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from google.protobuf.message import Message

from rpcdist._proto import store_pb2
from rpcdist.collectives._stores.table import StoreTable, Woken
from rpcdist.errors import DistStoreError
from rpcdist.ids import Identity

__all__ = ["MAX_WAIT_S", "StoreService"]

MAX_WAIT_S: Final = 7 * 24 * 3600.0  # no client may park a waiter for longer than this

LINGER_S: Final = 0.1

Handler = Callable[[Any], Awaitable[Message]]
Method = Callable[[Identity, Any], Awaitable[Message]]


class StoreService:
    """Answers the calls of service `Store` from one table."""

    def __init__(self) -> None:
        self.table = StoreTable()
        self._futures: dict[int, asyncio.Future[tuple[bytes, ...]]] = {}
        self._closed = False
        self._replied_at = float("-inf")

    def __repr__(self) -> str:
        return f"<StoreService {self.table!r}{' closed' if self._closed else ''}>"

    def methods(self) -> Mapping[str, Method]:
        """The handlers by method name, as `Node.add_service` takes them."""
        return {name: self._for_peers(handler) for name, handler in self.handlers().items()}

    def handlers(self) -> Mapping[str, Handler]:
        """The same for callers in this process; see `call`."""
        return {
            "Set": self.set,
            "Get": self.get,
            "Add": self.add,
            "Append": self.append,
            "CompareSet": self.compare_set,
            "Check": self.check,
            "Wait": self.wait,
            "Delete": self.delete,
            "Count": self.count,
            "List": self.list,
            "MultiGet": self.multi_get,
            "MultiSet": self.multi_set,
            "QueuePush": self.queue_push,
            "QueuePop": self.queue_pop,
            "QueueLength": self.queue_length,
        }

    def _for_peers(self, handler: Handler) -> Method:
        async def handle(peer: Identity, request: Any) -> Message:
            try:
                return await self.call(handler, request)
            finally:
                self._replied_at = asyncio.get_running_loop().time()

        return handle

    async def call(self, handler: Handler, request: Any) -> Message:
        """Calls one of `handlers`, unless the store is closed."""
        if self._closed:
            raise DistStoreError("the store that was served here has been closed")
        return await handler(request)

    async def close(self) -> None:
        """Refuses further calls and ends those that wait; their callers get an error. Idempotent.

        Often the serving process ends as soon as it sees the key that the last of its clients has set, which is before
        the reply to that client has left. So replies of the last moment get `LINGER_S` to leave.
        """
        self._closed = True
        loop = asyncio.get_running_loop()
        for future in self._futures.values():
            if not future.done():
                future.set_exception(DistStoreError("the store was closed by the process that serves it"))
                self._replied_at = loop.time()
        await asyncio.sleep(max(0.0, self._replied_at + LINGER_S - loop.time()))

    # ------------------------------------------------------------ waiting

    def _wake(self, woken: list[Woken]) -> None:
        for each in woken:
            future = self._futures.get(each.waiter)
            if future is not None and not future.done():
                future.set_result(each.values)

    async def _park(self, number: int, timeout_ms: int, queue: str | None = None) -> tuple[bytes, ...] | None:
        """Waits until waiter `number` is woken; None when the time is over.

        Cancellation removes the waiter, and a value that it popped from `queue` at that moment goes back.
        """
        future: asyncio.Future[tuple[bytes, ...]] = asyncio.get_running_loop().create_future()
        self._futures[number] = future
        try:
            await asyncio.wait({future}, timeout=min(timeout_ms / 1000, MAX_WAIT_S))
        except asyncio.CancelledError:
            if queue is not None and future.done() and future.exception() is None:
                self._wake(self.table.queue_restore(queue, future.result()[0]))
            raise
        finally:
            del self._futures[number]
            self.table.forget(number)
        return future.result() if future.done() else None

    async def _values(self, keys: list[str], timeout_ms: int) -> tuple[bytes, ...] | None:
        if not self.table.missing(keys, values_only=True):
            return tuple(self.table.get(key) or b"" for key in keys)
        return await self._park(self.table.park(keys, values_only=True), timeout_ms) if timeout_ms else None

    # ------------------------------------------------------------ the methods

    async def set(self, request: store_pb2.StoreSet) -> store_pb2.StoreDone:
        self._wake(self.table.set(request.key, request.value))
        return store_pb2.StoreDone()

    async def get(self, request: store_pb2.StoreGet) -> store_pb2.StoreValue:
        values = await self._values([request.key], request.timeout_ms)
        return store_pb2.StoreValue() if values is None else store_pb2.StoreValue(found=True, value=values[0])

    async def add(self, request: store_pb2.StoreAdd) -> store_pb2.StoreNumber:
        try:
            number, woken = self.table.add(request.key, request.amount)
        except DistStoreError as exc:
            return store_pb2.StoreNumber(problem=str(exc))
        self._wake(woken)
        return store_pb2.StoreNumber(number=number)

    async def append(self, request: store_pb2.StoreSet) -> store_pb2.StoreDone:
        self._wake(self.table.append(request.key, request.value))
        return store_pb2.StoreDone()

    async def compare_set(self, request: store_pb2.StoreCompareSet) -> store_pb2.StoreValue:
        value, woken = self.table.compare_set(request.key, request.expected, request.desired)
        self._wake(woken)
        return store_pb2.StoreValue(found=True, value=value)

    async def check(self, request: store_pb2.StoreKeys) -> store_pb2.StoreFlag:
        missing = self.table.missing(request.keys)
        return store_pb2.StoreFlag(flag=not missing, missing=missing)

    async def wait(self, request: store_pb2.StoreWait) -> store_pb2.StoreFlag:
        missing = self.table.missing(request.keys)
        if missing and request.timeout_ms:
            woken = await self._park(self.table.park(list(request.keys), values_only=False), request.timeout_ms)
            missing = self.table.missing(request.keys) or missing if woken is None else []
        return store_pb2.StoreFlag(flag=not missing, missing=missing)

    async def delete(self, request: store_pb2.StoreKeys) -> store_pb2.StoreNumber:
        return store_pb2.StoreNumber(number=sum(self.table.delete(key) for key in request.keys))

    async def count(self, request: store_pb2.StorePrefix) -> store_pb2.StoreNumber:
        table = self.table
        return store_pb2.StoreNumber(number=len(table.keys(request.prefix)) if request.prefix else table.num_keys)

    async def list(self, request: store_pb2.StorePrefix) -> store_pb2.StoreKeys:
        return store_pb2.StoreKeys(keys=self.table.keys(request.prefix))

    async def multi_get(self, request: store_pb2.StoreWait) -> store_pb2.StoreValues:
        keys = [*request.keys]
        values = await self._values(keys, request.timeout_ms)
        if values is None:
            return store_pb2.StoreValues(missing=self.table.missing(keys, values_only=True))
        return store_pb2.StoreValues(found=True, values=values)

    async def multi_set(self, request: store_pb2.StoreItems) -> store_pb2.StoreDone:
        for item in request.items:
            self._wake(self.table.set(item.key, item.value))
        return store_pb2.StoreDone()

    async def queue_push(self, request: store_pb2.StoreSet) -> store_pb2.StoreDone:
        self._wake(self.table.queue_push(request.key, request.value))
        return store_pb2.StoreDone()

    async def queue_pop(self, request: store_pb2.StoreGet) -> store_pb2.StoreValue:
        value = self.table.queue_pop(request.key)
        if value is None and request.timeout_ms:
            values = await self._park(self.table.park_pop(request.key), request.timeout_ms, queue=request.key)
            value = None if values is None else values[0]
        return store_pb2.StoreValue() if value is None else store_pb2.StoreValue(found=True, value=value)

    async def queue_length(self, request: store_pb2.StoreKeys) -> store_pb2.StoreNumber:
        return store_pb2.StoreNumber(number=sum(map(self.table.queue_len, request.keys)))
