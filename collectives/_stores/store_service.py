"""The gRPC service `Store`: a table served to other processes.

Its method runs as a coroutine on the I/O loop of the process that serves. A call that waits ends by an event in the
table, at its own time limit, or when the transport cancels it because the client went away; in each case its waiter
leaves the table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from google.protobuf.message import DecodeError, Message

from rpcdist._proto import store_pb2
from rpcdist.collectives._stores.shared_table import SharedTable
from rpcdist.collectives._stores.store_messages import operation_of, reply_with
from rpcdist.collectives._stores.store_operations import LARGEST_BYTES
from rpcdist.errors import DistStoreError
from rpcdist.ids import Identity
from rpcdist.time_limits import STORE_LINGER_S
from rpcdist.transport import LARGEST_UNCUT_BYTES

CLOSED: Final = "the store was closed by the process that serves it"

Method = Callable[[Identity, Any], Awaitable[Message | bytes]]


class StoreService:
    """Answers the calls of service `Store` from one table, which this process may use directly."""

    def __init__(self) -> None:
        self.table = SharedTable()
        self._replied_at = float("-inf")

    def __repr__(self) -> str:
        return f"<StoreService of {self.table!r}>"

    def methods(self) -> Mapping[str, Method]:
        """The handlers by method name, as `Node.add_service` takes them."""
        return {"Execute": self.execute, "ExecuteLarge": self.execute_large}

    async def execute(self, peer: Identity, request: store_pb2.StoreRequest) -> store_pb2.StoreReply:
        """Carries out one operation. Cancelling it removes its waiter, and a popped value goes back to its queue."""
        return await self._execute(request, LARGEST_UNCUT_BYTES, store_pb2.StoreReply(too_large=True))

    async def execute_large(self, peer: Identity, request: bytes) -> bytes:
        """The same, with request and reply as bytes that travel in pieces."""
        try:
            parsed = store_pb2.StoreRequest.FromString(request)
        except DecodeError as exc:
            raise DistStoreError("the request is none of a store") from exc
        return (await self._execute(parsed, LARGEST_BYTES, None)).SerializeToString()

    async def _execute(
        self, request: store_pb2.StoreRequest, limit_bytes: int, instead: store_pb2.StoreReply | None
    ) -> store_pb2.StoreReply:
        """The reply; if it is larger than the limit, nothing has happened, and the reply is another one, or says so."""
        try:
            operation = operation_of(request)
            result = await self.table.execute_on_loop(operation, request.timeout_ms / 1000)
            reply = reply_with(operation, result)
            if (size_bytes := reply.ByteSize()) <= limit_bytes:
                return reply
            self.table.give_back(operation, result)
            if instead is not None:
                return instead
            raise DistStoreError(
                f"the answer to {operation.method}() has {size_bytes} bytes, more than a store sends at once, "
                f"{limit_bytes} bytes ({limit_bytes >> 20} MiB). Ask for fewer keys at once."
            )
        except DistStoreError as exc:
            if self.table.closed:
                raise
            return store_pb2.StoreReply(problem=str(exc))
        finally:
            self._replied_at = asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Refuses further calls and ends those that wait; their callers get an error. Idempotent.

        Often the serving process ends as soon as it sees the key that the last of its clients has set, which is before
        the reply to that client has left. So replies of the last moment get `STORE_LINGER_S` to leave.
        """
        loop = asyncio.get_running_loop()
        failure = self.table.failure
        if self.table.close(CLOSED + (f", where this had failed: {failure}" if failure else "")):
            self._replied_at = loop.time()
        await asyncio.sleep(max(0.0, self._replied_at + STORE_LINGER_S - loop.time()))
